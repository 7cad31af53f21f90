"""Scores of validation against numbers by hand, and the evaluation of a model folder from the shell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from r1.config import RewardConfig
from r1.evaluate import prepare, table
from r1.evaluate_scores import answer_finder, majority, pass_at_k, score_prompt, summarize
from tests import shell
from tests.tiny import make_tiny

REWARD = """
def compute_score(reward_inputs):
    return [{"overall": len(x["response"]), "accuracy": float(len(x["response"]) % 2)} for x in reward_inputs]
"""


def test_pass_at_k_is_the_chance_of_a_right_one_among_k():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert (pass_at_k(4, 0, 4), pass_at_k(4, 1, 4), pass_at_k(8, 6, 4)) == (0.0, 1.0, 1.0)


def test_the_most_frequent_answer_wins_however_it_is_spelled():
    assert majority(["1/2", "0.5", "3"], [1.0, 1.0, 0.0]) == 1.0
    assert majority(["7", "3", "7", "3"], [1.0, 0.0, 1.0, 0.0]) == 0.5  # a tie is decided by a coin
    assert majority([None, None, "3"], [0.0, 0.0, 1.0]) == 1.0  # who gives no answer has no vote
    assert majority([None, " "], [0.0, 0.0]) == 0.0


def test_the_vote_looks_for_answers_where_the_reward_does():
    text = r"<answer>4</answer> so \boxed{5} Answer: 6"
    find = {name: answer_finder(RewardConfig(function=name)) for name in ("math", "r1v", "dapo")}
    assert {name: f(text) for name, f in find.items()} == {"math": "5", "r1v": "4", "dapo": "6"}
    tagged = RewardConfig(function={"math": 0.9, "repetition": 0.1}, kwargs={"math": {"forms": ("tag",)}})
    assert answer_finder(tagged)(text) == "4"
    assert answer_finder(RewardConfig(function="mine.py:score"))("Answer: 6") == "6"


def test_a_set_is_summed_up_over_prompts_and_failures_count_as_wrong():
    find = answer_finder(RewardConfig(function="math"))
    right, wrong = {"overall": 0.9, "accuracy": 1.0}, {"overall": 0.1, "accuracy": 0.0}
    one = score_prompt([right, wrong, wrong, None], [1, 2, 3, 6], [r"\boxed{2}", r"\boxed{3}", r"\boxed{3}", ""], find,
                       "accuracy")  # fmt: skip
    two = score_prompt([right] * 4, [4] * 4, [r"\boxed{2}"] * 4, find, "accuracy")
    assert summarize("a", [one, two], "accuracy") == pytest.approx({
        "val/a/reward": (1.1 + 3.6) / 8, "val/a/accuracy": 5 / 8, "val/a/response_length": 28 / 8,
        "val/a/failed_frac": 1 / 8, "val/a/mean@4": 5 / 8, "val/a/maj@4": 0.5,
        "val/a/pass@1": 5 / 8, "val/a/pass@2": (0.5 + 1) / 2, "val/a/pass@4": 1.0,
    })  # fmt: skip


def test_one_response_a_prompt_or_no_correct_key_gives_plain_means():
    find = answer_finder(RewardConfig())
    single = summarize(
        "a", [score_prompt([{"overall": 1.0, "accuracy": 1.0}], [3], ["x"], find, "accuracy")], "accuracy"
    )
    assert "val/a/accuracy" in single and not [name for name in single if "@" in name]
    keyless = summarize("a", [score_prompt([{"overall": 1.0}] * 2, [3, 3], ["x"] * 2, find, "accuracy")], "accuracy")
    assert not [name for name in keyless if "@" in name]


def test_the_table_has_a_column_a_set():
    lines = table({"geo": {"accuracy": 0.5, "pass@8": 0.75}, "a_long_name": {"accuracy": 0.25}}).splitlines()
    assert lines[0].split() == ["geo", "a_long_name"] and lines[1].split() == ["accuracy", "0.5", "0.25"]
    assert lines[2].split() == ["pass@8", "0.75"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "./nowhere", "--data", "{here}/a.jsonl"], "no such folder"),
        (["--model", "{here}", "--data", "{here}/none.jsonl"], "no such file"),
        (["--model", "{here}", "--data", "{here}/a.jsonl", "--reward.function", "none.py:f"], "there is no file"),
        (["--config", "{here}/c.py", "--model", "{here}"], "there is nothing to evaluate on"),
    ],
)
def test_mistakes_end_before_an_engine_starts(tmp_path, words, message):
    (tmp_path / "a.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    (tmp_path / "c.py").write_text("from r1.config import *\nconfig = Config(data=DataConfig(val_files=()))\n")
    with pytest.raises(ValueError, match=message):
        prepare([word.format(here=tmp_path) for word in words])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    make_tiny("qwen3", folder / "model")
    for name, rows in (("a", 5), ("b", 3)):
        lines = [json.dumps({"problem": f"{name}: what is {i} + 1?", "answer": str(i + 1)}) for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "reward.py").write_text(REWARD)
    return folder


def evaluate(here: Path, output: str, *words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    own = ["--model", str(here / "model"), "--data", f"first={here / 'a.jsonl'}", str(here / "b.jsonl")]
    own += ["--output", str(here / output), "--reward.function", f"{here / 'reward.py'}:compute_score"]
    own += ["--model.precision", "float32", "--data.max_response_length", "8", "--data.max_prompt_length", "64"]
    command = shell.torchrun("r1.evaluate", *own, *words, ranks=ranks) if ranks > 1 else [
        sys.executable, "-m", "r1.evaluate", *own, *words]  # fmt: skip
    done = shell.run(command, here)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done


def samples(here: Path, output: str) -> list[dict]:
    return [json.loads(line) for line in (here / output / "samples.jsonl").read_text().splitlines()]


@pytest.mark.dist
def test_a_folder_is_evaluated_on_two_sets_alike_on_one_rank_and_on_two(here):
    words = ("--rollout.engine", "hf", "--rollout.val.n", "4", "--rollout.val.temperature", "1.0")
    done = evaluate(here, "one", *words)
    evaluate(here, "two", *words, "--data.val_batch_size", "2", ranks=2)
    scores = json.loads((here / "one" / "scores.json").read_text())["sets"]
    assert scores.keys() == {"first", "b"} and scores["first"]["pass@4"] >= scores["first"]["mean@4"]
    for name in ("pass@2", "maj@4", "response_length"):
        assert name in done.stdout
    found = samples(here, "one")
    assert [(s["set"], s["row"], s["sample"]) for s in found] == [
        (name, row, sample) for name, rows in (("first", 5), ("b", 3)) for row in range(rows) for sample in range(4)
    ]
    right = [s["rewards"]["accuracy"] for s in found if s["set"] == "first"]
    assert scores["first"]["mean@4"] == pytest.approx(sum(right) / len(right))
    assert samples(here, "two") == found


@pytest.mark.engine
def test_vllm_holds_the_folders_weights(here):
    # Greedy: both engines write the same, so both hold the weights of the folder.
    greedy = ("--rollout.val.temperature", "0", "--rollout.val.top_p", "1")
    evaluate(here, "hf", *greedy, "--rollout.engine", "hf")
    evaluate(here, "vllm", *greedy)
    assert samples(here, "vllm") == samples(here, "hf")
