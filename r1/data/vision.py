"""What a Qwen-VL processor makes of images and videos: their sizes, their tokens and their pixel values."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ProcessorMixin
from transformers.video_utils import VideoMetadata

from r1.config import DataConfig
from r1.data.faults import ImageError, RowError
from r1.data.images import image_size, load_image, resize_image, resized, smart_resize
from r1.data.videos import Footage, inspect_video, load_video
from r1.types import Prompt


@dataclass(slots=True)
class Sizes:
    """Images and videos of a row before they are resized, and the tokens that stand for each."""

    images: list[tuple[int, int]] = field(default_factory=list)  # (width, height)
    image_tokens: list[int] = field(default_factory=list)
    videos: list[Footage] = field(default_factory=list)
    video_tokens: list[int] = field(default_factory=list)  # with time stamps, where the model has them


class Vision:
    """The processor of a model that sees, and the bounds that the config sets for it."""

    def __init__(self, processor: ProcessorMixin, config: DataConfig) -> None:
        """ValueError: no image size meets the config's pixel bounds."""
        qwen: Any = processor  # its base class does not declare these
        self.config = config
        self.image_processor, self.tokenizer = qwen.image_processor, qwen.tokenizer
        self.video_processor: Any = getattr(qwen, "video_processor", None)
        self.image_token_id, self.video_token_id = qwen.image_token_id, qwen.video_token_id
        self.start_id, self.end_id = (
            self.tokenizer.convert_tokens_to_ids(token) for token in ("<|vision_start|>", "<|vision_end|>")
        )
        # Tokens that stand for pixels or bracket them.
        self.ids = frozenset({self.image_token_id, self.video_token_id, self.start_id, self.end_id})
        # Qwen3-VL writes the time of each pair of frames, and bounds the pixels of all frames together.
        self.stamps_frames = type(processor).__name__.startswith("Qwen3VL")
        self.merge = self.image_processor.merge_size
        self.bounds = {
            "factor": self.image_processor.patch_size * self.merge,
            "min_pixels": config.min_pixels,
            "max_pixels": config.max_pixels,
        }
        smart_resize(self.bounds["factor"], self.bounds["factor"], **self.bounds)

    def measure(self, images: Sequence[Any], videos: Sequence[Any], folder: Path | None, *, decode: bool) -> Sizes:
        """Sizes and token counts; RowError: an image or video that cannot be used.

        Args:
            decode: read them whole, to find damage behind their headers.
        """
        sizes = Sizes()
        for value in images:
            with _faults("an image"):
                size = load_image(value, folder).size if decode else image_size(value, folder)
                width, height = smart_resize(*size, **self.bounds)
            sizes.images.append(size)
            sizes.image_tokens.append(width * height // self.bounds["factor"] ** 2)
        for value in videos:
            with _faults("a video"):
                footage = self._inspect(value, folder)
                if decode:
                    load_video(value, folder, footage)
                grid = self._video_grid(footage)
            sizes.videos.append(footage)
            sizes.video_tokens.append(len(self.video_ids(footage, grid)))
        return sizes

    def add_pixels(self, prompt: Prompt, images: Sequence[Any], videos: Sequence[Any], folder: Path | None) -> None:
        """Fill a prompt's images, videos and pixel values; RowError as measure."""
        with _faults("an image"):
            prompt.images = [resize_image(load_image(value, folder), **self.bounds) for value in images]
        if prompt.images:
            # do_resize=False: the one resize has been done.
            pixels = self.image_processor(images=prompt.images, do_resize=False, return_tensors="pt")
            prompt.pixel_values, prompt.image_grid_thw = pixels["pixel_values"].float(), pixels["image_grid_thw"]
        for value in videos:
            with _faults("a video"):
                footage = self._inspect(value, folder)
                frames = load_video(value, folder, footage)
                size = self._video_size(footage)
            frames = [resized(frame, size) for frame in frames]
            prompt.videos.append((np.stack([np.asarray(frame) for frame in frames]), footage.metadata))
            sampled_fps = VideoMetadata(**footage.metadata).sampled_fps
            seconds = self.video_processor.temporal_patch_size / sampled_fps
            prompt.video_seconds.append(float(torch.tensor(seconds)))  # float32, as the sampler has it
        if prompt.videos:
            pixels = self.video_processor(
                videos=[frames for frames, _ in prompt.videos],
                do_resize=False,
                do_sample_frames=False,
                return_tensors="pt",
            )
            prompt.pixel_values_videos = pixels["pixel_values_videos"].float()
            prompt.video_grid_thw = pixels["video_grid_thw"]

    def expand(self, ids: Sequence[int], prompt: Prompt) -> list[int]:
        """ids with each image and video token replaced by all that stand for it, as the model's processor does."""
        grids = [] if prompt.image_grid_thw is None else prompt.image_grid_thw
        images = iter([[self.image_token_id] * int(grid.prod() // self.merge**2) for grid in grids])
        video_grids = [] if prompt.video_grid_thw is None else prompt.video_grid_thw.tolist()
        videos = iter(
            self.video_ids(metadata, tuple(grid))
            for (_, metadata), grid in zip(prompt.videos, video_grids, strict=True)
        )
        expanded: list[int] = []
        for i in ids:
            if i == self.image_token_id:
                expanded += next(images)
            elif i == self.video_token_id:
                expanded += next(videos)
            else:
                expanded.append(i)
        return expanded

    def video_ids(self, footage: Footage | dict[str, Any], grid: tuple[int, int, int]) -> list[int]:
        """The tokens of one video of grid (time, height, width) in patches."""
        metadata = footage.metadata if isinstance(footage, Footage) else footage
        time, height, width = grid
        frame = [self.video_token_id] * (height * width // self.merge**2)
        if not self.stamps_frames:
            return frame * time
        taken, fps = metadata["frames_indices"], metadata["fps"]
        size = len(taken) // time
        ids: list[int] = []
        for i in range(0, len(taken), size):
            stamp = f"<{(taken[i] / fps + taken[i + size - 1] / fps) / 2:.1f} seconds>"
            ids += [*self.tokenizer.encode(stamp, add_special_tokens=False), self.start_id, *frame, self.end_id]
        return ids

    def _inspect(self, value: Any, folder: Path | None) -> Footage:
        config = self.config
        return inspect_video(value, folder, fps=config.video_fps, max_frames=config.video_max_frames)

    def _video_size(self, footage: Footage) -> tuple[int, int]:
        bounds, frames = dict(self.bounds), len(footage.indices)
        if self.stamps_frames:
            bounds |= {
                "min_pixels": -(-bounds["min_pixels"] // frames),
                "max_pixels": bounds["max_pixels"] // frames,
            }
            if bounds["max_pixels"] < bounds["factor"] ** 2:
                problem = f"has {frames} frames, too many for data.max_pixels={self.config.max_pixels}"
                raise ImageError("video has too many frames", problem, "raise it, or lower data.video_max_frames")
        return smart_resize(*footage.size, **bounds)

    def _video_grid(self, footage: Footage) -> tuple[int, int, int]:
        width, height = self._video_size(footage)
        patch, pair = self.image_processor.patch_size, getattr(self.video_processor, "temporal_patch_size", 2)
        return len(footage.indices) // pair, height // patch, width // patch


@contextmanager
def _faults(what: str) -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        raise RowError(error.kind, f"has {what} that cannot be used: {error.problem}", error.fix) from error
