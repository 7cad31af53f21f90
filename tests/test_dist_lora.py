"""Contract 1 for adapters: the same weights on 1 and 2 ranks, in one and many microbatches, and the same sync."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import shell
from tests.tiny import make_tiny

pytestmark = pytest.mark.dist

ALL = ["language", "projector", "vision"]
SCENARIOS: dict[str, dict[str, Any]] = {
    "text": {"family": "qwen3", "lora": {"rank": 5, "alpha": 16}},
    "language": {"family": "qwen2_5_vl", "lora": {"rank": 5, "alpha": 16}},
    "projector": {"family": "qwen2_5_vl", "lora": {"rank": 5, "alpha": 16, "parts": ALL[:2], "use_rslora": True}},
    "vision": {"family": "qwen2_5_vl", "lora": {"rank": 5, "alpha": 16, "parts": ALL, "use_dora": True}},
    "saved": {"family": "qwen2", "lora": {"rank": 5, "modules_to_save": ["lm_head"], "use_dora": True}},
    "full_kl": {
        "family": "qwen2_5_vl",
        "lora": {"rank": 5, "alpha": 16, "modules_to_save": ["merger", "lm_head"]},
        "algorithm": {"kl_penalty": "full", "entropy_coef": 0.02},
    },
    "kl_in_reward": {"family": "qwen2", "lora": {"rank": 5}, "algorithm": {"kl_in": "reward", "kl_penalty": "k1"}},
    "critic": {"family": "qwen2", "lora": {"rank": 5, "alpha": 16}, "algorithm": {"advantage": "gae"}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lora")
    models = {f: str(make_tiny(f, folder / f, tie=f == "qwen3")) for f in ("qwen2", "qwen3", "qwen2_5_vl")}
    results = {}
    for name, ranks, max_tokens in (("one", 1, 10_000), ("many", 1, 30), ("two", 2, 30)):
        plan = {"models": models, "max_tokens": max_tokens, "scenarios": SCENARIOS, "out": str(folder / f"{name}.pt")}
        (folder / "plan.json").write_text(json.dumps(plan))
        command = shell.torchrun("tests.dist.policy_step", str(folder / "plan.json"), ranks=ranks)
        done = shell.run(command, shell.ROOT)
        assert done.returncode == 0, done.stderr.split("torch.distributed.elastic")[0][-3000:]
        results[name] = torch.load(Path(plan["out"]))
    return results


@pytest.mark.parametrize("split", ["many", "two"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_split_leaves_adapters_metrics_and_the_synced_weights_unchanged(name, split, runs):
    a, b = runs["one"][name], runs[split][name]
    for one, two in zip(a["metrics"], b["metrics"], strict=True):
        for key in one.keys() - {"microbatches"}:
            assert one[key] == pytest.approx(two[key], rel=1e-5, abs=1e-6), key
    for part in ("weights", "merged"):
        assert a[part].keys() == b[part].keys()
        for key, weight in a[part].items():
            torch.testing.assert_close(weight, b[part][key], rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_steps_move_the_policy_from_its_reference(name, runs):
    first, second = runs["two"][name]["metrics"]
    assert first["policy/grad_norm"] > 0
    key = "reward/kl" if name == "kl_in_reward" else "loss/kl"
    assert key not in second or second[key] != first[key]
    assert any(
        n.endswith(".lora_B.default.weight") and w.abs().max() > 0 for n, w in runs["two"][name]["weights"].items()
    )
