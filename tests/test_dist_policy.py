"""Contract 1: loss, gradient norm and weights are the same on 1 and 2 ranks, in one and many microbatches."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.loss import LOSSES
from tests import shell
from tests.tiny import make_tiny

pytestmark = pytest.mark.dist
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")

SPLIT: dict[str, dict[str, Any]] = {
    "text": {"family": "qwen3"},
    # Home ranks alternate by group: in the second minibatch no rank has a picture.
    "vision": {"family": "qwen2_5_vl"},
    "experts": {"family": "qwen3_moe"},
    "experts_vision": {"family": "qwen3_vl_moe"},
    # One rank has the picture and the other the text; the group with the picture has no reward.
    "untrained_picture": {"family": "qwen2_5_vl", "failed": [0, 1, 2], "last_prompt": 0},
    "full_kl": {"family": "qwen2_5_vl", "algorithm": {"kl_penalty": "full", "entropy_coef": 0.02}},
    "kl_in_reward": {"family": "qwen2", "algorithm": {"kl_in": "reward", "kl_penalty": "k1"}},
    "moving_reference": {"family": "qwen2", "algorithm": {"reference_update_steps": 1, "reference_polyak": 0.5}},
    "bypass": {"family": "qwen2", "algorithm": {"old_logprobs": "rollout"}},
    "sequence_truncate": {"family": "qwen2", "algorithm": {"correction": "sequence_truncate"}},
    "two_passes": {"family": "qwen2", "update": {"ppo_epochs": 2}, "algorithm": {"clip_low": 0.01, "clip_high": 0.01}},
    "scored_before": {
        "family": "qwen2",
        "update": {"ppo_epochs": 2},
        "algorithm": {"clip_low": 0.01, "clip_high": 0.01},
        "scored_before": True,
    },
    "on_policy": {"family": "qwen2", "update": {"global_batch_size": 4}, "scored_before": True},
    "masked": {"family": "qwen2", "algorithm": {"mask_truncated": True, "drop_tied_groups": True}},
}
SPLIT |= {
    f"{loss}-{aggregation}": {"family": "qwen2", "algorithm": {"loss": loss, "aggregation": aggregation}}
    for loss, aggregation in itertools.product(LOSSES, AGGREGATIONS)
}
SPLIT |= {f"advantage-{name}": {"family": "qwen2", "algorithm": {"advantage": name}} for name in ADVANTAGES}
OTHER: dict[str, dict[str, Any]] = {
    "no_rewards": {"family": "qwen2", "failed": list(range(12))},
    "nan": {"family": "qwen2", "nan_rank": 1},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("policy")
    families = ("qwen2", "qwen3", "qwen2_5_vl", "qwen3_moe", "qwen3_vl_moe")
    models = {f: str(make_tiny(f, folder / f, tie=f == "qwen3")) for f in families}
    results = {}
    for name, ranks, max_tokens in (("one", 1, 10_000), ("many", 1, 30), ("two", 2, 30)):
        plan = {
            "models": models,
            "max_tokens": max_tokens,
            "scenarios": SPLIT | (OTHER if ranks == 2 else {}),
            "out": str(folder / f"{name}.pt"),
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        command = shell.torchrun("tests.dist.policy_step", str(folder / "plan.json"), ranks=ranks)
        done = shell.run(command, shell.ROOT)
        assert done.returncode == 0, done.stderr.split("torch.distributed.elastic")[0][-3000:]
        results[name] = torch.load(Path(plan["out"]))
    return results


@pytest.mark.parametrize("split", ["many", "two"])
@pytest.mark.parametrize("name", SPLIT)
def test_a_split_leaves_the_steps_unchanged(name, split, runs):
    a, b = runs["one"][name], runs[split][name]
    few = 1 if name == "on_policy" else 2  # one for each minibatch
    assert a["metrics"][0]["microbatches"] == few < b["metrics"][0]["microbatches"] or split == "two"
    for one, two in zip(a["metrics"], b["metrics"], strict=True):
        for key in one.keys() - {"microbatches", "cut_pictures"}:
            assert one[key] == pytest.approx(two[key], rel=1e-5, abs=1e-6), key
    for key, weight in a["weights"].items():
        torch.testing.assert_close(weight, b["weights"][key], rtol=0, atol=1e-5, msg=key)


def test_a_minibatch_without_any_reward_changes_nothing(runs):
    result = runs["two"]["no_rewards"]
    assert result["metrics"][0]["loss/policy"] == 0
    assert result["metrics"][0]["policy/grad_norm"] == 0
    assert result["version"] == 0
    assert all(torch.equal(result["start"][name], weight) for name, weight in result["weights"].items())


def test_N04_nan_gradient_on_one_rank_skips_the_step_on_all(runs):
    result = runs["two"]["nan"]
    assert [m["policy/skipped_steps"] for m in result["metrics"]] == [1, 0]
    assert all(w.isfinite().all() for w in result["weights"].values())


@pytest.mark.parametrize("split", ["one", "two"])
def test_A20_a_second_pass_takes_the_same_rollouts(split, runs):
    once, twice = runs[split]["ppo-token_mean"], runs[split]["two_passes"]
    assert (once["version"], twice["version"]) == (2 * 2, 2 * 2 * 2)  # steps, minibatches, passes
    assert twice["metrics"][0]["microbatches"] == once["metrics"][0]["microbatches"]
    # Ratios are to the logprobs before the first pass, from which the second has moved.
    assert abs(twice["metrics"][0]["policy/kl_to_old"]) > abs(once["metrics"][0]["policy/kl_to_old"])


@pytest.mark.parametrize("split", ["one", "many", "two"])
def test_old_logprobs_that_the_first_update_makes_are_those_made_before_it(split, runs):
    deferred, before = runs[split]["two_passes"], runs[split]["scored_before"]
    assert deferred["metrics"] == [pytest.approx(metrics, rel=1e-5, abs=1e-7) for metrics in before["metrics"]]
    torch.testing.assert_close(deferred["weights"], before["weights"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("split", ["one", "many", "two"])
def test_N06_one_update_a_step_has_ratio_1_throughout(split, runs):
    for metrics in runs[split]["on_policy"]["metrics"]:
        assert abs(metrics["policy/kl_to_old"]) < 1e-6
        assert metrics["policy/clip_frac_low"] == metrics["policy/clip_frac_high"] == 0


@pytest.mark.parametrize("name", ["experts", "experts_vision"])
def test_load_of_experts_is_reported_for_each_layer(name, runs):
    for metrics in runs["two"][name]["metrics"]:
        for figure, even in (("max_share", 1 / 6), ("entropy", 1.0)):
            layers = [metrics[f"moe/layer_{number:02}/{figure}"] for number in range(2)]
            assert metrics[f"moe/{figure}"] == pytest.approx(sum(layers) / 2)
            assert all(even < value <= 0.5 if figure == "max_share" else 0.3 < value < even for value in layers)
    assert not any(key.startswith("moe/") for key in runs["two"]["text"]["metrics"][0])
