"""Log-probabilities, entropy and KL of chosen tokens from hidden states, never holding [tokens, vocabulary] logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What to make of the hidden states of R response positions."""

    temperature: float  # the sampler's, so that the ratio to its logprobs is 1 for equal weights
    chunk_tokens: int  # positions per pass: memory is this times the vocabulary
    banned: Sequence[int] = ()  # ids that the sampler never draws; their probability is 0 here as it is there
    entropy_grad: bool = False
    ref_hidden: Tensor | None = None  # [R, H] of the reference, for the full KL
    ref_lm_head: nn.Module | None = None


@dataclass(kw_only=True, slots=True)
class Scored:
    """Of R response tokens; float32 nats each."""

    logprobs: Tensor  # [R], with gradient
    entropy: Tensor  # [R], with gradient if asked for
    kl: Tensor | None  # [R] KL(policy || reference) over the whole vocabulary, with gradient; None without reference


def _log_softmax(hidden: Tensor, lm_head: nn.Module, head: Head) -> Tensor:
    logits = lm_head(hidden).float() / head.temperature  # [R, V]
    if head.banned:
        # Finite: entropy and KL multiply it by a probability of 0.
        logits = logits.index_fill(-1, torch.tensor(head.banned, device=logits.device), -1e9)
    return logits.log_softmax(-1)


def _chunk(
    hidden: Tensor, lm_head: nn.Module, labels: Tensor, ref_hidden: Tensor | None, head: Head
) -> tuple[Tensor, Tensor, Tensor]:
    log_p = _log_softmax(hidden, lm_head, head)
    logprobs = log_p.gather(-1, labels[:, None])[:, 0]
    with torch.set_grad_enabled(head.entropy_grad and torch.is_grad_enabled()):
        entropy = -(log_p.exp() * log_p).sum(-1)
    kl = torch.zeros_like(logprobs)
    if ref_hidden is not None and head.ref_lm_head is not None:
        with torch.no_grad():
            log_q = _log_softmax(ref_hidden, head.ref_lm_head, head)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return logprobs, entropy, kl


def score_tokens(hidden: Tensor, lm_head: nn.Module, labels: Tensor, head: Head) -> Scored:
    """log softmax(lm_head(hidden) / temperature) at the labels, with entropy and KL of that distribution.

    Memory is O(chunk_tokens x vocabulary): each chunk's logits are made again in the backward pass. On a GPU that is
    r1/policy/fused_head.py's work, but for the full KL and a head that is not one plain matrix.

    Args:
        hidden: [R, H], position r predicts labels[r].
        labels: [R] int64.
    """
    if hidden.is_cuda and head.ref_hidden is None and type(lm_head) is nn.Linear and lm_head.bias is None:
        from r1.policy.fused_head import fused_score

        logprobs, entropy = fused_score(
            hidden, lm_head.weight, labels,
            temperature=head.temperature, banned=head.banned, chunk_tokens=head.chunk_tokens,
        )  # fmt: skip
        return Scored(logprobs=logprobs, entropy=entropy if head.entropy_grad else entropy.detach(), kl=None)
    parts = []
    for start in range(0, max(len(labels), 1), head.chunk_tokens):
        rows = slice(start, start + head.chunk_tokens)
        ref_hidden = None if head.ref_hidden is None else head.ref_hidden[rows]
        inputs = (hidden[rows], lm_head, labels[rows], ref_hidden, head)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, *inputs, use_reentrant=False))
        else:
            parts.append(_chunk(*inputs))
    logprobs, entropy, kl = (torch.cat(column) for column in zip(*parts, strict=True))
    return Scored(logprobs=logprobs, entropy=entropy, kl=None if head.ref_hidden is None else kl)
