"""The policy that samples is the policy that trains: vLLM after a weight sync against transformers, for each family."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

PROBE = Path(__file__).with_name("vllm_probe.py")
MODELS = (
    "llama3",
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "qwen3_moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl-tied",
    "qwen3_vl_moe",
)
TOLERANCE = 1e-4  # nats, float32


def run_probe(launcher: list[str], *arguments: str, out: Path) -> dict[str, Any]:
    task, *rest = arguments
    paths = [str(PROBE.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(PROBE), task, str(out), *rest]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_probe([], "parity", *MODELS, out=tmp_path_factory.mktemp("parity") / "out.json")


def largest_gap(left: list[list[float]], right: list[list[float]]) -> float:
    return max(abs(a - b) for p, q in zip(left, right, strict=True) for a, b in zip(p, q, strict=True))


def pick(rollouts: list[dict[str, Any]], name: str) -> list[Any]:
    return [rollout[name] for rollout in rollouts]


def by_owner(rollouts: list[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    return {(rollout["group"], rollout["sample"]): rollout["response_ids"] for rollout in rollouts}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs_equal_transformers_after_each_sync(probes, name):
    # The same prompts twice, text and pictures: keys or picture features kept from the first weights would show.
    for ours, theirs in zip(probes[name]["greedy"], probes[name]["reference"], strict=True):
        assert len(ours) == (4 if name.removesuffix("-tied") in tiny.VISION_FAMILIES else 2)
        assert pick(ours, "response_ids") == pick(theirs, "response_ids")
        assert pick(ours, "truncated") == pick(theirs, "truncated")
        assert largest_gap(pick(ours, "rollout_logprobs"), pick(theirs, "rollout_logprobs")) < TOLERANCE
    first, second = probes[name]["greedy"]
    assert all(a != b for a, b in zip(pick(first, "response_ids"), pick(second, "response_ids"), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_samples_differ_within_a_group_and_repeat_with_their_seed(probes, name):
    result = probes[name]
    samples = by_owner(result["sampled"])
    assert [(r["group"], r["sample"]) for r in result["sampled"][:5]] == [(10, 0), (10, 1), (10, 2), (10, 3), (11, 0)]
    assert len(set(map(tuple, samples.values()))) == len(samples)
    # The second call had the prompts in reverse order: a request's seed is its own, whatever the batch.
    assert by_owner(result["sampled_again"]) == samples
    other = by_owner(result["sampled_other_seed"])
    assert all(other[owner] != response for owner, response in samples.items())
    for seed in ("sampled", "sampled_other_seed", "sampled_reference"):
        assert not any(set(response) & set(result["banned"]) for response in by_owner(result[seed]).values())


@pytest.mark.parametrize("name", MODELS)
def test_sampled_logprobs_are_the_trainers_at_the_sampling_temperature(probes, name):
    ours = pick(probes[name]["sampled"], "rollout_logprobs")
    assert largest_gap(ours, probes[name]["plain_banned"]) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_engine_leaves_its_host_process_alone(probes, name):
    assert all(probes[name]["random_state_kept"])
    assert all(probes[name]["host_kept"])


@pytest.mark.parametrize("name", MODELS)
def test_a_picture_is_processed_once_for_all_samples_of_its_prompt(probes, name):
    pictures = 3 if name.removesuffix("-tied") in tiny.VISION_FAMILIES else 0
    assert probes[name]["images"] == [pictures, pictures]
    assert probes[name]["images_of_samples"] == pictures


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_vllm_sees_otherwise_names_its_row(probes, name):
    assert probes[name]["error_prompt"].startswith("row 41: vLLM made ")


def test_an_incomplete_sync_is_an_error(probes):
    assert probes["error_missing"].startswith("the weight sync left out 1 of ")


def test_videos_beside_images_give_the_trainers_logprobs(tmp_path):
    result = run_probe([], "videos", *tiny.VISION_FAMILIES, out=tmp_path / "out.json")
    for family in tiny.VISION_FAMILIES:
        assert largest_gap([result[family]["sampler"]], [result[family]["trainer"]]) < TOLERANCE, family


def torchrun(tensor_parallel_size: int, folder: Path) -> list[Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = run_probe(launcher, "ranks", str(tensor_parallel_size), out=folder / "out.json")
    for again, first, greedy, reference in ((r[1], r[0], r[2], r[3]) for r in result["ranks"]):
        assert again == first
        assert pick(greedy, "response_ids") == pick(reference, "response_ids")
        assert largest_gap(pick(greedy, "rollout_logprobs"), pick(reference, "rollout_logprobs")) < TOLERANCE
    return [rank[0] for rank in result["ranks"]]


def test_X01_two_ranks_draw_eight_distinct_samples(tmp_path):
    responses = [tuple(r["response_ids"]) for rank in torchrun(1, tmp_path) for r in rank]
    assert len(set(responses)) == 8


def test_a_tensor_parallel_group_draws_the_same_samples_on_both_ranks(tmp_path):
    left, right = torchrun(2, tmp_path)
    assert pick(left, "response_ids") == pick(right, "response_ids")
    assert len(set(map(tuple, pick(left, "response_ids")))) == 4
