"""A mixture of experts from end to end: vLLM samples from what trains, and both load what was merged."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.shell import run, torchrun
from tests.test_train import write_run
from tests.tiny import VISION_FAMILIES
from tools.merge import merge

pytestmark = [pytest.mark.engine, pytest.mark.dist, pytest.mark.slow]


def steps_of(folder: Path, name: str, *words: str, ranks: int) -> list[dict]:
    own = ("--config", str(folder / "config.py"), "--trainer.experiment_name", name, "--trainer.val_freq", "-1")
    words = (*own, "--trainer.val_before_train", "False", "--optim.lr", "3e-3", "--optim.eps", "1e-3", *words)
    done = run(torchrun("r1.train", *words, ranks=ranks), folder)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_experts_train_reach_the_engine_and_are_merged(family: str, tmp_path: Path) -> None:
    write_run(tmp_path, family)
    steps = steps_of(tmp_path, "first", ranks=2)
    assert all(step["mismatch/abs_max"] < 1e-4 for step in steps)
    assert min(step["loss/kl"] for step in steps[1:]) > 0.01  # responses are of the policy that has moved
    assert all(1 / 6 < step[f"moe/layer_{layer:02}/max_share"] <= 0.5 for step in steps for layer in range(2))
    merge(tmp_path / "runs/first", tmp_path / "merged", dtype="float32")
    auto = AutoModelForImageTextToText if family in VISION_FAMILIES else AutoModelForCausalLM
    old, new = (auto.from_pretrained(tmp_path / name).state_dict() for name in ("model", "merged"))
    moved = [name for name in old if ".experts." in name and not torch.equal(old[name], new[name])]
    assert len(moved) == 4  # both tensors of both layers
    again = steps_of(tmp_path, "again", "--model.path", str(tmp_path / "merged"), "--trainer.max_steps", "1", ranks=1)
    assert again[0]["mismatch/abs_max"] < 1e-4
