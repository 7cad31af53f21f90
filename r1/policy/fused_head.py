"""Triton kernels for log-probabilities and entropy of an LM head's bfloat16 logits, each read once from memory.

The same numbers as r1/policy/logprobs.py's plain code, which runs where there is no CUDA: softmax in float32 over
logits / temperature. That code writes five float32 tensors of [chunk, vocabulary]; these kernels write none.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 16


@triton.jit
def _score_kernel(logits, labels, logprobs, entropy, lse_out, inv_temperature, vocab, BLOCK: tl.constexpr):
    """One row: its label's log-probability, its entropy and its log-sum-exp, in one pass over the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)  # sum of exp(x - top)
    weighted = tl.zeros([], tl.float32)  # sum of exp(x - top) * x
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab
        x = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32) * inv_temperature
        new_top = tl.maximum(top, tl.max(x, axis=0))
        shrink = tl.exp(top - new_top)
        p = tl.exp(x - new_top)
        total = total * shrink + tl.sum(p, axis=0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, p * x, 0.0), axis=0)
        top = new_top
    lse = top + tl.log(total)
    x = tl.load(logits + tl.load(labels + row)).to(tl.float32) * inv_temperature
    tl.store(logprobs + row, x - lse)
    tl.store(entropy + row, lse - weighted / total)
    tl.store(lse_out + row, lse)


@triton.jit
def _gradient_kernel(logits, labels, lse_in, entropy, grad_logprobs, grad_entropy, inv_temperature, vocab,
                     BLOCK: tl.constexpr):  # fmt: skip
    """One row: its logits are overwritten with their gradient.

    d logprob / d x_j = [j = label] - p_j;  d entropy / d x_j = -p_j (log p_j + entropy)
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    label = tl.load(labels + row)
    lse, h = tl.load(lse_in + row), tl.load(entropy + row)
    g_logprob, g_entropy = tl.load(grad_logprobs + row), tl.load(grad_entropy + row)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab
        log_p = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32) * inv_temperature - lse
        p = tl.exp(log_p)
        gradient = g_logprob * (tl.where(columns == label, 1.0, 0.0) - p)
        gradient -= tl.where(p > 0, g_entropy * p * (log_p + h), 0.0)
        tl.store(logits + columns, (gradient * inv_temperature).to(logits.dtype.element_ty), mask=inside)


class _FusedScore(torch.autograd.Function):
    """(hidden [R, H], weight [V, H], labels [R]) -> (logprobs [R], entropy [R]) in float32, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, banned: Tensor | None,
                chunk_tokens: int) -> tuple[Tensor, Tensor]:  # fmt: skip
        logprobs, entropy, lse = (torch.empty(len(labels), device=hidden.device) for _ in range(3))
        for rows in _chunks(len(labels), chunk_tokens):
            logits = _logits(hidden[rows], weight, banned)
            cast(Any, _score_kernel)[(len(logits),)](
                logits,
                labels[rows],
                logprobs[rows],
                entropy[rows],
                lse[rows],
                1 / temperature,
                logits.shape[1],
                BLOCK,
                num_warps=WARPS,
            )
        ctx.save_for_backward(hidden, weight, labels, lse, entropy)
        ctx.temperature, ctx.banned, ctx.chunk_tokens = temperature, banned, chunk_tokens
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, entropy = ctx.saved_tensors
        g_logprobs, g_entropy = (g.contiguous() for g in gradients)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # float32: chunks add up in it
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(labels), ctx.chunk_tokens):
            logits = _logits(hidden[rows], weight, ctx.banned)
            cast(Any, _gradient_kernel)[(len(logits),)](
                logits, labels[rows], lse[rows], entropy[rows], g_logprobs[rows], g_entropy[rows],
                1 / ctx.temperature, logits.shape[1], BLOCK, num_warps=WARPS,
            )  # fmt: skip
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += logits.T @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _logits(hidden: Tensor, weight: Tensor, banned: Tensor | None) -> Tensor:
    logits = hidden @ weight.T
    return logits if banned is None else logits.index_fill_(1, banned, -1e9)


def fused_score(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float, banned: Sequence[int], chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels and entropies under softmax(hidden @ weight.T / temperature), with gradient.

    Args:
        hidden: [R, H] bfloat16 or float32 on a GPU, R at least 1.
        weight: [V, H], of the same dtype.
        labels: [R] int64.
        banned: ids whose probability is 0.

    Returns:
        [R] float32 nats each; the gradient of hidden has its dtype, that of weight is summed over chunks in float32.
    """
    ids = torch.tensor(list(banned), device=hidden.device) if banned else None
    out: Any = _FusedScore.apply(hidden.contiguous(), weight, labels, temperature, ids, chunk_tokens)
    return out
