"""Sequence parallelism and sharding inside a node: the same loss, gradient norm and weights as on one rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from r1.policy.sequence_parallel import head_shares, share_frames
from tests import shell
from tests.test_train import write_run
from tests.tiny import make_config, make_tiny, randomize

SCENARIOS: dict[str, dict[str, Any]] = {
    # A ratio over whole responses, which lie across the cuts; 2 heads, so that two of four ranks have none.
    "text": {"family": "qwen2", "algorithm": {"loss": "gspo"}},
    "tied": {"family": "qwen3"},
    "uneven_heads": {"family": "heads"},
    "experts": {"family": "qwen3_moe"},
    "vision": {"family": "qwen2_5_vl"},
    "no_picture_in_a_minibatch": {"family": "qwen2_vl", "failed": [0, 1, 2]},
    "deepstack": {"family": "qwen3_vl", "last_prompt": 1},
    "full_kl": {"family": "qwen2_5_vl", "algorithm": {"kl_penalty": "full", "entropy_coef": 0.02}},
    "critic": {"family": "qwen3_vl", "algorithm": {"advantage": "gae", "kl_in": "reward", "kl_penalty": "k1"}},
    "lora": {"family": "qwen3_vl", "lora": {"rank": 2, "alpha": 4.0, "parts": ["language", "vision"]}},
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "two": (2, {"sequence_parallel_size": 2}),
    "four": (4, {"sequence_parallel_size": 4}),
    "two_groups_sharded_in_pairs": (4, {"sequence_parallel_size": 2, "fsdp_size": 2}),
    "four_sharded_in_pairs": (4, {"fsdp_size": 2}),
}


def make_heads(folder: Path) -> Path:
    """A model whose 10 query heads, two to a key head, do not divide over 4 ranks."""
    config = make_config("qwen2")
    config.num_attention_heads, config.num_key_value_heads, config.hidden_size = 10, 5, 160
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed=0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sequence")
    families = {s["family"] for s in SCENARIOS.values()} - {"heads"}
    models = {f: str(make_tiny(f, folder / f, tie=f == "qwen3")) for f in families}
    models["heads"] = str(make_heads(folder / "heads"))
    results = {}
    for name, (ranks, parallel) in LAYOUTS.items():
        wanted = SCENARIOS if name in ("one", "two", "four") else {n: SCENARIOS[n] for n in ("text", "deepstack")}
        plan = {"models": models, "scenarios": wanted, "parallel": parallel, "out": str(folder / f"{name}.pt")}
        plan["max_tokens"] = 10_000 if ranks == 1 else -(-30 // parallel.get("sequence_parallel_size", 1))
        (folder / "plan.json").write_text(json.dumps(plan))
        command = shell.torchrun("tests.dist.policy_step", str(folder / "plan.json"), ranks=ranks)
        done = shell.run(command, shell.ROOT)
        assert done.returncode == 0, done.stderr.split("torch.distributed.elastic")[0][-3000:]
        results[name] = torch.load(Path(plan["out"]))
    return results


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "name"),
    [(layout, name) for layout in ("two", "four") for name in SCENARIOS]
    + [(layout, name) for layout in LAYOUTS if "pairs" in layout for name in ("text", "deepstack")],
)
def test_a_layout_leaves_the_steps_unchanged(layout, name, runs):
    a, b = runs["one"][name], runs[layout][name]
    assert a["metrics"][0].keys() == b["metrics"][0].keys()
    for one, several in zip(a["metrics"], b["metrics"], strict=True):
        for key in one.keys() - {"microbatches", "cut_pictures"}:
            assert one[key] == pytest.approx(several[key], rel=1e-5, abs=1e-6), key
    for key, weight in a["weights"].items():
        torch.testing.assert_close(weight, b["weights"][key], rtol=0, atol=1e-5, msg=key)


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["two", "four"])
@pytest.mark.parametrize("name", ["vision", "deepstack", "full_kl"])
def test_pictures_lie_across_the_cuts(layout, name, runs):
    assert runs[layout][name]["metrics"][0]["cut_pictures"] > 0


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_halve_the_memory_of_a_response_of_32k_tokens(tmp_path):
    config = make_config("qwen3")
    config.num_hidden_layers, config.layer_types, config.max_position_embeddings = 1, config.layer_types[:1], 40_000
    # Wide where a token costs memory, narrow where attention costs time.
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 2048, 16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed=0)
    model.save_pretrained(tmp_path / "model")
    results = {}
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        words = (str(out), str(tmp_path / "model"), "32768")
        done = shell.run(shell.torchrun("tests.dist.sequence_memory", *words, ranks=ranks), shell.ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        results[ranks] = json.loads(out.read_text())
    one, two = (max(rank["extra_gib"] for rank in results[n]["ranks"]) for n in (1, 2))
    assert one > 1 and two < 0.6 * one  # seen: 1.74 and 0.88 GiB
    for key in ("policy/grad_norm", "loss/policy", "policy/entropy"):
        assert results[2]["metrics"][key] == pytest.approx(results[1]["metrics"][key], rel=1e-5)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "amp"])
def test_a_run_is_the_same_with_shared_microbatches(precision, tmp_path):
    write_run(tmp_path, "qwen3_vl")
    words = ["--config", str(tmp_path / "config.py"), "--rollout.engine", "hf", "--model.precision", precision]
    words += ["--trainer.max_steps", "2", "--trainer.val_freq", "-1", "--update.max_tokens_per_microbatch", "256"]
    words += ["--optim.eps", "0.01"]  # else Adam makes whole steps of gradients that are rounding
    lines = []
    for size in ("1", "2"):
        own = ["--parallel.sequence_parallel_size", size, "--trainer.experiment_name", size]
        done = shell.run(shell.torchrun("r1.train", *words, *own, ranks=2), shell.ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        lines.append([json.loads(line) for line in (tmp_path / f"runs/{size}/metrics.jsonl").read_text().splitlines()])
    # In bfloat16 rounding moves the first update and so what is sampled next.
    steps, rel = (3, 1e-5) if precision == "float32" else (2, 0.02)
    for one, two in zip(lines[0][:steps], lines[1][:steps], strict=True):
        assert one.keys() == two.keys()
        for key in one.keys() & {"policy/grad_norm", "policy/entropy", "reward/mean", "response/length_mean"}:
            assert one[key] == pytest.approx(two[key], rel=rel), key


def test_query_heads_are_shared_evenly_and_key_heads_go_where_they_are_needed():
    assert head_shares(28, 4, 2) == [(slice(0, 14), slice(0, 2)), (slice(14, 28), slice(2, 4))]
    # Fewer key heads than ranks: a pair of ranks has the same one.
    assert head_shares(16, 2, 4) == [
        (slice(0, 4), slice(0, 1)),
        (slice(4, 8), slice(0, 1)),
        (slice(8, 12), slice(1, 2)),
        (slice(12, 16), slice(1, 2)),
    ]
    # Unequal shares, one of which has queries of a key head in part.
    assert head_shares(10, 5, 4)[1] == (slice(2, 5), slice(1, 3))
    assert [heads.stop - heads.start for heads, _ in head_shares(2, 1, 4)] == [0, 1, 0, 1]


def test_frames_are_shared_by_patches_in_order():
    assert share_frames([4, 4, 4, 4], 2) == [slice(0, 2), slice(2, 4)]
    assert share_frames([10, 1, 1, 1], 2) == [slice(0, 1), slice(1, 4)]
    assert share_frames([7], 2) == [slice(0, 0), slice(0, 1)]
