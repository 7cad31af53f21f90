"""Policy losses: pure functions of a microbatch's tokens, whose sum over microbatches and ranks is the loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from r1.algorithms.kl import KL_PENALTIES
from r1.config import AlgorithmConfig

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: products with advantages stay finite in float32


def ppo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: AlgorithmConfig) -> Tensor:
    """PPO's clipped surrogate (arXiv 1707.06347) with its own bound on each side and dual clip (arXiv 1912.09729).

        ratio = exp(logprobs - old_logprobs)
        loss = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), at most -A clip_dual where A < 0

    Args:
        logprobs, old_logprobs: [T] float32 nats; the first carries the gradient.
        advantages: [T] float32.

    Returns:
        [T] float32, the loss of each token.
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * config.clip_dual), loss)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, AlgorithmConfig], Tensor]] = {"ppo": ppo_loss}


def microbatch_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    entropy: Tensor,
    global_valid_tokens: int,
    config: AlgorithmConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This microbatch's share of the loss: a sum over its tokens divided by the minibatch's count on all ranks.

    The divisor is the all-rank count, so splitting over microbatches or ranks leaves the gradient unchanged;
    gradients are therefore summed over ranks.

    Args:
        logprobs, old_logprobs: [T] float32 nats; the first carries the gradient.
        ref_logprobs: [T] float32 nats; None: no KL.
        advantages, entropy: [T] float32; entropy in nats, for the log.
        loss_mask: [T] bool. All False is legal: the loss is 0 and still reaches every parameter, so this rank
            joins the backward collectives.
        global_valid_tokens: sum of loss_mask over the minibatch and all ranks.

    Returns:
        The loss, [] float32, and metrics already divided for a SUM over microbatches and ranks.
    """
    divisor = max(global_valid_tokens, 1)
    # A masked token may hold anything: 0 * NaN would be NaN in its gradient.
    advantages = advantages.masked_fill(~loss_mask, 0.0)

    def token_mean(x: Tensor) -> Tensor:
        return torch.where(loss_mask, x, 0.0).sum() / divisor

    policy = token_mean(LOSSES[config.loss](logprobs, old_logprobs, advantages, config))
    loss = policy
    with torch.no_grad():
        log_ratio = logprobs - old_logprobs
        metrics = {
            "loss/policy": policy.detach(),
            "policy/entropy": token_mean(entropy),
            "policy/clip_frac_low": token_mean(((log_ratio.exp() < 1 - config.clip_low) & (advantages < 0)).float()),
            "policy/clip_frac_high": token_mean(((log_ratio.exp() > 1 + config.clip_high) & (advantages > 0)).float()),
            "policy/kl_to_old": token_mean(-log_ratio),
        }
    if ref_logprobs is not None:
        kl = token_mean(KL_PENALTIES[config.kl_penalty](logprobs, ref_logprobs))
        metrics["loss/kl"] = kl.detach()
        loss = loss + config.kl_coef * kl
    return loss, metrics
