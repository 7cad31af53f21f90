import itertools
import math

import pytest
import torch

from r1.algorithms.advantage import group_advantages, tied_groups
from r1.algorithms.kl import KL_PENALTIES, k3
from r1.algorithms.loss import microbatch_loss, ppo_loss
from r1.config import AlgorithmConfig

GRPO, NO_KL = AlgorithmConfig(), AlgorithmConfig(kl_coef=0)
NAN = float("nan")


def loss_of(logprobs, old, advantages, mask=None, ref=None, valid=None, config=NO_KL):
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    valid = int(mask.sum()) if valid is None else valid
    return microbatch_loss(
        logprobs, old, ref, advantages, mask, entropy=torch.zeros_like(old), global_valid_tokens=valid, config=config
    )


def test_A01_groups_are_normalized_alone_with_the_sample_deviation():
    got = group_advantages(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), GRPO)
    torch.testing.assert_close(got, torch.tensor([[0.7071, -0.7071], [0.0, 0.0]]), atol=1e-4, rtol=0)


def test_tied_group_teaches_nothing():
    assert group_advantages(torch.full((1, 8), 0.7), GRPO).abs().max() == 0
    assert tied_groups(torch.tensor([[0.7, 0.7, NAN], [0.0, 1.0, NAN]])).tolist() == [True, False]


def test_A04_group_of_one_is_zero_not_nan():
    assert group_advantages(torch.tensor([[1.0], [NAN]]), GRPO).tolist() == [[0.0], [0.0]]


def test_R11_missing_reward_leaves_the_group_statistics():
    got = group_advantages(torch.tensor([[1.0, 0.0, NAN, 1.0]]), AlgorithmConfig(normalize_std=False))
    torch.testing.assert_close(got, torch.tensor([[1 / 3, -2 / 3, 0.0, 1 / 3]]))


def test_without_std_it_is_reward_minus_mean():
    got = group_advantages(torch.tensor([[3.0, 1.0]]), AlgorithmConfig(normalize_std=False))
    assert got.tolist() == [[1.0, -1.0]]


def test_A10_k3_by_hand_and_finite_far_out():
    log_ratio = torch.tensor([0.0, 1.0, -1.0, 100.0], requires_grad=True)  # log q - log p
    values = k3(-log_ratio, torch.zeros(4))
    torch.testing.assert_close(values[:3], torch.tensor([0.0, 0.71828, 0.36788]), atol=1e-5, rtol=0)
    values.sum().backward()
    assert values.isfinite().all() and log_ratio.grad.isfinite().all()


def test_kl_estimators_by_hand():
    p, q = torch.tensor([-1.0]), torch.tensor([-1.5])
    got = {name: f(p, q).item() for name, f in KL_PENALTIES.items()}
    assert got == pytest.approx({"k1": 0.5, "abs": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 1 + 0.5}, abs=1e-6)


def test_A09_kl_raises_the_loss_and_a_step_lowers_it():
    logprobs, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0])
    loss, metrics = loss_of(logprobs, logprobs.detach(), torch.zeros(1), ref=ref, config=AlgorithmConfig(kl_coef=0.1))
    kl = math.exp(-1) - 1 + 1
    assert loss.item() == pytest.approx(0.1 * kl, rel=1e-5) and metrics["loss/kl"].item() == pytest.approx(kl, rel=1e-5)
    loss.backward()
    assert logprobs.grad.item() > 0  # descending lowers logprobs, toward the reference


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.0, 2.0, -2.0, True),
        (2.0, 1.0, -1.3, False),  # clipped above
        (0.5, 1.0, -0.5, True),  # the pessimistic side is not clipped
        (0.5, -1.0, 0.8, False),  # clipped below
        (2.0, -1.0, 2.0, True),
        (5.0, -1.0, 3.0, False),  # dual clip
    ],
)
def test_ppo_clips_by_hand(ratio, advantage, expected, gradient):
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = ppo_loss(new, torch.zeros(1), torch.tensor([advantage]), GRPO)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert (new.grad.item() != 0) == gradient


def test_A13_token_mean_is_global_not_of_means():
    # Sequence A: 2 tokens of loss 1 each (advantage -1, ratio 1); B: 8 tokens of loss 0. Split 1 + 1.
    parts = [(torch.zeros(2), torch.full((2,), -1.0)), (torch.zeros(8), torch.zeros(8))]
    assert sum(loss_of(x, x, a, valid=10)[0] for x, a in parts).item() == pytest.approx(0.2)


def test_A12_splitting_keeps_the_gradient():
    g = torch.Generator().manual_seed(0)
    new, old, advantages = torch.randn(3, 64, generator=g) / 4
    mask, grads = advantages > -0.2, []
    for bounds in ([0, 64], [0, 5, 64], [0, 8, 16, 24, 32, 40, 48, 56, 64]):
        x = new.clone().requires_grad_()
        for low, high in itertools.pairwise(bounds):
            s = slice(low, high)
            loss_of(x[s], old[s], advantages[s], mask[s], valid=int(mask.sum()))[0].backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])


def test_A14_A15_all_masked_is_zero_and_attached():
    logprobs = torch.zeros(3, requires_grad=True)
    loss, metrics = loss_of(logprobs, torch.zeros(3), torch.full((3,), NAN), torch.zeros(3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.tolist() == [0, 0, 0]
    assert all(m.item() == 0 for m in metrics.values())


def test_loss_matches_a_float64_loop():
    g = torch.Generator().manual_seed(1)
    new, old, ref, advantages = torch.randn(4, 200, generator=g)
    mask = torch.rand(200, generator=g) > 0.3
    config = AlgorithmConfig(kl_coef=0.05)
    expected = 0.0
    for i in range(200):
        if not mask[i]:
            continue
        a, ratio = advantages[i].item(), math.exp(new[i].item() - old[i].item())
        term = max(-a * ratio, -a * min(max(ratio, 0.8), 1.3))
        if a < 0:
            term = min(term, -a * 3.0)
        d = ref[i].item() - new[i].item()
        expected += term + 0.05 * (math.exp(d) - 1 - d)
    loss, _ = loss_of(new, old, advantages, mask, ref=ref, config=config)
    assert loss.item() == pytest.approx(expected / int(mask.sum()), rel=1e-5)
