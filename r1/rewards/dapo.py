"""DAPO's reward: +1 or -1 for the last line `Answer: ...`, and a soft penalty for length (arXiv 2503.14476)."""

import re
from typing import Any

from r1.rewards.grader import is_correct
from r1.rewards.grader_text import extract_boxed

REWARD_NAME = "dapo"
REWARD_TYPE = "batch"


def extract_answer(response: str) -> str | None:
    """What follows the last `Answer:` on its line, or the box in it; None if there is none."""
    lines = re.findall(r"(?i)\banswer\s*:[ \t*]*([^\n]+)", response)
    if not lines:
        return None
    return extract_boxed(lines[-1]) if re.search(r"\\boxed\s*\{", lines[-1]) else lines[-1].strip(" \t*")


def soft_overlong(response_length: int, max_response_length: int, overlong_buffer_length: int) -> float:
    """0 up to max - buffer tokens, then linearly down to -1 at max, and -1 beyond."""
    excess = response_length - (max_response_length - overlong_buffer_length)
    if excess <= 0:
        return 0.0
    return -min(excess / overlong_buffer_length, 1.0) if overlong_buffer_length > 0 else -1.0


def compute_score(
    reward_inputs: list[dict[str, Any]],
    max_response_length: int,
    overlong_buffer_length: int,
    overlong_penalty_factor: float,
) -> list[dict[str, float]]:
    """overall = accuracy (+1 or -1) + overlong_penalty_factor * overlong (0 to -1); lengths are in tokens."""
    rewards = []
    for one in reward_inputs:
        accuracy = 1.0 if is_correct(extract_answer(one["response"]), one["ground_truth"]) else -1.0
        overlong = soft_overlong(one["response_length"], max_response_length, overlong_buffer_length)
        rewards.append(
            {
                "overall": accuracy + overlong_penalty_factor * overlong,
                "accuracy": accuracy,
                "overlong": overlong,
                "accuracy_normalized": (accuracy + 1) / 2,
            }
        )
    return rewards
