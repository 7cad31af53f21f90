"""The built-in reward functions, called as a user's would be."""

import subprocess
import sys
from pathlib import Path

import pytest

import r1
from r1.rewards import dapo, math, r1v


def sample(response: str, gold: object = "42", *, length: int = 10, prompt: str = "") -> dict[str, object]:
    return {"response": response, "response_length": length, "ground_truth": gold, "prompt": prompt}


def test_math_weights_accuracy_and_format() -> None:
    rewards = math.compute_score(
        [
            sample(r"<think>6 times 7</think> \boxed{42}"),
            sample(r"\boxed{42}"),
            sample(r"<think>6 times 7</think> \boxed{41}"),
            sample(r"< think >6 times 7< / think >\boxed{42"),
        ]
    )
    assert [r["overall"] for r in rewards] == pytest.approx([1.0, 0.9, 0.1, 0.0])
    assert rewards[1] == {"overall": 0.9, "format": 0.0, "accuracy": 1.0}
    assert math.compute_score([sample(r"\boxed{42}")], format_weight=0.5)[0]["overall"] == 0.5


def test_r08_think_opened_by_the_template() -> None:
    response = "First, 2 plus 2.\n</think>\nThe answer is \\boxed{4}."
    assert math.compute_score([sample(response, "4", prompt="2+2?<think>\n")])[0]["format"] == 1.0
    assert math.compute_score([sample(response, "4", prompt="2+2?")])[0]["format"] == 0.0
    assert math.compute_score([sample(r"\boxed{4}", "4", prompt="2+2?<think>\n")])[0]["format"] == 0.0


@pytest.mark.parametrize(
    ("response", "format_", "accuracy"),
    [
        ("<think>a</think><answer>42</answer>", 1, 1),
        (r"<think>a</think> <answer>\boxed{42}</answer>", 1, 1),  # R16
        ("<think>a</think><answer>41</answer>", 1, 0),
        ("<answer>41</answer> no, <answer>42</answer>", 0, 1),
        ("<answer>42</answer> no, <answer>4", 0, 0),
        ("42", 0, 1),
    ],
)
def test_r1v_tags(response: str, format_: float, accuracy: float) -> None:
    reward = r1v.compute_score(sample(response))
    assert reward == {"overall": 0.5 * format_ + 0.5 * accuracy, "format": format_, "accuracy": accuracy}


def test_r1v_think_opened_by_the_template() -> None:
    assert r1v.compute_score(sample("a</think><answer>42</answer>", prompt="<think>\n"))["format"] == 1.0


def test_r20_dapo_overlong_penalty_counts_tokens() -> None:
    rewards = dapo.compute_score([sample("Answer: 42", length=n) for n in (80, 90, 100, 101)], 100, 20, 1.0)
    assert [r["overlong"] for r in rewards] == [0.0, -0.5, -1.0, -1.0]
    assert [r["overall"] for r in rewards] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        ("so\nAnswer: $42$", 1),  # G33
        ("**Answer:** 42.", 1),
        ("Answer: 41\nAnswer: 42" + "\nthat is all" * 100, 1),  # G25: not only the last characters
        (r"Answer: \boxed{42}", 1),
        ("42", -1),
        ("Answer: 41", -1),
    ],
)
def test_dapo_reads_the_answer_line(response: str, accuracy: float) -> None:
    (reward,) = dapo.compute_score([sample(response)], 100, 20, 1.0)
    assert (reward["accuracy"], reward["accuracy_normalized"]) == (accuracy, (accuracy + 1) / 2)


def test_reward_modules_import_without_torch() -> None:
    code = (
        "import sys, r1.rewards.runner, r1.rewards.process, r1.rewards.math, r1.rewards.r1v, r1.rewards.dapo;"
        "sys.exit(len({'torch', 'vllm', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=Path(r1.__file__).parent.parent).returncode == 0
