"""A LoRA run from end to end: the engine samples from what trains, it resumes exactly, and it merges."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shell import run, torchrun
from tests.test_train import CONFIG, REWARD
from tests.tiny import make_tiny
from tools.merge import merge
from tools.merge_files import Shards

pytestmark = [pytest.mark.dist]

LORA = ("--model.lora.rank", "4", "--optim.lr", "1e-2", "--optim.eps", "1e-3", "--trainer.val_freq", "-1",
        "--trainer.val_before_train", "False", "--data.val_files")  # fmt: skip
FAMILIES = {"text": "qwen3", "vision": "qwen2_5_vl"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    make_tiny("qwen2_5_vl", folder / "vision")
    make_tiny("qwen3", folder / "text", tie=True)
    (folder / "train.jsonl").write_text(
        "\n".join(json.dumps({"problem": f"what is {i} + 1?", "answer": i + 1, "index": i}) for i in range(24))
    )
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.py").write_text(CONFIG.format(here=str(folder)))
    return folder


def train(here: Path, name: str, *words: str, ranks: int = 2, model: str = "text", engine: str = "hf") -> Any:
    own = ("--config", str(here / "config.py"), "--trainer.experiment_name", name, "--rollout.engine", engine)
    return run(torchrun("r1.train", *own, "--model.path", str(here / model), *LORA, *words, ranks=ranks), here)


def metrics(here: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (here / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def assert_reached_the_engine(steps: list[dict]) -> None:
    """Each step's responses are of the policy that has moved away from its reference by the updates before."""
    assert all(step["policy/grad_norm"] > 0 for step in steps)
    assert all(step["mismatch/abs_max"] < 1e-4 for step in steps)
    moved = [step["loss/kl"] for step in steps]
    assert min(moved[1:]) > 0.01, moved


@pytest.fixture(scope="module")
def straight(here: Path) -> list[dict]:
    done = train(here, "straight")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return metrics(here, "straight")


def test_C15_the_engine_samples_from_the_adapted_policy(here, straight):
    assert [step["step"] for step in straight] == [1, 2, 3, 4]
    assert_reached_the_engine(straight)


@pytest.mark.engine
def test_C15_vllm_samples_from_the_adapted_policy(here):
    words = ("--model.lora.parts", "language", "projector", "vision", "--model.lora.use_dora", "True")
    done = train(here, "vllm", *words, "--trainer.max_steps", "3", ranks=1, model="vision", engine="vllm")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert_reached_the_engine(metrics(here, "vllm"))


def test_it_resumes_bit_for_bit_and_on_other_ranks_to_rounding(here, straight):
    for name, ranks in (("same", 2), ("fewer", 1)):
        shutil.copytree(here / "runs/straight", here / "runs" / name)
        shutil.rmtree(here / "runs" / name / "checkpoints/step_000004")
        done = train(here, name, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        assert "resumed after step 2 of 4" in done.stdout
        merge(here / "runs" / name, here / f"{name}-merged", dtype="float32")
    merge(here / "runs/straight", here / "straight-merged", dtype="float32")
    a, b = Shards(here / "runs/straight/checkpoints/step_000004"), Shards(here / "runs/same/checkpoints/step_000004")
    c = Shards(here / "runs/fewer/checkpoints/step_000004")
    assert a.tensors.keys() == b.tensors.keys() == c.tensors.keys() and all(".lora_" in name for name in a.tensors)
    for name in a.tensors:
        assert torch.equal(a.read(name), b.read(name)), name
        torch.testing.assert_close(a.read(name), c.read(name), rtol=0, atol=2e-4, msg=name)
    whole = sum(p.stat().st_size for p in (here / "text").glob("*.safetensors"))
    saved = sum(p.stat().st_size for p in (here / "runs/straight/checkpoints/step_000004/shards").iterdir())
    assert saved < whole / 2, "weights, first and second moments of adapters, and no weight of the model"
