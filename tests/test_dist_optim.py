"""Every optimizer's states survive a checkpoint: bit for bit on the same ranks, to rounding on others."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import shell
from tests.tiny import make_tiny

pytestmark = pytest.mark.dist
SCENARIOS: dict[str, dict[str, Any]] = {
    "adamw": {"precision": "float32", "optim": {}},
    "kahan": {"precision": "bf16", "optim": {}},
    "muon": {"precision": "float32", "optim": {"strategy": "muon"}},
}
TORCHAO: dict[str, dict[str, Any]] = {
    "stochastic": {"precision": "bf16", "optim": {"strategy": "adamw_stochastic"}},
    "8bit": {"precision": "float32", "optim": {"strategy": "adamw_8bit"}},
    "8bit_bf16": {"precision": "bf16", "optim": {"strategy": "adamw_8bit"}},
    "stochastic_copies": {"precision": "bf16", "optim": {"strategy": "adamw_stochastic"}, "fsdp_size": 1},
}
SCENARIOS |= TORCHAO if find_spec("torchao") is not None else {}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("optim")
    model = make_tiny("qwen2", folder / "model")
    plan = folder / "plan.json"
    out = {}
    for what, ranks in (("save", 2), ("load", 1)):
        chosen = {n: s for n, s in SCENARIOS.items() if ranks == 2 or "fsdp_size" not in s}
        plan.write_text(json.dumps({"model": str(model), "folder": str(folder), "scenarios": chosen}))
        done = shell.run(shell.torchrun("tests.dist.optim_states", what, str(plan), ranks=ranks), shell.ROOT)
        assert done.returncode == 0, done.stderr.split("torch.distributed.elastic")[0][-3000:]
        out[what] = torch.load(Path(folder) / f"{what}.pt")
    return out


def largest_step(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


@pytest.mark.parametrize("name", SCENARIOS)
def test_resume_on_the_same_ranks_is_exact(name, results):
    result = results["save"][name]
    for key, weight in result["straight"].items():
        assert torch.equal(weight, result["resumed"][key]), key


@pytest.mark.parametrize("name", [n for n in SCENARIOS if "fsdp_size" not in SCENARIOS[n]])
def test_resume_of_two_ranks_on_one_goes_on_alike(name, results):
    # lr is 1e-3. Float32 agrees to rounding, 8 bits to that of their blocks, bfloat16 weights, up to 2, to one
    # unit in the last place, Muon to that of its bfloat16 products: on shards for matrices it would be off by 1e-3.
    tolerance = {"adamw": 1e-6, "muon": 2e-4, "8bit": 2e-5}.get(name, 0.0079)
    assert largest_step(results["save"][name]["straight"], results["load"][name]["resumed"]) < tolerance


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_ranks_that_hold_copies_round_alike(results):
    assert results["save"]["stochastic_copies"]["equal_shards"]


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_states_of_8bit_are_8bit(results):
    assert "OptimState8bit" in results["save"]["8bit"]["kinds"]
