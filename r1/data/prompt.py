"""A row -> a Prompt: chat text, token ids as the model sees them, resized images and their pixel values."""

import copy
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL.Image import Image
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from r1.config import DataConfig
from r1.data.chat import ChatFormat, RowError, count_of
from r1.data.faults import ImageError
from r1.data.images import image_size, list_images, load_image, resize_image, smart_resize
from r1.data.messages import Message
from r1.types import Prompt


@dataclass(slots=True)
class Measured:
    """What is known of a row without making its pixels."""

    text: str  # the rendered chat text
    sizes: list[tuple[int, int]]  # (width, height) of each image before it is resized
    image_tokens: list[int]  # of each image
    length: int = 0  # tokens of the prompt, image tokens counted
    uncut: int = 0  # of these, tokens that truncation leaves: images and what brackets them


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
        self.image_token_id = self.video_token_id = -1
        self.vision_ids: frozenset[int] = frozenset()  # of tokens that stand for pixels or bracket them
        if processor is not None:
            qwen_processor: Any = processor  # its base class does not declare these
            self.image_processor = qwen_processor.image_processor
            self.image_token_id = qwen_processor.image_token_id
            self.video_token_id = qwen_processor.video_token_id
            factor = self.image_processor.patch_size * self.image_processor.merge_size
            bounds = (qwen_processor.tokenizer.convert_tokens_to_ids(t) for t in ("<|vision_start|>", "<|vision_end|>"))
            self.vision_ids = frozenset({self.image_token_id, self.video_token_id, *bounds})
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

    def from_folder(self, folder: Path | None) -> "Renderer":
        """The same renderer for rows whose relative image paths start from another folder."""
        other = copy.copy(self)
        other.image_dir = folder
        return other

    def render(self, row: dict[str, Any]) -> str:
        """The row's chat text, one image placeholder of the model per image.

        Raises:
            RowError: no prompt, or its <image> tags do not match the images.
        """
        messages = self.chat.messages(row)
        return self.chat.render(messages, {"image": len(self._image_values(row, messages))})

    def length(self, row: dict[str, Any]) -> int:
        """Tokens of the row's prompt, image tokens counted; reads no more of an image than its header.

        Raises:
            RowError: as build, except for images that are damaged behind their header.
        """
        [measured] = self.measure([row])
        if isinstance(measured, RowError):
            raise measured
        return measured.length

    def measure(
        self, rows: Sequence[dict[str, Any]], pool: Executor | None = None, *, decode: bool = False
    ) -> list[Measured | RowError]:
        """Text, images and length of each row, or what is wrong with it; texts are tokenized as one batch.

        Args:
            pool: reads the images.
            decode: read images whole, to find damage behind their headers.
        """
        found = list((map if pool is None else pool.map)(partial(self._measure, decode=decode), rows))
        good = [m for m in found if not isinstance(m, RowError)]
        all_ids = iter(self._tokenize([m.text for m in good]) if good else [])
        return [m if isinstance(m, RowError) else self._with_length(m, next(all_ids)) for m in found]

    def build(self, index: int, row: dict[str, Any]) -> Prompt:
        """Make the prompt: text, ids, resized images and their pixel values.

        Args:
            index: the row's position in its data set, for Prompt.row and for messages.

        Raises:
            RowError: 'row 17 has …': tags and images do not match, an image cannot be read, an unusable prompt.
        """
        try:
            messages = self.chat.messages(row)
            values = self._image_values(row, messages)
            text = self.chat.render(messages, {"image": len(values)})
            [sampler_ids] = self._tokenize([text])
            self._check_ids(sampler_ids, len(values))
            images = [self._load(value) for value in values]
        except RowError as error:
            raise error.of(f"row {index}") from error
        prompt = Prompt(
            row=index,
            text=text,
            prompt_ids=list(sampler_ids),
            sampler_ids=sampler_ids,
            images=images,
            ground_truth=_ground_truth(row.get(self.config.answer_key)),
            fields={k: v for k, v in row.items() if k not in (self.config.answer_key, self.config.image_key)},
        )
        counts: list[int] = []
        if images:
            # do_resize=False: the one resize has been done.
            pixels = self.image_processor(images=images, do_resize=False, return_tensors="pt")
            prompt.pixel_values, grid = pixels["pixel_values"].float(), pixels["image_grid_thw"]
            prompt.image_grid_thw = grid
            counts = (grid.prod(dim=1) // self.image_processor.merge_size**2).tolist()
        excess = len(sampler_ids) - len(images) + sum(counts) - self.config.max_prompt_length
        if excess > 0 and self.config.overlong_prompts == "truncate_left":
            prompt.sampler_ids = _cut_left(sampler_ids, excess, keep=self.vision_ids)
            [prompt.text] = self.tokenizer.batch_decode([prompt.sampler_ids])
        prompt.prompt_ids = _expand(prompt.sampler_ids, self.image_token_id, counts)
        return prompt

    def image_values(self, row: dict[str, Any]) -> list[Any]:
        """The row's images as they stand in the data, in any form that load_image reads; [] where it has none.

        Raises:
            RowError: no prompt, which may hold images of its own.
        """
        return self._image_values(row, self.chat.messages(row))

    def _image_values(self, row: dict[str, Any], messages: Sequence[Message]) -> list[Any]:
        column = list_images(row.get(self.config.image_key))
        inline = [value for message in messages for name, value in message.inline if name == "image"]
        if column and inline:
            raise RowError(
                "images in two places",
                f"has images in its messages and in column {self.config.image_key!r}",
                "leave them in one place, or set data.image_key to a name that is no column",
            )
        return column or inline

    def _measure(self, row: dict[str, Any], *, decode: bool) -> Measured | RowError:
        """All but the length."""
        try:
            messages = self.chat.messages(row)
            values = self._image_values(row, messages)
            text = self.chat.render(messages, {"image": len(values)})
            sizes = [self._size(value, decode=decode) for value in values]
        except RowError as error:
            return error
        return Measured(text=text, sizes=sizes, image_tokens=[self._image_tokens(size) for size in sizes])

    def _with_length(self, measured: Measured, ids: Sequence[int]) -> Measured | RowError:
        try:
            self._check_ids(ids, len(measured.sizes))
        except RowError as error:
            return error
        others = len(ids) - len(measured.sizes)
        measured.length = others + sum(measured.image_tokens)
        measured.uncut = sum(measured.image_tokens)
        if measured.sizes:
            measured.uncut += sum(i in self.vision_ids for i in ids) - len(measured.sizes)
        return measured

    def _check_ids(self, ids: Sequence[int], num_images: int) -> None:
        """Refuse a text that spells the model's own image or video token: it would stand for pixels."""
        if self.image_processor is None:
            return
        for token_id, expected in ((self.image_token_id, num_images), (self.video_token_id, 0)):
            if (found := list(ids).count(token_id)) != expected:
                token = self.tokenizer.convert_ids_to_tokens(token_id)
                raise RowError(
                    "prompt spells a vision token",
                    f"has {found} {token} tokens for {count_of(num_images, 'image')}",
                    f"take {token} out of the prompt's text, and check that the chat template writes one per image",
                )

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        with self._tokenizer_lock:
            encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        return encoded["input_ids"]

    def _size(self, value: Any, *, decode: bool) -> tuple[int, int]:
        """(width, height) of an image before it is resized."""
        with _image_errors():
            size = load_image(value, self.image_dir).size if decode else image_size(value, self.image_dir)
            smart_resize(*size, **self.bounds)
        return size

    def _image_tokens(self, size: tuple[int, int]) -> int:
        width, height = smart_resize(*size, **self.bounds)
        return width * height // self.bounds["factor"] ** 2

    def _load(self, value: Any) -> Image:
        with _image_errors():
            return resize_image(load_image(value, self.image_dir), **self.bounds)


@contextmanager
def _image_errors() -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        raise RowError(error.kind, f"has an image that cannot be used: {error.problem}", error.fix) from error


def _cut_left(ids: Sequence[int], excess: int, *, keep: frozenset[int]) -> list[int]:
    """ids without their first `excess` tokens that are not in keep: an image stays whole, what is around it goes."""
    cut = []
    for i in ids:
        if excess > 0 and i not in keep:
            excess -= 1
        else:
            cut.append(i)
    return cut


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
