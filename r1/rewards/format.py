"""Reward for the form of a response: 1 for thinking between tags and an answer after it, else 0."""

import re
from typing import Any

from r1.rewards.grader import extract_boxed

REWARD_NAME = "format"
REWARD_TYPE = "batch"


def with_opened_think(response: str, prompt: str) -> str:
    """The response with `<think>` in front where the chat template already wrote it at the prompt's end."""
    return f"<think>{response}" if re.search(r"<think>\s*\Z", prompt) else response


def boxed_form(response: str) -> bool:
    """Whether a complete box follows the thinking."""
    # Some models put spaces around the brackets of their tags.
    match = re.fullmatch(r"\s*<\s*think\s*>.*?<\s*/\s*think\s*>(.*)", response, re.DOTALL)
    return match is not None and extract_boxed(match[1]) is not None


def answer_form(response: str) -> bool:
    """Whether it is `<think>...</think><answer>...</answer>` and nothing else."""
    return re.fullmatch(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", response, re.DOTALL) is not None


def think_form(response: str) -> bool:
    """Whether some text follows the thinking, which is closed once."""
    return re.fullmatch(r"\s*<think>(?:(?!</think>).)*</think>(?!.*</think>).*\S.*", response, re.DOTALL) is not None


FORMS = {"boxed": boxed_form, "answer": answer_form, "think": think_form}


def compute_score(reward_inputs: list[dict[str, Any]], form: str = "think") -> list[dict[str, float]]:
    """overall = 1 if the response has the form: think, boxed, answer, or a regular expression for all of it."""
    rewards = []
    for one in reward_inputs:
        response = with_opened_think(one["response"], one.get("prompt", ""))
        fits = FORMS[form](response) if form in FORMS else re.fullmatch(form, response, re.DOTALL) is not None
        rewards.append({"overall": float(fits)})
    return rewards
