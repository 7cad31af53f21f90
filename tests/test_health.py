"""The health line names what goes wrong, with advice, and says nothing about a run that learns."""

import json
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from r1.config import Config
from r1.health import health

HEALTHY = {
    "reward/mean": 0.5, "reward/failed_frac": 0.0, "reward/zero_std_frac": 0.3, "response/clip_frac": 0.02,
    "policy/entropy": 0.3, "policy/skipped_steps": 0.0, "policy/clip_frac_low": 0.01, "policy/clip_frac_high": 0.01,
    "mismatch/abs_mean": 0.005, "time/step_s": 60.0, "time/reward_s": 0.1,
}  # fmt: skip


def steps(count: int = 20, /, **late: float) -> list[dict[str, float]]:
    """A run whose last 5 steps differ from a healthy one's in some metrics, named with _ for /."""
    changed = {name.replace("__", "/"): value for name, value in late.items()}
    return [HEALTHY | (changed if i >= count - 5 else {}) for i in range(count)]


def names(history: list[dict[str, float]]) -> list[str]:
    return [trouble.name for trouble in health(history)]


def test_a_healthy_run_is_not_talked_about() -> None:
    assert health(steps()) == []
    assert health([]) == []


def test_a_run_that_learns_to_the_end_is_healthy() -> None:
    # What the demo does: reward to 1, entropy down, ever more groups tied.
    late = {"reward__accuracy": 0.97, "reward__mean": 0.97, "policy__entropy": 0.02, "reward__zero_std_frac": 0.8}
    assert health(steps(60, **late)) == []


@pytest.mark.parametrize(
    ("late", "name", "words"),
    [
        ({"reward__zero_std_frac": 0.95}, "groups tied", "95% of groups"),
        ({"reward__failed_frac": 0.1}, "rewards fail", "10% of responses"),
        ({"reward__gold_unparsable": 0.04}, "answers unreadable", "4% of responses"),
        ({"response__clip_frac": 0.6}, "responses cut", "60% of responses reach data.max_response_length"),
        ({"policy__skipped_steps": 1.0}, "gradients skipped", "5 updates of the last 10 steps"),
        ({"policy__clip_frac_low": 0.2, "policy__clip_frac_high": 0.2}, "ratios clipped", "40% of tokens"),
        ({"time__reward_s": 24.0}, "rewards slow", "24 of its 60 s"),
        ({"mismatch__abs_mean": 0.02}, "mismatch rising", "0.020 nats a token, 0.005 at first"),
        ({"mismatch__abs_mean": 0.3}, "mismatch rising", "0.300 nats"),
        ({"policy__entropy": 0.01}, "entropy collapse", "0.300 nats a token at first, 0.010 now"),
        ({"policy__entropy": 2.0}, "entropy rising", "2.000 now"),
    ],
)
def test_trouble_is_named_with_its_numbers(late: dict[str, float], name: str, words: str) -> None:
    (trouble,) = health(steps(**late))
    assert trouble.name == name
    assert words in str(trouble) and len(trouble.advice) > 20


def test_one_odd_step_is_not_news() -> None:
    history = steps()
    history[-1] = history[-1] | {"response/clip_frac": 0.5, "mismatch/abs_mean": 0.02, "reward/zero_std_frac": 1.0}
    assert health(history) == []


def test_a_mismatch_that_is_wrong_from_the_start_needs_no_comparison() -> None:
    assert names([HEALTHY | {"mismatch/abs_mean": 2.0}] * 5) == ["mismatch high"]


def test_ties_of_a_solved_task_are_called_solved() -> None:
    (trouble,) = health(steps(reward__zero_std_frac=0.98, reward__accuracy=0.99))
    assert "solved" in trouble.advice


def test_validation_lines_and_missing_values_do_no_harm() -> None:
    history: list[Any] = [{"step": 0, "val/held/accuracy": 0.4}, *steps(8), HEALTHY | {"policy/entropy": None}]
    assert health(history) == []


def test_settings_that_advice_names_exist() -> None:
    late = [
        {"reward__zero_std_frac": 1.0}, {"reward__failed_frac": 0.5}, {"response__clip_frac": 0.9},
        {"policy__skipped_steps": 1.0}, {"policy__clip_frac_high": 0.9}, {"time__reward_s": 50.0},
        {"mismatch__abs_mean": 0.9}, {"policy__entropy": 0.001}, {"policy__entropy": 9.0},
    ]  # fmt: skip
    sections = json.loads(json.dumps([f.name for f in fields(Config())]))
    named = 0
    for case in late:
        for word in " ".join(str(t) for t in health(steps(**case))).replace("=", " ").replace(",", " ").split():
            section, _, field = word.strip(".;:()").partition(".")
            if section in sections and field:
                part = getattr(Config(), section)
                assert is_dataclass(part) and field.strip(".;:") in [f.name for f in fields(part)], word
                named += 1
    assert named >= 12
