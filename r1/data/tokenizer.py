"""Load the tokenizer, and for models that see the processor, of a run."""

from typing import Any

from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

from r1.config import ModelConfig


def load_tokenizer(config: ModelConfig) -> tuple[PreTrainedTokenizerBase, ProcessorMixin | None]:
    """The tokenizer, and the processor of a vision-language model (None for a text model).

    Raises:
        ValueError: the folder or hub id holds neither.
    """
    path = config.tokenizer_path or config.path
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    try:
        if not hasattr(AutoConfig.from_pretrained(config.path, **options), "vision_config"):
            return AutoTokenizer.from_pretrained(path, **options), None
        processor = AutoProcessor.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"no tokenizer or processor could be loaded from {path!r}: {reason}") from None
    return processor.tokenizer, processor
