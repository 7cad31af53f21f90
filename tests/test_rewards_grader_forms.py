"""The grader on rarer ways to write an answer: each kind with what it equals and what it must not."""

# ruff: noqa: RUF001 - characters that look like others are its subject

import time

import pytest

from r1.rewards.grader import extract_boxed, is_correct

Pairs = list[tuple[str, str, bool]]  # answer, gold, right


def check(pairs: Pairs) -> None:
    for answer, gold, right in pairs:
        assert is_correct(answer, gold) is right, (answer, gold)


def test_superscripts_subscripts_fractions_and_wide_letters_of_unicode() -> None:
    check([("x⁴", "x^4", True), ("10⁻³", "0.001", True), ("3×10⁵", "300000", True), ("a₁₂", "a_{12}", True),
           ("2⅛", r"\frac{17}{8}", True), ("∛8", "2", True), ("√2.25", "1.5", True), ("（Ｂ）", "B", True),
           ("１２．５", "12.5", True), ("1、2", "2, 1", True), ("𝑥²", "x^2", True),
           ("x⁴", "x^3", False), ("2⅛", r"\frac{2}{8}", False), ("x²³", "x^6", False)])  # fmt: skip


def test_a_dash_is_a_minus_but_not_between_numbers() -> None:
    check([("–5", "-5", True), ("(–1, –2)", "(-1, -2)", True), ("3 – x", "3-x", True), ("3–5", "-2", False)])


def test_open_ends_written_with_reversed_brackets() -> None:
    check([("]1,2[", "(1,2)", True), (r"]-\infty,2]", r"(-\infty,2]", True), ("[1,2[", "[1,2)", True),
           (r"]-\infty,2[\cup]3,\infty[", r"(-\infty,2)\cup(3,\infty)", True), ("]1,2]", "[1,2]", False)])  # fmt: skip
    check([("0 < x < 1", r"x \in (0,1)", True), (r"0 \le x < 1", r"x \in (0,1)", False)])


def test_a_column_is_its_tuple_and_T_turns_it() -> None:
    column = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
    check([(column, "(1,2)", True), ("(1,2)", column, True), (r"\langle 1,2\rangle", column, True),
           (r"\begin{bmatrix} 1 & 2 \end{bmatrix}^T", column, True), (column, "(2,1)", False),
           (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", column, False), (r"\{1,2\}", column, False)])  # fmt: skip


def test_chained_equalities_end_in_the_answer() -> None:
    check([("2+3=5", "5", True), (r"\frac{2}{4}=\frac{1}{2}=0.5", r"\frac12", True),
           (r"A=\pi r^2=9\pi", r"9\pi", True), ("(x+1)^2=x^2+2x+1", "x^2+2x+1", True),
           ("2+3=6", "6", False), ("5=5=6", "6", False), ("0=0", "0", False), ("x+1=5", "5", False),
           (r"A=\pi r^2=8\pi=9\pi", r"9\pi", False), ("(x+1)^2=x^2+1", "x^2+1", False)])  # fmt: skip


def test_ratios_but_no_clock_times() -> None:
    check([("6:8", "3:4", True), (r"\frac34", "3:4", True), ("6:8:10", "3:4:5", True), ("5:30", "1:6", False),
           ("3:4:6", "3:4:5", False), ("0:0", "3:4", False), ("1:2", "2", False)])  # fmt: skip
    check([("10:30 AM", "10:30 a.m.", True), ("10:30 PM", "10:30 a.m.", False)])


def test_degrees_and_radians() -> None:
    check([(r"45^\circ", r"\frac{\pi}{4}", True), (r"\frac{\pi}{4}", r"45^\circ", True), ("45", r"45^\circ", True),
           (r"\frac{\pi}{3}", r"45^\circ", False), (r"45\text{ radians}", r"45^\circ", False)])  # fmt: skip


def test_several_letters_of_multiple_choice() -> None:
    check([("AC", "A,C", True), ("(A)(C)", "A, C", True), ("A and C", "AC", True), ("AC", "A,B", False),
           ("ACD", "A,C", False), ("A", "AC", False)])  # fmt: skip


@pytest.mark.parametrize("answer", ["(A) or (B)", "A: or B", "A. or B. both", "A: 5, B: 6", "A & B"])
def test_two_choices_are_none(answer: str) -> None:
    assert not is_correct(answer, "A")


def test_numbered_roots_and_systems() -> None:
    check([("x_1=1, x_2=2", "1,2", True), ("x₁ = 2, x₂ = 1", r"x=1 \text{ or } x=2", True),
           (r"\begin{cases} x=1\\ y=2\end{cases}", "x=1, y=2", True), ("x_1=1, x_2=2", "x_1=2, x_2=1", False),
           ("x_1=1, x_2=3", "1,2", False), ("x_1=1, y_2=2", "1,2", False)])  # fmt: skip


def test_words_for_sets() -> None:
    check([("no real solutions", r"\emptyset", True), (r"\emptyset", "no solution", True),
           (r"\text{all real numbers}", r"(-\infty,\infty)", True), ("solution", r"\emptyset", False),
           ("all real numbers except 0", r"(-\infty,\infty)", False)])  # fmt: skip


def test_a_name_before_the_answer() -> None:
    check([(r"\text{Area} = 5", "5", True), (r"m\angle A = 50^\circ", "50", True), ("The answer is 5.", "5", True),
           (r"\text{Area} = 5", r"\text{Perimeter} = 5", False), ("sin x = 5", "5", False),
           ("not x = 5", "5", False), ("The answer is not 5", "5", False)])  # fmt: skip


def test_layout_around_an_answer() -> None:
    for answer in ("**5**", "`5`", r"\textcolor{red}{5}", r"\color{red}5", r"\underline{5}", r"\large 5", "5\\\\",
                   r"\phantom{0}5", r"\mathbf{\frac{10}{2}}", r"{5 \choose 4}", r"{10 \over 2}"):  # fmt: skip
        assert is_correct(answer, "5"), answer
    check([("**5** or **6**", "5", False), (r"\phantom{5}", "5", False)])
    check([(r"60 \frac{\text{km}}{\text{h}}", r"60\text{ km/h}", True), (r"\text{\$}12.50", "12.5", True),
           ("2 x 10^3", "2000", True), ("x^2+c", "x^2+C", True), ("x^2", "x^2+C", False)])  # fmt: skip


def test_dots_that_go_on_are_no_full_stop() -> None:
    check([("0.333.", "0.333", True), ("0.333...", "0.333", False), ("5…", "5", False)])


@pytest.mark.parametrize(("text", "box"), [(r"\boxed 5", "5"), (r"\boxed{3}, no: $\boxed 12$", "12"),
                                           (r"\boxed B.", "B"), (r"\boxed{5}, in the \boxed form", "5")])  # fmt: skip
def test_a_box_without_braces(text: str, box: str) -> None:
    assert extract_boxed(text) == box


def test_long_texts_take_no_time() -> None:
    for part in ("A B", "answer is ", "\\\\ ", "[a,", r"\text{", "½", "x_1=1,", "1:", "²", "area ", r"\boxed ", "=1"):
        start = time.monotonic()
        assert not is_correct(part * 2000, "7") and not is_correct("7", part * 2000)
        assert time.monotonic() - start < 1, part


def test_letters_in_a_row_are_a_word_and_choices_beside_listed_ones() -> None:
    assert not is_correct("CBA", "ABC")
    assert is_correct("B, A", "AB") and is_correct("BC", "B and C")


@pytest.mark.parametrize("answer", ["D. Both B and C", "D) A and B", "D. None of A, B, C", "D. Hepatitis B, C"])
def test_a_choice_whose_text_names_others_is_one(answer: str) -> None:
    assert is_correct(answer, "D")


def test_conditions_and_numbers_of_terms_keep_their_order() -> None:
    one, other = (rf"\begin{{cases}}{a}, x>0\\{b}, x<0\end{{cases}}" for a, b in ((1, 0), (0, 1)))
    assert is_correct(one, one) and not is_correct(other, one)
    assert not is_correct("2, 1", "a_1 = 1, a_2 = 2") and is_correct("2, 1", "x_1 = 1, x_2 = 2")
    assert not is_correct("-5", "10 – 15")
    assert is_correct("1, 2, 3, ...", "1, 2, 3, ...")
