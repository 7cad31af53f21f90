"""Parse an answer: numbers, names, brackets, fractions, roots, functions and matrices, joined by grader_parse.

It evaluates nothing, so that no text can do anything, and reads the whole text or nothing: a formula that it does not
know never turns into a number that stands in it.
"""

import re

from r1.rewards.grader_parse import CLOSING, MATRICES, Node, ParseError, Parser, literal

MAX_LENGTH = 1000  # characters
TRIGONOMETRY = {"sin", "cos", "tan", "cot", "sec", "csc"}
ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10", "varepsilon": "epsilon",
           "varphi": "phi", "vartheta": "theta"}  # fmt: skip
REALS: Node = ("seq", "(", ")", (("neg", ("const", "inf")), ("const", "inf")))


def parse_answer(text: str) -> Node | None:
    """The tree of a cleaned text; None if any part of it is not understood. `\\pm` gives a list of both signs."""
    if len(text) > MAX_LENGTH:
        return None
    signs = [("+", "-"), ("-", "+")] if re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text) else [("", "")]
    try:
        trees = []
        for up, down in signs:
            signed = re.sub(r"\\pm(?![a-zA-Z])", f" {up} ", text)
            trees.append(Parser(re.sub(r"\\mp(?![a-zA-Z])", f" {down} ", signed), primary).whole())
    except ParseError:
        return None
    return trees[0] if len(trees) == 1 else ("list", tuple(trees))


def primary(parser: Parser) -> Node:
    kind = parser.peek()
    if kind == "number":
        return number(parser)
    if kind == "name":
        return name(parser)
    if kind == "function":
        return function(parser)
    if kind == "text" and parser.tokens[parser.at].text in ("\\mathbb R", "\\mathbb Z", "\\mathbb N", "\\mathbb Q"):
        text = parser.take().text
        return REALS if text.endswith("R") else ("sym", text)
    if kind in CLOSING:
        return brackets(parser)
    if kind == "matrix":
        return matrix(parser)
    if kind in (r"\frac", r"\binom", r"\sqrt", r"\emptyset", r"\varnothing"):
        return command(parser)
    raise ParseError(f"unexpected {kind!r}")


def number(parser: Parser) -> Node:
    """A number, also repeating (0.\\overline{3}), mixed (7 3/4, 7\\frac{3}{4}), or in another base (101_2)."""
    text = parser.take().text
    node = literal(text)
    follows = parser.peek()
    if follows == "." and "." not in text and parser.at + 1 < len(parser.tokens):
        if parser.tokens[parser.at + 1].text in (r"\overline", r"\bar", r"\dot"):
            parser.take()
            return repeating(parser, text + ".")
    if follows in (r"\overline", r"\bar", r"\dot") and "." in text:
        return repeating(parser, text)
    if follows == "_":
        parser.take()
        return ("sym", f"{text}_{subscript(parser)}")
    if "." not in text and follows == "number" and not parser.tokens[parser.at].glued:
        top, slash, bottom = ([t.text for t in parser.tokens[parser.at : parser.at + 3]] + ["", ""])[:3]  # `7 3/4`
        if slash == "/" and top.isdigit() and bottom.isdigit() and int(bottom):
            parser.at += 3
            return ("add", node, ("div", literal(top), literal(bottom)))
    if "." not in text and follows == r"\frac":
        before = parser.at
        fraction = command(parser)
        if fraction[0] == "div" and all(part[0] == "num" for part in fraction[1:]):
            return ("add", node, fraction)
        parser.at = before
    return node


def repeating(parser: Parser, text: str) -> Node:
    parser.take()
    digits = argument_text(parser)
    if not digits.isdigit():
        raise ParseError("a bar over something else than digits")
    before = literal(text + "0") if text.endswith(".") else literal(text)
    places = len(text.partition(".")[2])
    period = literal(digits)[1] / (10 ** len(digits) - 1) / 10**places
    return ("num", before[1] + period, 0, 0)  # exact: it is not rounded at its last digit


def argument_text(parser: Parser) -> str:
    """What a command or subscript applies to, as text: one token or a group without groups in it."""
    if parser.peek() != "{":
        return parser.take().text
    parser.take()
    parts = []
    while parser.peek() not in ("}", ""):
        parts.append(parser.take().text)
    parser.expect("}")
    return "".join(parts)


def subscript(parser: Parser) -> str:
    text = argument_text(parser)
    if not re.fullmatch(r"[\w,+\- ]+", text):
        raise ParseError(f"subscript {text!r}")
    return text.strip()


def name(parser: Parser) -> Node:
    text = parser.take().text
    if text in ("pi", "e", "i") and parser.peek() != "_":
        return ("const", text)
    if text == "infty":
        return ("const", "inf")
    text = ALIASES.get(text, text)
    if parser.peek() == "_":
        parser.take()
        text += "_" + subscript(parser)
    while parser.peek() in ("'", r"\prime"):
        parser.take()
        text += "'"
    inverse = [token.text for token in parser.tokens[parser.at : parser.at + 6]] == ["^", "{", "-", "1", "}", "("]
    if text in ("f", "g", "h") and inverse:
        parser.at += 5
        text += "^{-1}"
    if (text.rstrip("'") in ("f", "g", "f^{-1}", "g^{-1}", "h^{-1}") or text.endswith("'")) and parser.peek() == "(":
        inside = brackets(parser)
        return ("sym", f"{text}({inside!r})")  # an unknown function is a number of its own at each argument
    return ("sym", text)


def function(parser: Parser) -> Node:
    """sin x, \\sin^2 x, \\log_2 8, sqrt(2): without brackets the argument is the product that follows."""
    text = parser.take().text
    text, exponent, inverse = ALIASES.get(text, text), None, False
    under: Node | None = None
    if parser.peek() == "_":
        if text != "log":
            raise ParseError(f"subscript of {text}")
        parser.take()
        under = parser.group() if parser.peek() == "{" else primary(parser)
    if parser.peek() == "^":
        parser.take()
        exponent = parser.exponent()
        inverse = exponent == ("neg", literal("1"))
        if inverse and text not in TRIGONOMETRY:
            raise ParseError(f"{text}^-1")
    start = parser.at
    arguments = function_arguments(parser)
    if text in TRIGONOMETRY and not inverse and in_degrees(parser, start):
        arguments = (("mul", arguments[0], ("div", ("const", "pi"), literal("180"))),)
    node: Node = ("fn", "arc" + text if inverse else text, arguments + ((under,) if under else ()))
    return ("pow", node, exponent) if exponent is not None and not inverse else node


def in_degrees(parser: Parser, start: int) -> bool:
    return any(token.text == r"\circ" for token in parser.tokens[start : parser.at])


def function_arguments(parser: Parser) -> tuple[Node, ...]:
    if parser.peek() in ("(", "[", "{"):
        inside = brackets(parser)
        return inside[3] if inside[0] == "seq" else (inside,)
    if parser.peek() in ("+", "-"):
        return (parser.signed(),)
    node = parser.power()
    while parser.peek() in ("name", r"\frac", r"\sqrt") or (parser.peek() in (r"\cdot", "*") and node[0] == "num"):
        if parser.peek() in (r"\cdot", "*"):
            parser.take()
        node = ("mul", node, parser.power())
    return (node,)


def brackets(parser: Parser) -> Node:
    """A group, a tuple or interval, a set, or what bars, floors and ceilings enclose."""
    opening = parser.take().text
    bars, parser.bars = parser.bars, 1 if opening == "|" else 0
    items: list[Node] = []
    if opening == r"\{" and (condition := set_builder(parser)) is not None:
        parser.bars = bars
        return condition
    ends = (")", "]") if opening in ("(", "[") else (CLOSING[opening],)
    while parser.peek() not in ends:
        items.append(parser.statement() if opening == r"\{" else parser.sum())
        if parser.peek() in (",", ";") and opening != "|":
            parser.take()
        elif parser.peek() not in ends:
            raise ParseError(f"expected a comma or {ends}, found {parser.peek()!r}")
    closing = parser.take().text
    parser.bars = bars
    if opening == r"\{":
        return ("set", tuple(items))
    if not items:
        raise ParseError("empty brackets")
    if len(items) == 1 and (named := enclosed(opening, closing, items[0])) is not None:
        return named
    if opening in ("(", "[", r"\langle") and len(items) > 1:
        return ("seq", opening, closing, tuple(items))
    raise ParseError(f"{opening} with {len(items)} parts")


def enclosed(opening: str, closing: str, item: Node) -> Node | None:
    names = {"|": "abs", r"\lvert": "abs", r"\lfloor": "floor", r"\lceil": "ceil"}
    if opening in names:
        return ("fn", names[opening], (item,))
    return item if closing == CLOSING[opening] and opening in ("(", "[", "{") else None


def set_builder(parser: Parser) -> Node | None:
    """The condition of {x | x > 2} or {x in R : x > 2}; None, with nothing taken, for a set of items."""
    before = parser.at
    if parser.peek() == "name":
        parser.take()
        if parser.peek() == r"\in":
            parser.at += 2
        if parser.peek() in ("|", ":", r"\mid"):
            parser.take()
            condition = parser.statement()
            parser.expect(r"\}")
            return condition
    parser.at = before
    return None


def command(parser: Parser) -> Node:
    text = parser.take().text
    if text in (r"\emptyset", r"\varnothing"):
        return ("set", ())
    if text == r"\sqrt":
        if parser.peek() == "[":
            parser.take()
            degree = parser.sum()
            parser.expect("]")
            return ("fn", "root", (argument(parser), degree))
        return ("fn", "sqrt", (brackets(parser) if parser.peek() == "(" else argument(parser),))
    top, bottom = argument(parser), argument(parser)
    return ("div", top, bottom) if text == r"\frac" else ("fn", "binomial", (top, bottom))


def argument(parser: Parser) -> Node:
    """A command's argument: a group, or one sign. In `\\frac12` each digit is one; `\\sqrt12` could mean two things."""
    if parser.peek() == "{":
        return parser.group()
    if parser.peek() != "number":
        return primary(parser)
    digits = parser.tokens[parser.at]
    command_text = parser.tokens[parser.at - 1].text
    if len(digits.text) == 2 and digits.text.isdigit() and command_text in (r"\frac", r"\binom"):
        parser.tokens[parser.at : parser.at + 1] = [digits._replace(text=d, glued=True) for d in digits.text]
    elif len(digits.text) > 1:
        raise ParseError("several digits after a command without braces")
    return literal(parser.take().text)


def matrix(parser: Parser) -> Node:
    kind = parser.take().text.partition("begin ")[2]
    if kind not in MATRICES:
        raise ParseError(f"environment {kind!r}")
    rows: list[tuple[Node, ...]] = []
    row: list[Node] = []
    while parser.peek() != "matrix":
        row.append(parser.sum())
        if parser.peek() == "&":
            parser.take()
        elif parser.peek() in (r"\\", "matrix"):
            rows, row = [*rows, tuple(row)], []
            if parser.peek() == r"\\":
                parser.take()
        else:
            raise ParseError(f"unexpected {parser.peek()!r} in a matrix")
    if parser.take().text != f"end {kind}" or len({len(r) for r in rows}) != 1:
        raise ParseError("an uneven matrix")
    return ("matrix", tuple(rows))
