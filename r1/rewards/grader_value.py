"""Values of parsed answers: exact fractions where possible, else many digits; with a bound on the work."""

import math
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from r1.rewards.grader_parse import Node

MAX_BITS = 1 << 16  # of a number's numerator, denominator or exponent's size
MAX_WORK = 1 << 22  # bits over all operations of one evaluation

Value = Any
"""Fraction, or mpmath's mpf or mpc."""


_contexts = threading.local()  # mpmath's functions change the precision of their context while they compute


class Undefined(ArithmeticError):
    """No value: a division by zero, an unknown function, or numbers too large to compare."""


class Evaluator:
    """Evaluates trees at one point, each variable's value a Fraction or mpf."""

    def __init__(self, point: dict[str, Value], digits: int) -> None:
        self.point = point
        self.mp = _context(digits)
        self.work = 0

    def __call__(self, node: Node) -> Value:
        try:
            value = self.evaluate(node)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise Undefined(str(error)) from error
        if not isinstance(value, Fraction) and not self.mp.isfinite(value):
            raise Undefined("infinite")
        return value

    def evaluate(self, node: Node) -> Value:
        kind = node[0]
        if kind == "num":
            value = node[1]
        elif kind == "sym":
            value = self.point[node[1]]
        elif kind == "const":
            value = self.constant(node[1])
        elif kind in ("neg", "add", "mul", "div", "pow"):
            value = self.operate(kind, *map(self.evaluate, node[1:]))
        elif kind == "fn":
            value = self.apply(node[1], [self.evaluate(argument) for argument in node[2]])
        else:
            raise Undefined(f"{kind} has no single value")
        self.count(value)
        return value

    def count(self, value: Value) -> None:
        if isinstance(value, Fraction):
            bits = value.numerator.bit_length() + value.denominator.bit_length()
        else:
            bits = max(abs(self.mp.mag(part)) if part else 0 for part in (value.real, value.imag))
            bits = (bits if math.isfinite(bits) else MAX_BITS + 1) + 1000
        self.work += int(bits)
        if bits > 2 * MAX_BITS or self.work > MAX_WORK:
            raise Undefined("too large")

    def constant(self, name: str) -> Value:
        if name == "inf":
            raise Undefined("infinity")
        return {"pi": +self.mp.pi, "e": +self.mp.e, "i": self.mp.mpc(0, 1)}[name]

    def number(self, value: Value) -> Value:
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def operate(self, kind: str, a: Value, b: Value = None) -> Value:
        if kind == "neg":
            return -a
        if kind == "pow":
            return self.raise_to(a, b)
        if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
            a, b = self.number(a), self.number(b)
        if kind == "div" and b == 0:
            raise Undefined("division by zero")
        return a + b if kind == "add" else a * b if kind == "mul" else a / b

    def raise_to(self, base: Value, exponent: Value) -> Value:
        if base == 0:
            if isinstance(exponent, Fraction) and exponent > 0:
                return Fraction(0)
            raise Undefined("a power of zero")
        if not isinstance(exponent, Fraction) and abs(self.mp.mag(exponent)) > 1000:
            raise Undefined("too large")
        size = abs(self.mp.log(abs(self.number(base)), 2)) * abs(self.number(exponent))
        if isinstance(base, Fraction):  # (k+1)/k has a small logarithm and large powers
            bits = base.numerator.bit_length() + base.denominator.bit_length()
            if _rational(exponent) and exponent.denominator == 1:
                size = max(size, bits * abs(int(exponent)))
        if size > MAX_BITS:
            raise Undefined("too large")
        if _rational(exponent) and exponent.denominator == 1:
            return base ** int(exponent)
        if _rational(exponent) and is_real(base) and exponent.denominator % 2 and base < 0:
            root = self.root(base, exponent.denominator)  # the real root of a negative number, as in school
            return root ** int(exponent.numerator)
        if exponent == Fraction(1, 2):
            return self.root(base, 2)
        return self.mp.power(self.number(base), self.number(exponent))

    def root(self, value: Value, degree: int) -> Value:
        if not 1 <= degree <= 1000:
            raise Undefined("root")
        if is_real(value) and value < 0 and degree % 2:
            return -self.root(-value, degree)
        if isinstance(value, Fraction) and value >= 0 and degree <= 64:  # perfect powers stay exact
            top, bottom = _exact_root(value.numerator, degree), _exact_root(value.denominator, degree)
            if top is not None and bottom is not None:
                return Fraction(top, bottom)
        return self.mp.root(self.number(value), degree)

    def apply(self, name: str, values: list[Value]) -> Value:
        if name in ("floor", "ceil", "binomial", "gcd", "lcm", "max", "min"):
            return self.apply_exact(name, values)
        if len(values) > (2 if name in ("log", "root") else 1):
            raise Undefined(f"{name} of {len(values)} numbers")
        if name in ("sqrt", "cbrt", "root"):
            degree = values[1] if name == "root" else Fraction(2 if name == "sqrt" else 3)
            return (
                self.root(values[0], int(degree)) if degree.denominator == 1 else self.raise_to(values[0], 1 / degree)
            )
        if name in ("abs", "factorial"):
            return abs(values[0]) if name == "abs" else self.factorial(values[0])
        if name in ("log", "ln", "log10"):
            base = self.number(values[1]) if len(values) > 1 else self.mp.mpf(10) if name == "log10" else self.mp.e
            return self.mp.log(self.number(values[0])) / self.mp.log(base)
        return self.apply_elementary(name, self.number(values[0]))

    def apply_elementary(self, name: str, x: Value) -> Value:
        limit = 15 if name in ("exp", "sinh", "cosh", "tanh") else 64  # sines of huge numbers need as many digits
        if x != 0 and self.mp.mag(x) > limit:
            raise Undefined("too large")
        functions = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec",
                     "arccsc": "acsc"}  # fmt: skip
        function: Callable[[Value], Value] = getattr(self.mp, functions.get(name, name))
        return function(x)

    def factorial(self, value: Value) -> Value:
        if _rational(value) and value.denominator == 1:
            if not 0 <= value <= 5000:
                raise Undefined("factorial")
            return Fraction(math.factorial(int(value)))
        if not is_real(value) or abs(value) > 1000:
            raise Undefined("factorial")
        return self.mp.factorial(self.number(value))

    def binomial(self, top: Value, bottom: Value) -> Value:
        """For a variable on top: (n choose 2) is n (n - 1) / 2 wherever n is."""
        if _whole(bottom) and 0 <= bottom <= 50 and isinstance(top, Fraction):
            return math.prod(((top - i) / (i + 1) for i in range(int(bottom))), start=Fraction(1))
        if max(abs(top), abs(bottom)) > 1000:
            raise Undefined("too large")
        return self.mp.binomial(self.number(top), self.number(bottom))

    def apply_exact(self, name: str, values: list[Value]) -> Value:
        if not all(is_real(value) for value in values):
            raise Undefined(f"{name} of complex numbers")
        if name in ("floor", "ceil"):
            value = values[0]
            if not _rational(value):
                value = Fraction(int(self.mp.floor(value)), 1) + Fraction(1, 2)  # no irrational is a whole number
            return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
        if name in ("max", "min"):
            return (max if name == "max" else min)(values)
        if name == "binomial" and not _whole(values[0]):
            return self.binomial(*values)
        if not all(_whole(v) and 0 <= v <= 10**5 for v in values):
            raise Undefined(name)
        whole = [int(v) for v in values]
        if name == "binomial":
            if whole[0] > 5000:
                raise Undefined("too large")
            return Fraction(math.comb(*whole))
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*whole))


def _context(digits: int) -> Any:
    """This thread's mpmath context of so many digits; one takes a millisecond to make."""
    contexts: dict[int, Any] | None = getattr(_contexts, "by_digits", None)
    if contexts is None:
        contexts = _contexts.by_digits = {}
    if digits not in contexts:
        contexts[digits] = mpmath.mp.clone()
        contexts[digits].dps = digits
    return contexts[digits]


def _whole(value: Value) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _rational(value: Value) -> bool:
    return isinstance(value, Fraction)


def is_real(value: Value) -> bool:
    return isinstance(value, Fraction) or hasattr(value, "_mpf_")


def _exact_root(value: int, degree: int) -> int | None:
    root = math.isqrt(value) if degree == 2 else int(mpmath.nint(mpmath.root(value, degree)))
    return root if root**degree == value else None
