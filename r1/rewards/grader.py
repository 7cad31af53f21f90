"""Whether an answer equals the gold answer: plain numbers exactly, text as text, mathematics by math-verify.

It leans towards False: a wrong True teaches the model a wrong answer, a wrong False only wastes a response.
mathruler is not used on what a model wrote: it evaluates it as Python.
"""

import logging
import numbers
import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, Float, N, Rational

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of having no timeout; the reward processes do

LATEX_ONLY = [LatexExtractionConfig(boxed_match_priority=-1)]
MAX_LENGTH = 300  # characters of an answer that is worth parsing
FUNCTIONS = (
    "arccos|arcsin|arctan|arg|cos|cosh|cot|csc|det|exp|gcd|infty|lcm|ln|log|max|min|mod|pi|sec|sin|sinh|sqrt|tan|tanh"
)

UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
DECIMAL = re.compile(rf"(?P<value>[+-]?(?:{UNSIGNED})(?:[eE][+-]?\d{{1,2}})?)\s*(?P<percent>\\?%|percent|pct)?", re.I)
RATIO = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<whole>\d+) (?=\d)|(?P<whole2>\d+)(?=\\frac))?"
    r"(?:(?P<top>\d+)/(?P<bottom>\d+)|\\frac\{(?P<top2>-?\d+)\}\{(?P<bottom2>\d+)\})"
)
UNIT = re.compile(
    r"(?P<value>.*?[\d}])\s*(?:\\(?:text|mathrm|mbox)\{\s*(?P<latex>[^{}]*)\}|(?<=[\d}]) (?P<plain>[A-Za-z ]{2,}))"
)


def extract_boxed(text: str) -> str | None:
    """What the last \\boxed{...} of a text holds; None if there is none or the last one does not close."""
    *_, start = (-1, *(match.end() for match in re.finditer(r"\\boxed\s*\{", text)))
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):  # \{ and \} are signs, not braces
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0 and start >= 0:
            return text[start : start + brace.start()].strip()
    return None


def _clean(text: str) -> str:
    """One spelling for what means the same: no math delimiters, sizing, spacing or outer text commands."""
    text = text.strip().replace("\u2212", "-").replace("{,}", ",").rstrip(".").strip()
    text = re.sub(r"(?<=\d)\\[!,;: ](?=\d{3}(?!\d))", "", text)  # thousands
    text = re.sub(r"(?<!\\)\\(?:left|right|displaystyle|[!,;: ])(?![a-zA-Z])", " ", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\mathrm\{([a-zA-Z])\}", r"\1", text)
    outer = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+)\\\)|\\\[(.+)\\\]|\\(?:boxed|text|textbf|mathbf|mathrm)\{([^{}]*)\}")
    while match := outer.fullmatch(text):
        text = next(group for group in match.groups() if group is not None).strip().rstrip(".")
    text = re.sub(r"\s*([^\w\s,])\s*", r"\1", re.sub(r"\s+", " ", text))  # spaces between words and digits stay
    return re.sub(r"^([+-]?)\\?[$€£¥](?=[\d.])", r"\1", text.strip())


def _number(text: str) -> tuple[Fraction, str, bool] | None:
    """A plain number as (exact value, its decimal spelling or "", has a percent sign); None if it is not one."""
    if match := DECIMAL.fullmatch(text):
        spelling = match["value"].replace(",", "")
        return Fraction(spelling), spelling, bool(match["percent"])
    if match := RATIO.fullmatch(text):
        top, bottom = int(match["top"] or match["top2"]), int(match["bottom"] or match["bottom2"])
        whole = int(match["whole"] or match["whole2"] or 0)
        if bottom and (top >= 0 or not whole):
            return (whole + Fraction(top, bottom)) * (-1 if match["sign"] == "-" else 1), "", False
    return None


def _rounds(spelling: str, value: Fraction) -> bool:
    """Whether a decimal of at least six significant digits is the value, up to one unit in its last place."""
    digits = Decimal(spelling).as_tuple()
    assert isinstance(digits.exponent, int)
    last_place = Fraction(10) ** digits.exponent
    return len(digits.digits) >= 6 and last_place < 1 and abs(Fraction(spelling) - value) < last_place


def _same_number(a: tuple[Fraction, str, bool], b: tuple[Fraction, str, bool]) -> bool:
    (a_value, a_text, a_percent), (b_value, b_text, b_percent) = a, b
    if a_value == b_value:  # 28% may be spelled 28: a choice, the same as math-verify's
        return True
    if a_percent != b_percent:
        return a_value == b_value * 100 if a_percent else a_value * 100 == b_value
    if a_text and b_text:  # two decimals are the same only up to the last bits of a float
        return max(len(a_text), len(b_text)) > 14 and abs(a_value - b_value) <= abs(b_value) / 10**12
    return bool(a_text and _rounds(a_text, b_value)) or bool(b_text and _rounds(b_text, a_value))


def _same_letter(answer: str, gold: str) -> bool:
    """Multiple choice: `e`, `(E)`, `E.` and `E: polygenic score` all choose E."""
    match = re.match(r"\(?(?:\\text\{)?([A-Za-z])\}?\)?(?:$|[.:)])", answer)
    return match is not None and match[1].upper() == gold


def _split_unit(text: str) -> tuple[str, str]:
    match = UNIT.fullmatch(text)
    return (match["value"].strip(), (match["latex"] or match["plain"] or "").strip().lower()) if match else (text, "")


def _explodes(text: str) -> bool:
    """Whether evaluating could take for ever: a power or factorial in an exponent, or exponents of four digits."""
    in_exponent, previous, opened = False, "", [False]
    for token in re.findall(r"\d+|\S", text):
        in_exponent = opened[-1] or previous == "^"
        if in_exponent and (token in "^!" or len(token) >= 4):
            return True
        if token == "!" and (len(previous) >= 5 or previous in ("!", ")", "}")):
            return True
        if token in "{([":
            opened.append(in_exponent)
        elif token in "})]" and len(opened) > 1:
            opened.pop()
        previous = token
    return "**" in text


@lru_cache(maxsize=256)  # the responses of a group share their gold answer
def _parse(text: str) -> Basic | None:
    """Mathematics as a sympy expression, not evaluated; None for text, and for what is too large to compare."""
    if len(text) > MAX_LENGTH or "$" in text or _explodes(text) or re.search(r"\d[ :]\d", text):
        return None
    text = re.sub(r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(rf"(?<![\\a-zA-Z])({FUNCTIONS})(?![a-zA-Z])", r"\\\1 ", text)
    if re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}", text.replace("\\begin{", "\\").replace("\\end{", "\\")):
        return None  # a word; the parser would read it as a product of its letters, in any order
    # Its time limits need signals, which only the main thread has; None is documented, though not in its annotation.
    no_limit: Any = None
    parsed = parse(f"${text}$", LATEX_ONLY, fallback_mode="no_fallback", parsing_timeout=no_limit)
    return parsed[0] if parsed else None


def _differ_at_points(gold: Basic, answer: Basic) -> bool:
    """Whether two expressions have clearly different values somewhere.

    math-verify compares to an absolute precision, so that 2^-99 and 2^-98 are equal to it; this compares relatively. It
    is also the quick way to most verdicts: simplifying takes much longer.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    symbols = gold.free_symbols | answer.free_symbols
    names = sorted({str(symbol) for symbol in symbols})
    for shift in (Rational(3, 7), Rational(29, 11)):
        point = [(symbol, shift + Rational(5 * names.index(str(symbol)), 13)) for symbol in symbols]
        try:
            a, b = gold.subs(point), answer.subs(point)
            size, difference = abs(N(a, 30)), abs(N(a - b, 30))
            if size.is_finite and difference.is_finite and difference > size * Float("1e-9"):
                return True
        except (TypeError, ValueError, ArithmeticError, AttributeError):  # no value there
            continue
    return False


def is_correct(answer: str | None, gold: object) -> bool:
    """Whether an extracted answer equals the gold answer; not symmetric: the gold answer's form decides.

    Args:
        answer: as from extract_boxed; None or empty is never right.
        gold: text (LaTeX with or without $, a number, a letter) or a number; empty text never matches.

    Raises:
        ValueError: gold is something else, such as None or a list.
    """
    if not isinstance(gold, (str, numbers.Real)):
        raise ValueError(f"ground_truth must be text or a number, got {type(gold).__name__} {gold!r:.80}")
    if answer is None:
        return False
    answer, gold_text = _clean(answer), _clean(str(gold))
    if not answer or not gold_text:
        return False
    if re.sub(r", ", ",", answer).casefold() == re.sub(r", ", ",", gold_text).casefold():
        return True
    if letter := re.fullmatch(r"\(?([A-J])\)?", gold_text):
        return _same_letter(answer, letter[1])
    (answer, unit), (gold_text, gold_unit) = _split_unit(answer), _split_unit(gold_text)
    if unit and gold_unit and unit.rstrip("s") != gold_unit.rstrip("s"):
        return False
    number, gold_number = _number(answer), _number(gold_text)
    if number and gold_number:
        return _same_number(number, gold_number)
    return _same_mathematics(answer, gold_text)


def _same_mathematics(answer: str, gold: str) -> bool:
    parsed, parsed_gold = _parse(answer), _parse(gold)
    if parsed is None or parsed_gold is None:
        return False
    for text, value in ((answer, parsed_gold), (gold, parsed)):
        decimal = DECIMAL.fullmatch(text)  # against something like \sqrt{2}
        if decimal and not decimal["percent"] and isinstance(value, Expr) and value.is_number:
            spelling, exact = decimal["value"].replace(",", ""), N(value, 40)
            if not (exact.is_real and exact.is_finite):
                return False
            difference = abs(Fraction(str(exact)) - Fraction(spelling))
            return difference <= abs(Fraction(spelling)) / 10**12 or _rounds(spelling, Fraction(str(exact)))
    return not _differ_at_points(parsed_gold, parsed) and verify(parsed_gold, parsed, timeout_seconds=None)
