"""Contract 1: loss, gradient norm and weights are the same on 1 and 2 ranks, in one and many microbatches."""

import json
from pathlib import Path

import pytest
import torch

from tests import shell
from tests.tiny import make_tiny

pytestmark = pytest.mark.dist


def run(folder: Path, name: str, *, ranks: int, max_tokens: int, **options: object) -> dict:
    out = folder / f"{name}.pt"
    words = json.dumps({"model": str(folder / "model"), "out": str(out), "max_tokens": max_tokens, **options})
    done = shell.run(shell.torchrun("tests.dist.policy_step", words, ranks=ranks), shell.ROOT)
    assert done.returncode == 0, done.stderr.split("torch.distributed.elastic")[0][-3000:]
    return torch.load(out)


def assert_same(a: dict, b: dict, *, tolerance: float = 1e-5) -> None:
    for one, two in zip(a["metrics"], b["metrics"], strict=True):
        for key in one.keys() - {"microbatches"}:
            assert one[key] == pytest.approx(two[key], rel=tolerance, abs=1e-6), key
    for name, weight in a["weights"].items():
        torch.testing.assert_close(weight, b["weights"][name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl"])
def test_ranks_and_microbatches_leave_the_step_unchanged(family, tmp_path):
    make_tiny(family, tmp_path / "model", tie=family == "qwen3")
    one = run(tmp_path, "one", ranks=1, max_tokens=10_000)
    assert one["metrics"][0]["microbatches"] == 2
    many = run(tmp_path, "many", ranks=1, max_tokens=30)
    assert many["metrics"][0]["microbatches"] > 2
    assert_same(one, many)
    # Home ranks alternate by group: in the second minibatch of the vision model no rank has a picture.
    assert_same(one, run(tmp_path, "two", ranks=2, max_tokens=30))


def test_a_rank_with_only_text_and_a_rank_without_trained_tokens(tmp_path):
    make_tiny("qwen2_5_vl", tmp_path / "model")
    # Groups 0 and 2: one rank samples the picture, the other the text; the whole group of the picture has no reward.
    options = {"failed": [0, 1, 2], "last_prompt": 0}
    one = run(tmp_path, "one", ranks=1, max_tokens=10_000, **options)
    two = run(tmp_path, "two", ranks=2, max_tokens=10_000, **options)
    assert_same(one, two)


def test_a_minibatch_without_any_reward_changes_nothing_but_decay(tmp_path):
    make_tiny("qwen2", tmp_path / "model")
    result = run(tmp_path, "none", ranks=2, max_tokens=10_000, failed=list(range(12)))
    assert result["metrics"][0]["loss/policy"] == 0
    assert result["metrics"][0]["policy/grad_norm"] == 0
    assert all(w.isfinite().all() for w in result["weights"].values())


def test_nan_gradient_on_one_rank_skips_the_step_on_all(tmp_path):
    make_tiny("qwen2", tmp_path / "model")
    result = run(tmp_path, "nan", ranks=2, max_tokens=10_000, nan_rank=1)
    assert [m["policy/skipped_steps"] for m in result["metrics"]] == [1, 0]
    assert all(w.isfinite().all() for w in result["weights"].values())
