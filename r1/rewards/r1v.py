"""Reward for `<think>...</think><answer>...</answer>`: half for a right answer, half for exactly this form."""

import re
from typing import Any

from r1.rewards.grader import is_correct
from r1.rewards.grader_text import extract_boxed
from r1.rewards.math import with_opened_think

REWARD_NAME = "r1v"
REWARD_TYPE = "sequential"


def extract_answer(response: str) -> str | None:
    """What the last pair of answer tags holds, or the box in it; the whole response where there are no tags."""
    *before, last = response.split("<answer>")
    if before:
        last, closed, _ = last.partition("</answer>")
        if not closed:
            return None
    return extract_boxed(last) if re.search(r"\\boxed\s*\{", last) else last


def compute_score(reward_input: dict[str, Any], format_weight: float = 0.5) -> dict[str, float]:
    """overall = (1 - format_weight) * accuracy + format_weight * format, each 0 or 1."""
    response = with_opened_think(reward_input["response"], reward_input.get("prompt", ""))
    form = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
    format_ = 1.0 if re.fullmatch(form, response, re.DOTALL) else 0.0
    accuracy = float(is_correct(extract_answer(reward_input["response"]), reward_input["ground_truth"]))
    overall = (1 - format_weight) * accuracy + format_weight * format_
    return {"overall": overall, "format": format_, "accuracy": accuracy}
