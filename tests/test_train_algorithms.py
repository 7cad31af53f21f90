"""Whole runs of the loop, on 1 and 2 ranks, of what a step of pure functions does not show: refill, critic, greedy."""

import json
from typing import Any

import pytest
import torch

from tests.shell import ROOT, run, torchrun
from tests.tiny import make_tiny

pytestmark = pytest.mark.dist
STEPS = 3
FILTER = {"filter_by": "mean", "filter_key": "accuracy", "filter_max_tries": 8}
OWN = str(ROOT / "tests" / "example_algorithm.py")
SCENARIOS: dict[str, dict[str, Any]] = {
    "filtered": {"reward": {"tied": "odd"}, "algorithm": FILTER},
    "hopeless": {"reward": {"tied": "all"}, "algorithm": FILTER | {"filter_max_tries": 3}},
    "remax": {"algorithm": {"advantage": "remax"}},
    "remax_seed_2": {"algorithm": {"advantage": "remax"}, "seed": 2},
    "ppo": {"reward": {"tied": "all"}, "algorithm": {"advantage": "gae", "critic_lr": 3e-3, "critic_warmup_steps": 1}},
    "own": {"algorithm": {"advantage": f"{OWN}:above_median", "loss": f"{OWN}:fading"}},
}
# A response is right by its own letters; but every response to a tied prompt is.
REWARD = """
def compute_score(reward_inputs, tied="none"):
    scores = []
    for x in reward_inputs:
        right = float(sum(map(ord, x["response"])) % 2)
        if tied == "all" or (tied == "odd" and x["index"] % 2):
            right = 1.0
        scores.append({"overall": right, "accuracy": right})
    return scores
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By the number of ranks: what rank 0 has recorded, with the metrics of every step; ranks agree on the error."""
    folder = tmp_path_factory.mktemp("algorithms")
    make_tiny("qwen2", folder / "model")
    rows = [{"problem": f"what is {i} + 1?", "answer": str(i + 1), "index": i} for i in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    results: dict[int, dict[str, Any]] = {}
    for ranks in (1, 2):
        out = folder / f"runs{ranks}"
        out.mkdir()
        plan = {"model": str(folder / "model"), "rows": str(folder / "rows.jsonl"), "runs": str(out), "steps": STEPS,
                "reward": f"{folder}/reward.py:compute_score", "scenarios": SCENARIOS}  # fmt: skip
        (folder / "plan.json").write_text(json.dumps(plan))
        done = run(torchrun("tests.dist.train_algorithms", str(folder / "plan.json"), ranks=ranks), ROOT)
        assert done.returncode == 0, done.stderr.split("torch.distributed.elastic")[0][-3000:]
        mine, *others = (torch.load(out / f"rank{rank}.pt") for rank in range(ranks))
        for name, result in mine.items():
            assert all(other[name]["error"] == result["error"] for other in others)
            lines = out / name / "metrics.jsonl"
            rows_of = lines.read_text().splitlines() if lines.exists() else []
            result["metrics"] = [json.loads(line) for line in rows_of]
        results[ranks] = mine
    return results


def test_dynamic_sampling_fills_every_batch_with_groups_that_teach(runs):
    result = runs[2]["filtered"]
    assert not result["error"] and len(result["steps"]) == STEPS
    for step, metrics in zip(result["steps"], result["metrics"], strict=True):
        assert step["rewards"].shape == (8, 4)
        assert all(0 < mean < 1 for mean in step["rewards"].mean(1).tolist())
        assert metrics["reward/zero_std_frac"] == 0 and metrics["rollout/groups_drawn"] >= 8


def test_dynamic_sampling_refills_alike_on_any_number_of_ranks(runs):
    one, two = runs[1]["filtered"], runs[2]["filtered"]
    for a, b in zip(one["steps"], two["steps"], strict=True):
        assert torch.equal(a["rewards"], b["rewards"])
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        assert a["policy/grad_norm"] == pytest.approx(b["policy/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_A17_dynamic_sampling_that_never_fills_stops_with_the_counts(ranks, runs):
    result = runs[ranks]["hopeless"]
    assert "kept 0 of 24 groups in algorithm.filter_max_tries=3 batches, and 8 are needed" in result["error"]
    assert not result["steps"]


def test_remax_subtracts_the_reward_of_a_greedy_response(runs):
    one, other = runs[2]["remax"]["steps"][0], runs[2]["remax_seed_2"]["steps"][0]
    assert not torch.equal(one["rewards"], other["rewards"])  # sampled with another seed
    assert torch.equal(one["baselines"], other["baselines"])  # greedy, before the first update
    assert set(one["baselines"].tolist()) <= {0.0, 1.0}
    torch.testing.assert_close(one["advantages"], one["rewards"] - one["baselines"][:, None])
    assert torch.equal(one["baselines"], runs[1]["remax"]["steps"][0]["baselines"])
    assert all(m["policy/grad_norm"] > 0 for m in runs[2]["remax"]["metrics"])


def test_the_critic_learns_alone_first_and_both_learn_after(runs):
    for ranks in (1, 2):
        first, *later = runs[ranks]["ppo"]["metrics"]
        # The value head starts at 0 and every return is 1: (0 - 1)^2 / 2.
        assert first["critic/loss"] == pytest.approx(0.5, abs=1e-6)
        assert first["critic/grad_norm"] > 0 and "policy/grad_norm" not in first
        assert all("policy/grad_norm" in m for m in later)
        assert later[-1]["critic/loss"] < first["critic/loss"] / 2
    for a, b in zip(runs[1]["ppo"]["metrics"], runs[2]["ppo"]["metrics"], strict=True):
        assert a["critic/loss"] == pytest.approx(b["critic/loss"], rel=1e-3)


def test_an_advantage_and_a_loss_from_a_users_file_train(runs):
    metrics = runs[2]["own"]["metrics"]
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert all(m["policy/grad_norm"] > 0 for m in metrics)
    for a, b in zip(runs[1]["own"]["metrics"], metrics, strict=True):
        assert a["policy/grad_norm"] == pytest.approx(b["policy/grad_norm"], rel=1e-3)
