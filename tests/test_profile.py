"""Chosen steps of a loop leave a trace in the run folder, on the ranks that were asked."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from r1.config import Config, TrainerConfig
from r1.profile import profiled


def loop(folder: Path, *, rank: int = 0, stop: int = 99) -> list[int]:
    trainer = TrainerConfig(output_dir=str(folder), experiment_name="run", profile_steps=(2, 4), profile_ranks=(0, 3))
    ranks: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    seen = []
    for step in profiled(range(1, 6), Config(trainer=trainer), ranks):
        torch.ones(7, 7) @ torch.ones(7, 7)
        seen.append(step)
        if step == stop:
            break
    return seen


def test_chosen_steps_leave_a_trace_of_what_ran(tmp_path: Path) -> None:
    assert loop(tmp_path, rank=3) == [1, 2, 3, 4, 5]
    found = sorted(p.name for p in (tmp_path / "run" / "profile").iterdir())
    assert found == ["step_000002_rank3.json.gz", "step_000004_rank3.json.gz"]
    with gzip.open(tmp_path / "run" / "profile" / found[0]) as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 1


def test_a_loop_that_breaks_in_a_chosen_step_still_writes_it(tmp_path: Path) -> None:
    loop(tmp_path, stop=2)
    assert [p.name for p in (tmp_path / "run" / "profile").iterdir()] == ["step_000002_rank0.json.gz"]


def test_other_ranks_and_steps_cost_nothing(tmp_path: Path) -> None:
    loop(tmp_path, rank=1)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="counts from 1, got 0"):
        TrainerConfig(profile_steps=(0, 3))
