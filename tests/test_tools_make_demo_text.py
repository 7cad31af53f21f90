"""The text demo's questions: right answers, none held out that is trained on; and its reward."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import make_demo_text  # noqa: E402


def test_questions_are_right_and_held_out_ones_are_new():
    train, val = make_demo_text.make_rows()
    assert not {r["problem"] for r in train} & {r["problem"] for r in val}
    for row in train + val:
        a, sign, b = row["problem"].removeprefix("What is ").split("?")[0].split()
        assert int(row["answer"]) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]


def test_the_reward_reads_the_last_number():
    spec = importlib.util.spec_from_file_location("last_number", ROOT / "configs" / "rewards" / "last_number.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    score = lambda text: module.compute_score({"response": text, "ground_truth": "-5"})["overall"]  # noqa: E731
    assert score("7 - 12 = -5.") == 1 and score("-5 is 7 - 12") == 0 and score("none") == 0
