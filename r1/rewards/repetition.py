"""Penalty for repeating oneself: minus the share of word n-grams that occurred before in the same response."""

import re
from typing import Any

REWARD_NAME = "repetition"
REWARD_TYPE = "batch"
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")  # kana and hanzi have no spaces


def repetition(text: str, size: int) -> float:
    """1 - distinct / all n-grams of size words, case ignored; 0 for a text with fewer words."""
    words = WORD.findall(text.lower())
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def compute_score(reward_inputs: list[dict[str, Any]], size: int = 4) -> list[dict[str, float]]:
    """overall = -repetition, in (-1, 0]."""
    if size < 1:
        raise ValueError(f"the n-grams need at least one word, got size={size}")
    return [{"overall": -repetition(one["response"], size)} for one in reward_inputs]
