"""How much better a response was than expected: one number for each response, from the rewards of its group."""

from collections.abc import Callable

import torch
from torch import Tensor

from r1.config import AlgorithmConfig


def group_advantages(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Compare each response with its own group.

        A[i, j] = r[i, j] - mean(r[i]),  divided by std(r[i]) + 1e-6 if config.normalize_std

    Statistics are over the valid responses of a group, the standard deviation with n - 1. Tied groups and groups
    with one valid response get exactly 0: eight rewards of 0.7 would otherwise each get 0.056, float32 rounding
    of the mean divided by 1e-6.

    Args:
        rewards: [num_groups, group_size] float32; NaN marks a response without a reward.
        config: normalize_std True is GRPO (arXiv 2402.03300), False is Dr. GRPO (arXiv 2503.20783).

    Returns:
        [num_groups, group_size] float32, in standard deviations or reward units; 0 where the reward is NaN.
    """
    valid = ~rewards.isnan()
    count = valid.sum(dim=1, keepdim=True).clamp(min=1)
    filled = rewards.masked_fill(~valid, 0.0)
    centred = (filled - filled.sum(dim=1, keepdim=True) / count).masked_fill(~valid, 0.0)
    advantages = centred
    if config.normalize_std:
        std = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        advantages = centred / (std + 1e-6)
    return advantages.masked_fill(tied_groups(rewards)[:, None], 0.0)


def tied_groups(rewards: Tensor) -> Tensor:
    """[num_groups] bool: all valid rewards of the group are equal, so it teaches nothing. rewards as above."""
    low = rewards.masked_fill(rewards.isnan(), torch.inf).amin(dim=1)
    high = rewards.masked_fill(rewards.isnan(), -torch.inf).amax(dim=1)
    return high <= low


ADVANTAGES: dict[str, Callable[[Tensor, AlgorithmConfig], Tensor]] = {"grpo": group_advantages}
"""Each takes rewards, [num_groups, group_size] float32 with NaN for none, and returns advantages of that shape."""
