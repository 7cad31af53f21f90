"""An advantage and a loss of one's own: algorithm.advantage="FILE:above_median", algorithm.loss="FILE:fading"."""

import torch
from torch import Tensor

from r1.algorithms.loss import Tokens
from r1.algorithms.scores import Scores
from r1.config import AlgorithmConfig


def above_median(scores: Scores, config: AlgorithmConfig) -> Tensor:
    """Each reward less its group's median, which one lucky response does not move, [G, n]."""
    return (scores.rewards - scores.rewards.nanmedian(dim=1, keepdim=True).values).nan_to_num(0.0)


def fading(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """A policy gradient whose tokens fade out the further their ratio has moved, [T]."""
    moved = (tokens.logprobs - tokens.old_logprobs).detach()
    return -torch.exp(-((moved / config.clip_high) ** 2)) * tokens.advantages * tokens.logprobs
