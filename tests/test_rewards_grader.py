"""The grader: known failures of other graders by their id, a list of pairs, and hostile texts."""

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from r1.rewards.grader import extract_answer, extract_boxed, gold_fault, is_correct, is_gradable
from r1.rewards.grader_text import FORMS, extract_tag, read_number, split_unit

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "data/grader_pairs.jsonl").read_text("utf-8").split("\n") if line]  # fmt: skip  # noqa: E501


def graded(response: str, gold: object) -> bool:
    """The verdict on a whole response, or on a bare answer."""
    marked = any(mark in response for mark in (r"\boxed", "<answer>", "####", "Answer:"))
    return is_correct(extract_answer(response) if marked else response, gold)


def test_the_list_of_pairs_covers_the_kinds_in_both_directions() -> None:
    right = Counter(pair["kind"] for pair in PAIRS if pair["right"])
    wrong = Counter(pair["kind"] for pair in PAIRS if not pair["right"])
    assert len(PAIRS) >= 300 and 0.45 < sum(right.values()) / len(PAIRS) < 0.55
    assert len(wrong) >= 20 and set(wrong) - set(right) == {"missing", "hostile"}
    assert len({(pair["gold"], pair["response"]) for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_pairs(kind: str) -> None:
    for pair in PAIRS:
        if pair["kind"] == kind:
            assert graded(pair["response"], pair["gold"]) is pair["right"], pair


def test_G01_tiny_values_are_compared_exactly() -> None:
    assert not is_correct(r"\boxed{\frac{1}{2^{98}}}", r"$\frac{1}{2^{99}}$")
    assert is_correct(r"\frac{2}{2^{100}}", r"$\frac{1}{2^{99}}$")
    assert not is_correct(r"\frac{x}{2^{98}}", r"\frac{x}{2^{99}}")
    assert not is_correct(r"\sqrt{2}+10^{-150}", r"\sqrt{2}")


def test_G02_tiny_factorials_differ() -> None:
    assert not is_correct(r"$\frac{1}{2006!}$", r"$\frac{1}{2004!}$")
    assert is_correct(r"\frac{2005 \cdot 2006}{2006!}", r"$\frac{1}{2004!}$")


@pytest.mark.parametrize("wrap", ["${}$", r"\boxed{{{}}}", "{}"])
def test_G04_a_formula_never_falls_back_to_a_number_in_it(wrap: str) -> None:
    assert not is_correct(wrap.format(r"1 + \frac{1}{\mathrm{e}}"), r"$1 - \frac{1}{\mathrm{e}}$")
    for formula in (r"\oint_C 1", r"\unknown{1}", r"1 \star", r"\frac{1}{}", "1)", r"\lim_{x \to 1}"):
        assert not is_correct(wrap.format(formula), "1"), formula


def test_G06_equations_do_not_reduce_to_their_zero() -> None:
    assert not is_correct("3x + 4y + 14=0", "3*x-1*y+13=0")
    assert not is_correct(r"\forall x>0, f(x) = 0", "f(x) = 0")
    assert not is_correct("x^2 + 1 = 0", "x = 0")
    assert is_correct("13 = y - 3x", "3*x-1*y+13=0")


def test_G08_radicals_in_two_forms() -> None:
    assert is_correct(r"$\frac{1}{\sqrt{n}}$", r"$\sqrt{1/n}$")


def test_G09_plain_text_in_a_box() -> None:
    assert is_correct(r"\boxed{pi/2}", r"\dfrac{\pi}{2}")
    assert is_correct(r"\boxed{14.0 + -1.0i}", "14 - i")
    assert is_correct(r"\boxed{2*sqrt(3)/3}", r"\frac{2}{\sqrt{3}}")


def test_G10_last_box_wins() -> None:
    assert extract_boxed(r"the answer is \boxed{2}. wait, actually \boxed{3}") == "3"
    assert graded(r"the answer is \boxed{2}. wait, actually \boxed{3}", "3")
    assert graded(r"\boxed{C} so maybe \boxed{E}", "E")


def test_G12_braces_in_a_box() -> None:
    assert extract_boxed(r"so \boxed{\frac{1}{3}}.") == r"\frac{1}{3}"
    assert extract_boxed(r"\boxed{\left\{1,2\right.}") == r"\left\{1,2\right."


@pytest.mark.parametrize("end", [r"\boxed{", r"\boxed{7", r"\boxed", r"\boxed{\frac{1}{2}"])
def test_G13_an_unfinished_box_is_no_answer_nor_is_one_before_it(end: str) -> None:
    assert extract_boxed(r"\boxed{5} and then " + end) is None
    assert not graded(r"\boxed{5} and then " + end, "5")


@pytest.mark.parametrize(("answer", "gold"), [(None, "None"), ("", ""), (None, ""), (r"\boxed{}", ""), ("$", "$")])
def test_G14_no_answer_is_never_right(answer: str | None, gold: str) -> None:
    assert not is_correct(answer, gold)


def test_G15_gold_comes_second_and_its_form_decides() -> None:
    assert is_correct("$(0,12.5)$", "$0<x<12.5$")
    assert not is_correct("$0<x<12.5$", "$(0,12.5)$")  # this gold may be a point
    assert is_correct("$x<3$", r"$(-\infty,3)$")  # this one is no point
    assert is_correct(r"$(-\infty,3)$", "$x<3$")


def test_G16_gold_without_dollars_or_box() -> None:
    assert is_correct(r"\boxed{\dfrac{9}{7}}", r"\dfrac{9}{7}")
    assert is_correct(r"\frac{9}{7}", r"\boxed{\dfrac{9}{7}}")


def test_G18_percent() -> None:
    for answer in (r"\boxed{28 pct}", r"\boxed{28 percent}", r"28\%", "28 %", "0.28", "28"):
        assert is_correct(answer, r"28\%"), answer
    assert is_correct("50%", "0.5") and is_correct(r"\frac{1}{2}", "50%")
    assert not is_correct("0.28", "28") and not is_correct("0.5", r"0.5\%")


def test_G19_implicit_equations() -> None:
    assert not is_correct(r"\frac{x^2}{16}+\frac{y^2}{12}=1", "x^2/4+y^2/3=1")
    assert is_correct("3x^2 + 4y^2 = 12", "x^2/4+y^2/3=1")


@pytest.mark.parametrize("response", [r"\boxed{\text{E}}", r"\boxed{E: polygenic score}", r"\boxed{C} ... \boxed{E}", r"\boxed{e}"])  # fmt: skip  # noqa: E501
def test_G21_letters_of_multiple_choice(response: str) -> None:
    assert graded(response, "E")
    assert not graded(response, "C")


def test_G23_currency_and_thousands() -> None:
    assert is_correct("$29.00", "29") and is_correct("$70,000", "70000") and is_correct("1,000", "1000")
    assert not is_correct("1, 000", "1000") and not is_correct("$70,000", "7000")


def test_G24_signs() -> None:
    assert not is_correct(r"\boxed{-5}", "5")
    assert is_correct("-5", "-5") and is_correct("\u22125", "-5")


def test_G25_an_answer_far_from_the_end() -> None:
    response = "2+40=42\n#### 42" + "\nand that is what it is" * 20
    assert extract_answer(response) == "42" and graded(response, "42")
    assert is_correct("42", "2+40=42\n#### 42")  # a gold answer as GSM8K has it


def test_G27_the_same_line_in_two_forms() -> None:
    assert is_correct(r"$y = -\frac{1}{2}x + \frac{3}{4}$", "$2x+4y-3=0$")
    assert not is_correct(r"$y = -\frac{1}{2}x - \frac{3}{4}$", "$2x+4y-3=0$")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("0.0833333333333333", r"\frac{1}{12}"),
        ("(1,4.5)", r"(1,\frac{9}{2})"),
        (r"\frac{x}{7}+\frac{2}{7}", r"\frac{x+2}{7}"),
        (r"\sec^2(y)", r"\tan^2(y)+1"),
        ("-34x-45y+20z-100=0", "34x+45y-20z+100=0"),
        (r"\text{13}", "13"),
    ],
)
def test_G29_easy_equalities(answer: str, gold: str) -> None:
    assert is_correct(answer, gold) and is_correct(gold, answer)


def test_G32_an_unreduced_fraction_is_right() -> None:
    assert is_correct(r"\frac{2}{4}", r"\frac{1}{2}")


def test_G33_answer_line() -> None:
    assert graded("so\nAnswer: $13$", "13") and graded("**Answer:** 13.", "13")


def test_R01_huge_numbers_are_refused_at_once() -> None:
    towers = [r"\dfrac{5^{(5^{(5^{(5^5)})} - 4)} - 5}{16}", "10^{100000}", "1000000!", "9**9**9",
              r"9^{\frac{9^{9}}{1}}",
              r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}", "x^{99999999}",
              r"\sin(e^{e^{e^{e^5}}})", r"\binom{999999999}{99999999}", "((5000!)!)!",
              "1.0000000001^{10^{30}}"]  # fmt: skip
    for tower in towers:
        start = time.monotonic()
        assert not is_correct(tower, "7") and not is_correct("7", tower)
        assert time.monotonic() - start < 1, tower


def test_R01_long_and_deep_texts_are_refused() -> None:
    for text in (
        "(" * 5000 + "7" + ")" * 5000,
        "2" + "^2" * 400,
        r"\sqrt" * 300 + "7",
        r"\sin" * 200 + " x",
        "-" * 900,
    ):
        assert not is_correct(text, "7")
    assert is_correct("+".join(["x"] * 100), "100x")


def test_R03_grades_off_the_main_thread() -> None:
    results: list[bool] = []

    def grade() -> None:
        for _ in range(20):
            results.append(
                is_correct("5", "5") and is_correct(r"\sqrt{16}", "4") and not is_correct(r"\sqrt{2}", r"\pi")
            )

    threads = [threading.Thread(target=grade) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


def test_R05_model_text_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for call in (
        f"__import__('pathlib').Path('{marker}').touch()",
        f"open('{marker}', 'w')",
        f"(lambda: open('{marker}', 'w'))()",
        f"[x for x in [open('{marker}', 'w')]]",
        f"exec(\"open('{marker}','w')\")",
    ):
        for answer in (rf"\pi + {call}", call, rf"\frac{{{call}}}{{1}}", f"sqrt({call})"):
            assert not is_correct(answer, "5") and not is_correct(answer, r"\pi + 5")
    assert not marker.exists() and not is_correct("5", "6")


@pytest.mark.parametrize("gold", ["unparsable text!!", r"\frac{1}{", "", "$", "{5", "?", r"\boxed{5"])
def test_R10_nothing_equals_an_unparsable_gold(gold: str, caplog: pytest.LogCaptureFixture) -> None:
    assert gold_fault(gold)
    assert not is_gradable(gold) and not is_gradable(gold)
    assert len(caplog.records) <= 1  # named once
    for answer in (gold, "5", rf"\boxed{{{gold}}}", None):
        assert not is_correct(answer, gold)


@pytest.mark.parametrize("gold", ["5", 5, 5.5, "Tuesday", "(B)", r"\int_0^1 x\,dx", "10:30", "5 cm", "28%", r"\{1,2\}"])
def test_gold_answers_without_fault(gold: object) -> None:
    assert gold_fault(gold) is None
    assert is_correct(str(gold), gold)


def test_R19_gold_of_another_type() -> None:
    assert is_correct(r"\boxed{5}", 5) and is_correct(r"\boxed{5}", 5.0)
    for gold in (None, ["5"], {"a": 5}):
        with pytest.raises(ValueError, match="ground_truth must be text or a number, got"):
            is_correct("5", gold)


def test_forms_of_answers() -> None:
    assert extract_tag("<answer>1</answer> or <answer> 2 </answer>") == "2"
    assert extract_tag("<answer>1</answer> or <answer>2") is None
    assert extract_answer(r"<answer>\boxed{42}</answer>") == "42"  # R16
    assert extract_answer("#### 1\nAnswer: 2", ("line", "hashes")) == "2"
    assert extract_answer("Answer: 2", ("boxed",)) is None and extract_answer("just 2") is None
    with pytest.raises(ValueError, match="forms must be a tuple of some of"):
        extract_answer("x", ("box",))
    assert FORMS == ("boxed", "tag", "hashes", "line")


def test_units_and_numbers_are_read() -> None:
    assert split_unit(r"12\text{ cm}^2") == split_unit("12 square centimeters") == ("12", "cm^2")
    assert split_unit("5 x") == ("5 x", "") and split_unit("5 apples") == ("5", "apple")
    number = read_number("-1,234.50")
    assert number is not None and (number.value, number.digits, number.places) == (-1234.5, 6, 2)
    assert read_number("1,23") is None and read_number("") is None


def test_no_text_makes_the_grader_raise_or_hang() -> None:
    draw: Any = random.Random(0)
    texts = [pair[key] for pair in PAIRS for key in ("gold", "response")]
    parts = [r"\frac{", r"\sqrt{", "}", "{", "(", ")", "^{", "!", "\\", "$", "|", "&", r"\begin{pmatrix}", "_", "999",
             "%", r"\log_", ",", r"\pm ", "=", "<", r"\cup", r"\text{", r"\{", "10^{9999}", "**", "5000!",
             r"\infty", r"\approx", "é"]  # fmt: skip

    def mangled() -> str:
        text = draw.choice(texts)
        for _ in range(draw.randint(0, 6)):
            at = draw.randint(0, len(text))
            text = text[:at] + draw.choice(parts) + text[at + draw.randint(0, 4) :]
        return text

    for _ in range(3000):
        answer, gold = mangled(), mangled()
        start = time.monotonic()
        is_correct(answer, gold)
        assert time.monotonic() - start < 2, (answer, gold)
