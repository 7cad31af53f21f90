"""The grader: ids are those of known failures of other graders."""

import threading
import time

import pytest

from r1.rewards.grader import is_correct
from r1.rewards.grader_text import extract_boxed

RIGHT = [
    ("R19 integer gold", "5", 5),
    ("R19 float gold", "5", 5.0),
    ("G16 bare LaTeX gold", r"\dfrac{9}{7}", r"\dfrac{9}{7}"),
    ("G24 minus sign U+2212", "\u22125", "-5"),
    ("G32 unreduced fraction", r"\frac{2}{4}", r"\frac{1}{2}"),
    ("G09 plain text", "pi/2", r"\dfrac{\pi}{2}"),
    ("G15 interval", "(0,12.5)", "$0<x<12.5$"),
    ("G18 percent", "28 percent", r"28\%"),
    ("G18 percent", "50%", "0.5"),
    ("G21 choice", r"\text{E}", "E"),
    ("G21 choice", "E: polygenic score", "E"),
    ("G21 choice", "e", "E"),
    ("G23 thousands", "$70,000", "70000"),
    ("G23 thousands", r"5\,000", "5000"),
    ("G27 same line", r"y = -\frac{1}{2}x + \frac{3}{4}", "$2x+4y-3=0$"),
    ("G29 decimal", "0.0833333333333333", r"\frac{1}{12}"),
    ("G29 pair", "(1,4.5)", r"(1,\frac{9}{2})"),
    ("G29 sum", r"\frac{x}{7}+\frac{2}{7}", r"\frac{x+2}{7}"),
    ("G29 trigonometry", r"\sec^2(y)", r"\tan^2(y)+1"),
    ("G33 dollars", "$13$", "13"),
    ("mixed number", r"7\frac{3}{4}", "31/4"),
    ("irrational decimal", "1.41421356", r"\sqrt{2}"),
    ("degrees", r"145^\circ", "145"),
    ("unit", r"5\text{ cm}", "5"),
    ("set", r"\{2,1\}", r"\{1, 2\}"),
    ("words", "Tuesday", r"\text{tuesday}"),
    ("scientific", r"3 \times 10^{4}", "30000"),
]
WRONG = [
    ("G14 no answer", None, "None"),
    ("G14 empty", "", ""),
    ("G01 tiny", r"\frac{1}{2^{98}}", r"$\frac{1}{2^{99}}$"),
    ("G01 tiny coefficient", r"\frac{x}{2^{98}}", r"\frac{x}{2^{99}}"),
    ("G02 factorial", r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
    ("G04 unlike formulas", r"1 + \frac{1}{\mathrm{e}}", r"$1 - \frac{1}{\mathrm{e}}$"),
    ("G06 equations", "3x + 4y + 14=0", "3*x-1*y+13=0"),
    ("G06 trailing zero", r"\forall x>0, f(x) = 0", "f(x) = 0"),
    ("G19 implicit equations", r"\frac{x^2}{16}+\frac{y^2}{12}=1", "x^2/4+y^2/3=1"),
    ("G24 sign", "-5", "5"),
    ("R10 unparsable gold", "5", "unparsable text!!"),
    ("anagram", "cba", "abc"),
    ("choice", "E or F", "E"),
    ("mixed number", "5/2", "7 3/4"),
    ("percent", "0.28", "28"),
    ("units", r"5\text{ cm}", r"5\text{ m}"),
    ("rough decimal", "3.14", r"\pi"),
    ("large decimals", "123456789.5", "123456790.5"),
    ("tuple is not thousands", "1, 200", "1200"),
    ("order of a pair", "(2,1)", "(1,2)"),
    ("open and closed", "[0,1]", "(0,1)"),
    ("subset", "1", "1,2"),
    ("clock", "10:30", "1/3"),
    ("division by zero", "1/0", "5"),
    ("stray dollar", "$5$6$", "5"),
]


@pytest.mark.parametrize(("case", "answer", "gold"), RIGHT)
def test_right_answers(case: str, answer: str, gold: object) -> None:
    assert is_correct(answer, gold)


@pytest.mark.parametrize(("case", "answer", "gold"), WRONG)
def test_wrong_answers(case: str, answer: str | None, gold: object) -> None:
    assert not is_correct(answer, gold)


@pytest.mark.parametrize(
    "tower",
    [
        r"\dfrac{5^{(5^{(5^{(5^5)})} - 4)} - 5}{16}",  # R01
        r"9^{\frac{9^{9}}{1}}",
        "10^{100000}",
        "1000000!",
        "9**9**9",
    ],
)
def test_r01_huge_numbers_are_refused_at_once(tower: str) -> None:
    start = time.monotonic()
    assert not is_correct(tower, "7")
    assert time.monotonic() - start < 1


def test_r05_model_text_is_never_run(tmp_path) -> None:
    marker = tmp_path / "marker"
    assert not is_correct(rf"\pi + __import__('pathlib').Path('{marker}').touch()", "5")
    assert not marker.exists() and not is_correct("5", "6")


def test_r03_grades_off_the_main_thread() -> None:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.extend([is_correct("5", "5"), is_correct(r"\sqrt{16}", "4")]))
    thread.start()
    thread.join()
    assert results == [True, True]


@pytest.mark.parametrize("gold", [None, ["5"], {"a": 5}])
def test_r19_gold_of_another_type_is_an_error(gold: object) -> None:
    with pytest.raises(ValueError, match="ground_truth must be text or a number, got"):
        is_correct("5", gold)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"the answer is \boxed{2}. wait, actually \boxed{3}", "3"),  # G10
        (r"so \boxed{\frac{1}{3}}.", r"\frac{1}{3}"),  # G12
        (r"\boxed{5} and then \boxed{", None),  # G13
        (r"\boxed{\left\{1,2\right.}", r"\left\{1,2\right."),
        ("no box", None),
    ],
)
def test_last_complete_box(text: str, boxed: str | None) -> None:
    assert extract_boxed(text) == boxed
