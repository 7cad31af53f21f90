"""Policy losses: pure functions of a microbatch's tokens, whose sum over microbatches and ranks is the loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from r1.algorithms.correction import CORRECTIONS, bounded_ratio, sequence_mean
from r1.algorithms.kl import KL_PENALTIES
from r1.config import AlgorithmConfig


@dataclass(kw_only=True, slots=True)
class Tokens:
    """The response tokens of a microbatch: T of them, response after response; no response is split."""

    logprobs: Tensor  # [T] float32 nats, by the policy, with gradient
    entropy: Tensor  # [T] float32 nats, of the policy; with gradient where entropy_coef is set
    old_logprobs: Tensor  # [T] float32 nats, before the step's first update
    rollout_logprobs: Tensor  # [T] float32 nats, the sampler's
    advantages: Tensor  # [T] float32
    owners: Tensor  # [T] int64, which response of the microbatch each token belongs to
    loss_mask: Tensor  # [T] bool. All False is legal: the loss is 0 and still reaches every parameter
    weights: Tensor  # [T] float32, of each token in the loss, over the whole minibatch and all ranks; 0 where masked
    kl: Tensor | None = None  # [T] float32 nats, to the reference, with gradient; None: no KL in the loss


def _clipped(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Tensor:
    """max(-A ratio, -A clip(ratio)), at most -A clip_dual where A < 0."""
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * config.clip_dual), loss)


def ppo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """PPO's clipped surrogate (arXiv 1707.06347) with a bound of its own on each side and dual clip (arXiv 1912.09729).

        ratio = exp(logprobs - old_logprobs)
        loss = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), at most -A clip_dual where A < 0

    Returns:
        [T] float32, the loss of each token, as all functions in LOSSES.
    """
    return _clipped(bounded_ratio(tokens.logprobs - tokens.old_logprobs), tokens.advantages, config)


def gspo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """One ratio for a whole response, the geometric mean of its tokens', clipped as PPO's (arXiv 2507.18071).

    Meant with aggregation sequence_mean_token_mean and clips near 3e-4.
    """
    log_ratio = sequence_mean(tokens.logprobs - tokens.old_logprobs, tokens.owners)
    return _clipped(bounded_ratio(log_ratio), tokens.advantages, config)


def gspo_token(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """GSPO's ratio in value, the token's own in gradient, so that advantages may differ by token (arXiv 2507.18071)."""
    log_ratio = sequence_mean(tokens.logprobs - tokens.old_logprobs, tokens.owners).detach()
    return _clipped(bounded_ratio(log_ratio + tokens.logprobs - tokens.logprobs.detach()), tokens.advantages, config)


def cispo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Clip the importance weight, not the token: every token keeps its gradient (arXiv 2506.13585).

    loss = -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprobs
    """
    ratio = bounded_ratio((tokens.logprobs - tokens.old_logprobs).detach())
    return -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * tokens.advantages * tokens.logprobs


def sapo(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """A soft gate in place of the clip (arXiv 2511.20347).

    loss = -A (4 / tau) sigmoid(tau (ratio - 1)),  tau = tau_positive where A > 0, else tau_negative
    """
    ratio = bounded_ratio(tokens.logprobs - tokens.old_logprobs)
    tau = torch.where(tokens.advantages > 0, config.tau_positive, config.tau_negative)
    return -tokens.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


LOSSES: dict[str, Callable[[Tokens, AlgorithmConfig], Tensor]] = {
    "ppo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
}
"""Each takes a microbatch's Tokens and the config and returns [T] float32, the loss of each token."""

CLIP_SEQUENCES = (gspo, gspo_token)
"""Those that clip one ratio of a whole response; policy/clip_frac_* then counts by it."""


def kl_to_reference(logprobs: Tensor, ref_logprobs: Tensor | None, config: AlgorithmConfig) -> Tensor | None:
    """[T] the KL that the loss is charged with, or None; the full one comes from the LM head."""
    if ref_logprobs is None or config.kl_in != "loss" or config.kl_penalty not in KL_PENALTIES:
        return None
    return KL_PENALTIES[config.kl_penalty](logprobs, ref_logprobs)


def microbatch_loss(
    tokens: Tokens,
    loss_fn: Callable[[Tokens, AlgorithmConfig], Tensor],
    *,
    kl_coef: float,
    global_valid_tokens: int,
    config: AlgorithmConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This microbatch's share of the loss: the sum of its tokens' losses, each times its weight.

    The weights were divided by counts over the minibatch and all ranks, so splitting over microbatches or ranks leaves
    the gradient unchanged; gradients are therefore summed over ranks.

    Args:
        loss_fn: one of LOSSES, or a user's.
        kl_coef: weight of tokens.kl.
        global_valid_tokens: sum of loss_mask over the minibatch and all ranks, for the metrics.

    Returns:
        The loss, [] float32, and metrics (means over trained tokens) already divided for a SUM over microbatches and
        ranks.
    """
    # A masked token may hold anything: 0 * NaN would be NaN in its gradient.
    tokens.advantages = tokens.advantages.masked_fill(~tokens.loss_mask, 0.0)
    divisor = max(global_valid_tokens, 1)

    def token_mean(x: Tensor) -> Tensor:
        return torch.where(tokens.loss_mask, x.detach(), 0.0).sum() / divisor

    gap = tokens.old_logprobs - tokens.rollout_logprobs
    trust = CORRECTIONS[config.correction](gap, tokens.owners, config)
    policy = trust * loss_fn(tokens, config)
    total = policy
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach()
    ratio = (sequence_mean(log_ratio, tokens.owners) if loss_fn in CLIP_SEQUENCES else log_ratio).exp()
    low, high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
    metrics = {
        "loss/policy": torch.where(tokens.loss_mask, policy.detach() * tokens.weights, 0.0).sum(),
        "policy/entropy": token_mean(tokens.entropy),
        "policy/clip_frac_low": token_mean((low & (tokens.advantages < 0)).float()),
        "policy/clip_frac_high": token_mean((high & (tokens.advantages > 0)).float()),
        "policy/kl_to_old": token_mean(-log_ratio),
    }
    if config.correction != "off":
        metrics["mismatch/weight_mean"] = token_mean(trust)
    if config.entropy_coef > 0:
        total = total - config.entropy_coef * tokens.entropy
    if tokens.kl is not None:
        total = total + kl_coef * tokens.kl
        metrics["loss/kl"] = token_mean(tokens.kl)
    return torch.where(tokens.loss_mask, total * tokens.weights, 0.0).sum(), metrics
