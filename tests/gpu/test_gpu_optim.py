"""On a CUDA GPU: every optimizer steps, leaves for host memory and comes back, and resumes; torchao's compiled."""

import json
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from r1.config import OptimConfig
from r1.policy.optim import make_optimizer
from tests import shell
from tests.test_dist_optim import SCENARIOS
from tests.tiny import make_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_every_optimizer_resumes_while_its_states_are_offloaded(tmp_path):
    plan, model = tmp_path / "plan.json", make_tiny("qwen2", tmp_path / "model")
    scenarios = {n: {**s, "offload": True} for n, s in SCENARIOS.items() if "fsdp_size" not in s}
    plan.write_text(json.dumps({"model": str(model), "folder": str(tmp_path), "scenarios": scenarios}))
    done = shell.run(shell.torchrun("tests.dist.optim_states", "save", str(plan), ranks=1), shell.ROOT)
    assert done.returncode == 0, done.stderr.split("torch.distributed.elastic")[0][-3000:]
    results = torch.load(tmp_path / "save.pt", map_location="cpu")
    for name, result in results.items():
        for key, weight in result["straight"].items():  # to rounding: sums on a GPU have no fixed order
            assert (weight.float() - result["resumed"][key].float()).abs().max() < 0.0079, (name, key)
    if find_spec("torchao") is not None:
        assert "OptimState8bit" in results["8bit"]["kinds"]


def test_the_fused_step_is_the_step():
    weights = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        gradients = [torch.randn(p.shape) for p in model.parameters()]
        model.to(device)
        optimizer = make_optimizer(model, OptimConfig(lr=1e-3, weight_decay=0.1))
        assert optimizer.param_groups[0]["fused"] == (device == "cuda")
        for _ in range(5):
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient.to(device)
            optimizer.step()
        weights.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)
