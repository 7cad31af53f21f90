import itertools
import math

import pytest
import torch

from r1.algorithms.correction import CORRECTIONS
from r1.algorithms.kl import KL_PENALTIES, k3
from r1.algorithms.loss import LOSSES, Tokens, kl_to_reference, microbatch_loss, ppo
from r1.config import AlgorithmConfig
from r1.policy.logprobs import Head, score_tokens

PLAIN = AlgorithmConfig(kl_coef=0)
NAN = float("nan")


def make(
    logprobs, old, advantages, *, owners=None, mask=None, kl=None, entropy=None, total=None, rollout=None
) -> Tokens:
    mask = torch.ones_like(old, dtype=torch.bool) if mask is None else mask
    total = int(mask.sum()) if total is None else total
    return Tokens(
        logprobs=logprobs, entropy=torch.zeros_like(old) if entropy is None else entropy, old_logprobs=old,
        rollout_logprobs=old if rollout is None else rollout, advantages=advantages,
        owners=torch.zeros(len(old), dtype=torch.int64) if owners is None else owners,
        loss_mask=mask, weights=mask / max(total, 1), kl=kl,
    )  # fmt: skip


def loss_of(tokens: Tokens, config: AlgorithmConfig = PLAIN, total: int | None = None):
    total = int(tokens.loss_mask.sum()) if total is None else total
    return microbatch_loss(
        tokens, LOSSES[config.loss], kl_coef=config.kl_coef, global_valid_tokens=total, config=config
    )


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
    loss = ppo(make(new, torch.zeros(1), torch.tensor([advantage])), PLAIN)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert (new.grad.item() != 0) == gradient


def test_gspo_uses_the_geometric_mean_of_each_response():
    # Response 0: log ratios 0.2, 0.0 -> e^0.1; response 1: -0.4 -> e^-0.4, clipped to 0.8 where A < 0.
    new = torch.tensor([0.2, 0.0, -0.4], requires_grad=True)
    tokens = make(new, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), owners=torch.tensor([0, 0, 1]))
    loss = LOSSES["gspo"](tokens, PLAIN)
    assert loss.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1), 0.8], rel=1e-5)
    loss.sum().backward()
    # d/d new[t] of -2 exp(mean) = -exp(0.1) for each of the two tokens.
    assert new.grad.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.1), 0.0], rel=1e-5)


def test_gspo_token_has_gspo_values_and_each_tokens_own_gradient():
    new = torch.tensor([0.2, 0.0], requires_grad=True)
    tokens = make(new, torch.zeros(2), torch.tensor([1.0, 2.0]), owners=torch.tensor([0, 0]))
    loss = LOSSES["gspo_token"](tokens, PLAIN)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-math.exp(0.1), -2 * math.exp(0.1)], rel=1e-5)
    assert new.grad.tolist() == pytest.approx([-math.exp(0.1), -2 * math.exp(0.1)], rel=1e-5)


@pytest.mark.parametrize(("name", "high", "low"), [("ppo", 1 / 4, 1 / 4), ("gspo", 0, 2 / 4), ("gspo_token", 0, 2 / 4)])
def test_clip_fractions_count_by_the_ratio_that_is_clipped(name, high, low):
    # Response 0: ratios 2 and 1/2, of mean 1; response 1: 1/2 and 9/10, whose geometric mean is 0.67.
    new = torch.tensor([2.0, 0.5, 0.5, 0.9]).log()
    tokens = make(new, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), owners=torch.tensor([0, 0, 1, 1]))
    _, metrics = loss_of(tokens, AlgorithmConfig(loss=name, kl_coef=0))
    assert (metrics["policy/clip_frac_high"].item(), metrics["policy/clip_frac_low"].item()) == (high, low)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    new = torch.tensor([math.log(2.0)], requires_grad=True)
    loss = LOSSES["cispo"](make(new, torch.zeros(1), torch.tensor([1.0])), PLAIN)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-1.3 * math.log(2.0), rel=1e-5)
    assert new.grad.item() == pytest.approx(-1.3, rel=1e-5)


def test_sapo_gate_by_hand():
    ratio = 1.5
    new = torch.tensor([math.log(ratio)] * 2, requires_grad=True)
    loss = LOSSES["sapo"](make(new, torch.zeros(2), torch.tensor([1.0, -2.0])), PLAIN)
    gate = [4 / tau / (1 + math.exp(-tau * (ratio - 1))) for tau in (1.0, 1.05)]
    assert loss.tolist() == pytest.approx([-gate[0], 2 * gate[1]], rel=1e-5)
    on_policy = torch.zeros(1, requires_grad=True)  # the gate's slope is 1 at ratio 1: the policy gradient
    LOSSES["sapo"](make(on_policy, torch.zeros(1), torch.tensor([3.0])), PLAIN).sum().backward()
    assert on_policy.grad.item() == pytest.approx(-3.0, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_first_gradient_is_the_policy_gradient_for_every_loss(name):
    new = torch.zeros(4, requires_grad=True)
    owners, advantages = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 1.0, -2.0, -2.0])
    LOSSES[name](make(new, torch.zeros(4), advantages, owners=owners), AlgorithmConfig(loss=name)).sum().backward()
    torch.testing.assert_close(new.grad, -advantages)


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
    config = AlgorithmConfig(kl_coef=0.1)
    logprobs, ref = torch.tensor([-1.0], requires_grad=True), torch.tensor([-2.0])
    kl = kl_to_reference(logprobs, ref, config)
    loss, metrics = loss_of(make(logprobs, logprobs.detach(), torch.zeros(1), kl=kl), config)
    expected = math.exp(-1) - 1 + 1
    assert loss.item() == pytest.approx(0.1 * expected, rel=1e-5)
    assert metrics["loss/kl"].item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert logprobs.grad.item() > 0  # descending lowers logprobs, toward the reference


@pytest.mark.parametrize("name", KL_PENALTIES)
@pytest.mark.parametrize("start", [-0.5, 0.5])
def test_A09_a_step_on_the_loss_lowers_every_kl(name, start):
    # One token whose logprob is start above the reference's; no advantage, so that the KL alone is in the loss.
    config = AlgorithmConfig(kl_coef=0.1, kl_penalty=name)
    ref, logprobs = torch.tensor([-2.0]), torch.tensor([-2.0 + start], requires_grad=True)
    kl = kl_to_reference(logprobs, ref, config)
    loss, _ = loss_of(make(logprobs, logprobs.detach(), torch.zeros(1), kl=kl), config)
    assert loss.item() == pytest.approx(0.1 * kl.item()) and (loss.item() > 0 or name == "k1")
    loss.backward()
    after = KL_PENALTIES[name](logprobs.detach() - 0.1 * logprobs.grad, ref)
    assert after.item() < kl.item()


def test_A09_the_full_kl_falls_by_a_step_and_is_0_for_equal_models():
    g = torch.Generator().manual_seed(0)
    ref, logits, labels = torch.randn(4, 9, generator=g), torch.randn(4, 9, generator=g), torch.zeros(4).long()
    measured = []
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        head = Head(temperature=1.0, chunk_tokens=3, ref_hidden=ref, ref_lm_head=torch.nn.Identity())
        kl = score_tokens(leaf, torch.nn.Identity(), labels, head).kl
        loss, _ = loss_of(make(torch.zeros(4), torch.zeros(4), torch.zeros(4), kl=kl), AlgorithmConfig(kl_coef=0.1))
        loss.backward()
        assert loss.item() == pytest.approx(0.1 * kl.mean().item())
        measured.append(kl.mean().item())
        logits = logits - 10 * leaf.grad
    assert measured[1] < measured[0]
    same = Head(temperature=1.0, chunk_tokens=3, ref_hidden=logits, ref_lm_head=torch.nn.Identity())
    assert score_tokens(logits, torch.nn.Identity(), labels, same).kl.abs().max() < 1e-6


@pytest.mark.parametrize("far", [100.0, 1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_A10_ratios_far_out_leave_loss_and_gradient_finite(name, far):
    old = torch.zeros(4)
    new = torch.tensor([far, -far, far, -far], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    for correction in CORRECTIONS:
        tokens = make(new, old, advantages, owners=torch.arange(4), rollout=old - torch.tensor([far, -far, -far, far]))
        config = AlgorithmConfig(loss=name, kl_coef=0, correction=correction)
        loss, metrics = loss_of(tokens, config)
        gradient = torch.autograd.grad(loss, new)[0]
        assert loss.isfinite() and gradient.isfinite().all(), correction
        assert all(m.isfinite() for m in metrics.values())


def test_A13_token_mean_is_global_not_of_means():
    # Sequence A: 2 tokens of loss 1 each (advantage -1, ratio 1); B: 8 tokens of loss 0. Microbatch 1 each.
    parts = [(torch.zeros(2), torch.full((2,), -1.0)), (torch.zeros(8), torch.zeros(8))]
    assert sum(loss_of(make(x, x, a, total=10), total=10)[0] for x, a in parts).item() == pytest.approx(0.2)


@pytest.mark.parametrize("name", LOSSES)
def test_A12_splitting_keeps_the_gradient(name):
    config = AlgorithmConfig(loss=name, entropy_coef=0.1)
    g = torch.Generator().manual_seed(0)
    new, old, advantages = torch.randn(3, 64, generator=g) / 4
    owners, mask, grads = torch.arange(8).repeat_interleave(8), advantages > -0.2, []
    for bounds in ([0, 64], [0, 8, 64], [0, 8, 16, 24, 32, 40, 48, 56, 64]):
        x = new.clone().requires_grad_()
        for low, high in itertools.pairwise(bounds):
            s = slice(low, high)
            tokens = make(x[s], old[s], advantages[s], owners=owners[s] - owners[low], mask=mask[s],
                          total=int(mask.sum()), entropy=x[s].square())  # fmt: skip
            loss_of(tokens, config, int(mask.sum()))[0].backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])


@pytest.mark.parametrize("name", LOSSES)
def test_A14_A15_all_masked_is_zero_and_attached(name):
    logprobs = torch.zeros(3, requires_grad=True)
    tokens = make(logprobs, torch.zeros(3), torch.full((3,), NAN), mask=torch.zeros(3, dtype=torch.bool))
    loss, metrics = loss_of(tokens, AlgorithmConfig(loss=name, kl_coef=0))
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.tolist() == [0, 0, 0]
    assert all(m.item() == 0 for m in metrics.values())


def reference_loss(name: str, new, old, advantage: float, log_s: float) -> float:
    """One token's loss in plain Python; log_s is the mean log ratio of its response."""
    ratio = math.exp(log_s if name.startswith("gspo") else new - old)
    if name == "cispo":
        return -min(max(ratio, 0.8), 1.3) * advantage * new
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    term = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
    return min(term, -advantage * 3.0) if advantage < 0 else term


@pytest.mark.parametrize("name", LOSSES)
def test_losses_match_a_float64_loop(name):
    g = torch.Generator().manual_seed(1)
    new, old, ref, advantages, entropy = torch.randn(5, 200, generator=g) / 2
    mask = torch.rand(200, generator=g) > 0.3
    owners = torch.arange(20).repeat_interleave(10)
    config = AlgorithmConfig(loss=name, kl_coef=0.05, entropy_coef=0.02)
    expected = 0.0
    for i in range(200):
        if mask[i]:
            peers = [j for j in range(200) if owners[j] == owners[i]]
            log_s = sum(new[j].item() - old[j].item() for j in peers) / len(peers)
            d = ref[i].item() - new[i].item()
            expected += reference_loss(name, new[i].item(), old[i].item(), advantages[i].item(), log_s)
            expected += 0.05 * (math.exp(d) - 1 - d) - 0.02 * entropy[i].item()
    tokens = make(new, old, advantages, owners=owners, mask=mask, kl=k3(new, ref), entropy=entropy)
    assert loss_of(tokens, config)[0].item() == pytest.approx(expected / int(mask.sum()), rel=1e-5)


def test_corrections_by_hand():
    # Log ratios of response 0: log 4, log 1; of response 1: log 0.25.
    log_ratio, owners = torch.tensor([4.0, 1.0, 0.25]).log(), torch.tensor([0, 0, 1])
    got = {name: f(log_ratio, owners, PLAIN).tolist() for name, f in CORRECTIONS.items()}
    assert got["off"] == [1, 1, 1]
    assert got["token_truncate"] == pytest.approx([2, 1, 0.25])
    assert got["sequence_truncate"] == pytest.approx([2, 2, 0.25])
    assert got["token_mask"] == pytest.approx([0, 1, 0])
    assert got["sequence_mask"] == [1, 1, 0]  # geometric means 2 and 0.25


def test_correction_weights_the_policy_loss():
    old, rollout = torch.log(torch.tensor([0.5, 0.5])), torch.log(torch.tensor([0.25, 0.5]))
    tokens = make(old.clone().requires_grad_(), old, torch.ones(2), rollout=rollout)
    loss, metrics = loss_of(tokens, AlgorithmConfig(kl_coef=0, correction="token_truncate"))
    assert loss.item() == pytest.approx(-(2.0 + 1.0) / 2)
    assert metrics["mismatch/weight_mean"].item() == pytest.approx(1.5)
