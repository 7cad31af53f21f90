"""The whole program on two ranks with the transformers engine: seeds, restarts, failures of one rank, removed files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.shell import ROOT, environment, run, torchrun
from tests.tiny import make_tiny

pytestmark = pytest.mark.dist

CONFIG = """
from r1.config import *

HERE = {here!r}
config = Config(
    model=ModelConfig(path=HERE + "/model", precision="float32", gradient_checkpointing=False),
    data=DataConfig(train_files=HERE + "/train.jsonl", val_files=("held=" + HERE + "/val.jsonl",), max_prompt_length=64,
                    max_response_length=8, rollout_batch_size=4, num_workers=1),
    rollout=RolloutConfig(engine="hf", n=3),
    reward=RewardConfig(function=HERE + "/reward.py:compute_score", num_workers=1),
    algorithm=AlgorithmConfig(kl_coef=0.0),
    optim=OptimConfig(lr=1e-3),
    update=UpdateConfig(global_batch_size=4, max_tokens_per_microbatch=512),
    checkpoint=CheckpointConfig(save_freq=1),
    trainer=TrainerConfig(output_dir=HERE + "/runs", max_steps=6, val_freq=2, progress=False,
                          loggers=("console", "file")),
)
"""
REWARD = """
import os, time
REWARD_TYPE = "batch"

def compute_score(inputs):
    fault = os.environ.get("FAULT", "")
    if any(x["response"] for x in inputs) and os.environ.get("RANK") == "1":
        if fault == "raise":
            open(os.environ["MARK"], "w").close()
            raise KeyError("a column that only this rank misses")
        if fault == "die" and not os.path.exists(os.environ["MARK"]):
            open(os.environ["MARK"], "w").close()
            os.kill(os.getpid(), 9)
    if fault == "slow":
        time.sleep(0.5)
    return [{"overall": sum(c in "aeiou" for c in x["response"]) / max(1, len(x["response"]))} for x in inputs]
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist_train")
    make_tiny("qwen2", folder / "model", tie=True)
    rows = [{"problem": f"what is {i} + 1?", "answer": i + 1} for i in range(12)]
    for name, part in (("train", rows), ("val", rows[:3]), ("same", [rows[0]] * 6)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.py").write_text(CONFIG.format(here=str(folder)))
    return folder


def command(here: Path, name: str, *words: str) -> list[str]:
    own = ("--config", str(here / "config.py"), "--trainer.experiment_name", name)
    return torchrun("r1.train", *own, *words, ranks=2)


def metrics(here: Path, name: str) -> list[dict[str, Any]]:
    path = here / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "mem/", "engine/"))} for row in rows]


@pytest.fixture(scope="module")
def straight(here: Path) -> list[dict[str, Any]]:
    done = run(command(here, "straight"), here)
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(here, "straight")


@pytest.fixture(scope="module")
def draws(here: Path) -> dict[str, list[dict[str, Any]]]:
    plan = {
        "model": str(here / "model"), "rows": str(here / "same.jsonl"), "reward": str(here / "reward.py:compute_score"),
        "runs": {"first": (1, 1), "again": (1, 1), "other_seed": (2, 1), "other_order": (1, 2)},
    }  # fmt: skip
    done = run(torchrun("tests.dist.sampling", json.dumps(plan), ranks=2), ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def responses(step: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(tokens) for *_, tokens in step["rollouts"]]


def test_X01_one_prompt_on_two_ranks_gives_eight_samples_and_the_same_eight_again(draws):
    for first, again in zip(draws["first"], draws["again"], strict=True):
        assert [home for _, _, home, _ in first["rollouts"]] == [0] * 4 + [1] * 4
        assert len(set(responses(first))) == 8
        assert again == first
    assert not set(responses(draws["first"][0])) & set(responses(draws["first"][1]))  # nor are steps alike


def test_X02_the_seed_reaches_the_engine_and_the_order_has_its_own(draws):
    first, seed, order = draws["first"], draws["other_seed"], draws["other_order"]
    for a, b in zip(first, seed, strict=True):
        assert a["rows"] == b["rows"]
        assert not set(responses(a)) & set(responses(b))
    assert [s["rows"] for s in first] != [s["rows"] for s in order]
    # All rows hold the same prompt here, so the order must leave the samples alone.
    assert [responses(s) for s in first] == [responses(s) for s in order]


def test_X06_a_reward_that_raises_on_one_rank_ends_all_with_its_words(here):
    mark = here / "raised"
    words = ("--reward.on_error", "raise", "--trainer.val_before_train", "False")
    done = run(command(here, "raise", *words), here, FAULT="raise", MARK=str(mark))
    assert time.time() - mark.stat().st_mtime < 20
    assert done.returncode != 0
    assert "Traceback" in done.stderr and "a column that only this rank misses" in done.stderr
    assert metrics(here, "raise") == []


def test_a_reward_process_that_dies_comes_back_and_nothing_is_lost(here, straight):
    words = ("--trainer.max_steps", "2", "--trainer.val_before_train", "False")
    done = run(command(here, "die", *words), here, FAULT="die", MARK=str(here / "died"))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = metrics(here, "die")
    assert (here / "died").exists()
    # The call that killed its process is graded again, response by response, in a new one.
    assert [row["reward/failed_frac"] for row in rows] == [0, 0]
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in straight[1:3]]


def test_a_removed_data_file_does_not_end_the_run(here, straight):
    gone = here / "gone.jsonl"
    gone.write_text((here / "train.jsonl").read_text())
    job = subprocess.Popen(command(here, "gone", "--data.train_files", str(gone)), cwd=here, env=environment(),
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    wait_for(job, lambda: len(metrics(here, "gone")) > 0)
    gone.unlink()
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output[-3000:]
    assert numbers(metrics(here, "gone")) == numbers(straight)


def wait_for(job: subprocess.Popen[str], condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        assert job.poll() is None, job.communicate()[0][-3000:]
        time.sleep(0.05)


def test_L01_bare_torchrun_starts_a_killed_run_again_and_its_log_equals_a_straight_runs(here, straight):
    words = command(here, "again")
    words.insert(words.index("--standalone"), "--max-restarts=1")
    job = subprocess.Popen(words, cwd=here, env=environment(FAULT="slow"), stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True)  # fmt: skip
    wait_for(job, lambda: len(metrics(here, "again")) >= 4)
    listing = ["ps", "-o", "pid=,args=", "--ppid", str(job.pid)]
    children = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    ranks = [int(line.split()[0]) for line in children if "r1.train" in line]
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output[-3000:]
    assert "resumed after step" in output
    rows = metrics(here, "again")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]  # each once: 0 is the validation before training
    assert numbers(rows) == numbers(straight)
    assert [row["step"] for row in rows if "val/held/reward" in row] == [0, 2, 4, 6]


def test_resume_on_other_shard_layouts_keeps_the_data_and_the_numbers(here, straight):
    lives = ((2, "2", "1"), (2, "4", "2"), (1, "6", "-1"))  # whole copies, then halves, then all on one rank
    for ranks, steps, fsdp_size in lives:
        words = command(here, "moved", "--trainer.max_steps", steps, "--parallel.fsdp_size", fsdp_size)
        words[words.index("--nproc_per_node=2")] = f"--nproc_per_node={ranks}"
        done = run(words, here)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "changed since step_000004: parallel.fsdp_size 2 -> -1" in done.stderr
    assert "was saved on 2 ranks and is loaded on 1" in done.stderr
    rows = metrics(here, "moved")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    for one, two in zip(straight[1:], rows[1:], strict=True):
        for key in ("reward/mean", "response/length_mean", "loss/policy", "policy/entropy", "policy/grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), (one["step"], key)


def test_a_mistake_that_only_one_rank_meets_is_said(here):
    script = "import os, sys; sys.argv[2] += '.gone' * (os.environ['RANK'] == '1'); import runpy; runpy.run_module('r1.train', run_name='__main__')"  # noqa: E501
    (here / "one_rank.py").write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run([*launch, str(here / "one_rank.py"), "--config", str(here / "config.py")], here)
    assert done.returncode != 0
    assert "error: rank 1: --config" in done.stderr and "no such file" in done.stderr
