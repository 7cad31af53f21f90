"""From config to data: tokenizer, training rows and validation sets, for the loop and for --dry-run alike."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from r1.config import Config
from r1.data.loader import Loader
from r1.data.prompt import Renderer
from r1.data.tokenizer import load_tokenizer


def load_data(
    config: Config,
) -> tuple[PreTrainedTokenizerBase, ProcessorMixin | None, Loader, list[Loader]]:
    """Tokenizer, processor (None for text models), the training loader and one loader per validation set.

    Raises:
        ValueError: a file, column, template or row that cannot be used; says which and what to do.
    """
    tokenizer, processor = load_tokenizer(config.model)
    renderer = make_renderer(config, tokenizer, processor)
    train = _loader(config, renderer, config.data.train_files, shuffle=config.data.shuffle)
    return tokenizer, processor, train, load_val_sets(config, renderer)


def make_renderer(config: Config, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None) -> Renderer:
    """What makes prompts of rows."""
    folder = Path(config.data.image_dir) if config.data.image_dir else None
    return Renderer(config.data, tokenizer, processor, image_dir=folder)


def load_val_sets(config: Config, renderer: Renderer) -> list[Loader]:
    """One loader per validation set, in the order of data.val_files.

    Raises:
        ValueError: as load_data; or two sets of one name.
    """
    val_sets = [_loader(config, renderer, source, shuffle=False) for source in config.data.val_files]
    names = [s.name for s in val_sets]
    twins = sorted({n for n in names if names.count(n) > 1})
    if twins:
        raise ValueError(f"two of data.val_files are named {twins[0]!r}; name one as in {twins[0]}2=path")
    return val_sets


def _loader(config: Config, renderer: Renderer, source: str | Sequence[str], *, shuffle: bool) -> Loader:
    limits = {"limit_images": config.rollout.limit_images, "limit_videos": config.rollout.limit_videos}
    return Loader(source, config.data, renderer, shuffle=shuffle, **limits)
