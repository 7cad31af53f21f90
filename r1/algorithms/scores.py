"""What advantages are made of: a step's rewards by group, and where wanted something for every token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Rewards and lengths of all rollouts of a step, in (group, sample) order; T tokens in all, flat in that order."""

    rewards: Tensor  # [G, n] float32, the response's reward less its penalties; NaN: excluded
    lengths: Tensor  # [G, n] int64, tokens of each response
    penalties: Tensor | None = None  # [T] float32, taken off the reward token by token (KL in the reward)
    baselines: Tensor | None = None  # [G] float32, reward of the greedy response to each prompt (ReMax)
    values: Tensor | None = None  # [T] float32, the critic's expectation before each token (GAE)

    @property
    def valid(self) -> Tensor:
        """[G, n] bool."""
        return ~self.rewards.isnan()

    def spread(self, per_response: Tensor) -> Tensor:
        """[G, n] -> [T]: every token gets its response's value."""
        return per_response.flatten().repeat_interleave(self.lengths.flatten())

    def token_rewards(self) -> Tensor:
        """[T] float32: minus each token's penalty, and the response's own reward on its last token; 0 if excluded."""
        penalties = torch.zeros(int(self.lengths.sum())) if self.penalties is None else self.penalties
        some = self.lengths.flatten() > 0
        ends = self.lengths.flatten().cumsum(0)[some] - 1
        totals = torch.zeros(self.lengths.numel()).index_add(0, self.owners(), penalties)
        tokens = -penalties
        tokens[ends] += (self.rewards.flatten() + totals)[some]
        return torch.where(self.spread(self.valid), tokens, 0.0)

    def owners(self) -> Tensor:
        """[T] int64: the response each token belongs to."""
        return torch.arange(self.lengths.numel()).repeat_interleave(self.lengths.flatten())


def scores_of(rollouts: list[Rollout], group_size: int) -> Scores:
    """Collect what the rollouts carry; they are in (group, sample) order. A response without tokens is excluded."""
    assert len(rollouts) % group_size == 0, f"{len(rollouts)=} is not a multiple of {group_size=}"

    def flat(name: str) -> Tensor | None:
        parts = [getattr(r, name) for r in rollouts]
        return None if any(p is None for p in parts) else torch.cat(parts)

    penalties = flat("kl_penalties")
    graded = [r.reward if r.reward is not None and r.response_ids else float("nan") for r in rollouts]
    rewards = torch.tensor(graded, dtype=torch.float32)
    if penalties is not None:
        rewards -= torch.stack([r.kl_penalties.sum() for r in rollouts if r.kl_penalties is not None])
    baselines = [r.baseline for r in rollouts[::group_size]]
    return Scores(
        rewards=rewards.view(-1, group_size),
        lengths=torch.tensor([len(r.response_ids) for r in rollouts]).view(-1, group_size),
        penalties=penalties,
        baselines=None if any(b is None for b in baselines) else torch.tensor(baselines, dtype=torch.float32),
        values=flat("values"),
    )
