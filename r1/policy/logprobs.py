"""Log-probabilities and entropy of chosen tokens from hidden states, never holding [tokens, vocabulary] logits."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def _chunk(
    hidden: Tensor, lm_head: nn.Module, labels: Tensor, temperature: float, banned: Sequence[int]
) -> tuple[Tensor, Tensor]:
    logits = lm_head(hidden).float() / temperature  # [R, V]
    if banned:
        # Finite: the entropy below multiplies it by a probability of 0.
        logits = logits.index_fill(-1, torch.tensor(banned, device=logits.device), -1e9)
    log_z = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, labels[:, None])[:, 0] - log_z
    with torch.no_grad():
        entropy = log_z - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return logprobs, entropy


def chunked_logprobs(
    hidden: Tensor,
    lm_head: nn.Module,
    labels: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """log softmax(lm_head(hidden) / temperature) at the labels, and the entropy of that distribution.

    Memory is O(chunk_tokens x vocabulary): each chunk's logits are made again in the backward pass.

    Args:
        hidden: [R, H], position r predicts labels[r].
        labels: [R] int64.
        banned: token ids that the sampler never draws; their probability is 0 here as it is there.
        temperature: the sampling temperature, so that the ratio to the sampler's logprobs is 1 for equal weights.

    Returns:
        logprobs [R] float32 nats with gradient, entropy [R] float32 nats without.
    """
    parts = []
    for start in range(0, max(len(labels), 1), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        if torch.is_grad_enabled():
            inputs = (hidden[rows], lm_head, labels[rows], temperature, banned)
            parts.append(checkpoint(_chunk, *inputs, use_reentrant=False))
        else:
            parts.append(_chunk(hidden[rows], lm_head, labels[rows], temperature, banned))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
