"""How much better a response, or each of its tokens, was than expected; one function an algorithm."""

from collections.abc import Callable

import torch
from torch import Tensor

from r1.algorithms.scores import Scores
from r1.config import AlgorithmConfig

EPS = 1e-6  # beside a standard deviation


def _mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of each group's valid entries, [G, 1]; 0 for none."""
    return x.masked_fill(~valid, 0.0).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)


def _std(x: Tensor, valid: Tensor) -> Tensor:
    """Sample standard deviation (n - 1) of each group's valid entries, [G, 1]; 0 for one."""
    squares = (x - _mean(x, valid)).masked_fill(~valid, 0.0).square().sum(1, keepdim=True)
    return (squares / (valid.sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()


def _whiten(x: Tensor, valid: Tensor) -> Tensor:
    """Shift and scale the valid entries to mean 0 and standard deviation 1 (n - 1) over all; 0 elsewhere."""
    chosen = x[valid]
    if chosen.numel() < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(x)
    return ((x - chosen.mean()) / (chosen.std() + EPS)).masked_fill(~valid, 0.0)


def tied_groups(rewards: Tensor) -> Tensor:
    """[G] bool: the group's valid rewards are all equal, so it teaches nothing. rewards: [G, n], NaN where excluded."""
    low = rewards.masked_fill(rewards.isnan(), torch.inf).amin(dim=1)
    high = rewards.masked_fill(rewards.isnan(), -torch.inf).amax(dim=1)
    return high <= low


def grpo(scores: Scores, config: AlgorithmConfig) -> Tensor:
    """Compare each response with its own group (arXiv 2402.03300).

        A[i, j] = (r[i, j] - mean(r[i])) / s,  s = std(r[i]) + 1e-6, or std(r) + 1e-6 over the batch, or 1

    Tied groups, and groups with one valid response, get exactly 0: eight rewards of 0.7 would otherwise each get
    0.056, float32 rounding of the mean divided by 1e-6.

    Args:
        config: advantage_std "group" is GRPO, "none" is Dr. GRPO (arXiv 2503.20783), "batch" divides by one deviation
            of all rewards (arXiv 2508.08221).

    Returns:
        [G, n] float32, in standard deviations or reward units; 0 where excluded.
    """
    valid = scores.valid
    advantages = (scores.rewards - _mean(scores.rewards, valid)).masked_fill(~valid, 0.0)
    if config.advantage_std == "group":
        advantages = advantages / (_std(scores.rewards, valid) + EPS)
    elif config.advantage_std == "batch" and valid.sum() > 1:
        advantages = advantages / (scores.rewards[valid].std() + EPS)
    return advantages.masked_fill(tied_groups(scores.rewards)[:, None], 0.0)


def rloo(scores: Scores, config: AlgorithmConfig) -> Tensor:
    """Leave one out: minus the mean of the others of its group (arXiv 2402.14740).

        A[i, j] = r[i, j] - mean over k != j of r[i, k] = n / (n - 1) (r[i, j] - mean(r[i]))

    Returns:
        [G, n] float32, reward units; 0 for a response alone in its group.
    """
    valid = scores.valid
    count = valid.sum(1, keepdim=True)
    centred = (scores.rewards - _mean(scores.rewards, valid)).masked_fill(~valid, 0.0)
    centred = centred.masked_fill(tied_groups(scores.rewards)[:, None], 0.0)
    return centred * count / (count - 1).clamp(min=1)


def passk(scores: Scores, config: AlgorithmConfig) -> Tensor:
    """Credit the best of a group alone, by its lead over the second (arXiv 2503.19595).

        A[i, best] = (r[i, best] - r[i, second]) / (std(r[i]) + 1e-6),  0 for the others

    This is max(r[i]) less the maximum of the others. The paper does not divide: advantage_std "none" leaves it out.
    Returns [G, n] float32.
    """
    valid = scores.valid
    filled = scores.rewards.masked_fill(~valid, -torch.inf)
    top = filled.topk(2, dim=1)
    lead = (top.values[:, :1] - top.values[:, 1:]).nan_to_num(0.0, posinf=0.0, neginf=0.0)  # fewer than two valid
    if config.advantage_std != "none":
        lead = lead / (_std(scores.rewards, valid) + EPS)
    return torch.zeros_like(filled).scatter(1, top.indices[:, :1], lead)


def remax(scores: Scores, config: AlgorithmConfig) -> Tensor:
    """Minus the reward of the greedy response to the same prompt (arXiv 2310.10505). Returns [G, n] float32.

    A prompt whose greedy response has no reward teaches nothing.
    """
    assert scores.baselines is not None, "remax without greedy baselines"
    baselines = scores.baselines[:, None]
    return (scores.rewards - baselines).masked_fill(~scores.valid | baselines.isnan(), 0.0)


def discounted_returns(tokens: Tensor, scores: Scores, gamma: float) -> Tensor:
    """[T]: what follows each token of its response, tokens[t] + gamma tokens[t + 1] + …"""
    lengths = scores.lengths.flatten()
    inside = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, longest]
    padded = torch.zeros(inside.shape, dtype=torch.float64)
    padded[inside] = tokens.double()
    for t in range(padded.shape[1] - 2, -1, -1):
        padded[:, t] += gamma * padded[:, t + 1]
    return padded[inside].float()


def reinforce_plus_plus(scores: Scores, config: AlgorithmConfig) -> Tensor:
    """Discounted return of each token, whitened over all tokens of the batch (arXiv 2501.03262).

    Returns:
        [T] float32, in standard deviations.
    """
    returns = discounted_returns(scores.token_rewards(), scores, config.gamma)
    return _whiten(returns, scores.spread(scores.valid))


def reinforce_plus_plus_baseline(scores: Scores, config: AlgorithmConfig) -> Tensor:
    """Reward minus its group's mean, whitened over all tokens of the batch (arXiv 2501.03262, with baseline).

    Returns:
        [T] float32, in standard deviations.
    """
    valid = scores.valid
    centred = (scores.rewards - _mean(scores.rewards, valid)).masked_fill(~valid, 0.0)
    centred = centred.masked_fill(tied_groups(scores.rewards)[:, None], 0.0)
    return _whiten(scores.spread(centred), scores.spread(valid))


def gae_returns(scores: Scores, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438) over each response's tokens.

        delta[t] = r[t] + gamma V[t + 1] - V[t],  A[t] = delta[t] + gamma lam A[t + 1],  V = A = 0 past the end

    Returns:
        Advantages and returns (A + V), [T] float32 each, reward units.
    """
    assert scores.values is not None, "gae without a critic's values"
    rewards, values = scores.token_rewards().double(), scores.values.double()
    last = torch.zeros(len(values), dtype=torch.bool)
    lengths = scores.lengths.flatten()
    last[lengths.cumsum(0)[lengths > 0] - 1] = True
    following = torch.cat([values[1:], values.new_zeros(1)]).masked_fill(last, 0.0)
    delta = rewards + gamma * following - values
    advantages = discounted_returns(delta, scores, gamma * lam).double()
    return advantages.float(), (advantages + values).float()


def gae(scores: Scores, config: AlgorithmConfig) -> Tensor:
    """PPO's advantages (arXiv 1707.06347): gae_returns, whitened over all tokens of the batch. Returns [T] float32."""
    return _whiten(gae_returns(scores, config.gamma, config.lam)[0], scores.spread(scores.valid))


ADVANTAGES: dict[str, Callable[[Scores, AlgorithmConfig], Tensor]] = {
    "grpo": grpo,
    "rloo": rloo,
    "passk": passk,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae,
}
"""Each takes a step's Scores and the config, and returns advantages: [G, n] for responses, or [T] for tokens."""
