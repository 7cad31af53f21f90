"""Sets of real numbers: intervals, their unions, and inequalities in one variable."""

from fractions import Fraction
from typing import Any

from r1.rewards.grader_equal import same_value, symbols_of
from r1.rewards.grader_parse import Node
from r1.rewards.grader_value import Evaluator, Undefined, is_real

INFINITY: Node = ("const", "inf")
MINUS_INFINITY: Node = ("neg", INFINITY)
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}

Range = tuple[Node, bool, Node, bool]
"""Low end, whether it belongs, high end, whether it belongs; a point has equal ends."""


def is_condition(node: Node) -> bool:
    """Whether it can only be read as a set of numbers: an inequality, a list of them, a union or a difference."""
    if node[0] == "list":
        return all(is_condition(item) for item in node[1])
    return node[0] in ("union", "minus") or (node[0] == "rel" and bool(set(node[1]) & set(FLIPPED)))


def ranges_of(node: Node) -> list[Range] | None:
    """The set as disjoint ranges in rising order; None if it is no set of numbers with known ends."""
    try:
        ranges = _ranges(node)
        return None if ranges is None else _merged(ranges)
    except Undefined:
        return None


def same_ranges(a: list[Range], b: list[Range]) -> bool:
    return len(a) == len(b) and all(
        x[1] == y[1] and x[3] == y[3] and _same_end(x[0], y[0]) and _same_end(x[2], y[2])
        for x, y in zip(a, b, strict=True)
    )


def _same_end(a: Node, b: Node) -> bool:
    return a == b or (not _infinite(a) and not _infinite(b) and same_value(a, b))


def _infinite(node: Node) -> bool:
    return node in (INFINITY, MINUS_INFINITY)


def _ranges(node: Node) -> list[Range] | None:
    if node[0] == "seq" and len(node[3]) == 2 and node[1] in ("(", "[") and node[2] in (")", "]"):
        low, high = node[3]
        return None if symbols_of(node) else [(low, node[1] == "[", high, node[2] == "]")]
    if node[0] in ("union", "list"):
        parts = [_ranges(part) for part in node[1]]
        known = [part for part in parts if part is not None]
        return [one for part in known for one in part] if len(known) == len(parts) else None
    if node[0] == "set":
        return None if symbols_of(node) else [(item, True, item, True) for item in node[1]]
    if node[0] == "minus" and node[2][0] == "set":
        ranges = _ranges(node[1])
        return None if ranges is None or symbols_of(node[2]) else _without(_merged(ranges), node[2][1])
    if node[0] == "rel":
        return _inequality(node)
    return None


def _inequality(node: Node) -> list[Range] | None:
    """x < 3, 3 > x, 1 <= x < 2, x != 0; the variable stands alone."""
    operators, operands = node[1], node[2]
    if len(operands) == 2 and operators[0] in FLIPPED:
        if operands[1][0] == "sym":
            operators, operands = (FLIPPED[operators[0]],), operands[::-1]
        bound = operands[1]
        if operands[0][:2] == ("fn", "abs") and not symbols_of(bound) and _position(bound) > 0:
            return _absolute(operands[0][2][0], operators[0], bound)
        if operands[0][0] != "sym" or symbols_of(bound):
            return None
        if operators[0] == "!=":
            return _without([(MINUS_INFINITY, False, INFINITY, False)], (bound,))
        closed = operators[0] in ("<=", ">=")
        if operators[0] in ("<", "<="):
            return [(MINUS_INFINITY, False, bound, closed)]
        return [(bound, closed, INFINITY, False)]
    if len(operands) != 3 or operands[1][0] != "sym" or symbols_of((operands[0], operands[2])):
        return None
    if set(operators) <= {"<", "<="}:
        return [(operands[0], operators[0] == "<=", operands[2], operators[1] == "<=")]
    if set(operators) <= {">", ">="}:
        return [(operands[2], operators[1] == ">=", operands[0], operators[0] == ">=")]
    return None


def _absolute(inside: Node, operator: str, bound: Node) -> list[Range] | None:
    """|x| < 3 and the like, for a bound above 0."""
    if inside[0] != "sym" or operator == "!=":
        return None
    closed = operator in ("<=", ">=")
    if operator in ("<", "<="):
        return [(("neg", bound), closed, bound, closed)]
    return [(MINUS_INFINITY, False, ("neg", bound), closed), (bound, closed, INFINITY, False)]


def _without(ranges: list[Range], points: tuple[Node, ...]) -> list[Range]:
    for point in points:
        at = _position(point)
        left: list[Range] = []
        for low, has_low, high, has_high in ranges:
            if _position(low) < at < _position(high):
                left += [(low, has_low, point, False), (point, False, high, has_high)]
            else:
                left.append((low, has_low and _position(low) != at, high, has_high and _position(high) != at))
        ranges = left
    return ranges


def _position(end: Node) -> Any:
    """An end as a number that can be ordered."""
    if _infinite(end):
        return float("inf") if end == INFINITY else float("-inf")
    value = Evaluator({}, 60)(end)
    if not is_real(value):
        raise Undefined("an end that is not real")
    return value if not isinstance(value, Fraction) else Evaluator({}, 60).number(value)


def _merged(ranges: list[Range]) -> list[Range]:
    """In rising order, with ranges that overlap or touch joined; empty and reversed ones refused."""
    ordered = sorted(ranges, key=lambda one: (_position(one[0]), not one[1]))
    merged: list[Range] = []
    for one in ordered:
        low, high = _position(one[0]), _position(one[2])
        if low > high or (low == high and not (one[1] and one[3])):
            raise Undefined("an empty range")
        if merged:
            last = merged[-1]
            end = _position(last[2])
            if low < end or (low == end and (one[1] or last[3])):
                wider = high > end or (high == end and one[3])
                merged[-1] = (last[0], last[1], *(one[2:] if wider else last[2:]))
                continue
        merged.append(one)
    return merged
