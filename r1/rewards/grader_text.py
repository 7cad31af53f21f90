"""Answers as text: find one in a response, and split units, percent signs and letters off."""

# ruff: noqa: RUF001 - characters that look like others are in its texts

import re
from fractions import Fraction
from typing import NamedTuple

UNITS = {
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "kilometer": "km",
    "kilometre": "km", "meter": "m", "metre": "m", "kilogram": "kg", "gram": "g", "second": "s", "sec": "s",
    "minute": "min", "hour": "h", "hr": "h", "liter": "l", "litre": "l", "foot": "ft", "feet": "ft", "inch": "in",
    "inches": "in", "yard": "yd", "mile": "mi", "pound": "lb", "degree": "°", "dollar": "$", "usd": "$", "euro": "€",
    "eur": "€", "miles per hour": "mph", "mi/h": "mph", "meters per second": "m/s", "square unit": "unit^2",
    "cubic unit": "unit^3", "sq unit": "unit^2", "people": "person", "women": "woman", "rad": "radian", "men": "man",
}  # fmt: skip
SHORT_UNITS = set("m s g h l V J N W A K F C L Pa Hz kg km cm mm nm ml mL ft lb oz mi yd kJ eV".split())
NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
CURRENCY = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<mark>(?:US|us)?\\?\$|€|£|¥|\\euro|\\pounds)\s*(?P<rest>[+-]?[\d.].*)", re.DOTALL
)
UNIT = re.compile(
    r"(?P<value>.*?[\d})\]!])(?:"
    r"\s*\\(?:text|mathrm|mbox|textrm|textit|operatorname|rm)\s*\{\s*(?P<latex>[^{}]*)\}\s*(?:\^\s*\{?(?P<power>[23])\}?)?|"
    r"(?P<space>[ ~]*)(?P<plain>[A-Za-z][A-Za-z./ ]*?)(?:\^\s*\{?(?P<power2>[23])\}?)?|"
    r"\s*(?P<degree>\^\s*\{?\s*\\circ\s*\}?)\s*(?P<scale>[CF]?)|"
    r"\s*(?P<mark>€|£|¥|\\?\$))",
    re.DOTALL,
)  # fmt: skip
PERCENT = re.compile(r"(?P<value>.*?)\s*(?:\\?%|\\?(?:text|mathrm)?\{?\s*(?:percent|per cent|pct\.?)\s*\}?)", re.DOTALL)
WORDS = re.compile(r"(?=.*[^\W\d_]|\d+(?: ?: ?\d+)+$)[\w '’,.\-:;&/()\"]+")  # ratios and clock times are words too
NO_UNIT = re.compile(r"(?:or|and|if|mod|for|to|plus|minus|less|more|at|not|except|pi|sqrt|in [a-z]|,)(?![a-z])|$")
BOX = re.compile(r"\\boxed\s*(?:\{|\Z|(?P<bare>-?\d+(?:\.\d+)?|[A-Z])(?![\w{]))")  # TeX lets one sign go without braces
SECOND_CHOICE = re.compile(  # at once, or labelled and with a text of its own; `D. Both B and C` chooses one
    r"^(?:or|and|[,;/&])\s*\(?[A-J]\b|"
    r"(?:[,;/&]|\b(?:or|and))\s*(?:\([A-J]\)|[A-J][.:)])\s*(?!(?:is|are)\b)\S"
)
LABEL = re.compile(
    r"(?!.*\bnot\b)(?P<label>\\text\s*\{[^\W\d_][^\W\d_ ]*(?: [^\W\d_]+)*\s*\}|[^\W\d_]{3,}(?: [^\W\d_]+)*|"
    r"m? ?\\angle\s*\{?\s*[A-Z1-9]{1,3}\}?)"
    r"\s*=(?P<value>[^=<>]+)",
    re.DOTALL,
)
FORMS = ("boxed", "tag", "hashes", "line")


def extract_boxed(text: str) -> str | None:
    """What the last \\boxed{...} of a text holds; None if there is none or the last one does not close."""
    boxes = list(BOX.finditer(text))
    if not boxes or boxes[-1]["bare"]:
        return boxes[-1]["bare"] if boxes else None
    start, depth = boxes[-1].end(), 1
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):  # \{ and \} are signs, not braces
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : start + brace.start()].strip()
    return None


def extract_tag(text: str) -> str | None:
    """What the last <answer>...</answer> holds, or the box in it; None without one, or if the last does not close."""
    _, opened, last = text.rpartition("<answer>")
    inside, closed, _ = last.partition("</answer>")
    return unbox(inside) if opened and closed else None


def extract_line(text: str) -> str | None:
    """What follows the last `Answer:` on its line, or the box in it."""
    lines = re.findall(r"(?i)\banswer\s*:[ \t*]*([^\n]+)", text)
    return unbox(lines[-1].strip(" \t*")) if lines else None


def extract_hashes(text: str) -> str | None:
    """What follows the last `####` on its line, GSM8K's form, or the box in it."""
    lines = re.findall(r"####[ \t]*([^\n#]+)", text)
    return unbox(lines[-1].strip()) if lines else None


def unbox(text: str) -> str | None:
    """The box in a text that has one, else the text."""
    return extract_boxed(text) if re.search(r"\\boxed(?![a-zA-Z])", text) else text.strip()


def extract_answer(text: str, forms: tuple[str, ...] | list[str] = FORMS) -> str | None:
    """The answer of a response in the first of these forms that it uses; None if it uses none.

    Args:
        forms: any of boxed, tag (<answer>...</answer>), hashes (#### 42) and line (Answer: 42). A form that the
            response began and did not finish gives None: it is no answer, nor is what stands in another form.
    """
    begins = {"boxed": r"\\boxed(?![a-zA-Z])", "tag": "<answer>", "hashes": "####", "line": r"(?i)\banswer\s*:"}
    extract = {"boxed": extract_boxed, "tag": extract_tag, "hashes": extract_hashes, "line": extract_line}
    unknown = [form for form in forms if form not in FORMS]
    if unknown or isinstance(forms, str):
        raise ValueError(f"forms must be a tuple of some of {FORMS}, got {forms!r}")
    form = next((form for form in forms if re.search(begins[form], text)), None)
    return None if form is None else extract[form](text)


class Decimals(NamedTuple):
    """A plain number and how many significant digits and places after the point it is written with."""

    value: Fraction
    digits: int
    places: int


def read_number(text: str) -> Decimals | None:
    """A plain decimal number, also in e-notation or with thousands commas; None for anything else."""
    match = re.fullmatch(rf"([+-]?)\s*({NUMBER})(?:[eE]([+-]?\d{{1,3}}))?", text)
    if match is None:
        return None
    mantissa, exponent = match[2].replace(",", ""), int(match[3] or 0)
    whole, _, after = mantissa.partition(".")
    value = Fraction(int(whole + after or 0)) * Fraction(10) ** (exponent - len(after))
    digits = len((whole + after).lstrip("0"))
    return Decimals(-value if match[1] == "-" else value, digits, len(after) - exponent)


def split_percent(text: str) -> tuple[str, bool]:
    match = PERCENT.fullmatch(text)
    return (match["value"].strip(), True) if match and match["value"] else (text, False)


def split_unit(text: str) -> tuple[str, str]:
    """(value, unit) of something like `5 \\text{ cm}^2`, `5 apples`, `\\$5`, `45^\\circ`; the unit "" if there is none.

    One or two bare letters are a unit only if they are a common one: 5 x is a product.
    """
    if match := CURRENCY.fullmatch(text):
        value, rest = split_unit(match["rest"])
        mark = match["mark"].lstrip("\\").upper().replace("US$", "$")
        return (match["sign"] + value, mark) if rest in ("", mark) else (text, "")
    match = UNIT.fullmatch(text)
    if match is None:
        return text, ""
    plain = match["plain"]
    if plain is not None:
        wordlike = match["space"] and re.fullmatch(r"[A-Za-z]{3,}[a-z./ A-Z]*|in", plain) and "  " not in plain
        short = all(part.strip() in SHORT_UNITS for part in plain.split("/"))  # also m/s
        if not (wordlike or short) or NO_UNIT.match(plain):
            return text, ""
    elif match["latex"] is not None and (NO_UNIT.match(match["latex"].strip()) or match["value"].endswith("frac}")):
        return text, ""
    return match["value"].strip(), _unit_name(match)


def _unit_name(match: re.Match[str]) -> str:
    if match["degree"]:
        return "°" + match["scale"]
    if match["mark"]:
        return match["mark"].lstrip("\\")
    name = " ".join((match["latex"] or match["plain"] or "").replace(".", "").split()).replace(" / ", "/")
    power = match["power"] or match["power2"]
    for word, exponent in (("square", "2"), ("sq", "2"), ("cubic", "3"), ("cu", "3")):
        if name.lower().startswith(word + " "):
            name, power = name[len(word) + 1 :], exponent
    if name not in SHORT_UNITS:  # g and G, m and M differ
        name = name.lower()
        name = UNITS.get(name) or UNITS.get(name.rstrip("s")) or (name.rstrip("s") if len(name) > 3 else name)
    return name.lower() if name in ("L", "mL") else name + (f"^{power}" if power else "")


def read_choice(text: str) -> tuple[str, str] | None:
    """(letter, what follows it) of a multiple-choice answer: `e`, `(E)`, `E.`, `E: polygenic score`, `option E`."""
    text = re.sub(r"\\(?:text|textbf|mathbf|mathrm|boxed)\s*\{([^{}]*)\}", r"\1", text).strip()
    text = re.sub(r"(?i)^(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?\s*:?\s*(?=\(?[a-z]\b)", "", text)
    match = re.fullmatch(r"\(([A-Za-z])\)[.:]?\s*(.*)|([A-Za-z])(?:\s*[.:)]\s*(.*))?", text, re.DOTALL)
    if match is None:
        return None
    letter, rest = (match[1] or match[3]).upper(), (match[2] or match[4] or "").strip()
    return None if SECOND_CHOICE.search(rest) else (letter, rest)


def plain_words(text: str) -> str | None:
    """Text without formulas, in lower case; None if it holds anything else."""
    text = re.sub(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?i)\b([ap])\. ?m\b\.?", r"\1m", " ".join(text.replace("’", "'").split()))
    return text.casefold().strip(" .\"'") if WORDS.fullmatch(text) else None


def read_letters(text: str) -> frozenset[str]:
    """The letters of several choices: `A, C`, `A and C`, `(A)(C)`, `AC`; empty for anything else, also for one."""
    letters = re.sub(r"[\s,;&()]+|\band\b", "", text)
    several = re.fullmatch(r"[A-J]{2,10}", letters) and len(set(letters)) == len(letters)
    return frozenset(letters) if several else frozenset()


def split_label(text: str) -> tuple[str, str]:
    """(what is named, value) of `\\text{Area} = 5`, `Area = 5` or `m\\angle ABC = 50`; no name: ("", text)."""
    match = LABEL.fullmatch(text)
    if match is None:
        return "", text
    return " ".join(re.sub(r"\\text|[{}~]", " ", match["label"]).casefold().split()), match["value"]


def balanced(text: str) -> bool:
    """Whether braces close, so that the text can be LaTeX at all."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth < 0:
            return False
    return depth == 0
