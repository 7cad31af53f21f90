"""Reward for multiple choice: 1 for the right letter, in whatever form it is given, or for the right option's text."""

import re
from typing import Any

from r1.rewards.grader import extract_answer, is_correct, is_gradable

REWARD_NAME = "choice"
REWARD_TYPE = "batch"
PHRASE = re.compile(r"(?i)\b(?:answer|option|choice)(?: is)?:?[ \t*]*\(?((?-i:[A-Z])|[a-z](?=\)))\b")


def find_choice(response: str) -> str | None:
    """The answer in a box, tags, after #### or `Answer:`; else as in `the answer is (C)`; else a short response.

    The last of its form counts; one that is begun and not finished is none.
    """
    if re.search(r"\\boxed(?![a-zA-Z])|<answer>|####|(?i:\banswer\s*:)", response):
        return extract_answer(response)
    phrases = PHRASE.findall(response)
    if phrases:
        return phrases[-1]
    return response if len(response) <= 40 else None


def text_of_option(options: Any, letter: str) -> str | None:
    """The text of an option where a row lists them, as a list in order or a dict by letter."""
    if isinstance(options, dict):
        return options.get(letter)
    at = ord(letter) - ord("A")
    return str(options[at]) if isinstance(options, (list, tuple)) and 0 <= at < len(options) else None


def compute_score(reward_inputs: list[dict[str, Any]], options_key: str = "options") -> list[dict[str, float]]:
    """overall = accuracy, 0 or 1; options_key names the column of the options' texts, which may be absent."""
    rewards = []
    for one in reward_inputs:
        gold, answer = one["ground_truth"], find_choice(one["response"])
        accuracy = is_correct(answer, gold)
        letter = re.fullmatch(r"\(?([A-Za-z])\)?", str(gold).strip())
        if not accuracy and letter and answer:
            text = text_of_option(one.get(options_key), letter[1].upper())
            accuracy = text is not None and len(answer) > 1 and is_correct(answer, text)
        rewards.append(
            {
                "overall": float(accuracy),
                "accuracy": float(accuracy),
                "gold_unparsable": float(not is_gradable(gold)),
            }
        )
    return rewards
