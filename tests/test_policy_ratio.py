"""For unchanged weights the ratio of new to old probabilities is 1, whatever the sampler did to its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from r1.algorithms.loss import LOSSES, Tokens, microbatch_loss
from r1.config import AlgorithmConfig, Config, RolloutConfig
from r1.policy.attention import register
from r1.policy.balance import Piece
from r1.policy.logprobs import Head, score_tokens
from r1.policy.model import _packed_forward, _set_attention
from r1.policy.packing import Microbatch, pack
from tests.test_policy_packing import load, make_prompts, make_rollouts
from tests.tiny import make_tiny

CPU = torch.device("cpu")


def scored(logits: torch.Tensor, labels: list[int], temperature: float = 1.0) -> torch.Tensor:
    head = Head(temperature=temperature, chunk_tokens=2)
    return score_tokens(logits, nn.Identity(), torch.tensor(labels), head).logprobs


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.14293), (1.0, -0.40761), (2.0, -0.68027)])
def test_N01_logprobs_are_those_of_the_sampling_temperature(temperature, expected):
    got = scored(torch.tensor([[2.0, 1.0, 0.0]]), [0], temperature)
    assert got.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("warper", [TopPLogitsWarper(0.5), TopKLogitsWarper(1)])
def test_N02_old_logprobs_are_never_the_samplers_of_a_cut_distribution(warper):
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert warper(None, logits.clone()).log_softmax(-1)[0, 0].item() == 0.0  # what an engine reports
    old, new = scored(logits, [0]), scored(logits.clone(), [0])
    assert new.item() == pytest.approx(-0.40761, abs=1e-5)
    assert (new - old).exp().item() == 1.0


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 20}, {"top_p": 0.9, "top_k": 3}])
@pytest.mark.parametrize("use", [{"old_logprobs": "rollout"}, {"correction": "token_mask"}])
def test_N02_a_cut_distribution_may_be_neither_old_nor_corrected_for(cut, use):
    with pytest.raises(ValueError, match="cut the sampler's distribution: its logprobs and the trainer's are of two"):
        Config(rollout=RolloutConfig(**cut), algorithm=AlgorithmConfig(**use))
    assert Config(rollout=RolloutConfig(**cut)).algorithm.old_logprobs == "recompute"
    assert Config(algorithm=AlgorithmConfig(**use)).rollout.top_p == 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("ratio") / "qwen2")


def microbatches(model: nn.Module, sizes: list[int]) -> list[Microbatch]:
    """The same nine responses in microbatches of so many groups."""
    prompts = make_prompts(model.config, None)
    rollouts = make_rollouts(prompts, {0: [7, 1, 3], 1: [2, 11, 5], 2: [4, 4, 9]})
    pieces = [Piece(rollouts=[r for r in rollouts if r.group == g]) for g in prompts]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [pack(pieces[s : s + n], prompts, None, with_mask=True) for s, n in zip(starts, sizes, strict=True)]


def logprobs(model: nn.Module, microbatch: Microbatch) -> torch.Tensor:
    head = Head(temperature=0.7, chunk_tokens=5)
    return _packed_forward(model, *microbatch.model_inputs(CPU), microbatch.labels, head).logprobs


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
@pytest.mark.parametrize("loss", LOSSES)
def test_N06_the_ratio_is_1_before_the_first_update(loss, dtype, tolerance, folder):
    model: Any = load(folder).to(dtype)
    register("sdpa")
    _set_attention(model, "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    config = AlgorithmConfig(loss=loss, kl_coef=0.0, clip_low=0.01, clip_high=0.01)
    with torch.no_grad():
        old = [logprobs(model, m) for m in microbatches(model, [2, 1])]
    for before, microbatch in zip(old, microbatches(model, [2, 1]), strict=True):
        new = logprobs(model, microbatch)
        assert ((new - before).exp() - 1).abs().max().item() <= tolerance
        advantages = torch.randn(len(new), generator=torch.Generator().manual_seed(0))
        tokens = Tokens(
            logprobs=new, entropy=torch.zeros_like(new), old_logprobs=before, rollout_logprobs=before,
            advantages=advantages, owners=microbatch.owners(), loss_mask=torch.ones(len(new), dtype=torch.bool),
            weights=torch.full((len(new),), 1 / len(new)),
        )  # fmt: skip
        _, metrics = microbatch_loss(tokens, LOSSES[loss], kl_coef=0.0, global_valid_tokens=len(new), config=config)
        assert metrics["policy/clip_frac_low"] == metrics["policy/clip_frac_high"] == 0
        assert abs(metrics["policy/kl_to_old"].item()) <= tolerance


def test_N06_other_microbatches_move_the_ratio_by_rounding_only(folder):
    model: Any = load(folder)
    register("sdpa")
    _set_attention(model, "sdpa")
    with torch.no_grad():
        parts = [torch.cat([logprobs(model, m) for m in microbatches(model, s)]) for s in ([3], [1, 2], [1, 1, 1])]
    for other in parts[1:]:
        assert ((parts[0] - other).exp() - 1).abs().max() < 1e-5


def test_A07_a_response_without_tokens_is_packed_as_nothing(folder):
    model: Any = load(folder)
    register("sdpa")
    _set_attention(model, "sdpa")
    prompts = make_prompts(model.config, None)
    rollouts = make_rollouts(prompts, {0: [3, 4]})
    empty = make_rollouts(prompts, {0: [0]})[0]
    with torch.no_grad():
        expected = logprobs(model, pack([Piece(rollouts=rollouts)], prompts, None, with_mask=True))
        three = pack([Piece(rollouts=[rollouts[0], empty, rollouts[1]])], prompts, None, with_mask=True)
        torch.testing.assert_close(logprobs(model, three), expected)
    assert three.owners().tolist() == [0] * 3 + [2] * 4
