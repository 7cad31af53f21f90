"""What a run ran on is kept with each start, without secrets."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from r1.loggers_environment import commit, write_environment
from r1.parallel import Ranks


def ranks_of(world_size: int) -> Ranks:
    mesh = cast(Any, None)
    return Ranks(
        rank=0, world_size=world_size, local_rank=0, local_world_size=world_size, tensor_parallel_size=1,
        device=torch.device("cpu"), mesh=mesh,
    )  # fmt: skip


def test_each_start_of_a_run_is_an_entry_and_a_new_run_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "environment.json"
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    write_environment(path, ranks_of(2), num_steps=10, start=0)
    write_environment(path, ranks_of(4), num_steps=10, start=6)
    starts = json.loads(path.read_text())
    assert [(s["world_size"], s["start_after_step"], s["num_steps"]) for s in starts] == [(2, 0, 10), (4, 6, 10)]
    assert starts[0]["packages"]["torch"] == torch.__version__ and starts[0]["device"].startswith("cpu")
    assert starts[0]["variables"]["NCCL_DEBUG"] == "WARN" and "hush" not in path.read_text()
    write_environment(path, ranks_of(1), num_steps=3, start=0)
    assert [s["num_steps"] for s in json.loads(path.read_text())] == [3]


def test_code_outside_of_a_repository_has_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
