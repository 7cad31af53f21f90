import math
from pathlib import Path

import pytest
import torch

from r1.algorithms.advantage import ADVANTAGES, discounted_returns, gae_returns, grpo, tied_groups
from r1.algorithms.groups import keeps_group, minibatches_of, next_kl_coef, set_advantages, valid_tokens
from r1.algorithms.named import function_of
from r1.algorithms.scores import Scores, scores_of
from r1.config import AlgorithmConfig, Config, DataConfig, RolloutConfig, UpdateConfig
from r1.types import Rollout

GRPO = AlgorithmConfig()
NAN = float("nan")


def scores(rewards, lengths=None, **extra) -> Scores:
    rewards = torch.tensor(rewards, dtype=torch.float32)
    lengths = torch.ones_like(rewards, dtype=torch.int64) if lengths is None else torch.tensor(lengths)
    return Scores(rewards=rewards, lengths=lengths, **extra)


def rollouts(rewards, lengths, truncated=()) -> list[Rollout]:
    return [
        Rollout(group=g, sample=s, prompt_ids=[1], response_ids=[2] * lengths[g][s],
                rollout_logprobs=[0.0] * lengths[g][s], truncated=(g, s) in truncated, reward=r)
        for g, row in enumerate(rewards)
        for s, r in enumerate(row)
    ]  # fmt: skip


def config(n: int, groups: int = 1, **algorithm) -> Config:
    return Config(
        data=DataConfig(max_response_length=10, rollout_batch_size=groups),
        rollout=RolloutConfig(n=n),
        algorithm=AlgorithmConfig(**algorithm),
        update=UpdateConfig(global_batch_size=groups),
    )


def test_A01_groups_are_normalized_alone_with_the_sample_deviation():
    got = grpo(scores([[1.0, 0.0], [1.0, 1.0]]), GRPO)
    torch.testing.assert_close(got, torch.tensor([[0.7071, -0.7071], [0.0, 0.0]]), atol=1e-4, rtol=0)


def test_A01_prompts_are_told_apart_by_their_group_not_by_their_place():
    # Rewards of another prompt change nothing, and the order of groups is theirs.
    alone = grpo(scores([[1.0, 0.0, 0.0]]), GRPO)
    beside = grpo(scores([[5.0, 5.0, 4.0], [1.0, 0.0, 0.0]]), GRPO)
    assert torch.equal(beside[1:], alone)
    items = rollouts([[1.0, 0.0], [1.0, 1.0]], [[1, 2], [3, 1]])
    set_advantages(items, grpo, config(2, groups=2))
    assert [r.advantages.tolist()[0] for r in items] == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-4)


def test_A21_advantages_are_normalized_once():
    got = grpo(scores([[1.0, 0.0, 0.0, 1.0]]), GRPO)
    std = math.sqrt(4 * 0.25 / 3)
    assert got.flatten().tolist() == pytest.approx([0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std], rel=1e-4)


def test_A21_four_rewards_share_one_mean():
    got = grpo(scores([[1.0, 0.0, 0.0, 1.0]]), AlgorithmConfig(advantage_std="none"))
    assert got.tolist() == [[0.5, -0.5, -0.5, 0.5]]


@pytest.mark.parametrize("name", ["grpo", "rloo", "passk", "reinforce_plus_plus_baseline"])
def test_a_tied_group_teaches_nothing(name):
    got = ADVANTAGES[name](scores([[0.7] * 8]), GRPO)
    assert got.abs().max() == 0
    assert tied_groups(torch.tensor([[0.7, 0.7, NAN], [0.0, 1.0, NAN]])).tolist() == [True, False]


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_A04_group_of_one_is_zero_not_nan(std):
    c = AlgorithmConfig(advantage_std=std)
    assert grpo(scores([[1.0], [NAN]]), c).tolist() == [[0.0], [0.0]]
    assert grpo(scores([[1.0]]), c).tolist() == [[0.0]]
    # As much where failed rewards have left one of its group.
    assert grpo(scores([[NAN, 1.0, NAN]]), c).tolist() == [[0.0, 0.0, 0.0]]
    assert ADVANTAGES["rloo"](scores([[NAN, 1.0]]), c).tolist() == [[0.0, 0.0]]


def test_A04_a_run_of_groups_of_one_is_refused_where_it_would_learn_nothing():
    with pytest.raises(ValueError, match=r"rollout\.n=1 gives every response an advantage of 0"):
        config(1, advantage="rloo")
    assert config(1, advantage="reinforce_plus_plus").rollout.n == 1


def test_R11_missing_reward_leaves_the_group_statistics():
    got = grpo(scores([[1.0, 0.0, NAN, 1.0]]), AlgorithmConfig(advantage_std="none"))
    torch.testing.assert_close(got, torch.tensor([[1 / 3, -2 / 3, 0.0, 1 / 3]]))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_A07_a_reply_without_tokens_moves_no_baseline(name):
    # Reward 100 for nothing, 1 for two tokens: alone in its group, the second teaches nothing (and never -49.5).
    items = rollouts([[100.0, 1.0], [0.0, 1.0]], [[0, 2], [3, 1]])
    for rollout, value in zip(items, (0.0, 0.5, 0.25, 0.0), strict=True):
        rollout.baseline, rollout.values = 1.0, torch.full((len(rollout.response_ids),), value)
    c = config(2, groups=2)
    set_advantages(items, ADVANTAGES[name], c)
    assert [len(r.advantages) for r in items] == [0, 2, 3, 1]
    assert all(r.advantages.isfinite().all() and r.advantages.abs().max() < 3 for r in items[1:])
    assert items[0].weight == 0 and valid_tokens(items, c) == [6]
    if name in ("grpo", "rloo", "passk", "remax"):
        assert items[1].advantages.tolist() == [0.0, 0.0]


def test_A07_short_and_long_replies_count_once_each_in_the_baseline():
    got = grpo(scores([[1.0, 0.0]], [[1, 100]]), AlgorithmConfig(advantage_std="none"))
    assert got.tolist() == [[0.5, -0.5]]


def test_batch_deviation_by_hand():
    got = grpo(scores([[1.0, 0.0], [3.0, 1.0]]), AlgorithmConfig(advantage_std="batch"))
    std = torch.tensor([1.0, 0.0, 3.0, 1.0]).std().item()
    assert got.flatten().tolist() == pytest.approx([0.5 / std, -0.5 / std, 1 / std, -1 / std], rel=1e-4)


def test_rloo_by_hand():
    got = ADVANTAGES["rloo"](scores([[3.0, 0.0, 0.0], [1.0, NAN, 0.0]]), GRPO)
    assert got.flatten().tolist() == pytest.approx([3.0, -1.5, -1.5, 1.0, 0.0, -1.0])


def test_passk_credits_the_best_by_its_lead():
    got = ADVANTAGES["passk"](scores([[1.0, 0.0, 0.5], [NAN, NAN, 1.0]]), GRPO)
    assert got[0].tolist() == pytest.approx([0.5 / 0.5, 0.0, 0.0], rel=1e-4)
    assert got[1].tolist() == [0.0, 0.0, 0.0]


def test_remax_by_hand():
    got = ADVANTAGES["remax"](scores([[1.0, 0.0], [1.0, 0.5]], baselines=torch.tensor([0.25, NAN])), GRPO)
    assert got.tolist() == [[0.75, -0.25], [0.0, 0.0]]


def test_discounted_returns_by_hand():
    s = scores([[0.0, 0.0]], [[3, 2]])
    tokens = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert discounted_returns(tokens, s, 0.5).tolist() == [1 + 1 + 1, 2 + 2, 4, 8 + 8, 16]
    assert discounted_returns(tokens, s, 1.0).tolist() == [7, 6, 4, 24, 16]


def test_reinforce_plus_plus_whitens_token_returns_with_penalties():
    penalties = torch.tensor([0.5, 0.0, 0.25])
    s = scores([[1.0 - 0.5, 0.0 - 0.25]], [[2, 1]], penalties=penalties)
    assert s.token_rewards().tolist() == [-0.5, 1.0, -0.25]
    returns = torch.tensor([0.5, 1.0, -0.25])
    expected = (returns - returns.mean()) / returns.std()
    got = ADVANTAGES["reinforce_plus_plus"](s, GRPO)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_reinforce_plus_plus_baseline_by_hand():
    got = ADVANTAGES["reinforce_plus_plus_baseline"](scores([[1.0, 0.0]], [[3, 1]]), GRPO)
    centred = torch.tensor([0.5, 0.5, 0.5, -0.5])
    torch.testing.assert_close(got, (centred - centred.mean()) / centred.std(), atol=1e-5, rtol=0)


def test_gae_matches_a_float64_loop():
    g = torch.Generator().manual_seed(0)
    lengths = [[4, 1], [3, 6]]
    values, gamma, lam = torch.randn(14, generator=g), 0.9, 0.8
    s = scores([[1.0, -1.0], [0.5, 2.0]], lengths, values=values)
    advantages, returns = gae_returns(s, gamma, lam)
    at, flat = 0, [4, 1, 3, 6]
    for length, reward in zip(flat, s.rewards.flatten().tolist(), strict=True):
        v = [*values[at : at + length].double().tolist(), 0.0]
        running = 0.0
        for t in reversed(range(length)):
            r = reward if t == length - 1 else 0.0
            running = r + gamma * v[t + 1] - v[t] + gamma * lam * running
            assert advantages[at + t].item() == pytest.approx(running, rel=1e-5, abs=1e-6)
            assert returns[at + t].item() == pytest.approx(running + v[t], rel=1e-5, abs=1e-6)
        at += length


def test_token_mean_weights_and_counts_are_over_trained_tokens():
    items = rollouts([[1.0, 0.0], [None, 1.0]], [[2, 3], [5, 5]])
    c = config(2, groups=2)
    set_advantages(items, grpo, c)
    assert [r.weight for r in items] == [1 / 10, 1 / 10, 0.0, 1 / 10]
    assert valid_tokens(items, c) == [10]
    assert items[0].advantages.tolist() == pytest.approx([0.7071] * 2, abs=1e-4)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean_token_mean", [1 / (2 * 2), 1 / (2 * 4)]),
        ("sequence_mean_token_sum", [1 / (2 * 10), 1 / (2 * 10)]),
    ],
)
def test_aggregation_weights_by_hand(aggregation, expected):
    items = rollouts([[1.0, 0.0]], [[2, 4]])
    set_advantages(items, grpo, config(2, aggregation=aggregation))
    assert [r.weight for r in items] == expected


def test_truncated_responses_and_tied_groups_can_be_left_out():
    make = lambda: rollouts([[1.0, 0.0], [1.0, 1.0]], [[2, 2], [2, 2]], truncated={(0, 1)})  # noqa: E731
    items = make()
    set_advantages(items, grpo, config(2, groups=2, mask_truncated=True))
    assert [r.weight > 0 for r in items] == [True, False, True, True]
    items = make()
    set_advantages(items, grpo, config(2, groups=2, drop_tied_groups=True))
    assert [r.weight > 0 for r in items] == [True, True, False, False]


def test_A14_nothing_left_to_train_is_legal():
    items = rollouts([[1.0, 0.0]], [[2, 2]], truncated={(0, 0), (0, 1)})
    c = config(2, mask_truncated=True)
    set_advantages(items, grpo, c)
    assert valid_tokens(items, c) == [0] and [r.weight for r in items] == [0, 0]


def test_A20_minibatches_are_consecutive_groups():
    items = rollouts([[1.0, 0.0]] * 4, [[1, 1]] * 4)
    c = Config(
        data=DataConfig(rollout_batch_size=4), rollout=RolloutConfig(n=2), update=UpdateConfig(global_batch_size=2)
    )
    assert [[r.group for r in part] for part in minibatches_of(items, c)] == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_A03_a_leftover_tail_is_refused():
    with pytest.raises(AssertionError, match="not a multiple"):
        scores_of(rollouts([[1.0, 2.0, 3.0]], [[1, 1, 1]]), 2)


def test_adaptive_kl_moves_toward_its_target():
    c = AlgorithmConfig(kl_target=0.1, kl_horizon=1000)
    assert next_kl_coef(0.5, 0.2, 100, c) == pytest.approx(0.5 * (1 + 0.2 * 0.1))
    assert next_kl_coef(0.5, 0.09, 100, c) == pytest.approx(0.5 * (1 - 0.1 * 0.1))
    assert next_kl_coef(0.5, 0.2, 100, GRPO) == 0.5
    assert next_kl_coef(0.5, math.nan, 100, c) == 0.5


def test_dynamic_sampling_bounds_are_strict():
    c = AlgorithmConfig(filter_by="mean", filter_key="accuracy", filter_low=0.0, filter_high=1.0)
    keep = lambda *xs: keeps_group([None if x is None else {"accuracy": x} for x in xs], c)  # noqa: E731
    assert keep(1.0, 0.0) and not keep(1.0, 1.0) and not keep(0.0, 0.0) and not keep(None, None)
    by_std = AlgorithmConfig(filter_by="std", filter_low=0.1, filter_high=9.0)
    assert keeps_group([{"overall": 1.0}, {"overall": 0.0}], by_std)
    assert not keeps_group([{"overall": 1.0}, {"overall": 1.0}], by_std)
    with pytest.raises(ValueError, match="'accuracy' is not among the reward's keys"):
        keeps_group([{"overall": 1.0}], c)


def test_names_and_files_resolve_and_mistakes_name_the_nearest(tmp_path: Path):
    assert function_of("grpo", ADVANTAGES, option="algorithm.advantage") is grpo
    with pytest.raises(ValueError, match=r"algorithm\.advantage='grppo' is not known; did you mean 'grpo'"):
        function_of("grppo", ADVANTAGES, option="algorithm.advantage")
    with pytest.raises(ValueError, match="no file"):
        function_of("absent.py:f", ADVANTAGES, option="algorithm.advantage")
    path = tmp_path / "mine.py"
    path.write_text("def lead(scores, config):\n    return scores.rewards - scores.rewards.mean(1, keepdim=True)\n")
    own = function_of(f"{path}:lead", ADVANTAGES, option="algorithm.advantage")
    assert own(scores([[1.0, 0.0]]), GRPO).tolist() == [[0.5, -0.5]]
    with pytest.raises(ValueError, match="has no function 'other'"):
        function_of(f"{path}:other", ADVANTAGES, option="algorithm.advantage")
