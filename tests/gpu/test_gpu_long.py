"""On a CUDA GPU: memory stays flat over 200 steps, and what a save and a resume cost (pytest -s shows the numbers)."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests import shell
from tests.test_memory import MIB, STEPS, early_and_late, run_watched, steps_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_gpu_and_host_memory_are_flat_over_200_steps(tmp_path: Path) -> None:
    watched = run_watched(tmp_path, "amp", STEPS)
    steps = steps_of(tmp_path)
    assert len(steps) == STEPS
    series = {
        "host MiB": ([own / MIB for own, _, _ in watched], 48.0),
        "reward processes MiB": ([more / MIB for _, more, _ in watched], 24.0),
        "tensors MiB": ([gpu / MIB for *_, gpu in watched], 16.0),
        "peak MiB": ([step["mem/peak_gib"] * 1024 for step in steps], 64.0),
    }
    found = {name: (*early_and_late(values), most) for name, (values, most) in series.items()}
    for name, (early, late, _) in found.items():
        sys.stdout.write(f"{name}: {early:.0f} early, {late:.0f} late, highest {max(series[name][0]):.0f}\n")
    assert [name for name, (early, late, most) in found.items() if late > early + most] == []


@pytest.mark.parametrize("layers", [14])  # 8 GiB with the optimizer's states; the whole 1.5B is 28
def test_a_save_stalls_training_for_a_copy_only(layers: int, tmp_path: Path) -> None:
    options = json.dumps({"layers": layers, "folder": str(tmp_path)})
    done = shell.run(shell.torchrun("tests.dist.save_speed", options, ranks=1), shell.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(done.stdout)
    assert result["asynchronous_stall_s_per_gib"] < 0.75 * result["waiting_stall_s_per_gib"]
