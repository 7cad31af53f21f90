"""On two GPUs or more, over NCCL: the same numbers on several ranks, whole steps, resuming, kills, memory of a sync.

Each test starts its own runs and shares none, so `pytest -n 4` (pytest-xdist) may run them side by side. With
R1_RANKS_ON_CPU=1 the same runs go over gloo on a CPU.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import shell
from tests.test_dist_policy import SPLIT
from tests.test_faults import ranks_of
from tests.test_train import command, metrics, write_run
from tests.tiny import make_tiny, randomize
from tools.bench_launch import end

ON_CPU = os.environ.get("R1_RANKS_ON_CPU") == "1"
GPUS = 4 if ON_CPU else torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")]

# Multicast over NVLink wants services of the host that a container may lack; TF32 rounds what float32 runs compare.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVIDIA_TF32_OVERRIDE": "0"}
# Given the size of its cache, an engine does not measure the GPU's memory, which others may use at the same time.
SHARED_GPU = ("--rollout.kv_cache_gib", "0.5", "--rollout.gpu_memory_utilization", "0.1")


def needs(ranks: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(GPUS < ranks, reason=f"needs {ranks} GPUs")


Job = tuple[subprocess.Popen[bytes], Path]


def start(words: list[str], folder: Path, name: str) -> Job:
    """Start a command; what it says goes to a file, so that several can run at once."""
    log = folder / f"{name}.log"
    with log.open("w") as output:
        environment = shell.environment(**ENVIRONMENT)
        return subprocess.Popen(words, cwd=shell.ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT), log


def finish(*jobs: Job) -> str:
    """Wait for runs that must end well; what the last one said."""
    said = ""
    try:
        for job, log in jobs:
            job.wait(timeout=400)
            said = log.read_text()
            assert job.returncode == 0, said.split("torch.distributed.elastic")[0][-4000:]
    finally:
        for job, _ in jobs:
            if job.poll() is None:
                end(job)
    return said


SCENARIOS: dict[str, dict[str, Any]] = {
    name: SPLIT[name] for name in ("text", "vision", "experts", "untrained_picture", "full_kl", "advantage-gae")
} | {"lora": {"family": "qwen2_5_vl", "lora": {"rank": 2, "alpha": 4.0}}}  # fmt: skip
# Of metrics, relative and absolute, and of the change of all weights. Half of the ranks left out would be 0.7; bfloat16
# rounding on these random weights is up to 0.07 on a CPU, float32's 1e-5.
TOLERANCES = {"float32": (1e-4, 1e-5, 1e-3), "amp": (0.15, 0.05, 0.15)}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "two": (2, {}),
    "sequence": (2, {"sequence_parallel_size": 2}),
    "hsdp": (4, {"fsdp_size": 2}),
    "sequence_hsdp": (4, {"sequence_parallel_size": 2, "fsdp_size": 2}),
}


def policy_steps(folder: Path, layout: str, scenarios: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results of tests/dist/policy_step.py on one rank and on the layout's, started at once."""
    families = {s["family"] for s in scenarios.values()}
    models = {f: str(make_tiny(f, folder / f, tie=f == "qwen3")) for f in families}
    jobs = []
    for name, (ranks, parallel) in (("one", (1, {})), (layout, LAYOUTS[layout])):
        plan = {"models": models, "scenarios": scenarios, "parallel": parallel, "out": str(folder / f"{name}.pt")}
        plan["max_tokens"] = 10_000 if ranks == 1 else 30 // parallel.get("sequence_parallel_size", 1)
        (folder / f"{name}.json").write_text(json.dumps(plan))
        words = shell.torchrun("tests.dist.policy_step", str(folder / f"{name}.json"), ranks=ranks)
        jobs.append(start(words, folder, name))
    finish(*jobs)
    return {name: torch.load(folder / f"{name}.pt") for name in ("one", layout)}


@pytest.mark.parametrize("layout", [pytest.param(n, marks=needs(ranks)) for n, (ranks, _) in LAYOUTS.items()])
def test_C1_loss_norm_and_weights_are_those_of_one_rank(layout: str, tmp_path: Path) -> None:
    scenarios = {f"{n}-{p}": s | {"precision": p} for n, s in SCENARIOS.items() for p in TOLERANCES}
    scenarios["nan"] = {"family": "qwen2", "nan_rank": 1}
    runs = policy_steps(tmp_path, layout, scenarios)
    wrong = {
        n: differences(runs["one"][n], runs[layout][n], s["precision"]) for n, s in scenarios.items() if n != "nan"
    }
    assert {name: found for name, found in wrong.items() if found} == {}
    assert [m["policy/skipped_steps"] for m in runs[layout]["nan"]["metrics"]] == [1, 0]  # on all ranks
    assert all(w.isfinite().all() for w in runs[layout]["nan"]["weights"].values())


def differences(a: dict[str, Any], b: dict[str, Any], precision: str) -> list[tuple[str, float, float]]:
    """What of two results is not the same to rounding."""
    relative, absolute, most = TOLERANCES[precision]
    found = []
    for one, several in zip(a["metrics"], b["metrics"], strict=True):
        for key in one.keys() - {"microbatches", "cut_pictures"}:
            if precision == "amp" and "clip_frac" in key:
                continue  # of 52 tokens, some lie on the edge
            if one[key] != pytest.approx(several[key], rel=relative, abs=absolute):
                found.append((key, one[key], several[key]))
    error = update_error(a, b)
    return [*found, ("update", 0.0, error)] if error > most else found


def update_error(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Norm of the difference of two runs' changes of all weights, over the norm of the first's."""
    moved, other = ([r["weights"][n] - r["start"][n] for n in a["start"]] for r in (a, b))
    difference = sum((x - y).square().sum() for x, y in zip(moved, other, strict=True))
    return float((difference / sum(x.square().sum() for x in moved)).sqrt())


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_C2_whole_steps_sample_from_the_policy_that_trains(
    family: str, tensor_parallel_size: int, tmp_path: Path
) -> None:
    here = write_run(tmp_path, family)
    own = ("--model.precision", "amp", "--rollout.tensor_parallel_size", str(tensor_parallel_size))
    eager = ("--rollout.enforce_eager", str(family == "qwen2"))  # with CUDA graphs for the other
    words = command(here, "run", *own, *eager, *SHARED_GPU, "--trainer.max_steps", "3", "--trainer.val_freq", "-1")
    finish(start(words, here, "run"))
    steps = [row for row in metrics(here, "run") if "mismatch/abs_mean" in row]
    shown = ("mismatch/abs_mean", "mismatch/abs_max", "time/weight_sync_s", "time/step_s", "mem/weight_sync_peak_gib")
    figures = ", ".join(f"{key} {steps[-1].get(key, 0):.4f}" for key in shown)
    sys.stdout.write(f"{family}, engines over {tensor_parallel_size}: {figures}\n")
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["mismatch/abs_mean"] < 0.03 and row["policy/grad_norm"] > 0 for row in steps)
    assert all(row["policy/skipped_steps"] == 0 and row["reward/failed_frac"] == 0 for row in steps)


def numbers(here: Path, name: str, step: int) -> dict[str, float]:
    """A step's metrics, but for what a clock or a counter of memory says."""
    row = next(row for row in metrics(here, name) if row["step"] == step)
    return {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "mem/", "engine/"))}


def test_C5_resuming_on_as_many_ranks_is_exact(tmp_path: Path) -> None:
    here = write_run(tmp_path, "qwen2_5_vl")
    words = ("--model.precision", "amp", "--trainer.deterministic", "True", "--rollout.enforce_eager", "True")
    first = command(here, "resumed", *words, *SHARED_GPU, "--trainer.max_steps", "2")
    straight = command(here, "straight", *words, *SHARED_GPU)
    finish(start(first, here, "first"), start(straight, here, "straight"))
    said = finish(start(command(here, "resumed", *words, *SHARED_GPU), here, "second"))
    assert "resumed after step 2" in said
    for step in (1, 2, 3, 4):  # 1 and 2: two runs are equal at all
        assert numbers(here, "resumed", step) == numbers(here, "straight", step), step


def test_C5_resuming_on_one_rank_and_on_two_again_keeps_the_data_and_the_numbers(tmp_path: Path) -> None:
    here = write_run(tmp_path, "qwen2_5_vl")
    # In float32 with transformers' sampling: one token that rounding changes would change all that follow it.
    words = ("--rollout.engine", "hf", "--trainer.val_before_train", "False", "--trainer.val_freq", "-1")
    straight = start(command(here, "straight", *words), here, "straight")
    for ranks, steps in ((2, 1), (1, 3), (2, 4)):
        life = command(here, "moved", *words, "--trainer.max_steps", str(steps), ranks=ranks)
        said = finish(start(life, here, f"life_{steps}"))
        assert f"resumed after step {steps - 1}" in said or steps != 4, said[-2000:]
    finish(straight)
    for step in (1, 2, 3, 4):
        one, two = numbers(here, "straight", step), numbers(here, "moved", step)
        assert two["prompt/length_mean"] == one["prompt/length_mean"], step  # lengths differ by row: the same rows
        for key in ("reward/mean", "response/length_mean", "loss/policy", "policy/entropy", "policy/grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), (step, key)


def test_a_killed_rank_ends_the_others_within_30_seconds(tmp_path: Path) -> None:
    here = write_run(tmp_path, "qwen2")
    words = ("--rollout.tensor_parallel_size", "2", "--rollout.enforce_eager", "True", "--model.precision", "amp")
    endless = ("--trainer.max_steps", "100000", "--trainer.val_freq", "-1", "--checkpoint.save_freq", "-1")
    job, log = start(command(here, "killed", *words, *SHARED_GPU, *endless), here, "killed")
    rows, deadline = here / "runs" / "killed" / "metrics.jsonl", time.monotonic() + 300
    while not (rows.exists() and len(metrics(here, "killed")) > 2) and time.monotonic() < deadline:
        assert job.poll() is None, log.read_text()[-4000:]
        time.sleep(0.1)
    ranks = ranks_of(job)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    try:
        job.wait(timeout=60)
    finally:
        if job.returncode is None:
            end(job)
    sys.stdout.write(f"the job ended {time.monotonic() - began:.1f} s after its rank\n")
    assert time.monotonic() - began < 30
    assert job.returncode != 0 and "SIGKILL" in log.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def make_deep(folder: Path) -> Path:
    """A model of many layers, whose largest weight is a small part of it."""
    make_tiny("qwen2", folder)
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = 24, ["full_attention"] * 24
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed=0)
    shutil.copy(folder / "generation_config.json", folder / "kept.json")
    model.save_pretrained(folder)
    (folder / "kept.json").replace(folder / "generation_config.json")
    return folder


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_weight_sync_gathers_tensor_by_tensor(tensor_parallel_size: int, tmp_path: Path) -> None:
    words = (str(make_deep(tmp_path / "model")), str(tensor_parallel_size))
    said = finish(start(shell.torchrun("tests.dist.sync_memory", *words, ranks=2), tmp_path, "sync"))
    found = json.loads(next(line for line in said.splitlines() if line.startswith('{"peak"')))
    sys.stdout.write(f"engines over {tensor_parallel_size}: {found}\n")
    assert found["total"] > 40 * found["largest"]
    assert found["peak"] < found["total"] / 4
