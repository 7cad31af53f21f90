"""The whole program under torchrun on a tiny vision-language model: logs, validates, saves, resumes, fails together."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.shell import ROOT, environment, run, torchrun
from tests.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.dist]

CONFIG = """
from r1.config import *

HERE = {here!r}
config = Config(
    model=ModelConfig(path=HERE + "/model", precision="float32", gradient_checkpointing=False),
    data=DataConfig(train_files=HERE + "/train.jsonl", val_files=("held=" + HERE + "/val.jsonl",), max_prompt_length=96,
                    max_response_length=12, rollout_batch_size=8, min_pixels=784, max_pixels=12544, num_workers=1),
    rollout=RolloutConfig(n=4),
    reward=RewardConfig(function=HERE + "/reward.py:compute_score", num_workers=1, timeout_s=2),
    optim=OptimConfig(lr=1e-3),
    update=UpdateConfig(global_batch_size=4, max_tokens_per_microbatch=512),
    checkpoint=CheckpointConfig(save_freq=2),
    trainer=TrainerConfig(output_dir=HERE + "/runs", max_steps=4, val_freq=2, progress=False, samples_to_log=2,
                          loggers=("console", "file", "tensorboard")),
)
"""
# Rewards vowels: something that a random model does sometimes, and can learn to do more.
REWARD = """
import os, time
REWARD_NAME, REWARD_TYPE = "vowels", "batch"

def compute_score(reward_inputs, **_):
    scores = []
    for x in reward_inputs:
        if os.environ.get("REWARD_FAULT") == "raise" and x["index"] == 1:
            raise RuntimeError("a broken row")
        if os.environ.get("REWARD_FAULT") == "hang" and x["index"] == 3:
            time.sleep(1000)
        if os.environ.get("REWARD_FAULT") == "kill":
            open(x["pid_file"], "a").write("x")
            time.sleep(3)
        text = x["response"]
        value = sum(c in "aeiou" for c in text) / max(len(text), 1)
        bad = os.environ.get("REWARD_FAULT") == "nan" and x["index"] == 2
        scores.append({"overall": float("nan") if bad else value, "accuracy": float(value > 0.2)})
    return scores
"""


def write_run(folder: Path, family: str) -> Path:
    """Model, rows, with pictures where the family sees, rewards and config.py of a run, in the folder."""
    make_tiny(family, folder / "model")
    rows = []
    for i in range(24):
        images = [f"{i}.png"] if i % 3 and "vl" in family else []
        for name in images:
            Image.new("RGB", (40 + i, 70), (i * 9, 99, 200)).save(folder / name)
        rows.append({"problem": "<image>" * len(images) + f"what is {i} + 1?", "answer": i + 1, "images": images,
                     "index": i, "pid_file": str(folder / "started")})  # fmt: skip
    for name, part in (("train", rows), ("val", rows[:6])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.py").write_text(CONFIG.format(here=str(folder)))
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("train"), "qwen2_5_vl")


def command(here: Path, name: str, *words: str, ranks: int = 2) -> list[str]:
    own = ("--config", str(here / "config.py"), "--trainer.experiment_name", name)
    return torchrun("r1.train", *own, *words, ranks=ranks)


def train(here: Path, name: str, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return run(command(here, name, *words), here, **extra)


def metrics(here: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (here / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(here: Path) -> subprocess.CompletedProcess[str]:
    done = train(here, "straight")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done


def test_a_run_logs_every_step_and_ends_with_what_to_do_next(here, straight):
    rows = metrics(here, "straight")
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    assert [any(k.startswith("val/held/") for k in r) for r in rows] == [True, False, True, False, True]
    step = rows[1]
    assert step["mismatch/abs_max"] < 1e-4  # contract 2, text and pictures, after a sync
    assert step["policy/grad_norm"] > 0 and step["loss/kl"] >= 0
    assert {"reward/mean", "reward/accuracy", "response/clip_frac", "policy/entropy", "time/rollout_s", "time/reward_s",
            "time/logprobs_s", "time/update_s", "time/weight_sync_s", "time/step_s", "perf/tokens_per_s_per_gpu",
            "mem/peak_gib", "engine/wake_s", "engine/generate_s", "engine/sleep_s"} <= step.keys()  # fmt: skip
    folder = here / "runs" / "straight"
    assert json.loads((folder / "config.json").read_text())["rollout"]["n"] == 4
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {"train", "val"} == {s["kind"].split("/")[0] for s in samples}
    pictures = {name for s in samples for name in s.get("images", [])}
    assert pictures and all((folder / name).is_file() for name in pictures)
    assert json.loads((folder / "environment.json").read_text())[0]["num_steps"] == 4
    report = (folder / "report.html").read_text()
    assert all(Path(name).stem in report for name in pictures) and "val/held/accuracy" in report
    assert list((folder / "tensorboard").iterdir())
    assert "tools/merge.py" in straight.stdout and "before" in straight.stdout


def test_C02_kill_and_resume_equals_a_straight_run_bit_for_bit(here, straight):
    first = train(here, "resumed", "--trainer.max_steps", "2")
    assert first.returncode == 0, first.stderr[-3000:]
    second = train(here, "resumed")
    assert second.returncode == 0, second.stderr[-3000:]
    assert "resumed after step 2" in second.stdout
    one, two = metrics(here, "straight"), metrics(here, "resumed")
    timeless = [k for k in one[3] if not k.startswith(("time/", "perf/", "mem/", "engine/"))]
    for step in (3, 4):
        a, b = ([r for r in rows if r["step"] == step][-1] for rows in (one, two))
        assert {k: a[k] for k in timeless} == {k: b[k] for k in timeless}


def test_resume_on_other_ranks_and_engines_keeps_the_data_and_the_numbers(here, straight):
    for ranks, steps, tensor_parallel in ((2, 1, 1), (1, 3, 1), (2, 4, 2)):
        words = command(here, "moved", "--trainer.max_steps", str(steps), "--trainer.val_before_train", "False",
                        "--rollout.tensor_parallel_size", str(tensor_parallel), ranks=ranks)  # fmt: skip
        done = run(words, here)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "changed since step_00000" in done.stderr or steps == 1
    one, two = ({r["step"]: r for r in metrics(here, name)} for name in ("straight", "moved"))
    assert sorted(two) == [1, 2, 3, 4]
    for step in (2, 3, 4):
        for key in ("reward/mean", "response/length_mean", "loss/policy", "policy/entropy", "policy/grad_norm"):
            assert two[step][key] == pytest.approx(one[step][key], rel=1e-3, abs=1e-5), (step, key)


def test_the_merged_model_is_the_trained_policy_and_loads_alone(here, straight):
    out = here / "merged"
    words = [str(here / "runs" / "straight"), "--output", str(out), "--dtype", "float32"]
    done = run([sys.executable, str(ROOT / "tools" / "merge.py"), *words], here)
    assert done.returncode == 0, done.stderr
    start = AutoModelForImageTextToText.from_pretrained(here / "model").state_dict()
    end = AutoModelForImageTextToText.from_pretrained(out).state_dict()
    assert start.keys() == end.keys()
    changed = sum(not torch.equal(start[k], end[k]) for k in start)
    assert changed > 0.9 * len(start)


def test_a_raising_hanging_or_nan_reward_costs_its_response_and_is_counted(here):
    # Each row is sampled by one of the two ranks; the other must not wait for more than its grades.
    for fault in ("raise", "hang", "nan"):
        done = train(here, fault, "--trainer.max_steps", "3", "--trainer.val_before_train", "False",
                     REWARD_FAULT=fault)  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        failed = [r["reward/failed_frac"] for r in metrics(here, fault) if "reward/failed_frac" in r]
        assert sum(failed) == pytest.approx(4 / 32)  # one row's four responses, once in an epoch of three steps
        assert "left out, their reward failed" in done.stderr


def test_a_killed_rank_ends_all_within_30_seconds(here):
    started = here / "started"
    job = subprocess.Popen(command(here, "killed"), cwd=here, env=environment(REWARD_FAULT="kill"),
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    deadline = time.monotonic() + 200
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    children = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(job.pid)], capture_output=True, text=True, check=True
    )
    ranks = [int(line.split()[0]) for line in children.stdout.splitlines() if "r1.train" in line]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert job.returncode != 0
    assert "SIGKILL" in output or "exitcode  : -9" in output
    for pid in ranks:
        assert subprocess.run(["ps", "-p", str(pid)], capture_output=True, check=False).returncode != 0


def test_one_engine_over_two_ranks_trains_on_both(here):
    done = train(here, "tp2", "--trainer.max_steps", "1", "--rollout.tensor_parallel_size", "2",
                 "--trainer.val_before_train", "False")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    step = metrics(here, "tp2")[0]
    # 8 prompts x 4 responses, each counted once although both ranks hold the engine's outputs.
    assert step["mismatch/abs_max"] < 1e-4 and step["policy/grad_norm"] > 0
    samples = (here / "runs" / "tp2" / "samples.jsonl").read_text().splitlines()
    assert samples
