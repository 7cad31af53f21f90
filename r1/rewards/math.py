"""Reward for an answer in \\boxed{}: 0.9 when it is right, 0.1 when thinking between <think> tags came first."""

from collections.abc import Sequence
from typing import Any

from r1.rewards.format import boxed_form, with_opened_think
from r1.rewards.grader import extract_answer, is_correct, is_gradable

REWARD_NAME = "math"
REWARD_TYPE = "batch"


def compute_score(
    reward_inputs: list[dict[str, Any]], format_weight: float = 0.1, forms: Sequence[str] = ("boxed",)
) -> list[dict[str, float]]:
    """overall = (1 - format_weight) * accuracy + format_weight * format, each 0 or 1.

    Args:
        forms: where the answer may stand, in this order: boxed, tag (<answer>...</answer>), hashes (#### 42),
            line (Answer: 42). format asks for a box, whatever they are.

    Returns:
        Also gold_unparsable, 1 where no answer can match the gold answer.
    """
    rewards = []
    for one in reward_inputs:
        gold = one["ground_truth"]
        accuracy = float(is_correct(extract_answer(one["response"], tuple(forms)), gold))
        format_ = float(boxed_form(with_opened_think(one["response"], one.get("prompt", ""))))
        rewards.append(
            {
                "overall": (1 - format_weight) * accuracy + format_weight * format_,
                "format": format_,
                "accuracy": accuracy,
                "gold_unparsable": float(not is_gradable(gold)),
            }
        )
    return rewards
