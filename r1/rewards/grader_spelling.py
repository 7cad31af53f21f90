"""Bring an answer to one spelling: characters beyond ASCII, math delimiters, sizing, colour, spacing, thousands."""

# ruff: noqa: RUF001 - characters that look like others are its subject

import itertools
import re
import unicodedata

SYMBOLS = {
    "\u2212": "-", "\u2010": "-", "\u2011": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "\u2044": "/", "∕": "/", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "ℝ": r"\mathbb{R}", "≈": r"\approx ", "°": r"^\circ ",
    "º": r"^\circ ", "\u00a0": "~", "\u2009": r"\,", "\u202f": r"\,", "…": "...", "、": ",", "。": ".", "“": '"',
    "”": '"', "‘": "'", "⟨": r"\langle ", "⟩": r"\rangle ",
}  # fmt: skip
GROUP = r"((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)"  # what braces hold, with braces three deep
OUTER = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$]+)\$|\\\(((?:(?!\\\)).)+)\\\)|\\\[((?:(?!\\\]).)+)\\\]|\*\*([^*]+)\*\*|`([^`]+)`|"
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|texttt|mathbf|mathrm|mathit|mbox|bm|boldsymbol|displaystyle|underline|"
    r"emph|(?:text)?color\s*\{\w+\})\s*\{" + GROUP + r"\}",
    re.DOTALL,
)
PREFIX = re.compile(r"(?i)(\\text\s*\{\s*)?(?:the )?(?:final |correct )?answer(?: is|\s*[:=])\s*:?\s*(?(1)\}\s*)(?=\S)")
THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?P<gap>\{,\}|,\\!|\\[,;: !]|~)\d{3})(?:(?P=gap)\d{3})*)(?!\d)")
MAGNITUDES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits)(?![a-zA-Z])\.?|"
    r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge)(?![a-zA-Z])|"
    r"\\(?:[hv]?phantom|[hv]space\*?)\s*\{[^{}]*\}|\\color\s*\{\w+\}"
)
ROWS = re.compile(
    r"\\begin\{(cases|aligned|align\*?|gathered|gather\*?|split)\}((?:(?!\\begin).)*?)\\end\{\1\}", re.DOTALL
)
REVERSED = re.compile(r"(?<!\\)([\[\]])([^\[\](),;]+[,;][^\[\](),;]+)(?<!\\)([\[\]])")
INFIX = re.compile(r"\{([^{}]*)\\(choose|over)(?![a-zA-Z])([^{}]*)\}")
UNIT_QUOTIENT = re.compile(
    r"\\frac\s*\{\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\}"
)


def clean(text: str) -> str:
    """One spelling for what means the same: no math delimiters, sizing, spacing or outer text commands."""
    text = _ascii(text.strip())
    text = text.rstrip("\\ \n\t")  # line breaks at the end, or the half of a space
    text = re.sub(r"\\degree(?![a-zA-Z])", r"^\\circ ", text)
    text = THOUSANDS.sub(lambda m: m[1] + m[2].replace(m["gap"], ""), text)
    if re.fullmatch(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        text = text.replace(" ", "")
    text = LAYOUT.sub(" ", ROWS.sub(_joined_rows, text))
    text = re.sub(r"(?<!\\)\\(?:[!,;:> ]|q?quad(?![a-zA-Z]))|(?<!\\)~", " ", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\[dt]binom(?![a-zA-Z])", r"\\binom", text)
    text = INFIX.sub(lambda m: rf"\{'binom' if m[2] == 'choose' else 'frac'}{{{m[1]}}}{{{m[3]}}}", text)
    text = re.sub(r"(?<=\d) ?x ?(?=10 ?\^)", r"\\times ", text)
    text = re.sub(r"\^\s*\{?\s*\\(?:top|intercal|mathrm\{T\}|mathsf\{T\}|text\{T\})\s*\}?", "^{T}", text)
    text = UNIT_QUOTIENT.sub(r"\\text{\1/\2}", text)
    text = re.sub(r"\\text\s*\{\s*(\\?\$|€|£|¥)\s*\}", r"\1", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s*\{\s*([a-zA-Z])\s*\}(?=\s*($|[^\s(]))", r"\1", text)
    text = re.sub(
        rf"(?<=\d)[ ~]*(\\text\s*\{{ *)?({'|'.join(MAGNITUDES)})\b(?(1) *(?=[^{{}}]*\}}))",
        lambda m: rf"\cdot 10^{{{MAGNITUDES[m[2]]}}}" + (r"\text{" if m[1] else ""),
        text,
    )
    text = _trimmed(re.sub(r"\s+", " ", text))
    while (match := OUTER.fullmatch(text)) or (prefix := PREFIX.match(text)):
        inside = next(group for group in match.groups() if group is not None) if match else text[prefix.end() :]
        text = _trimmed(inside)
    text = _exact_part(text)
    if text.count("$") - text.count(r"\$") >= 2:  # several formulas, as in `$2$ or $3$`
        text = re.sub(r"(?<!\\)\$", " ", text)
    if "sqrt[" not in text.replace(" ", ""):
        text = REVERSED.sub(_interval, text)
    return re.sub(r"\s+", " ", text).strip()


def _ascii(text: str) -> str:
    """Signs, super- and subscripts, fractions, wide and slanted letters of Unicode as LaTeX; other letters stay."""
    if text.isascii():
        return text
    # A dash between numbers may mean from one to the other, and is no minus.
    text = re.sub(r"(?<![\w)}])(?!(?<=\d )[–]\s*\d)[–](?=\s*[\d.\\a-zA-Z(])", "-", text)
    text = re.sub(r"√\s*(\d+(?:\.\d+)?|\w)", r"\\sqrt{\1}", text).replace("√", r"\sqrt")
    text = re.sub(r"∛\s*(\d+(?:\.\d+)?|\w)", r"\\sqrt[3]{\1}", text).replace("∛", r"\sqrt[3]")
    return "".join(_spelled(kind, "".join(run)) for kind, run in itertools.groupby(text, _kind))


def _kind(character: str) -> str:
    if character in SYMBOLS:
        return "symbol"
    return "" if character.isascii() else unicodedata.decomposition(character).partition(" ")[0]


def _spelled(kind: str, run: str) -> str:
    if kind == "symbol":
        return "".join(SYMBOLS[c] for c in run)
    plain = unicodedata.normalize("NFKC", run).replace("\u2212", "-")
    if kind in ("<super>", "<sub>"):
        return f"{'^' if kind == '<super>' else '_'}{{{plain}}}"
    if kind == "<fraction>" and len(run) == 1 and not plain.endswith("\u2044"):
        top, _, bottom = plain.partition("\u2044")
        return rf"\frac{{{top}}}{{{bottom}}}"
    return plain if kind in ("<wide>", "<font>") else run


def _trimmed(text: str) -> str:
    """Without the full stop or comma at its end; dots that go on stay, since 0.333... is not 0.333."""
    text = text.strip()
    return text if text.endswith("..") else text.rstrip(" .,;")


CONDITION = re.compile(r",|[<>]|\\[lg]e(?:q|qslant)?(?![a-z])")


def _joined_rows(match: re.Match[str]) -> str:
    """The rows of a system of equations as a list; those with conditions (cases of a function) as they are."""
    kind, inside = match[1], match[2]
    rows = [row.strip(" ,;") for row in inside.replace("&", "").split(r"\\")]
    if (kind == "cases" and "&" in inside) or any(CONDITION.search(row) for row in rows):
        return match[0]
    return ", ".join(row for row in rows if row)


def _interval(match: re.Match[str]) -> str:
    """An open end written ]1, 2[ as (1, 2)."""
    opening, inside, closing = match.groups()
    return f"{'(' if opening == ']' else '['}{inside}{')' if closing == '[' else ']'}"


def _exact_part(text: str) -> str:
    """`\\frac{22}{7} \\approx 3.14` without its rounding; x \\approx 7 and \\approx 7 as what is given."""
    exact, approximate, rounded = (
        part.strip() for part in re.sub(r"\\simeq|\\doteq", r"\\approx", text).partition(r"\approx")
    )
    if not approximate:
        return text
    if re.fullmatch(r"\\?[a-zA-Z]+", exact) and exact != r"\pi":
        return f"{exact} = {rounded}"
    return exact or rounded
