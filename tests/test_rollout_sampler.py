"""Dynamic sampling: batches are drawn until one is full of groups that teach something, or the run stops."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.groups import set_advantages, valid_tokens
from r1.config import AlgorithmConfig, Config, DataConfig, RolloutConfig, UpdateConfig
from r1.rollout.engines import ENGINES
from r1.rollout.sampler import Batch, Sampler
from r1.types import Rollout

N = 2


def make_sampler(draws: list[list[list[float | None]]], monkeypatch: pytest.MonkeyPatch, **algorithm: Any) -> Sampler:
    """A sampler whose draw i has these rewards, by group and sample; the last draw is repeated."""
    size = len(draws[0])
    config = Config(
        data=DataConfig(rollout_batch_size=size),
        rollout=RolloutConfig(n=N),
        update=UpdateConfig(global_batch_size=size),
        algorithm=AlgorithmConfig(**{"filter_by": "mean", **algorithm}),
    )
    monkeypatch.setitem(ENGINES, config.rollout.engine, MagicMock())
    sampler = Sampler(config, MagicMock(), MagicMock(), MagicMock(), MagicMock(), None)

    def draw(self: Sampler, loader: object) -> Batch:
        self.draws += 1
        rewards = draws[min(self.draws, len(draws)) - 1]
        rollouts = [
            Rollout(group=g, sample=s, prompt_ids=[1], response_ids=[2] * (g + 1), rollout_logprobs=[0.0] * (g + 1),
                    truncated=False, reward=r, rewards=None if r is None else {"overall": r, "accuracy": r})
            for g, row in enumerate(rewards)
            for s, r in enumerate(row)
        ]  # fmt: skip
        rows = [100 * self.draws + g for g in range(size)]
        return Batch(rows=rows, rollouts=rollouts, homes=[0] * len(rollouts), local=rollouts[:N], pending=[])

    monkeypatch.setattr(Sampler, "_draw", draw)
    return sampler


LOADER: Any = SimpleNamespace(num_rows=1000, prefetch=lambda *_, **__: None)


@pytest.mark.parametrize(
    ("row", "algorithm"),
    [
        ([1.0, 1.0], {}),
        ([0.0, 0.0], {}),
        ([1.0, 1.0], {"filter_by": "std"}),
        ([1.0, 1.0], {"filter_key": "accuracy"}),
        ([None, None], {}),
    ],
)
def test_A17_a_filter_that_nothing_passes_stops_the_run_with_the_counts(row, algorithm, monkeypatch):
    sampler = make_sampler([[row] * 8], monkeypatch, filter_max_tries=3, **algorithm)
    with pytest.raises(ValueError, match=r"kept 0 of 24 groups in algorithm\.filter_max_tries=3 batches, and 8 are"):
        sampler.sample(LOADER)
    assert sampler.draws == 3


def test_A17_a_batch_that_stays_short_stops_the_run_as_well(monkeypatch):
    sampler = make_sampler([[[1.0, 0.0]] * 2 + [[1.0, 1.0]] * 6], monkeypatch, filter_max_tries=3)
    with pytest.raises(ValueError, match="kept 6 of 24 groups"):
        sampler.sample(LOADER)


def test_A17_a_wrong_key_is_named_at_once(monkeypatch):
    sampler = make_sampler([[[1.0, 0.0]]], monkeypatch, filter_key="acuracy")
    with pytest.raises(
        ValueError, match=r"filter_key='acuracy' is not among the reward's keys \['accuracy', 'overall'"
    ):
        sampler.sample(LOADER)
    assert sampler.draws == 1


def test_A18_a_filtered_batch_is_refilled_and_weighed_by_what_it_holds(monkeypatch):
    good, easy, hard = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]
    first = [easy, good, hard, good, easy, easy, hard, good]  # 5 of 8 filtered
    second = [good, [None, 1.0], [None, 0.5], easy, easy, good, hard, good]
    sampler = make_sampler([first, second, [good] * 8], monkeypatch)
    batch = sampler.sample(LOADER)
    assert sampler.draws == 3  # 3 + 4 + the first of 8
    assert batch.rows == [101, 103, 107, 200, 202, 205, 207, 300]
    assert [(r.group, r.sample) for r in batch.rollouts] == [(g, s) for g in range(8) for s in range(N)]
    assert len(batch.homes) == 16
    # The divisor is the count of what is trained: 8 groups less the response that has no reward.
    config = sampler.config
    set_advantages(batch.rollouts, ADVANTAGES["grpo"], config)
    trained = sum(len(r.response_ids) for r in batch.rollouts if r.reward is not None)
    assert valid_tokens(batch.rollouts, config) == [trained]
    assert sum(r.weight * len(r.response_ids) for r in batch.rollouts) == pytest.approx(1.0)


def test_A18_without_a_filter_every_group_is_taken_as_drawn(monkeypatch):
    sampler = make_sampler([[[1.0, 1.0], [1.0, 0.0]]], monkeypatch, filter_by="off")
    batch = sampler.sample(LOADER)
    assert (sampler.draws, batch.rows) == (1, [100, 101])
    set_advantages(batch.rollouts, ADVANTAGES["grpo"], sampler.config)
    assert batch.rollouts[0].advantages.abs().max() == 0 and batch.rollouts[2].advantages.abs().max() > 0


def test_a_validation_between_steps_adds_nothing_to_the_next_steps_times(monkeypatch):
    sampler = make_sampler([[[1.0, 0.0]]], monkeypatch, filter_by="off")
    with sampler.awake():
        pass
    batch = sampler.sample(LOADER)
    assert sampler.take_metrics(batch).keys() == {"rollout/groups_drawn", "engine/sleep_s"}
    with sampler.awake():
        pass
    assert sampler.take_metrics(batch).keys() == {"rollout/groups_drawn"}
