"""What packing needs of images and videos: positions along three axes, and patches in the order of the prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from r1.types import Prompt


def banned_token_ids(hf_config: PretrainedConfig) -> tuple[int, ...]:
    """Ids that stand for image and video features; empty for a text model.

    A response that held one would have more placeholders than pictures, which the trainer cannot compute. Engines give
    them probability 0 and report logprobs of the remaining tokens, renormalized: log p / (1 - p(banned)).
    """
    ids = (getattr(hf_config, name, None) for name in ("image_token_id", "video_token_id"))
    return tuple(sorted({token for token in ids if token is not None}))


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """What packing needs to know of a vision-language model."""

    image_token_id: int
    video_token_id: int = -1
    merge_size: int  # patches per token along each side
    patch_dim: int  # values of one flattened patch
    banned_ids: tuple[int, ...]  # image and video tokens: never part of a response
    tokens_per_second: float | None = None  # steps along the time axis; None: one for each pair of frames
    separate_frames: bool = False  # a video is written as a row of stamped pictures (Qwen3-VL)

    @staticmethod
    def from_config(config: PretrainedConfig) -> "VisionSpec | None":
        """None for a text model. Covers Qwen2-VL, Qwen2.5-VL, Qwen3-VL."""
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return None
        return VisionSpec(
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            merge_size=vision.spatial_merge_size,
            banned_ids=banned_token_ids(config),
            patch_dim=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
            tokens_per_second=getattr(vision, "tokens_per_second", None),
            separate_frames=config.model_type.startswith("qwen3_vl"),
        )


def mrope_positions(
    prompt_ids: Sequence[int],
    grid_thw: Tensor | None,
    vision: VisionSpec,
    *,
    video_grid_thw: Tensor | None = None,
    video_seconds: Sequence[float] = (),
) -> Tensor:
    """[3, P] int64: time, height and width position of each prompt token (M-RoPE, arXiv 2409.12191).

    Text counts on along all three axes; an image's tokens keep its starting time and spread over rows and columns; a
    video's also step along time. What follows starts one past the largest position of any axis, as in vLLM.

    Args:
        grid_thw: [images, 3] patches along time, height and width.
        video_grid_thw: [videos, 3], the same.
        video_seconds: of each video, that one step of its grid in time stands for.
    """
    images = iter([] if grid_thw is None else grid_thw.tolist())
    videos = _video_grids(video_grid_thw, video_seconds, vision)
    parts, start, at = [], 0, 0
    while at < len(prompt_ids):
        if prompt_ids[at] in (vision.image_token_id, vision.video_token_id):
            grid, stride = (next(images), 1.0) if prompt_ids[at] == vision.image_token_id else next(videos)
            time, height, width = grid[0], grid[1] // vision.merge_size, grid[2] // vision.merge_size
            cell = torch.arange(time * height * width)
            steps = (torch.arange(time, dtype=torch.float64) * stride).long()
            block = torch.stack([steps[cell // (height * width)], cell // width % height, cell % width])
            parts.append(block + start)
            at, start = at + len(cell), start + int(block.max()) + 1
        else:
            end = at
            while end < len(prompt_ids) and prompt_ids[end] not in (vision.image_token_id, vision.video_token_id):
                end += 1
            parts.append((torch.arange(end - at) + start).expand(3, -1))
            at, start = end, start + end - at
    return torch.cat(parts, dim=1)


def _video_grids(
    grid_thw: Tensor | None, seconds: Sequence[float], vision: VisionSpec
) -> Iterator[tuple[list[int], float]]:
    """(grid, positions a step in time) of each run of video tokens."""
    for (time, height, width), duration in zip([] if grid_thw is None else grid_thw.tolist(), seconds, strict=True):
        if vision.separate_frames:
            yield from (([1, height, width], 1.0) for _ in range(time))
        else:
            per_second = vision.tokens_per_second
            yield [time, height, width], 1.0 if per_second is None else duration * per_second


def prompt_positions(prompt: Prompt, prompt_ids: Sequence[int], vision: VisionSpec) -> Tensor:
    """[3, P] int64 positions of a prompt's tokens."""
    return mrope_positions(
        prompt_ids,
        prompt.image_grid_thw,
        vision,
        video_grid_thw=prompt.video_grid_thw,
        video_seconds=prompt.video_seconds,
    )


def as_images(prompt_ids: Sequence[int], vision: VisionSpec) -> list[int]:
    """prompt_ids with image tokens in place of video tokens: the vision tower sees one kind, in one call.

    It treats both alike, and positions are given. Two calls would break the ranks' step: one with videos would run
    more collectives than one without.
    """
    return [vision.image_token_id if i == vision.video_token_id else i for i in prompt_ids]


def prompt_patches(prompt: Prompt, prompt_ids: Sequence[int], vision: VisionSpec) -> list[tuple[Tensor, Tensor]]:
    """(patches [n, patch_dim], grid [1, 3]) of each image and video, in the order of the prompt."""
    if prompt.pixel_values_videos is None or prompt.video_grid_thw is None:
        if prompt.pixel_values is None or prompt.image_grid_thw is None:
            return []
        return [(prompt.pixel_values, prompt.image_grid_thw)]
    queues = {
        vision.image_token_id: _split(prompt.pixel_values, prompt.image_grid_thw),
        vision.video_token_id: _split(prompt.pixel_values_videos, prompt.video_grid_thw),
    }
    ordered: list[tuple[Tensor, Tensor]] = []
    remaining = 0  # tokens of the image or video under way; time stamps between a video's frames are none of them
    for i in prompt_ids:
        if i in queues:
            if remaining == 0:
                ordered.append(queues[i].pop(0))
                remaining = int(ordered[-1][1].prod()) // vision.merge_size**2
            remaining -= 1
    return ordered


def _split(pixels: Tensor | None, grids: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    if pixels is None or grids is None:
        return []
    return list(zip(pixels.split(grids.prod(dim=1).tolist()), grids.split(1), strict=True))
