"""Whether an answer equals the gold answer: numbers exactly, formulas by value, sets as sets, words as text.

It leans towards False: a wrong True teaches the model a wrong answer, a wrong False only wastes a response. Nothing
that a model wrote is run, and the work per answer is bounded. README, "Your reward", lists what counts as equal.
"""

import logging
import numbers
import re
from fractions import Fraction
from functools import lru_cache

from r1.rewards.grader_compare import same_answer, size_of
from r1.rewards.grader_parse import Node
from r1.rewards.grader_primary import parse_answer
from r1.rewards.grader_text import (
    balanced,
    clean,
    extract_answer,
    extract_boxed,
    extract_hashes,
    plain_words,
    read_choice,
    read_number,
    split_percent,
    split_unit,
    unbox,
)

__all__ = ["extract_answer", "extract_boxed", "gold_fault", "is_correct", "is_gradable"]
_log = logging.getLogger(__name__)
HUNDRED: Node = ("num", Fraction(100), 0, 0)
MAX_WARNINGS = 20  # distinct gold answers of one process that are named
_warned: set[str] = set()


@lru_cache(maxsize=256)  # the responses of a group share their gold answer
def _parse(text: str) -> Node | None:
    number = read_number(text)
    return parse_answer(text) if number is None else ("num", number.value, number.digits, number.places)


def _gold_text(gold: object) -> str:
    if not isinstance(gold, (str, numbers.Real)):
        raise ValueError(f"ground_truth must be text or a number, got {type(gold).__name__} {gold!r:.80}")
    text = str(gold)
    if "####" in text:  # GSM8K's answers come with their derivation
        text = extract_hashes(text) or ""
    return clean(unbox(text) or "")


def gold_fault(gold: object) -> str | None:
    """Why no answer can ever equal this gold answer; None if it is a formula, a number, a choice or words.

    Raises:
        ValueError: it is neither text nor a number, but None or a list, say.
    """
    text = _gold_text(gold)
    if not text:
        return "it is empty, or its box is"
    value = split_unit(split_percent(text)[0])[0]
    if _parse(value) is not None or _parse(text) is not None or plain_words(text) or read_choice(text):
        return None
    if "\\" in text and balanced(text) and text.count("$") == text.count(r"\$"):
        return None  # LaTeX beyond the parser, which the same LaTeX still equals
    return "it is neither a formula that can be read nor plain words"


def is_gradable(gold: object) -> bool:
    """Whether gold_fault finds nothing; a gold answer with a fault is warned of, once."""
    fault = gold_fault(gold)
    if fault is None:
        return True
    if repr(gold) not in _warned and len(_warned) < MAX_WARNINGS:
        _warned.add(repr(gold))
        _log.warning("WARNING gold answer %.80r: %s; every response to its row gets accuracy 0", gold, fault)
    return False


def is_correct(answer: str | None, gold: object) -> bool:
    """Whether an answer equals the gold answer. Not symmetric: the gold answer comes second, and its form decides.

    Args:
        answer: as from extract_boxed or extract_answer, or a text with a box; None or empty is never right.
        gold: text (LaTeX with or without $, a number, a letter) or a number; one with a gold_fault never matches.

    Raises:
        ValueError: gold is something else, such as None or a list.
    """
    gold_text = _gold_text(gold)
    answer = clean(unbox(answer) or "") if answer is not None else ""
    if not answer or gold_fault(gold) is not None:
        return False
    if answer == gold_text or _squeeze(answer) == _squeeze(gold_text):
        return True
    choice = _same_choice(answer, gold_text)
    if choice is not None:
        return choice
    words = plain_words(gold_text)
    if words and _squeeze(words) == _squeeze(plain_words(answer) or "") and _has_word(words):
        return True
    return _same_quantity(answer, gold_text)


def _squeeze(text: str) -> str:
    """Without the spaces that mean nothing: those between words and between numbers stay."""
    return re.sub(r" ?([^\w\s\\]) ?", r"\1", text)


def _has_word(text: str) -> bool:
    """Whether case may be ignored: in `2X` and `2x` it may not."""
    return re.search(r"[^\W\d_]{3}", text) is not None or text in ("no", "up", "on", "in", "am", "pm")


def _same_choice(answer: str, gold: str) -> bool | None:
    """Multiple choice; None if the gold answer is no choice. `e` and `E: polygenic score` both choose E."""
    match = re.fullmatch(r"\(?([A-J]|[a-d](?=\)|$))\)?|([A-J])\s*[.:)]\s*(\S.*)", gold)
    if match is None:
        return None
    letter, text = (match[1] or match[2]).upper(), match[3]
    chosen = read_choice(answer)
    if chosen is None:
        return bool(text) and _squeeze(text.casefold()) == _squeeze((plain_words(answer) or answer).casefold())
    if chosen[0] != letter:
        return False
    return not text or not chosen[1] or plain_words(chosen[1]) == plain_words(text)


def _same_quantity(answer: str, gold: str) -> bool:
    """Compare as mathematics: as it stands, else with percent signs and units off."""
    if _same_trees(answer, gold):
        return True
    (answer, percent), (gold, gold_percent) = split_percent(answer), split_percent(gold)
    (answer, unit), (gold, gold_unit) = split_unit(answer), split_unit(gold)
    if percent != gold_percent:
        return not (unit or gold_unit) and _same_percentage(answer, gold, answer_has_sign=percent)
    return (unit == gold_unit or not (unit and gold_unit)) and _same_trees(answer, gold)


def _same_trees(answer: str, gold: str) -> bool:
    tree, gold_tree = _parse(answer), _parse(gold)
    return tree is not None and gold_tree is not None and same_answer(tree, gold_tree)


def _same_percentage(answer: str, gold: str, *, answer_has_sign: bool) -> bool:
    """Only one has a percent sign: 50% is 0.5 or, spelled carelessly, 50; but 0.5 is not 0.5%."""
    tree, gold_tree = _parse(answer), _parse(gold)
    if tree is None or gold_tree is None:
        return False
    if size_of(gold_tree) > 1 and same_answer(tree, gold_tree):
        return True
    if answer_has_sign:
        return same_answer(("div", tree, HUNDRED), gold_tree)
    return same_answer(tree, ("div", gold_tree, HUNDRED))
