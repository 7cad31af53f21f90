"""Soft penalty for length in tokens, DAPO's (arXiv 2503.14476): from 0 down to -1 over the last tokens allowed."""

from typing import Any

REWARD_NAME = "overlong"
REWARD_TYPE = "batch"


def soft_overlong(response_length: int, max_response_length: int, overlong_buffer_length: int) -> float:
    """0 up to max - buffer tokens, then linearly down to -1 at max, and -1 beyond."""
    excess = response_length - (max_response_length - overlong_buffer_length)
    if excess <= 0:
        return 0.0
    return -min(excess / overlong_buffer_length, 1.0) if overlong_buffer_length > 0 else -1.0


def compute_score(
    reward_inputs: list[dict[str, Any]], max_response_length: int, overlong_buffer_length: int
) -> list[dict[str, float]]:
    """overall = soft_overlong, in [-1, 0]; its weight is the penalty factor."""
    return [
        {"overall": soft_overlong(one["response_length"], max_response_length, overlong_buffer_length)}
        for one in reward_inputs
    ]
