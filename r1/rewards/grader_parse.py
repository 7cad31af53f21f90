"""The tokens of an answer, LaTeX or plain, and the operators and relations between its parts, as a small tree."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

MAX_TOKENS, MAX_DEPTH = 300, 40  # what Python's stack holds, with room
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "asin", "acos",
    "atan", "arccot", "ln", "log", "lg", "exp", "sqrt", "cbrt", "abs", "floor", "ceil", "gcd", "lcm", "max", "min",
}  # fmt: skip
GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
    "rho", "sigma", "tau", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi", "Psi",
    "Omega", "ell", "hbar", "varepsilon", "varphi", "vartheta",
}  # fmt: skip
RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=",
    r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", r"\lt": "<", r"\gt": ">",
    r"\in": "in",
}  # fmt: skip
TIMES = {"*", r"\cdot", r"\times", r"\ast"}
CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil",
           r"\langle": r"\rangle", r"\lvert": r"\rvert", "|": "|"}  # fmt: skip
MATRICES = {"pmatrix", "bmatrix", "matrix", "smallmatrix", "array", "Bmatrix"}
TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<text>\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|rm|mathbb|mathcal|bm)\s*"
    r"\{(?P<inside>[^{}]*)\})|(?P<matrix>\\(?:begin|end)\s*\{(?P<kind>\w+)\}(?:\s*\{[lcr|]*\})?)|"
    r"(?P<command>\\[a-zA-Z]+|\\\\|\\[{}|])|(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<word>[A-Za-z]+)|"
    r"(?P<operator>\*\*|<=|>=|!=|\S)"
)

Node = Any
"""A tuple (kind, operands...): num value digits places; sym name; const pi|e|i|inf; neg a; add, mul, div, pow a b;
fn name arguments; seq opening closing items; set, list items; matrix rows; rel operators operands; union parts;
minus whole part."""


class ParseError(ValueError):
    """The text is no formula that this parser knows."""


class Token(NamedTuple):
    kind: str  # number, name, function, text, command, matrix, operator
    text: str
    glued: bool  # no space before it


def tokenize(text: str) -> list[Token]:
    tokens: list[Token] = []
    glued = True
    formula = re.search(r"[-+*/^=<>\\]", text) is not None
    for match in TOKEN.finditer(text):
        kind, found = match.lastgroup, match.group()
        if match["space"]:
            glued = False
            continue
        if match["text"]:
            tokens += _text_token(match["inside"], found, glued)
        elif match["matrix"]:
            tokens.append(Token("matrix", ("begin " if "begin" in found[:6] else "end ") + match["kind"], glued))
        elif match["word"]:
            after_number = glued and bool(tokens) and tokens[-1].kind == "number"  # 2abc
            tokens += _split_word(found, formula or after_number, glued)
        elif match["command"] and found[1:] in FUNCTIONS - {"sqrt"}:
            tokens.append(Token("function", found[1:], glued))
        elif match["command"] and (found[1:] in GREEK or found in (r"\pi", r"\infty")):
            tokens.append(Token("name", found[1:], glued))
        else:
            tokens.append(Token("number" if kind == "number" else "operator", "^" if found == "**" else found, glued))
        glued = True
    return tokens


def _text_token(inside: str, found: str, glued: bool) -> list[Token]:
    inside = inside.strip()
    if inside in ("and", "or", ",", ""):
        return [Token("operator", "or" if inside else ",", glued)] if inside else []
    if found.startswith(r"\mathbb"):
        return [Token("text", "\\mathbb " + inside, glued)]
    if inside in FUNCTIONS:
        return [Token("function", inside, glued)]
    return [Token("name" if len(inside) == 1 and inside.isalpha() else "text", inside, glued)]


def _split_word(word: str, formula: bool, glued: bool) -> list[Token]:
    """Letters as functions, constants and single-letter names; a word of ordinary language is no product of letters."""
    if word in ("and", "or"):
        return [Token("operator", "or", glued)]
    if word in ("infinity", "inf", "oo", "infty"):
        return [Token("name", "infty", glued)]
    tokens: list[Token] = []
    letters, at = 0, 0
    while at < len(word):
        size = next((n for n in (7, 6, 5, 4, 3, 2) if word[at : at + n] in FUNCTIONS | GREEK | {"pi"}), 1)
        part = word[at : at + size]
        letters = letters + 1 if size == 1 else 0
        if letters > (3 if formula else 2):
            raise ParseError(f"{word!r} is a word")
        tokens.append(Token("function" if part in FUNCTIONS else "name", part, glued and not at))
        at += size
    if letters == 2 and len(word) == 2 and not formula and not set(word) <= set("abcdkmnpqrstuvwxyzABCPQRXYZ"):
        raise ParseError(f"{word!r} is a word")
    if letters == 3 and not formula:
        raise ParseError(f"{word!r} is a word")
    return tokens


class Parser:
    """Recursive descent over the tokens of one text: operators, relations and lists of them.

    primary reads what the operators join; it gets the parser.
    """

    def __init__(self, text: str, primary: Callable[["Parser"], Node]) -> None:
        self.primary = primary
        self.tokens = tokenize(text)
        if len(self.tokens) > MAX_TOKENS:
            raise ParseError("too long")
        self.at = 0
        self.depth = 0
        self.bars = 0  # inside how many |...|: there a bar closes

    def peek(self) -> str:
        """The next token's text for operators and commands, its kind for the others, "" at the end."""
        if self.at >= len(self.tokens):
            return ""
        token = self.tokens[self.at]
        return token.text if token.kind == "operator" else token.kind

    def take(self) -> Token:
        if self.at >= len(self.tokens):
            raise ParseError("the text ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, text: str) -> None:
        if self.peek() != text:
            raise ParseError(f"expected {text}, found {self.peek()!r}")
        self.at += 1

    def whole(self) -> Node:
        items = [self.statement()]
        while self.peek() in (",", ";", "or"):
            self.take()
            if self.peek() == "or":  # as in `1, 2, and 3`
                self.take()
            items.append(self.statement())
        if self.peek():
            raise ParseError(f"unexpected {self.peek()!r}")
        return items[0] if len(items) == 1 else ("list", tuple(items))

    def statement(self) -> Node:
        """A chain of relations, or a single operand."""
        operators: list[str] = []
        operands = [self.union()]
        while self.peek() in RELATIONS:
            operators.append(RELATIONS[self.take().text])
            operands.append(self.union())
        return ("rel", tuple(operators), tuple(operands)) if operators else operands[0]

    def union(self) -> Node:
        parts = [self.sum()]
        while self.peek() == r"\cup":
            self.take()
            parts.append(self.sum())
        node: Node = ("union", tuple(parts)) if len(parts) > 1 else parts[0]
        while self.peek() in (r"\setminus", r"\backslash"):
            self.take()
            node = ("minus", node, self.sum())
        return node

    def sum(self) -> Node:
        node = self.term()
        while self.peek() in ("+", "-"):
            minus = self.take().text == "-"
            right = self.term()
            node = ("add", node, ("neg", right) if minus else right)
        return node

    def term(self) -> Node:
        node = self.signed()
        while True:
            if self.peek() in TIMES:
                self.take()
                node = ("mul", node, self.signed())
            elif self.peek() in ("/", r"\div"):
                self.take()
                node = ("div", node, self.signed())
            elif self.starts_factor():
                node = ("mul", node, self.power())
            else:
                return node

    def starts_factor(self) -> bool:
        """Whether what follows multiplies without a sign; two numbers side by side are no product."""
        kind = self.peek()
        if kind == "number":
            raise ParseError("two numbers side by side")
        if kind == "|":
            return not self.bars
        opens = kind in CLOSING and kind != r"\{"
        return kind in ("name", "function", r"\frac", r"\sqrt", r"\binom") or opens or self.begins_matrix()

    def begins_matrix(self) -> bool:
        return self.peek() == "matrix" and self.tokens[self.at].text.startswith("begin")

    def signed(self) -> Node:
        signs = 0
        while self.peek() in ("+", "-"):
            signs += self.take().text == "-"
        node = self.power()
        return ("neg", node) if signs % 2 else node

    def power(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("nested too deeply")
        node = self.postfix()
        self.depth -= 1
        return node

    def postfix(self) -> Node:
        """A primary with the factorial or exponent after it."""
        node = self.primary(self)
        while self.peek() == "!":
            self.take()
            node = ("fn", "factorial", (node,))
        if self.peek() == "!" or (node[:2] == ("fn", "factorial") and node[2][0][:2] == ("fn", "factorial")):
            raise ParseError("a double factorial")
        if self.peek() != "^":
            return node
        self.take()
        exponent = self.exponent()
        if exponent is None:  # a degree sign
            return node if self.peek() != "^" else self.fail("a degree sign with an exponent")
        if self.peek() in ("!", "^"):
            raise ParseError("an operator after an exponent")
        return ("pow", node, exponent)

    def fail(self, message: str) -> Node:
        raise ParseError(message)

    def exponent(self) -> Node | None:
        """What stands after ^; None for \\circ."""
        if self.peek() == r"\circ":
            self.take()
            return None
        if self.peek() == "{":
            if self.tokens[self.at + 1 : self.at + 2] and self.tokens[self.at + 1].text == r"\circ":
                self.at += 2
                self.expect("}")
                return None
            return self.group()
        return self.signed_power()

    def signed_power(self) -> Node:
        """A plain exponent: right-associative, and with one sign."""
        minus = self.peek() == "-"
        if self.peek() in ("+", "-"):
            self.take()
        node = self.power()
        return ("neg", node) if minus else node

    def group(self) -> Node:
        self.expect("{")
        bars, self.bars = self.bars, 0
        node = self.sum()
        self.bars = bars
        self.expect("}")
        return node


def literal(token: str) -> Node:
    whole, _, after = token.partition(".")
    digits = len((whole + after).lstrip("0"))
    return ("num", Fraction(int(whole + after), 10 ** len(after)), digits, len(after))
