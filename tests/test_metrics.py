"""Every number in metrics.jsonl that r1.metrics makes, against numbers worked out by hand."""

import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import r1.metrics
from r1.config import Config
from r1.metrics import Timer, mismatch_from_sums, mismatch_sums, rollout_metrics, step_metrics
from r1.metrics_flops import ModelSize, mfu, peak_flops, update_flops
from r1.types import Rollout
from tests.tiny import make_config


def rollout(group: int, reward: float | None, *, tokens: int = 2, truncated: bool = False, prompt: int = 3) -> Rollout:
    return Rollout(
        group=group,
        sample=0,
        prompt_ids=[1] * prompt,
        response_ids=[2] * tokens,
        rollout_logprobs=[-1.0] * tokens,
        truncated=truncated,
        rewards=None if reward is None else {"overall": reward, "accuracy": reward / 2},
        reward=reward,
    )


def test_rollout_metrics_by_hand() -> None:
    rollouts = [
        rollout(0, 1.0, tokens=4, prompt=10),
        rollout(0, 0.0, tokens=8, truncated=True, prompt=10),
        rollout(1, 1.0, tokens=2, prompt=20),
        rollout(1, None, tokens=6, prompt=20),
    ]
    assert rollout_metrics(rollouts) == pytest.approx(
        {
            "reward/mean": 2 / 3,
            "reward/std": math.sqrt(1 / 3),  # of (1, 0, 1)
            "reward/std_in_group": math.sqrt(0.5),  # of (1, 0) with n - 1; group 1 has one reward
            "reward/accuracy": 1 / 3,
            "reward/failed_frac": 0.25,
            "reward/zero_std_frac": 0.5,
            "response/length_mean": 5.0,
            "response/length_max": 8.0,
            "response/length_min": 2.0,
            "response/clip_frac": 0.25,
            "prompt/length_mean": 15.0,
            "prompt/length_max": 20.0,
        }
    )


@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("values", [(1.0, 0.0), (0.7, 0.1), (-1.0, 1.0, 0.3)])
def test_L06_groups_all_same_but_unlike_have_a_batch_std_and_none_in_group(values, size) -> None:
    rollouts = [rollout(group, value) for group, value in enumerate(values) for _ in range(size)]
    metrics = rollout_metrics(rollouts)
    assert (metrics["reward/std_in_group"], metrics["reward/zero_std_frac"]) == (0.0, 1.0)
    assert metrics["reward/std"] == pytest.approx(torch.tensor([r.reward for r in rollouts]).std().item())
    assert metrics["reward/std"] > 0.1


def test_L06_one_group_that_differs_is_counted_alone() -> None:
    metrics = rollout_metrics([rollout(0, 1.0), rollout(0, 0.0), rollout(1, 1.0), rollout(1, 1.0)])
    assert metrics["reward/std_in_group"] == pytest.approx(math.sqrt(0.5) / 2)
    assert (metrics["reward/std"], metrics["reward/zero_std_frac"]) == (0.5, 0.5)


def test_a_step_without_rewards_has_no_reward_mean() -> None:
    metrics = rollout_metrics([rollout(0, None), rollout(0, None)])
    assert "reward/mean" not in metrics and "reward/std_in_group" not in metrics
    assert (metrics["reward/failed_frac"], metrics["reward/zero_std_frac"]) == (1.0, 1.0)
    assert rollout_metrics([]) == {}


def mismatch_metrics(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> dict[str, float]:
    return mismatch_from_sums([mismatch_sums(old_logprobs, rollout_logprobs)])


def test_mismatch_by_hand() -> None:
    # d = log 2 and 0: ratios 2 and 1.
    log2 = math.log(2)
    metrics = mismatch_metrics(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0 - log2, -2.0]))
    assert metrics == pytest.approx(
        {
            "mismatch/abs_mean": log2 / 2,
            "mismatch/abs_max": log2,
            "mismatch/kl_k1": -log2 / 2,
            "mismatch/kl_k3": (2 - 1 - log2) / 2,
            "mismatch/perplexity_ratio": 1 / math.sqrt(2),
            "mismatch/ess": 3**2 / (2 * (4 + 1)),
        },
        abs=1e-6,
    )


def test_mismatch_of_equal_logprobs_and_of_none() -> None:
    same = torch.tensor([-0.5, -3.0])
    metrics = mismatch_metrics(same, same)
    assert (metrics["mismatch/abs_max"], metrics["mismatch/perplexity_ratio"], metrics["mismatch/ess"]) == (0, 1, 1)
    assert mismatch_metrics(torch.empty(0), torch.empty(0)) == {}


def test_mismatch_is_the_same_in_parts_and_finite_when_broken() -> None:
    old, sampled = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    slices = (slice(0, 7), slice(7, 7), slice(7, 50))
    parts = [mismatch_sums(old[s], sampled[s]) for s in slices]
    assert mismatch_from_sums(parts) == pytest.approx(mismatch_metrics(old, sampled))
    broken = mismatch_metrics(torch.tensor([0.0, -1.0]), torch.tensor([-1000.0, -1.0]))
    assert all(math.isfinite(value) for value in broken.values())


def test_an_h200_is_no_h20() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H20") == 148e12 and peak_flops("NVIDIA H20-3e") == 148e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12  # the longest name wins
    assert (
        peak_flops("NVIDIA L40") == 181e12 and peak_flops("NVIDIA L40S") == 362e12 and peak_flops("NVIDIA L4") == 121e12
    )
    assert peak_flops("NVIDIA L20") == 119.5e12
    assert peak_flops("cpu") is None and peak_flops("NVIDIA X9000") is None


def test_mfu_by_hand() -> None:
    assert mfu(989e12 * 3, 2.0, 3, "NVIDIA H200") == pytest.approx(0.5)
    assert mfu(1.0, 2.0, 3, "cpu") is None and mfu(1.0, 0.0, 3, "NVIDIA H200") is None


@dataclass
class FakeMicrobatch:
    input_ids: Tensor
    hidden_index: Tensor
    packing: SimpleNamespace
    image_grid_thw: Tensor | None = None
    rollout_logprobs: Tensor = field(default_factory=lambda: torch.tensor([-1.0, -1.0, -9.0]))
    old_logprobs: Tensor | None = field(default_factory=lambda: torch.tensor([-1.5, -1.0, -1.0]))

    def own(self, values: Tensor) -> Tensor:
        return values[:2]  # the third token only keeps ranks in step


def packed(
    tokens: int, responses: int, q: list[int], k: list[int], grid: list[list[int]] | None = None
) -> FakeMicrobatch:
    return FakeMicrobatch(
        torch.zeros(1, tokens, dtype=torch.int64),
        torch.zeros(responses, dtype=torch.int64),
        SimpleNamespace(cu_seqlens_q=torch.tensor(q), cu_seqlens_k=torch.tensor(k)),
        None if grid is None else torch.tensor(grid),
    )


def meta_model(family: str, *, tie: bool) -> nn.Module:
    config = make_config(family, tie=tie)
    auto = AutoModelForImageTextToText if "vl" in family else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


@pytest.mark.parametrize("tie", [False, True])
def test_text_flops_by_hand(tie: bool) -> None:
    model = meta_model("qwen2", tie=tie)
    # A prompt of 3 and one response of 4 of which 3 are computed: 6 packed tokens, 4 predicted positions.
    batch = packed(6, 4, [0, 3, 6], [0, 3, 9])
    # 2 layers, hidden 128: q 128 x 128 + 128, k and v 64 x 128 + 64, o 128 x 128, mlp 3 x 128 x 192, norms 2 x 128.
    layer = (128 * 128 + 128) + 2 * (64 * 128 + 64) + 128 * 128 + 3 * 128 * 192 + 2 * 128
    text, head = 2 * layer + 128, 320 * 128
    pairs = (1 + 2 + 3) + (4 + 5 + 6)
    assert update_flops(model, [batch]) == 6 * text * 6 + 6 * head * 4 + 12 * 2 * 128 * pairs
    assert update_flops(model, [batch, batch]) == 2 * update_flops(model, [batch])


def test_flops_of_experts_count_those_that_a_token_is_sent_to() -> None:
    # 2 layers, hidden 128: q, k, v, o and their norms, a router over 6 experts, and 2 of them of width 96.
    layer = 2 * 128 * 128 + 2 * 64 * 128 + 2 * 64 + 6 * 128 + 2 * 3 * 128 * 96 + 2 * 128
    assert ModelSize.of(meta_model("qwen3_moe", tie=False)).text == pytest.approx(6 * (2 * layer + 128))


def test_picture_flops_count_the_tower_and_its_windows() -> None:
    model = meta_model("qwen2_5_vl", tie=False)
    size = ModelSize.of(model)
    # 8 x 16 patches: one layer sees all 128, the other windows of (112 / 14)^2 = 64.
    without, with_picture = (packed(40, 4, [0, 40], [0, 40], grid) for grid in (None, [[1, 8, 16]]))
    pairs = 128 * 128 + 128 * 64
    expected = size.patch * 128 + size.merged * 32 + 12 * 128 * pairs
    assert update_flops(model, [with_picture]) - update_flops(model, [without]) == expected
    for name, parameter in model.model.visual.named_parameters():
        parameter.requires_grad_("merger" in name)
    frozen = size.patch / 3 * 128 + size.merged * 32 + 4 * 128 * pairs
    assert update_flops(model, [with_picture]) - update_flops(model, [without]) == pytest.approx(frozen)


def test_frozen_weights_above_what_trains_still_pass_gradients_back() -> None:
    model = meta_model("qwen2_5_vl", tie=False)
    whole = ModelSize.of(model)
    model.requires_grad_(False)
    model.model.visual.merger.requires_grad_(True)
    size = ModelSize.of(model)
    assert size.patch == whole.patch / 3 and size.merged == whole.merged
    assert (size.text, size.head) == (whole.text * 4 / 6, whole.head * 4 / 6)


def test_timer_adds_up_phases_and_times_the_step() -> None:
    timer = Timer()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer("update"):
        raise KeyError
    metrics = timer.metrics()
    assert metrics.keys() == {"time/rollout_s", "time/update_s", "time/step_s"}
    assert 0.04 <= metrics["time/rollout_s"] <= metrics["time/step_s"] < 1


def test_step_metrics_join_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_ranks(mine: dict) -> list[dict]:
        return [mine, mine | {"mismatch": [], "memory": {"mem/peak_gib": 1000.0}}]

    monkeypatch.setattr(r1.metrics, "gather_objects", two_ranks)
    timer = Timer()
    with timer("update"):
        time.sleep(0.01)
    ranks = SimpleNamespace(world_size=2, sequence_parallel_size=1, device=torch.device("cpu"))
    rollouts = [rollout(0, 1.0, tokens=4, prompt=10), rollout(0, 0.0, tokens=8, prompt=10)]
    batch = packed(6, 4, [0, 3, 6], [0, 3, 9])
    metrics = step_metrics(rollouts, [[batch]], timer, meta_model("qwen2", tie=False), Config(), ranks)
    assert metrics["mismatch/abs_mean"] == 0.25 and metrics["mismatch/abs_max"] == 0.5
    assert metrics["mem/peak_gib"] == 1000.0 and metrics["reward/mean"] == 0.5
    assert metrics["perf/tokens_per_s_per_gpu"] == pytest.approx(32 / (2 * metrics["time/step_s"]))
    assert metrics["perf/computed_tokens_per_s_per_gpu"] == pytest.approx(12 / (2 * metrics["time/step_s"]))
    assert "perf/mfu" not in metrics and "perf/mfu_logprobs" not in metrics  # a CPU's peak is not known


def test_peak_memory_is_that_of_this_process() -> None:
    assert 0.05 < r1.metrics.peak_memory_gib() < 100
