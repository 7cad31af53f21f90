"""What the stages hand on: prompts, rollouts and sampling parameters."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL.Image import Image
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One row of a data set, rendered, tokenized and with its pictures processed."""

    row: int  # index in its data set, after filtering; names the row in messages
    text: str  # the rendered chat text, one image placeholder per image
    prompt_ids: list[int]  # [P] token ids, image tokens expanded: what is trained on
    sampler_ids: list[int]  # [<= P] token ids with one image token per image: what vLLM is given
    images: list[Image] = field(default_factory=list)  # RGB, already resized to their final size
    pixel_values: Tensor | None = None  # [num_patches, patch_dim] float32, of all images
    image_grid_thw: Tensor | None = None  # [num_images, 3] int64, in patches
    videos: list[tuple[np.ndarray, dict[str, Any]]] = field(default_factory=list)
    # each: [frames, height, width, 3] uint8 frames at their final size, and what transformers calls video_metadata
    pixel_values_videos: Tensor | None = None  # [num_patches, patch_dim] float32, of all videos
    video_grid_thw: Tensor | None = None  # [num_videos, 3] int64, in patches; time in pairs of frames
    video_seconds: list[float] = field(default_factory=list)  # of each video, that one pair of frames stands for
    ground_truth: Any = None  # the answer column
    fields: dict[str, Any] = field(default_factory=dict)  # every other column of the row


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One sampled response to one prompt; rollout.n of them form a group."""

    group: int  # index of the prompt within the step, over all ranks
    sample: int  # index within the group
    prompt_ids: list[int]  # [P] token ids, as fed to the sampler, image tokens expanded
    response_ids: list[int]  # [C] token ids, as sampled; never re-tokenized
    rollout_logprobs: list[float]  # [C] nats, the sampler's own, at the sampling temperature
    truncated: bool  # stopped by max_response_length, not by an end token
    response: str = ""  # decoded text, as the reward function sees it
    rewards: dict[str, float] | None = None  # what the reward function returned; None where it failed
    reward: float | None = None  # rewards["overall"]; None: excluded from the loss and its group's statistics
    baseline: float | None = None  # reward of the greedy response to its prompt (ReMax); NaN: it has none
    kl_penalties: Tensor | None = None  # [C] float32, taken off the reward at each token (kl_in="reward")
    values: Tensor | None = None  # [C] float32, the critic's, before each token (gae)
    advantages: Tensor | None = None  # [C] float32
    returns: Tensor | None = None  # [C] float32, what the critic should have said (gae)
    weight: float = 0.0  # of each of its tokens in the minibatch's loss; 0: not trained


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How an engine samples; temperature 0 is greedy."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    max_tokens: int = 2048
    ignore_eos: bool = False
    seed: int = 0  # of the run and the step; each request's own seed is derived from it, its prompt and its sample
