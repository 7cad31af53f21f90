"""Reward for an answer in \\boxed{}: 0.9 when it is right, 0.1 when thinking between <think> tags came first."""

import re
from typing import Any

from r1.rewards.grader import is_correct
from r1.rewards.grader_text import extract_boxed

REWARD_NAME = "math"
REWARD_TYPE = "batch"


def with_opened_think(response: str, prompt: str) -> str:
    """The response with `<think>` in front where the chat template already wrote it at the prompt's end."""
    return f"<think>{response}" if re.search(r"<think>\s*\Z", prompt) else response


def format_reward(response: str) -> float:
    """1 for thinking between tags and a complete box after it."""
    # Some models put spaces around the brackets of their tags.
    match = re.fullmatch(r"\s*<\s*think\s*>.*?<\s*/\s*think\s*>(.*)", response, re.DOTALL)
    return 1.0 if match and extract_boxed(match[1]) is not None else 0.0


def compute_score(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    """overall = (1 - format_weight) * accuracy + format_weight * format, each 0 or 1."""
    rewards = []
    for one in reward_inputs:
        accuracy = float(is_correct(extract_boxed(one["response"]), one["ground_truth"]))
        format_ = format_reward(with_opened_think(one["response"], one.get("prompt", "")))
        overall = (1 - format_weight) * accuracy + format_weight * format_
        rewards.append({"overall": overall, "format": format_, "accuracy": accuracy})
    return rewards
