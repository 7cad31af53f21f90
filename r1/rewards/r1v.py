"""Reward for `<think>...</think><answer>...</answer>`: half for a right answer, half for exactly this form."""

from typing import Any

from r1.rewards.format import answer_form, with_opened_think
from r1.rewards.grader import extract_answer, is_correct, is_gradable

REWARD_NAME = "r1v"
REWARD_TYPE = "sequential"


def find_answer(response: str) -> str | None:
    """What the last pair of answer tags holds, or the box in it; the whole response where there are no tags."""
    return extract_answer(response, ("tag", "boxed")) if "<answer>" in response else response


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    """overall = (1 - format_weight) * accuracy + format_weight * format, each 0 or 1.

    Returns:
        Also gold_unparsable, 1 where no answer can match the gold answer.
    """
    response, gold = reward_input["response"], reward_input["ground_truth"]
    format_ = float(answer_form(with_opened_think(response, reward_input.get("prompt", ""))))
    accuracy = float(is_correct(find_answer(response), gold))
    return {
        "overall": (1 - format_weight) * accuracy + format_weight * format_,
        "format": format_,
        "accuracy": accuracy,
        "gold_unparsable": float(not is_gradable(gold)),
    }
