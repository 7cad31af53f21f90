"""Microbatches: pieces of groups packed into one padding-free row, every prompt computed once for its responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from r1.policy.attention import Packing, to_device
from r1.policy.balance import Piece
from r1.policy.vision import VisionSpec, as_images, prompt_patches, prompt_positions
from r1.types import Prompt, Rollout


@dataclass(kw_only=True, slots=True)
class Microbatch:
    """One packed row. T packed tokens, R response tokens, each predicted from one packed position."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T], or [4, 1, T] for vision-language models: text, then time, height, width
    pixel_values: Tensor | None  # [patches, patch_dim] float32, of images and videos
    image_grid_thw: Tensor | None  # [images and videos, 3] int64
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

    def sizes(self) -> dict[str, int]:
        """What its memory grows with, for messages."""
        patches = 0 if self.pixel_values is None else len(self.pixel_values)
        return {"tokens": self.input_ids.numel(), "responses": len(self.rollouts), "patches": patches}

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
            {name: to_device(tensor, device) for name, tensor in inputs.items()},
            self.packing.to(device),
            to_device(self.hidden_index, device),
        )


def _blank_picture(vision: VisionSpec) -> tuple[Tensor, Tensor]:
    """Patches and grid of a picture of one token."""
    grid = torch.tensor([[1, vision.merge_size, vision.merge_size]])
    return torch.zeros(vision.merge_size**2, vision.patch_dim), grid


def _append(
    ids: list[int], positions: list[Tensor], groups: list[tuple[int, list[int]]], filling: Sequence[int]
) -> None:
    """Add tokens that predict nothing, as a group of their own, if there are any."""
    if filling:
        ids += filling
        positions.append(torch.zeros(len(positions[0]), len(filling), dtype=torch.int64))
        groups.append((len(filling), []))


def pack(
    pieces: Sequence[Piece],
    prompts: Mapping[int, Prompt],
    vision: VisionSpec | None,
    *,
    with_mask: bool,
    multiple_of: int = 1,
) -> Microbatch:
    """Lay pieces out as [prompt][response]…[prompt][response]… and index what predicts what.

    The last prompt token's hidden state predicts the first token of every response; a response's last token predicts
    nothing and is left out. A vision-language model's microbatch always holds a picture, if need be a blank one: ranks
    must run the same collectives of the vision tower.

    Args:
        prompts: by group, with pixels.
        with_mask: also build the [T, T] mask that SDPA needs; multiple_of: T is made one, by tokens of no group.
    """
    ids: list[int] = []
    positions, groups, hidden_index, rollouts, masked = [], [], [], [], []
    patches: list[tuple[Tensor, Tensor]] = []
    for piece in pieces:
        prompt_ids, prompt = piece.rollouts[0].prompt_ids, prompts[piece.rollouts[0].group]
        if vision is None:
            places = torch.arange(len(prompt_ids))[None]
        else:
            places = prompt_positions(prompt, prompt_ids, vision)
            patches += prompt_patches(prompt, prompt_ids, vision)
        last, following = len(ids) + len(prompt_ids) - 1, int(places.max()) + 1
        ids += prompt_ids if vision is None else as_images(prompt_ids, vision)
        positions.append(places)
        for rollout in piece.rollouts:
            inputs = rollout.response_ids[:-1]
            first = torch.tensor([last])[: len(rollout.response_ids)]  # none of an empty response
            hidden_index += [first, torch.arange(len(ids), len(ids) + len(inputs))]
            positions.append((torch.arange(len(inputs)) + following).expand(len(places), -1))
            ids += inputs
            rollouts.append(rollout)
        masked += [piece.masked] * len(piece.rollouts)
        groups.append((len(prompt_ids), [max(len(r.response_ids) - 1, 0) for r in piece.rollouts]))
    if vision is not None and not patches:
        patches.append(_blank_picture(vision))
        _append(ids, positions, groups, [vision.image_token_id])
    _append(ids, positions, groups, [0] * (-len(ids) % multiple_of))
    position_ids = torch.cat(positions, dim=1)  # [1 or 3, T]
    if vision is not None:
        # A first row of text positions: with three rows transformers would build its own mask from them.
        position_ids = torch.cat([torch.arange(len(ids))[None], position_ids])[:, None]
    return Microbatch(
        input_ids=torch.tensor([ids]),
        position_ids=position_ids,
        pixel_values=torch.cat([pixels for pixels, _ in patches]) if patches else None,
        image_grid_thw=torch.cat([grid for _, grid in patches]) if patches else None,
        packing=Packing.from_groups(groups, with_mask=with_mask),
        hidden_index=torch.cat(hidden_index),
        labels=torch.tensor([t for r in rollouts for t in r.response_ids]),
        rollouts=rollouts,
        masked=masked,
        rollout_logprobs=torch.tensor([x for r in rollouts for x in r.rollout_logprobs], dtype=torch.float32),
    )
