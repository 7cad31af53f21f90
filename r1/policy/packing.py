"""Microbatches: pieces of groups packed into one padding-free row, every prompt computed once for its responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from r1.policy.attention import Packing
from r1.policy.balance import Piece
from r1.types import Prompt, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """What packing needs to know of a vision-language model."""

    image_token_id: int
    merge_size: int  # patches per token along each side
    patch_dim: int  # values of one flattened patch
    banned_ids: tuple[int, ...]  # image and video tokens: never part of a response

    @staticmethod
    def from_config(config: PretrainedConfig) -> "VisionSpec | None":
        """None for a text model. Covers Qwen2-VL, Qwen2.5-VL, Qwen3-VL."""
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return None
        return VisionSpec(
            image_token_id=config.image_token_id,
            merge_size=vision.spatial_merge_size,
            banned_ids=tuple(sorted({config.image_token_id, config.video_token_id})),
            patch_dim=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        )


@dataclass(kw_only=True, slots=True)
class Microbatch:
    """One packed row. T packed tokens, R response tokens, each predicted from one packed position."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T], or [4, 1, T] for vision-language models: text, then time, height, width
    pixel_values: Tensor | None  # [patches, patch_dim] float32
    image_grid_thw: Tensor | None  # [images, 3] int64
    packing: Packing
    hidden_index: Tensor  # [R] int64, packed position whose hidden state predicts labels[r]
    labels: Tensor  # [R] int64
    rollouts: list[Rollout]  # in the order of their R tokens
    masked: list[bool]  # per rollout: True only keeps the ranks in step
    rollout_logprobs: Tensor  # [R] float32 nats, the sampler's
    old_logprobs: Tensor | None = None  # [R] float32 nats
    ref_logprobs: Tensor | None = None  # [R] float32 nats
    values: Tensor | None = None  # [R] float32, the critic's before its update
    advantages: Tensor | None = None  # [R] float32
    returns: Tensor | None = None  # [R] float32, what the critic should have said
    weights: Tensor | None = None  # [R] float32, of each token in the minibatch's loss; 0: not trained

    def lengths(self) -> Tensor:
        """[rollouts] int64, tokens of each response."""
        return torch.tensor([len(r.response_ids) for r in self.rollouts])

    def owners(self) -> Tensor:
        """[R] int64, which of the rollouts each token belongs to."""
        return torch.arange(len(self.rollouts)).repeat_interleave(self.lengths())

    def take_advantages(self) -> None:
        """Copy advantages, returns and weights from the rollouts, whose own they have become."""
        weights = [0.0 if m else r.weight for r, m in zip(self.rollouts, self.masked, strict=True)]
        self.weights = torch.tensor(weights, dtype=torch.float32).repeat_interleave(self.lengths())
        self.advantages = torch.cat([r.advantages for r in self.rollouts if r.advantages is not None])
        if all(r.returns is not None for r in self.rollouts):
            self.returns = torch.cat([r.returns for r in self.rollouts if r.returns is not None])

    def own(self, values: Tensor) -> Tensor:
        """Those of [R] values that belong to rollouts this microbatch is there for."""
        return values[(~torch.tensor(self.masked)).repeat_interleave(self.lengths())]

    def by_rollout(self, values: Tensor) -> dict[tuple[int, int], Tensor]:
        """[R] values cut into the responses this microbatch is there for, by (group, sample)."""
        parts = values.split(self.lengths().tolist())
        rows = zip(self.rollouts, self.masked, parts, strict=True)
        return {(r.group, r.sample): part for r, masked, part in rows if not masked}

    def model_inputs(self, device: torch.device) -> tuple[dict[str, Tensor], Packing, Tensor]:
        """What a forward pass takes: tensors of the transformer, the packing, and hidden_index."""
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        if self.pixel_values is not None and self.image_grid_thw is not None:
            inputs |= {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}
        return (
            {name: tensor.to(device) for name, tensor in inputs.items()},
            self.packing.to(device),
            self.hidden_index.to(device),
        )


def mrope_positions(prompt_ids: Sequence[int], grid_thw: Tensor | None, vision: VisionSpec) -> Tensor:
    """[3, P] int64: time, height and width position of each prompt token (M-RoPE, arXiv 2409.12191, images only).

    Text counts on along all three axes; an image's tokens keep its starting time and spread over rows and columns;
    what follows an image starts one past its largest position.
    """
    grids = (
        [] if grid_thw is None else [(h // vision.merge_size, w // vision.merge_size) for _, h, w in grid_thw.tolist()]
    )
    parts, start, at = [], 0, 0
    while at < len(prompt_ids):
        if prompt_ids[at] == vision.image_token_id:
            height, width = grids.pop(0)
            cell = torch.arange(height * width)
            parts.append(torch.stack([torch.zeros_like(cell), cell // width, cell % width]) + start)
            at, start = at + height * width, start + max(height, width)
        else:
            end = at
            while end < len(prompt_ids) and prompt_ids[end] != vision.image_token_id:
                end += 1
            parts.append((torch.arange(end - at) + start).expand(3, -1))
            at, start = end, start + end - at
    return torch.cat(parts, dim=1)


def pack(
    pieces: Sequence[Piece], prompts: Mapping[int, Prompt], vision: VisionSpec | None, *, with_mask: bool
) -> Microbatch:
    """Lay pieces out as [prompt][response]…[prompt][response]… and index what predicts what.

    The last prompt token's hidden state predicts the first token of every response; a response's last token predicts
    nothing and is left out. A vision-language model's microbatch always holds a picture, a blank one-token one where
    there is none: ranks with and without pictures must run the same collectives of the vision tower.

    Args:
        prompts: by group, with pixels.
        with_mask: also build the [T, T] mask that SDPA needs.
    """
    ids: list[int] = []
    positions, groups, hidden_index, rollouts, masked = [], [], [], [], []
    for piece in pieces:
        prompt_ids, prompt = piece.rollouts[0].prompt_ids, prompts[piece.rollouts[0].group]
        if vision is None:
            prompt_positions = torch.arange(len(prompt_ids))[None]
        else:
            prompt_positions = mrope_positions(prompt_ids, prompt.image_grid_thw, vision)
        last, following = len(ids) + len(prompt_ids) - 1, int(prompt_positions.max()) + 1
        ids += prompt_ids
        positions.append(prompt_positions)
        for rollout in piece.rollouts:
            inputs = rollout.response_ids[:-1]
            hidden_index.append(torch.tensor([last]))
            hidden_index.append(torch.arange(len(ids), len(ids) + len(inputs)))
            positions.append((torch.arange(len(inputs)) + following).expand(len(prompt_positions), -1))
            ids += inputs
            rollouts.append(rollout)
            masked.append(piece.masked)
        groups.append((len(prompt_ids), [len(r.response_ids) - 1 for r in piece.rollouts]))
    pixels = [p.pixel_values for p in (prompts[x.rollouts[0].group] for x in pieces) if p.pixel_values is not None]
    grids = [p.image_grid_thw for p in (prompts[x.rollouts[0].group] for x in pieces) if p.image_grid_thw is not None]
    if vision is not None and not pixels:
        pixels = [torch.zeros(vision.merge_size**2, vision.patch_dim)]
        grids = [torch.tensor([[1, vision.merge_size, vision.merge_size]])]
        ids.append(vision.image_token_id)
        positions.append(torch.zeros(3, 1, dtype=torch.int64))
        groups.append((1, []))
    position_ids = torch.cat(positions, dim=1)  # [1 or 3, T]
    if vision is not None:
        # A first row of text positions: with three rows transformers would build its own mask from them.
        position_ids = torch.cat([torch.arange(len(ids))[None], position_ids])[:, None]
    return Microbatch(
        input_ids=torch.tensor([ids]),
        position_ids=position_ids,
        pixel_values=torch.cat(pixels) if pixels else None,
        image_grid_thw=torch.cat(grids) if grids else None,
        packing=Packing.from_groups(groups, with_mask=with_mask),
        hidden_index=torch.cat(hidden_index),
        labels=torch.tensor([t for r in rollouts for t in r.response_ids]),
        rollouts=rollouts,
        masked=masked,
        rollout_logprobs=torch.tensor([x for r in rollouts for x in r.rollout_logprobs], dtype=torch.float32),
    )
