"""Whether two parsed formulas are equal: by their values at several points, relatively to their size.

2^-99 and 2^-98 are as unlike as 1 and 2. Chance agreement at 300 digits does not happen; what is equal only for some
signs or sizes of its variables disagrees at one of the points.
"""

import random
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from r1.rewards.grader_parse import Node
from r1.rewards.grader_value import Evaluator, Undefined, Value, is_real

DIGITS, FEWER_DIGITS = 300, 200
RANGES = ((0, 1), (1, 3), (3, 9), (-1, 0), (-4, -1), (0, 1), (1, 3))  # variables are drawn from these, in turn


def symbols_of(node: Any) -> set[str]:
    """Names of the variables in a tree."""
    found, rest = set(), [node]
    while rest:
        part = rest.pop()
        if isinstance(part, tuple) and part:
            if part[0] == "sym":
                found.add(part[1])
            else:
                rest.extend(part)
    return found


def points(symbols: Iterable[str]) -> list[dict[str, Fraction]]:
    """Rational values for the variables, the same in every process; no variables: one empty point."""
    names = sorted(symbols)
    if not names:
        return [{}]
    found = []
    for index, (low, high) in enumerate(RANGES):
        values = {}
        for name in names:
            draw = random.Random(f"{name} {index}")  # not hash(), which differs between processes
            values[name] = low + (high - low) * Fraction(draw.randint(1, 96), 97)
        found.append(values)
    return found


def is_zero(value: Callable[[int], Value]) -> bool:
    """Whether something that can be computed to any number of digits is 0: its rounding error shrinks with them.

    A number that is small but not 0 stays what it is.
    """
    more = value(DIGITS)
    if isinstance(more, Fraction):
        return more == 0
    if more == 0:
        return True
    return bool(abs(more - value(FEWER_DIGITS)) > abs(more) / 2)


def equal_at(a: Node, b: Node, point: dict[str, Fraction]) -> bool | None:
    """Whether two formulas have the same value; None where one has none, or is not real for a negative variable."""
    try:
        evaluator = Evaluator(point, DIGITS)
        x, y = evaluator(a), evaluator(b)
        if any(v < 0 for v in point.values()) and not (_nearly_real(x) and _nearly_real(y)):
            return None
        if isinstance(x, Fraction) and isinstance(y, Fraction):
            return x == y
        difference = abs(evaluator.number(x) - evaluator.number(y))
        if difference > max(abs(evaluator.number(x)), abs(evaluator.number(y))) / 10**50:
            return False
        return is_zero(lambda digits: Evaluator(point, digits)(("add", a, ("neg", b))))
    except Undefined:
        return None


def _nearly_real(value: Value) -> bool:
    return isinstance(value, Fraction) or abs(value.imag) <= abs(value) / 10**100


def same_value(a: Node, b: Node) -> bool:
    """Whether two formulas are equal wherever both are defined, with at least three such points if they have variables.

    A logarithm without base is the natural one. Variables are real.
    """
    names = symbols_of(a) | symbols_of(b)
    agreed = 0
    for point in points(names):
        equal = equal_at(a, b, point)
        if equal is False:
            return False
        agreed += equal is True
    return agreed >= (3 if names else 1)


def constant_ratio(a: Node, b: Node, *, positive: bool) -> bool:
    """Whether a is b times a constant other than 0; positive: times a constant above 0."""
    names = symbols_of(a) | symbols_of(b)
    if not names:
        return False
    ratio: Node | None = None
    agreed = 0
    for point in points(names):
        try:
            evaluator = Evaluator(point, DIGITS)
            x, y = evaluator(a), evaluator(b)
            if x == 0 or y == 0:
                return False
            if ratio is None:
                # The quotient at the first point, as a tree over that point's constants: exact at any precision.
                ratio = ("div", substitute(a, point), substitute(b, point))
                if positive and not (is_real(value := evaluator(ratio)) and value > 0):
                    return False
        except Undefined:
            continue
        if equal_at(a, ("mul", ratio, b), point) is False:
            return False
        agreed += 1
    return agreed >= 3


def substitute(node: Any, point: dict[str, Fraction]) -> Any:
    """The tree with the point's values in place of its variables."""
    if not isinstance(node, tuple):
        return node
    if node and node[0] == "sym":
        return ("num", point[node[1]], 0, 0)
    return tuple(substitute(part, point) for part in node)
