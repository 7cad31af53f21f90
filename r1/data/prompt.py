"""A row -> a Prompt: chat text, token ids as the model sees them, resized images and videos and their pixel values."""

import copy
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from r1.config import DataConfig
from r1.data.chat import ChatFormat, count_of
from r1.data.faults import RowError
from r1.data.images import list_images
from r1.data.messages import Message
from r1.data.videos import list_videos
from r1.data.vision import Sizes, Vision
from r1.types import Prompt


@dataclass(slots=True)
class Measured:
    """What is known of a row without making its pixels."""

    text: str  # the rendered chat text
    sizes: Sizes = field(default_factory=Sizes)  # of its images and videos
    length: int = 0  # tokens of the prompt, those of images and videos counted
    uncut: int = 0  # of these, tokens that truncation leaves: images, videos and what brackets them


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
            image_dir: folder that relative paths of images and videos start from.

        Raises:
            ValueError: a template that is missing or broken, or pixel bounds that no image size meets.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.image_dir = image_dir
        self.chat = ChatFormat(config, tokenizer, processor)
        self.vision = None if processor is None else Vision(processor, config)
        # A fast tokenizer refuses ("Already borrowed") a second thread while it sets its own options.
        self._tokenizer_lock = threading.Lock()

    @property
    def mm_processor_kwargs(self) -> dict[str, Any]:
        """Options for vLLM's copy of the processor, under which it leaves our resized images as they are.

        Both edges are given: vLLM and transformers take "size" as a whole. Empty for a text model.
        """
        if self.vision is None:
            return {}
        return {"size": {"shortest_edge": self.config.min_pixels, "longest_edge": self.config.max_pixels}}

    def from_folder(self, folder: Path | None) -> "Renderer":
        """The same renderer for rows whose relative image paths start from another folder."""
        other = copy.copy(self)
        other.image_dir = folder
        return other

    def render(self, row: dict[str, Any]) -> str:
        """The row's chat text, one placeholder of the model per image and video.

        Raises:
            RowError: no prompt, or its tags do not match the images and videos.
        """
        text, _, _ = self._render(row)
        return text

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
        """Make the prompt: text, ids, resized images and videos and their pixel values.

        Args:
            index: the row's position in its data set, for Prompt.row and for messages.

        Raises:
            RowError: 'row 17 has …': tags and images do not match, an image cannot be read, an unusable prompt.
        """
        config = self.config
        try:
            text, images, videos = self._render(row)
            [ids] = self._tokenize([text])
            self._check_ids(ids, len(images), len(videos))
            prompt = Prompt(
                row=index,
                text=text,
                prompt_ids=list(ids),
                sampler_ids=ids,
                ground_truth=_ground_truth(row.get(config.answer_key)),
                fields={
                    k: v for k, v in row.items() if k not in (config.answer_key, config.image_key, config.video_key)
                },
            )
            if self.vision is not None:
                self.vision.add_pixels(prompt, images, videos, self.image_dir)
        except RowError as error:
            raise error.of(f"row {index}") from error
        self._expand(prompt)
        excess = len(prompt.prompt_ids) - config.max_prompt_length
        if excess > 0 and config.overlong_prompts == "truncate_left":
            prompt.sampler_ids = _cut_left(ids, excess, keep=frozenset() if self.vision is None else self.vision.ids)
            [prompt.text] = self.tokenizer.batch_decode([prompt.sampler_ids])
            self._expand(prompt)
        return prompt

    def media(self, row: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The row's images and videos as they stand in the data; empty lists where it has none.

        Raises:
            RowError: no prompt, which may hold images of its own.
        """
        return self._media(row, self.chat.messages(row))

    def _expand(self, prompt: Prompt) -> None:
        if self.vision is not None:
            with self._tokenizer_lock:  # time stamps of videos are tokenized
                prompt.prompt_ids = self.vision.expand(prompt.sampler_ids, prompt)
        else:
            prompt.prompt_ids = list(prompt.sampler_ids)

    def _render(self, row: dict[str, Any]) -> tuple[str, list[Any], list[Any]]:
        messages = self.chat.messages(row)
        images, videos = self._media(row, messages)
        return self.chat.render(messages, {"image": len(images), "video": len(videos)}), images, videos

    def _media(self, row: dict[str, Any], messages: Sequence[Message]) -> tuple[list[Any], list[Any]]:
        found = []
        for name, key, listed in (
            ("image", self.config.image_key, list_images),
            ("video", self.config.video_key, list_videos),
        ):
            column = listed(row.get(key))
            inline = [value for message in messages for kind, value in message.inline if kind == name]
            if column and inline:
                raise RowError(
                    f"{name}s in two places",
                    f"has {name}s in its messages and in column {key!r}",
                    f"leave them in one place, or set data.{name}_key to a name that is no column",
                )
            found.append(column or inline)
        return found[0], found[1]

    def _measure(self, row: dict[str, Any], *, decode: bool) -> Measured | RowError:
        """All but the length."""
        try:
            text, images, videos = self._render(row)
            if self.vision is None:
                return Measured(text=text)
            return Measured(text=text, sizes=self.vision.measure(images, videos, self.image_dir, decode=decode))
        except RowError as error:
            return error

    def _with_length(self, measured: Measured, ids: Sequence[int]) -> Measured | RowError:
        sizes = measured.sizes
        try:
            self._check_ids(ids, len(sizes.images), len(sizes.videos))
        except RowError as error:
            return error
        placeholders, pixels = len(sizes.images) + len(sizes.videos), sum(sizes.image_tokens) + sum(sizes.video_tokens)
        measured.length = len(ids) - placeholders + pixels
        if self.vision is not None and placeholders:
            measured.uncut = pixels + sum(i in self.vision.ids for i in ids) - placeholders
        return measured

    def _check_ids(self, ids: Sequence[int], num_images: int, num_videos: int) -> None:
        """Refuse a text that spells the model's own image or video token: it would stand for pixels."""
        if self.vision is None:
            return
        for token_id, expected, name in (
            (self.vision.image_token_id, num_images, "image"),
            (self.vision.video_token_id, num_videos, "video"),
        ):
            if (found := list(ids).count(token_id)) != expected:
                token = self.tokenizer.convert_ids_to_tokens(token_id)
                raise RowError(
                    "prompt spells a vision token",
                    f"has {found} {token} tokens for {count_of(expected, name)}",
                    f"take {token} out of the prompt's text, and check that the chat template writes one per {name}",
                )

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        with self._tokenizer_lock:
            encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
        return encoded["input_ids"]


def _cut_left(ids: Sequence[int], excess: int, *, keep: frozenset[int]) -> list[int]:
    """ids without their first `excess` tokens that are not in keep: an image stays whole, what is around it goes."""
    cut = []
    for i in ids:
        if excess > 0 and i not in keep:
            excess -= 1
        else:
            cut.append(i)
    return cut


def _ground_truth(answer: Any) -> Any:
    """Numbers and dates as text, since reward functions compare strings; NaN, a missing cell of a table, as None.

    Lists, dicts and None reach the reward function as they are.
    """
    if isinstance(answer, np.generic):
        answer = answer.item()
    if isinstance(answer, float) and math.isnan(answer):
        return None
    return str(answer) if isinstance(answer, (bool, int, float, Decimal, date, time)) else answer
