"""Reward by correctness and length (arXiv 2502.03373): right and short is best, wrong and short is worst."""

import math
from collections.abc import Sequence
from typing import Any

from r1.rewards.grader import extract_answer, is_correct, is_gradable

REWARD_NAME = "cosine"
REWARD_TYPE = "batch"


def cosine(length: int, max_length: int, at_zero: float, at_max: float) -> float:
    """Half a cosine wave from at_zero at length 0 to at_max at max_length."""
    return at_max + (at_zero - at_max) * (1 + math.cos(math.pi * min(length / max_length, 1))) / 2


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    right: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (-1.0, -0.5),
    exceeded: float = -1.0,
    forms: Sequence[str] = ("boxed",),
) -> list[dict[str, float]]:
    """overall along a cosine of the length in tokens.

    Args:
        right, wrong: rewards of such an answer at length 0 and at max_response_length.
        exceeded: reward of a response of max_response_length tokens or more.
        forms: where the answer may stand, as in the math reward.
    """
    rewards = []
    for one in reward_inputs:
        gold, length = one["ground_truth"], one["response_length"]
        correct = is_correct(extract_answer(one["response"], tuple(forms)), gold)
        ends = right if correct else wrong
        overall = exceeded if length >= max_response_length else cosine(length, max_response_length, *ends)
        rewards.append(
            {"overall": overall, "accuracy": float(correct), "gold_unparsable": float(not is_gradable(gold))}
        )
    return rewards
