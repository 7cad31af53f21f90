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
from r1.rewards.grader_primary import REALS, parse_answer
from r1.rewards.grader_spelling import clean
from r1.rewards.grader_text import (
    balanced,
    extract_answer,
    extract_boxed,
    extract_hashes,
    plain_words,
    read_choice,
    read_letters,
    read_number,
    split_label,
    split_percent,
    split_unit,
    unbox,
)

__all__ = ["extract_answer", "extract_boxed", "gold_fault", "is_correct", "is_gradable"]
_log = logging.getLogger(__name__)
EMPTY: Node = ("set", ())
WORDS_FOR_SETS: dict[str, Node] = {
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions"), EMPTY),
    **dict.fromkeys(("empty set", "the empty set"), EMPTY),
    **dict.fromkeys(("all real numbers", "all reals", "any real number", "the real numbers"), REALS),
}
HUNDRED: Node = ("num", Fraction(100), 0, 0)
ONE: Node = ("num", Fraction(1), 0, 0)
ONE_DEGREE: Node = ("div", ("const", "pi"), ("num", Fraction(180), 0, 0))
CLOCK = re.compile(r"\d{1,2} ?: ?[0-5]\d(?: ?: ?[0-5]\d)?")
DEGREES_AND_RADIANS = ({"°", ""}, {"°", "radian"})
MAX_WARNINGS = 20  # distinct gold answers of one process that are named
_warned: set[str] = set()


@lru_cache(maxsize=256)  # the responses of a group share their gold answer
def _parse(text: str) -> Node | None:
    number = read_number(text)
    if number is not None:
        return ("num", number.value, number.digits, number.places)
    return WORDS_FOR_SETS.get(plain_words(text) or "") or parse_answer(text)


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
    if text.endswith("..") or ("\\" in text and balanced(text) and text.count("$") == text.count(r"\$")):
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
    (label, value), (gold_label, gold_value) = _split_label(answer), _split_label(gold_text)
    if label and gold_label and label != gold_label:
        return False
    return _same_quantity(_with_constant(value, gold_value), gold_value)


def _split_label(text: str) -> tuple[str, str]:
    """Area = 5 as its name and 5; sin x = 5, which is a formula, as it is."""
    label, value = split_label(text)
    return (label, value.strip()) if label and _parse(text) is None else ("", text)


def _with_constant(answer: str, gold: str) -> str:
    """The constant of integration by the gold answer's name: + c where that has + C and no other c."""
    if re.search(r"\+ ?C$", gold) and not re.search(r"(?<![a-zA-Z])c(?![a-zA-Z])", gold):
        return re.sub(r"\+ ?(?:c|\\text ?\{constant\})$", "+ C", answer)
    return answer


def _squeeze(text: str) -> str:
    """Without the spaces that mean nothing: those between words and between numbers stay."""
    return re.sub(r" ?([^\w\s\\]) ?", r"\1", text)


def _has_word(text: str) -> bool:
    """Whether case may be ignored: in `2X` and `2x` it may not."""
    return re.search(r"[^\W\d_]{3}|\b[ap]m\b", text) is not None or text in ("no", "up", "on", "in")


def _same_choice(answer: str, gold: str) -> bool | None:
    """Multiple choice; None if the gold answer is no choice. `e` and `E: polygenic score` both choose E."""
    match = re.fullmatch(r"\(?([A-J]|[a-d](?=\)|$))\)?|([A-J])\s*[.:)]\s*(\S.*)", gold)
    if match is None:
        letters, words = read_letters(gold), answer.isalpha() and gold.isalpha()  # ABC and CBA may be two triangles
        return True if letters and not words and read_letters(answer) == letters else None
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
    if {unit, gold_unit} in DEGREES_AND_RADIANS and _in_degrees(answer, unit) != _in_degrees(gold, gold_unit):
        tree, gold_tree = _parse(answer), _parse(gold)
        if tree is None or gold_tree is None:
            return False
        if unit == "°":
            return same_answer(("mul", tree, ONE_DEGREE), gold_tree)
        return same_answer(tree, ("mul", gold_tree, ONE_DEGREE))
    if percent != gold_percent:
        return not (unit or gold_unit) and _same_percentage(answer, gold, answer_has_sign=percent)
    if not (unit or gold_unit) and ":" in answer + gold and _same_ratio(answer, gold):
        return True
    return (unit == gold_unit or not (unit and gold_unit)) and _same_trees(answer, gold)


def _in_degrees(value: str, unit: str) -> bool:
    """Whether a value is in degrees rather than in radians, which have a unit or pi; one without either may be both."""
    return unit == "°" or not (unit or "pi" in value)


def _same_ratio(answer: str, gold: str) -> bool:
    """3:4 as 6:8 or 3/4; what may be a clock time, such as 10:30, is no ratio."""
    if any(CLOCK.fullmatch(text) for text in (answer, gold)):
        return False
    ours, theirs = ([_parse(part.strip()) for part in text.split(":")] for text in (answer, gold))
    ours, theirs = (parts if len(parts) > 1 else [*parts, ONE] for parts in (ours, theirs))
    if len(ours) != len(theirs) or any(part is None or size_of(part) == 0 for part in ours + theirs):
        return False
    return all(same_answer(("mul", a, theirs[0]), ("mul", b, ours[0])) for a, b in zip(ours, theirs, strict=True))


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
