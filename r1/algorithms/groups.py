"""From rewards on rollouts to what each of their tokens counts: who is trained, at what advantage and weight."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from r1.algorithms.advantage import tied_groups
from r1.algorithms.scores import Scores, scores_of
from r1.config import AlgorithmConfig, Config
from r1.types import Rollout


def set_advantages(
    rollouts: list[Rollout], advantage_fn: Callable[[Scores, AlgorithmConfig], Tensor], config: Config
) -> None:
    """Fill each rollout's advantages and weight; every rank holds all rollouts, in (group, sample) order.

    Args:
        advantage_fn: one of ADVANTAGES, or a user's.
    """
    scores = scores_of(rollouts, config.rollout.n)
    advantages = advantage_fn(scores, config.algorithm)
    if advantages.shape == scores.rewards.shape:
        advantages = scores.spread(advantages)
    total = int(scores.lengths.sum())
    assert advantages.shape == (total,), f"advantages must be [G, n] or [T={total}], got {tuple(advantages.shape)}"
    for rollout, part in zip(rollouts, advantages.float().split(scores.lengths.flatten().tolist()), strict=True):
        rollout.advantages = part
    _set_trained(rollouts, scores, config.algorithm)
    for minibatch in minibatches_of(rollouts, config):
        _set_weights(minibatch, config)


def minibatches_of(rollouts: list[Rollout], config: Config) -> list[list[Rollout]]:
    """The rollouts of each optimizer step: global_batch_size groups after another."""
    size = config.update.global_batch_size * config.rollout.n
    return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]


def valid_tokens(rollouts: list[Rollout], config: Config) -> list[int]:
    """Trained tokens of each minibatch over all ranks."""
    return [sum(len(r.response_ids) for r in part if r.weight > 0) for part in minibatches_of(rollouts, config)]


def _set_trained(rollouts: list[Rollout], scores: Scores, config: AlgorithmConfig) -> None:
    tied = tied_groups(scores.rewards).repeat_interleave(scores.rewards.shape[1]).tolist()
    for rollout, in_tied_group in zip(rollouts, tied, strict=True):
        out = rollout.reward is None or not rollout.response_ids
        out = out or (config.mask_truncated and rollout.truncated)
        out = out or (config.drop_tied_groups and in_tied_group)
        rollout.weight = 0.0 if out else 1.0


def _set_weights(minibatch: list[Rollout], config: Config) -> None:
    """What one token of each rollout counts in the minibatch's loss; the counts are over all ranks."""
    trained = [r for r in minibatch if r.weight > 0]
    tokens = sum(len(r.response_ids) for r in trained)
    for rollout in trained:
        if config.algorithm.aggregation == "token_mean":
            rollout.weight = 1 / tokens
        elif config.algorithm.aggregation == "sequence_mean_token_mean":
            rollout.weight = 1 / (len(trained) * len(rollout.response_ids))
        else:
            rollout.weight = 1 / (len(trained) * config.data.max_response_length)


def next_kl_coef(kl_coef: float, kl: float, num_responses: int, config: AlgorithmConfig) -> float:
    """The coefficient after a step whose mean KL was kl: fixed, or adaptive (arXiv 1909.08593).

    kl_coef (1 + clip(kl / kl_target - 1, -0.2, 0.2) num_responses / kl_horizon)
    """
    if config.kl_target is None or not math.isfinite(kl):
        return kl_coef
    error = min(max(kl / config.kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_responses / config.kl_horizon)


def keeps_group(rewards: list[dict[str, float] | None], config: AlgorithmConfig) -> bool:
    """Whether dynamic sampling keeps a group: mean or deviation (n - 1) of filter_key strictly between the bounds.

    Raises:
        ValueError: the reward function returns no such key.
    """
    graded = [r for r in rewards if r is not None]
    if not graded:
        return False
    for reward in graded:
        if config.filter_key not in reward:
            raise ValueError(
                f"algorithm.filter_key={config.filter_key!r} is not among the reward's keys {sorted(reward)}"
            )
    values = torch.tensor([r[config.filter_key] for r in graded], dtype=torch.float64)
    if config.filter_by == "std":
        value = float(values.std()) if len(values) > 1 else 0.0
    else:
        value = float(values.mean())
    return config.filter_low < value < config.filter_high
