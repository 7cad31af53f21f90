"""Estimators of the KL divergence from policy to reference, token by token (joschu.net/blog/kl-approx.html)."""

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: k3 and its gradient stay finite in float32


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(p / q): unbiased, may be negative; its gradient has expectation 0."""
    return logprobs - ref_logprobs


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log(p / q)|."""
    return (logprobs - ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(p / q)^2 / 2: biased, low variance."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q / p - 1 - log(q / p): unbiased, never negative; GRPO's (arXiv 2402.03300).

    The log ratio is bounded before the exponential: bounding the result would leave an infinite gradient.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.exp(log_ratio) - 1 - log_ratio


KL_PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
"""Each takes logprobs and ref_logprobs, [T] float32 nats, and returns [T] float32 nats."""
