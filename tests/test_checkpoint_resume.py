"""A run that was stopped, again and again, draws the rows of one that was not, and each of them once."""

from pathlib import Path

import pytest
import torch

from r1.checkpoint import TrainerState
from r1.checkpoint_state import counter_device
from tests.test_checkpoint import Trainee, make_checkpoints, make_config
from tests.test_data_loader import make_loader, text_rows
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("tiny"), tie=True)


def drawn_in_lives(tiny: Path, folder: Path, num_rows: int, stops: tuple[int, ...], per_step: int) -> list[list[int]]:
    """The rows of every draw of a run that ends and starts again, with nothing but its checkpoint, after each stop."""
    drawn, trainee = [], Trainee(tiny)
    for stop in stops:
        checkpoints = make_checkpoints(make_config(tiny, folder))
        loader = make_loader(folder / "data", text_rows(num_rows))
        state = checkpoints.resume(trainee) or TrainerState(step=0, policy_version=0)
        draws = per_step * stop
        drawn += [loader.rows_at(draw) for draw in range(state.draws + 1, draws + 1)]
        checkpoints.save(TrainerState(step=stop, policy_version=stop, draws=draws), trainee)
        checkpoints.finish()
    return drawn


@pytest.mark.parametrize("per_step", [1, 2])  # with dynamic sampling a step draws more than one batch
@pytest.mark.parametrize("num_rows", [12, 20, 11, 4])  # an epoch of 3, 5, 2 and 1 batches: stops in and at its end
def test_C03_stops_after_3_5_and_8_of_10_steps_draw_what_a_straight_run_draws(tiny, tmp_path, num_rows, per_step):
    loader = make_loader(tmp_path / "straight", text_rows(num_rows))
    straight = [loader.rows_at(draw) for draw in range(1, 10 * per_step + 1)]
    assert drawn_in_lives(tiny, tmp_path, num_rows, (3, 5, 8, 10), per_step) == straight


def test_C01_after_an_epochs_end_come_exactly_the_rows_of_the_next(tiny, tmp_path):
    # 64 rows, 4 a step: 16 steps an epoch.
    rows = drawn_in_lives(tiny, tmp_path, 64, (16, 32), 1)
    for epoch in (rows[:16], rows[16:]):
        assert len(epoch) == 16 and sorted(row for step in epoch for row in step) == list(range(64))
    assert rows[:16] != rows[16:]


def test_step_counts_of_a_fused_optimizer_load_onto_the_gpu_while_its_weights_are_in_host_memory(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    waiting = torch.zeros(2)  # a critic's, which is on the GPU only while it works
    assert counter_device({"fused": True}, waiting) == torch.device("cuda", 3)
    assert counter_device({"fused": False}, waiting) == torch.device("cpu")
