"""A row -> a Prompt: chat text, token ids as the model sees them, resized images and their pixel values."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL.Image import Image
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from r1.config import DataConfig
from r1.data.chat import ChatFormat, RowError, count_of
from r1.data.images import image_size, list_images, load_image, resize_image, smart_resize
from r1.types import Prompt


class Renderer:
    """Turns rows into prompts for one tokenizer and, where the model sees, its processor.

    The text is tokenized once, without added special tokens: the chat template has written them. Each image's token
    is then repeated once per group of patches, as the model's own processor and vLLM do.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None,
        *,
        image_dir: Path | None,
    ) -> None:
        """Read the templates.

        Args:
            processor: the model's processor (Qwen2-VL, Qwen2.5-VL or Qwen3-VL); None for a text model.
            image_dir: folder that relative image paths start from.

        Raises:
            ValueError: a template that is missing or broken, or pixel bounds that no image size meets.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.image_dir = image_dir
        self.chat = ChatFormat(config, tokenizer, processor)
        # A fast tokenizer refuses ("Already borrowed") a second thread while it sets its own options.
        self._tokenizer_lock = threading.Lock()
        self.image_processor: Any = None
        if processor is not None:
            qwen_processor: Any = processor  # its base class does not declare these
            self.image_processor = qwen_processor.image_processor
            self.image_token_id: int = qwen_processor.image_token_id
            self.video_token_id: int = qwen_processor.video_token_id
            factor = self.image_processor.patch_size * self.image_processor.merge_size
            self.bounds = {"factor": factor, "min_pixels": config.min_pixels, "max_pixels": config.max_pixels}
            smart_resize(factor, factor, **self.bounds)

    @property
    def mm_processor_kwargs(self) -> dict[str, Any]:
        """Options for vLLM's copy of the processor, under which it leaves our resized images as they are.

        Both edges are given: vLLM and transformers take "size" as a whole. Empty for a text model.
        """
        if self.image_processor is None:
            return {}
        return {"size": {"shortest_edge": self.config.min_pixels, "longest_edge": self.config.max_pixels}}

    def render(self, row: dict[str, Any]) -> str:
        """The row's chat text, one image placeholder of the model per image.

        Raises:
            RowError: no prompt, or its <image> tags do not match the images.
        """
        return self.chat.render(row, len(self.image_values(row)))

    def length(self, row: dict[str, Any]) -> int:
        """Tokens of the row's prompt, image tokens counted; reads no more of an image than its header.

        Raises:
            RowError: as build, except for images that are damaged behind their header.
        """
        [length] = self.lengths([row])
        if isinstance(length, RowError):
            raise length
        return length

    def lengths(self, rows: Sequence[dict[str, Any]], pool: Executor | None = None) -> list[int | RowError]:
        """The length of each row, or what is wrong with it; texts are tokenized as one batch, headers read in pool."""
        measured = list((map if pool is None else pool.map)(self._measure, rows))
        texts = [m[0] for m in measured if not isinstance(m, RowError)]
        all_ids = iter(self._tokenize(texts) if texts else [])
        return [m if isinstance(m, RowError) else self._expanded_length(next(all_ids), m[1]) for m in measured]

    def build(self, index: int, row: dict[str, Any]) -> Prompt:
        """Make the prompt: text, ids, resized images and their pixel values.

        Args:
            index: the row's position in its data set, for Prompt.row and for messages.

        Raises:
            RowError: 'row 17 has …': tags and images do not match, an image cannot be read, an unusable prompt.
        """
        try:
            values = self.image_values(row)
            text = self.chat.render(row, len(values))
            [sampler_ids] = self._tokenize([text])
            self._check_ids(sampler_ids, len(values))
            images = [self._load(value) for value in values]
        except RowError as error:
            raise RowError(f"row {index} {error}") from error
        prompt = Prompt(
            row=index,
            text=text,
            prompt_ids=list(sampler_ids),
            sampler_ids=sampler_ids,
            images=images,
            ground_truth=_ground_truth(row.get(self.config.answer_key)),
            fields={k: v for k, v in row.items() if k not in (self.config.answer_key, self.config.image_key)},
        )
        if images:
            # do_resize=False: the one resize has been done.
            pixels = self.image_processor(images=images, do_resize=False, return_tensors="pt")
            prompt.pixel_values, grid = pixels["pixel_values"].float(), pixels["image_grid_thw"]
            prompt.image_grid_thw = grid
            counts = (grid.prod(dim=1) // self.image_processor.merge_size**2).tolist()
            prompt.prompt_ids = _expand(sampler_ids, self.image_token_id, counts)
        return prompt

    def image_values(self, row: dict[str, Any]) -> list[Any]:
        """The row's images as they stand in the data, in any form that load_image reads; [] where it has none."""
        return list_images(row.get(self.config.image_key))

    def _measure(self, row: dict[str, Any]) -> tuple[str, list[int]] | RowError:
        """The text, and the tokens of each image by its header."""
        try:
            values = self.image_values(row)
            text = self.chat.render(row, len(values))
            sizes = [self._header_size(value) for value in values]
        except RowError as error:
            return error
        return text, [width * height // self.bounds["factor"] ** 2 for width, height in sizes]

    def _expanded_length(self, ids: Sequence[int], image_tokens: Sequence[int]) -> int | RowError:
        try:
            self._check_ids(ids, len(image_tokens))
        except RowError as error:
            return error
        return len(ids) - len(image_tokens) + sum(image_tokens)

    def _check_ids(self, ids: Sequence[int], num_images: int) -> None:
        """Refuse a text that spells the model's own image or video token: it would stand for pixels."""
        if self.image_processor is None:
            return
        for token_id, expected in ((self.image_token_id, num_images), (self.video_token_id, 0)):
            if (found := list(ids).count(token_id)) != expected:
                token = self.tokenizer.convert_ids_to_tokens(token_id)
                raise RowError(
                    f"has {found} {token} tokens for {count_of(num_images, 'image')}; take {token} out of the prompt's "
                    "text, and check that the chat template writes one per image"
                )

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        with self._tokenizer_lock:
            encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        return encoded["input_ids"]

    def _header_size(self, value: Any) -> tuple[int, int]:
        with _image_errors():
            return smart_resize(*image_size(value, self.image_dir), **self.bounds)

    def _load(self, value: Any) -> Image:
        with _image_errors():
            return resize_image(load_image(value, self.image_dir), **self.bounds)


@contextmanager
def _image_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RowError(f"has an image that cannot be used: {error}") from error


def _expand(ids: Sequence[int], token_id: int, counts: Iterable[int]) -> list[int]:
    """Repeat the k-th occurrence of token_id counts[k] times."""
    remaining = iter(counts)
    expanded: list[int] = []
    for i in ids:
        expanded += [i] * next(remaining) if i == token_id else [i]
    return expanded


def _ground_truth(answer: Any) -> Any:
    """Numbers as text, since reward functions compare strings; NaN, a missing cell of a table, as None.

    Lists, dicts and None reach the reward function as they are.
    """
    if isinstance(answer, float) and math.isnan(answer):
        return None
    return str(answer) if isinstance(answer, (bool, int, float)) else answer
