"""Rollout correction: weights for tokens whose sampler and trainer disagree on how likely they were."""

from collections.abc import Callable

import torch
from torch import Tensor

from r1.config import AlgorithmConfig

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: products with advantages stay finite in float32


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), within exp(-20) and exp(20)."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def sequence_sum(x: Tensor, owners: Tensor) -> Tensor:
    """[T] -> [T]: every token gets the sum over its response. owners: [T] int64, the response of each token."""
    totals = torch.zeros(int(owners.max()) + 1, dtype=x.dtype, device=x.device).index_add(0, owners, x)
    return totals[owners]


def sequence_mean(x: Tensor, owners: Tensor) -> Tensor:
    """[T] -> [T]: every token gets the mean over its response."""
    return sequence_sum(x, owners) / sequence_sum(torch.ones_like(x), owners)


def off(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Tensor:
    """No correction."""
    return torch.ones_like(log_ratio)


def token_truncate(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Tensor:
    """min(ratio, high) of each token: truncated importance sampling (Yao et al. 2025, off-policy RL training)."""
    return bounded_ratio(log_ratio).clamp(max=config.correction_high)


def sequence_truncate(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Tensor:
    """min(ratio of the whole response, high) for each of its tokens: unbiased over sequences but for the cut."""
    return token_truncate(sequence_sum(log_ratio, owners), owners, config)


def token_mask(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Tensor:
    """The ratio where it lies in [low, high], else 0: IcePop (arXiv 2510.18855)."""
    ratio = bounded_ratio(log_ratio)
    return ratio * ((ratio >= config.correction_low) & (ratio <= config.correction_high))


def sequence_mask(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Tensor:
    """1 for responses whose geometric mean ratio lies in [low, high], else 0: rejects whole responses."""
    ratio = bounded_ratio(sequence_mean(log_ratio, owners))
    return ((ratio >= config.correction_low) & (ratio <= config.correction_high)).float()


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, AlgorithmConfig], Tensor]] = {
    "off": off,
    "token_truncate": token_truncate,
    "sequence_truncate": sequence_truncate,
    "token_mask": token_mask,
    "sequence_mask": sequence_mask,
}
"""Each takes old_logprobs - rollout_logprobs, [T] nats, each token's response, [T], and returns [T] float32 weights."""
