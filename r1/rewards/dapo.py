"""DAPO's reward: +1 or -1 for the last line `Answer: ...`, and a soft penalty for length (arXiv 2503.14476)."""

from typing import Any

from r1.rewards.grader import extract_answer, is_correct, is_gradable
from r1.rewards.overlong import soft_overlong

REWARD_NAME = "dapo"
REWARD_TYPE = "batch"


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float,
) -> list[dict[str, float]]:
    """overall = accuracy (+1 or -1) + overlong_penalty_factor * overlong (0 to -1); lengths are in tokens.

    Returns:
        Also accuracy_normalized, 0 or 1, and gold_unparsable, 1 where no answer can match the gold answer.
    """
    rewards = []
    for one in reward_inputs:
        gold = one["ground_truth"]
        accuracy = 1.0 if is_correct(extract_answer(one["response"], ("line",)), gold) else -1.0
        overlong = soft_overlong(one["response_length"], max_response_length, overlong_buffer_length)
        rewards.append(
            {
                "overall": accuracy + overlong_penalty_factor * overlong,
                "accuracy": accuracy,
                "overlong": overlong,
                "accuracy_normalized": (accuracy + 1) / 2,
                "gold_unparsable": float(not is_gradable(gold)),
            }
        )
    return rewards
