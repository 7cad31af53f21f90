"""On a CUDA GPU: weights that wait in host memory are the last ones, and a run resumes with all of it there."""

import pytest
import torch
from torch import nn

from r1.policy.offload import HostMemory, store_model
from tests.shell import run
from tests.test_train import command, metrics, write_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

OFFLOADED = [f"--parallel.offload_{name}" for name in ("params", "optimizer", "reference")]


def test_tied_weights_come_back_from_host_memory_as_they_left():
    model, memory = nn.Sequential(nn.Embedding(50_000, 512), nn.Linear(512, 50_000, bias=False)), HostMemory()
    model[1].weight = model[0].weight
    for _ in range(4):
        model.to("cuda")
        with torch.no_grad():
            model[0].weight.add_(1)
        wanted = model[0].weight.detach().cpu()
        store_model(model, memory)
        assert model[0].weight.device.type == "cpu"
        torch.testing.assert_close(model[1].weight.detach(), wanted, rtol=0, atol=0)


def test_ppo_with_all_in_host_memory_goes_on_from_its_checkpoint(tmp_path):
    here = write_run(tmp_path, "qwen2_5_vl")
    words = [word for name in OFFLOADED for word in (name, "True")]
    words += [
        "--algorithm.advantage",
        "gae",
        "--algorithm.reference_update_steps",
        "1",
        "--rollout.enforce_eager",
        "True",
    ]
    words += ["--rollout.gpu_memory_utilization", "0.1", "--rollout.kv_cache_gib", "0.5"]
    for steps in ("2", "4"):
        done = run(command(here, "ppo", *words, "--trainer.max_steps", steps, ranks=1), here)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    lines = metrics(here, "ppo")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["mismatch/abs_mean"] < 0.03 for line in lines[1:])
    assert all(line["critic/grad_norm"] > 0 for line in lines[1:])
