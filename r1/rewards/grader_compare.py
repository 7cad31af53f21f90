"""Whether two parsed answers are the same: numbers, lists and sets, tuples and intervals, matrices, equations."""

import re
from fractions import Fraction
from typing import Any

from r1.rewards.grader_equal import constant_ratio, same_value, symbols_of
from r1.rewards.grader_parse import Node
from r1.rewards.grader_ranges import is_condition, ranges_of, same_ranges
from r1.rewards.grader_value import Evaluator, Undefined, is_real

SCALARS = {"num", "sym", "const", "neg", "add", "mul", "div", "pow", "fn"}
VECTORS = (("seq", "(", ")"), ("seq", r"\langle", r"\rangle"))
NEGATED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def same_answer(answer: Node, gold: Node) -> bool:
    """Whether a parsed answer equals the parsed gold answer, whose form decides where one is ambiguous."""
    if answer == gold:
        return _meaningful(gold)
    answer, gold = _without_membership(answer), _without_membership(gold)
    answer, gold = _last_of_chain(answer, identities=gold[0] != "rel"), _last_of_chain(gold, identities=False)
    (name, answer_value), (gold_name, gold_value) = definition(answer), definition(gold)
    if name is not None and gold_name is not None:
        if name == gold_name:
            return _same_values(answer_value, gold_value)
        return _same_relation(answer, gold) if not _constant(gold_value) else False
    if gold_name is not None and answer[0] == "rel":
        # x = 5 asks for a solution, so 2x = 10 is none; y = 2x + 1 is a line in any of its forms.
        return not _constant(gold_value) and _same_relation(answer, gold)
    if name is not None and gold[0] == "rel":
        return _same_relation(answer, gold)
    return _same_values(answer_value if name else answer, gold_value if gold_name else gold)


def definition(node: Node) -> tuple[Node | None, Node]:
    """(name, value) of x = 5, f(x) = 2x or (x, y) = (1, 2), also through steps of numbers: x = 2/4 = 1/2."""
    if node[0] != "rel" or set(node[1]) != {"="}:
        return None, node
    left, *values = node[2]
    named = left[0] == "sym" or (left[0] == "seq" and all(item[0] == "sym" for item in left[3]))
    applied = left[0] == "mul" and left[1][0] == "sym" and left[1][1].isupper() and left[2][0] == "sym"  # P(x)
    applied = applied or (left[0] == "div" and all(_differential(part) for part in left[1:]))  # dy/dx
    if not named and not applied:
        return None, node
    if symbols_of(left) & symbols_of(tuple(values)) and not applied and "(" not in str(left[1]):
        return None, node  # x = x + y defines nothing
    *steps, last = values
    # A = \pi r^2 = 9 \pi: a step with variables is no other value.
    steps = [step for step in steps if step[0] == "sym" or not (_constant(last) and symbols_of(step))]
    return (None, node) if any(not _same_values(step, last) for step in steps) else (left, last)


def _last_of_chain(node: Node, *, identities: bool) -> Node:
    """The 42 of 2 + 40 = 42, whose sides are equal, though not the same; identities: also with variables."""
    if node[0] != "rel" or set(node[1]) != {"="} or any(part[0] not in SCALARS for part in node[2]):
        return node
    *steps, last = node[2]
    if not identities and symbols_of(node):
        return node
    return last if all(step != last and same_value(step, last) for step in steps) else node


def _differential(node: Node) -> bool:
    return node == ("sym", "d") or (node[0] == "mul" and node[1] == ("sym", "d") and node[2][0] == "sym")


def _constant(node: Node) -> bool:
    return not symbols_of(node)


def _meaningful(node: Node) -> bool:
    """Whether a formula is worth its own text: 1/0 = 1/0 and 0 = 0 are not."""
    if node[0] == "rel":
        return not (len(node[2]) == 2 and _constant(node))
    return True


def _without_membership(node: Node) -> Node:
    """The set S of x in S; an open interval there is no point."""
    if node[0] == "rel" and node[1] == ("in",) and node[2][0][0] == "sym":
        inside = node[2][1]
        return ("union", (inside,)) if inside[:3] == ("seq", "(", ")") and len(inside[3]) == 2 else inside
    return node


def _same_values(answer: Node, gold: Node) -> bool:
    if is_condition(answer) or is_condition(gold):
        return _same_conditions(answer, gold)
    if answer[0] == "rel" and gold[0] == "rel":
        return _same_relation(answer, gold)
    answer, gold = _as_point(answer, gold), _as_point(gold, answer)
    if gold[0] in ("list", "set") or answer[0] in ("list", "set"):
        return _same_items(_items(answer), _items(gold))
    answer, gold = _as_matrix(answer, gold), _as_matrix(gold, answer)
    if "matrix" in (answer[0], gold[0]):
        return _same_matrix(_scaled(answer), _scaled(gold))
    if answer[0] == "seq" and gold[0] == "seq":
        return (answer[1:3] == gold[1:3] or {answer[:3], gold[:3]} <= set(VECTORS)) and _pairwise(answer[3], gold[3])
    if answer[0] in SCALARS and gold[0] in SCALARS:
        return _same_scalar(answer, gold)
    return False


def _same_conditions(answer: Node, gold: Node) -> bool:
    """Inequalities, unions and intervals as sets of numbers.

    A gold (a, b) may be a point, so that no inequality equals it unless an end is infinite; the other way round, an
    inequality is answered by its interval.
    """
    if gold[0] == "seq" and gold[1:3] == ("(", ")") and answer[0] in ("rel", "list") and not _has_infinity(gold):
        return False
    ranges, gold_ranges = ranges_of(answer), ranges_of(gold)
    if ranges is not None and gold_ranges is not None:
        names = symbols_of(answer), symbols_of(gold)
        return (not all(names) or names[0] == names[1]) and same_ranges(ranges, gold_ranges)
    if answer[0] == "list" and gold[0] == "list":
        return _same_items(_items(answer), _items(gold))
    return answer[0] == "rel" and gold[0] == "rel" and _same_relation(answer, gold)


def _has_infinity(node: Any) -> bool:
    return isinstance(node, tuple) and (node == ("const", "inf") or any(_has_infinity(part) for part in node))


def _items(node: Node) -> list[Node]:
    """The parts of a list or set, lists within lists (from signs of both kinds) flattened, names of values left off."""
    if node[0] not in ("list", "set"):
        return [definition(node)[1]]
    parts: list[Node] = []
    for item in node[1]:
        parts += _items(item) if item[0] == "list" else [item]
    names = {named[0] for item in parts if (named := definition(item))[0] is not None}
    if len(names) == 1:  # x = 1 or x = 2; but x = 1, y = 2 keep their names
        parts = [definition(item)[1] for item in parts]
    return parts


def _same_items(answer: list[Node], gold: list[Node]) -> bool:
    """As sets: each part has its equal on the other side, under its name where there are several (x = 1, y = 2)."""
    answer, gold = _without_numbers(answer, gold), _without_numbers(gold, answer)
    names, gold_names = ({definition(item)[0] for item in side} for side in (answer, gold))
    if (len(names) > 1 or len(gold_names) > 1) and names != gold_names:
        return False

    def within(some: list[Node], others: list[Node], *, swap: bool) -> bool:
        return all(any(same_answer(b, a) if swap else same_answer(a, b) for b in others) for a in some)

    return max(len(answer), len(gold)) <= 30 and within(answer, gold, swap=False) and within(gold, answer, swap=True)


def _without_numbers(items: list[Node], others: list[Node]) -> list[Node]:
    """The values of x_1 = 1, x_2 = 2, roots of one equation, where the other side has no names."""
    named = [definition(item) for item in items]
    names = [name[1] if name is not None and name[0] == "sym" else "" for name, _ in named]
    if not all(re.fullmatch(r"[xyzt]_\W*\d+\W*", name) for name in names) or len({name[0] for name in names}) != 1:
        return items
    return items if any(definition(other)[0] is not None for other in others) else [value for _, value in named]


def _pairwise(answer: tuple[Node, ...], gold: tuple[Node, ...]) -> bool:
    return len(answer) == len(gold) and all(same_answer(a, b) for a, b in zip(answer, gold, strict=True))


def _as_point(node: Node, other: Node) -> Node:
    """x = 1, y = 2 as (1, 2), in the order of the names, where the other side is a tuple."""
    if node[0] != "list" or other[:3] != ("seq", "(", ")"):
        return node
    named = [definition(item) for item in node[1]]
    names = [name[1] for name, _ in named if name is not None and name[0] == "sym"]
    if len(set(names)) < len(named):
        return node
    return ("seq", "(", ")", tuple(value for _, value in sorted(named, key=lambda pair: str(pair[0]))))


def _as_matrix(node: Node, other: Node) -> Node:
    """[[1, 2], [3, 4]] as a matrix where the other side is one, (1, 2) as a row or column where that is one."""
    if other[0] == "matrix" and node[:3] in VECTORS and {1} & {len(other[1]), len(other[1][0])}:
        return ("matrix", (node[3],) if len(other[1]) == 1 else tuple((item,) for item in node[3]))
    if other[0] == "matrix" and node[0] == "seq" and node[1] == "[":
        rows = [row[3] for row in node[3] if row[0] == "seq" and row[1] == "["]
        if len(rows) == len(node[3]) and len({len(row) for row in rows}) == 1:
            return ("matrix", tuple(rows))
    return node


def _scaled(node: Node) -> Node:
    """A matrix with a factor or divisor before it multiplied in, or turned by ^T."""
    if node[0] == "neg" and _scaled(node[1])[0] == "matrix":
        return ("matrix", tuple(tuple(("neg", x) for x in row) for row in _scaled(node[1])[1]))
    if node[0] == "pow" and node[2] == ("sym", "T") and _scaled(node[1])[0] == "matrix":
        return ("matrix", tuple(zip(*_scaled(node[1])[1], strict=True)))
    if node[0] in ("mul", "div"):
        left, right = _scaled(node[1]), _scaled(node[2])
        if left[0] in SCALARS and right[0] == "matrix" and node[0] == "mul":
            return ("matrix", tuple(tuple(("mul", left, x) for x in row) for row in right[1]))
        if left[0] == "matrix" and right[0] in SCALARS:
            return ("matrix", tuple(tuple((node[0], x, right) for x in row) for row in left[1]))
    return node


def _same_matrix(answer: Node, gold: Node) -> bool:
    if answer[0] != "matrix" or gold[0] != "matrix" or len(answer[1]) != len(gold[1]):
        return False
    return all(_pairwise(a, b) for a, b in zip(answer[1], gold[1], strict=True))


def _same_scalar(answer: Node, gold: Node) -> bool:
    """Equal values; a decimal of six or more digits also equals what it is rounded from."""
    if _has_infinity(answer) or _has_infinity(gold):
        return _infinity_sign(answer) == _infinity_sign(gold) != 0
    decimal, gold_decimal = _decimal(answer), _decimal(gold)
    if decimal is not None and gold_decimal is not None:
        return decimal[0] == gold_decimal[0] or _same_floats(decimal, gold_decimal)
    if _constant(answer) and _constant(gold):
        for rounded, exact in ((decimal, gold), (gold_decimal, answer)):
            if rounded is not None and _rounds(rounded, exact):
                return True
    return same_value(answer, gold)


def _infinity_sign(node: Node) -> int:
    if node == ("const", "inf"):
        return 1
    return -_infinity_sign(node[1]) if node[0] == "neg" else 0


def _decimal(node: Node) -> tuple[Fraction, int, int] | None:
    if node[0] == "neg" and node[1][0] == "num":
        return -node[1][1], node[1][2], node[1][3]
    return (node[1], node[2], node[3]) if node[0] == "num" else None


def _rounds(decimal: tuple[Fraction, int, int], exact: Node) -> bool:
    """Whether the decimal is the exact value rounded or cut off; only where it has six digits or more."""
    value, digits, places = decimal
    if digits < 6 or places < 1:
        return False
    try:
        evaluator = Evaluator({}, 60)
        full, written = evaluator(exact), evaluator.number(value)
        if not is_real(full) or full * written <= 0:
            return False
        unit = evaluator.mp.mpf(10) ** -places
        left_out = abs(evaluator.number(full)) - abs(written)
        return bool(-unit / 2 <= left_out < unit)
    except Undefined:
        return False


def _same_floats(a: tuple[Fraction, int, int], b: tuple[Fraction, int, int]) -> bool:
    """0.30000000000000004 is 0.3: a float printed in full differs in its last bits."""
    longer = max(a, b, key=lambda decimal: decimal[1])
    return longer[1] >= 16 and longer[2] >= 1 and abs(a[0] - b[0]) * 10**15 <= abs(longer[0])


def _same_relation(answer: Node, gold: Node) -> bool:
    """Equations equal up to a factor other than 0, inequalities up to a positive one."""
    if len(answer[1]) != 1 or len(gold[1]) != 1 or symbols_of(answer) != symbols_of(gold):
        return False
    (operator,), (left, right) = answer[1], answer[2]
    (gold_operator,), (gold_left, gold_right) = gold[1], gold[2]
    if any(side[0] not in SCALARS for side in (left, right, gold_left, gold_right)) or "in" in (
        operator,
        gold_operator,
    ):
        return False
    if operator != gold_operator:
        if NEGATED.get(operator) != gold_operator:
            return False
        left, right = right, left
    ours, theirs = ("add", left, ("neg", right)), ("add", gold_left, ("neg", gold_right))
    return constant_ratio(ours, theirs, positive=operator in NEGATED)


def size_of(node: Node) -> float:
    """The absolute value of a number; 0 for what is none."""
    try:
        return float(abs(Evaluator({}, 60)(node))) if _constant(node) else 0.0
    except (Undefined, OverflowError):
        return 0.0
