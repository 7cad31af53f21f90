"""From rewards on rollouts to advantages on rollouts."""

import torch
from torch import Tensor

from r1.algorithms.advantage import ADVANTAGES
from r1.config import Config
from r1.types import Rollout


def reward_table(rollouts: list[Rollout], group_size: int) -> Tensor:
    """[num_groups, group_size] float32, NaN where there is no reward; rollouts are in (group, sample) order."""
    assert len(rollouts) % group_size == 0, f"{len(rollouts)=} is not a multiple of {group_size=}"
    rewards = [float("nan") if r.reward is None else r.reward for r in rollouts]
    return torch.tensor(rewards, dtype=torch.float32).view(-1, group_size)


def set_advantages(rollouts: list[Rollout], config: Config) -> None:
    """Fill each rollout's advantage with config.algorithm.advantage."""
    table = ADVANTAGES[config.algorithm.advantage](reward_table(rollouts, config.rollout.n), config.algorithm)
    for rollout, advantage in zip(rollouts, table.flatten().tolist(), strict=True):
        rollout.advantage = advantage


def valid_tokens(rollouts: list[Rollout], config: Config) -> list[int]:
    """Trained tokens of each minibatch over all ranks: those of its rollouts with a reward."""
    size = config.update.global_batch_size * config.rollout.n
    return [
        sum(len(r.response_ids) for r in rollouts[start : start + size] if r.reward is not None)
        for start in range(0, len(rollouts), size)
    ]
