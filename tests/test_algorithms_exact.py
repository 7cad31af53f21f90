"""Every loss, over any split into microbatches and ranks, has the gradient of one float64 loss over the minibatch.

The references below are written from the formulas of the papers, response by response, and share no code with r1.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.correction import CORRECTIONS
from r1.algorithms.groups import set_advantages, valid_tokens
from r1.algorithms.kl import KL_PENALTIES
from r1.algorithms.loss import LOSSES, Tokens, kl_to_reference, microbatch_loss
from r1.config import AlgorithmConfig, Config, DataConfig, RolloutConfig, UpdateConfig
from r1.policy.attention import register
from r1.policy.balance import plan_minibatch
from r1.policy.logprobs import Head, score_tokens
from r1.policy.model import _packed_forward, _set_attention
from r1.policy.packing import pack
from r1.types import Rollout
from tests.test_policy_packing import load, make_prompts, make_rollouts
from tests.tiny import make_tiny

VOCAB, TEMPERATURE, GROUP = 11, 0.9, 4
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")
CLIPS = {"clip_low": 0.1, "clip_high": 0.15, "clip_dual": 1.5}


def make_config(**algorithm: Any) -> Config:
    return Config(
        data=DataConfig(max_prompt_length=14, max_response_length=12, rollout_batch_size=4),
        rollout=RolloutConfig(n=GROUP, temperature=TEMPERATURE),
        algorithm=AlgorithmConfig(**{"kl_coef": 0.0, **CLIPS, **algorithm}),
        update=UpdateConfig(global_batch_size=4),
    )


class Response:
    """What the references know of one response, in float64."""

    def __init__(self, rollout: Rollout, logits: Tensor, old: Tensor, sampled: Tensor, ref_logits: Tensor) -> None:
        ids = torch.tensor(rollout.response_ids)[:, None]
        self.log_p = (logits / TEMPERATURE).log_softmax(-1)
        self.log_q = (ref_logits / TEMPERATURE).log_softmax(-1)
        self.new = self.log_p.gather(-1, ids)[:, 0]
        self.ref = self.log_q.gather(-1, ids)[:, 0]
        self.old, self.sampled = old, sampled
        self.advantages = rollout.advantages.double()

    def policy(self, c: AlgorithmConfig) -> Tensor:
        """[C] the loss of each token, without KL and entropy."""
        log_ratio, a = self.new - self.old, self.advantages
        if c.loss in ("gspo", "gspo_token"):
            log_ratio = log_ratio.mean().expand(len(a))
            if c.loss == "gspo_token":
                log_ratio = log_ratio.detach() + self.new - self.new.detach()
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)
        if c.loss == "cispo":
            return -clipped.detach() * a * self.new
        if c.loss == "sapo":
            tau = torch.where(a > 0, c.tau_positive, c.tau_negative).double()
            return -a * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
        objective = torch.minimum(ratio * a, clipped * a)
        return -torch.where(a < 0, torch.maximum(objective, c.clip_dual * a), objective)

    def trust(self, c: AlgorithmConfig) -> Tensor:
        """[C] the weight that the gap between sampler and trainer leaves each token."""
        gap, low, high = self.old - self.sampled, c.correction_low, c.correction_high
        inside = lambda x: ((x >= low) & (x <= high)).double()  # noqa: E731
        return {
            "off": torch.ones_like(gap),
            "token_truncate": gap.exp().clamp(max=high),
            "sequence_truncate": gap.sum().exp().clamp(max=high).expand(len(gap)),
            "token_mask": gap.exp() * inside(gap.exp()),
            "sequence_mask": inside(gap.mean().exp()).expand(len(gap)),
        }[c.correction]

    def kl(self, c: AlgorithmConfig) -> Tensor:
        d = self.new - self.ref
        return {
            "k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d,
            "full": (self.log_p.exp() * (self.log_p - self.log_q)).sum(-1),
        }[c.kl_penalty]  # fmt: skip

    def entropy(self) -> Tensor:
        return -(self.log_p.exp() * self.log_p).sum(-1)


def reference(responses: list[Response], rollouts: list[Rollout], config: Config) -> Tensor:
    """[] float64, the loss of the minibatch as a whole."""
    c = config.algorithm
    tied = {g for g in range(4) if len({r.reward for r in rollouts if r.group == g and r.reward is not None}) < 2}
    kept = [
        x for x, r in zip(responses, rollouts, strict=True)
        if r.reward is not None and not (c.mask_truncated and r.truncated)
        and not (c.drop_tied_groups and r.group in tied)
    ]  # fmt: skip
    tokens = [x.trust(c) * x.policy(c) + c.kl_coef * x.kl(c) - c.entropy_coef * x.entropy() for x in kept]
    if c.aggregation == "token_mean":
        return torch.cat(tokens).mean()
    if c.aggregation == "sequence_mean_token_mean":
        return torch.stack([t.mean() for t in tokens]).mean()
    return torch.stack([t.sum() / config.data.max_response_length for t in tokens]).mean()


def make_step(config: Config) -> tuple[list[Rollout], dict[str, list[Tensor]]]:
    """Four groups of four, one without some rewards, one tied; and for each response float64 logits and logprobs."""
    g = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 13, (16,), generator=g).tolist()
    rollouts = [
        Rollout(group=i // GROUP, sample=i % GROUP, prompt_ids=[1], rollout_logprobs=[0.0] * n, truncated=i % 5 == 0,
                response_ids=torch.randint(0, VOCAB, (n,), generator=g).tolist(),
                reward=float(torch.rand((), generator=g)))
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    for i, rollout in enumerate(rollouts):
        if i in (1, 2):
            rollout.reward = None
        if rollout.group == 3:
            rollout.reward = 0.5
    set_advantages(rollouts, ADVANTAGES["grpo"], config)
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    logits = [draw(n, VOCAB) for n in lengths]
    new = [(x / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(r.response_ids)[:, None])[:, 0]
           for x, r in zip(logits, rollouts, strict=True)]  # fmt: skip
    old = [x + 0.2 * draw(len(x)) for x in new]
    return rollouts, {
        "logits": logits, "old": old, "sampled": [x + 0.5 * draw(len(x)) for x in old],
        "ref": [x + 0.5 * draw(*x.shape) for x in logits],
    }  # fmt: skip


def splits(seed: int) -> Iterator[list[list[int]]]:
    """Whole, one by one, and in uneven pieces of shuffled order: as several microbatches, or ranks, would hold it."""
    yield [list(range(16))]
    yield [[i] for i in range(16)]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
    yield [order[:3], order[3:4], order[4:11], order[11:]]


def gradient_of_split(
    parts: list[list[int]], rollouts: list[Rollout], made: dict[str, list[Tensor]], config: Config
) -> tuple[Tensor, float]:
    """[T, V] float32 gradient of all logits, and the loss, over microbatches of these responses."""
    leaves, total = [x.clone().requires_grad_() for x in made["logits"]], 0.0
    algorithm = config.algorithm
    for part in parts:
        chosen = [rollouts[i] for i in part]
        lengths = torch.tensor([len(r.response_ids) for r in chosen])
        pick = lambda name, part=part: torch.cat([made[name][i] for i in part])  # noqa: E731
        full = algorithm.kl_coef > 0 and algorithm.kl_penalty == "full"
        head = Head(temperature=TEMPERATURE, chunk_tokens=5, entropy_grad=algorithm.entropy_coef > 0,
                    ref_hidden=pick("ref") if full else None, ref_lm_head=nn.Identity() if full else None)  # fmt: skip
        labels = torch.tensor([t for r in chosen for t in r.response_ids])
        scored = score_tokens(torch.cat([leaves[i] for i in part]), nn.Identity(), labels, head)
        ref = None
        if algorithm.kl_coef > 0 and not full:
            ref = (pick("ref") / TEMPERATURE).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        weights = torch.tensor([r.weight for r in chosen]).repeat_interleave(lengths)
        tokens = Tokens(
            logprobs=scored.logprobs, entropy=scored.entropy, old_logprobs=pick("old"),
            rollout_logprobs=pick("sampled"), advantages=torch.cat([r.advantages for r in chosen]),
            owners=torch.arange(len(chosen)).repeat_interleave(lengths), loss_mask=weights > 0, weights=weights,
            kl=scored.kl if full else kl_to_reference(scored.logprobs, ref, algorithm),
        )  # fmt: skip
        loss, _ = microbatch_loss(
            tokens, LOSSES[algorithm.loss], kl_coef=algorithm.kl_coef, config=algorithm,
            global_valid_tokens=valid_tokens(rollouts, config)[0],
        )  # fmt: skip
        loss.backward()
        total += loss.item()
    return torch.cat([x.grad for x in leaves]), total


CASES: list[dict[str, Any]] = [{"loss": loss, "aggregation": a} for loss in LOSSES for a in AGGREGATIONS]
CASES += [{"aggregation": a, "kl_coef": 0.1, "kl_penalty": k} for k in [*KL_PENALTIES, "full"] for a in AGGREGATIONS]
CASES += [{"aggregation": a, "entropy_coef": 0.05} for a in AGGREGATIONS]
CASES += [{"loss": loss, "correction": c} for loss in LOSSES for c in CORRECTIONS if c != "off"]
CASES += [{"loss": loss, "mask_truncated": True, "drop_tied_groups": True} for loss in LOSSES]
CASES += [{"kl_coef": 0.1, "kl_penalty": "full", "entropy_coef": 0.05, "correction": "token_mask", "loss": "gspo"}]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_A12_A13_any_split_has_the_gradient_of_one_float64_loss(case):
    config = make_config(**case)
    rollouts, made = make_step(config)
    leaves = [x.double().requires_grad_() for x in made["logits"]]
    rows = zip(rollouts, leaves, *(made[name] for name in ("old", "sampled", "ref")), strict=True)
    responses = [Response(r, x, o.double(), s.double(), q.double()) for r, x, o, s, q in rows]
    loss = reference(responses, rollouts, config)
    loss.backward()
    expected = torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves])
    assert expected.norm() > 1e-3
    for parts in splits(len(case)):
        got, total = gradient_of_split(parts, rollouts, made, config)
        assert (got.double() - expected).norm() < 1e-6 * expected.norm()
        assert total == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)


MODEL_CASES = [
    {"loss": "ppo", "kl_coef": 0.1},
    {"loss": "gspo", "aggregation": "sequence_mean_token_mean"},
    {"loss": "cispo", "aggregation": "sequence_mean_token_sum", "correction": "token_truncate"},
    {"loss": "sapo", "kl_coef": 0.1, "kl_penalty": "full", "entropy_coef": 0.05},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("exact") / "qwen3")


def rows_of(model: nn.Module, rollouts: list[Rollout]) -> list[Tensor]:
    """Of each response the logits that predict it, by transformers alone on the plain sequence."""
    out = []
    for r in rollouts:
        logits = model(input_ids=torch.tensor([r.prompt_ids + r.response_ids]), use_cache=False).logits[0]
        out.append(logits[len(r.prompt_ids) - 1 : -1])
    return out


@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda c: c["loss"])
def test_packed_shared_prompts_on_two_ranks_have_the_gradient_of_plain_float64_rows(case, folder):
    config = make_config(**case)
    model, exact = load(folder), load(folder).double()
    other, other_exact = copy.deepcopy(model), copy.deepcopy(exact)
    with torch.no_grad():  # the reference model
        for p, q in zip(other.parameters(), other_exact.parameters(), strict=True):
            noise = 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
            p.add_(noise)
            q.copy_(p)
    prompts = make_prompts(model.config, None)
    prompts[3] = prompts[0]
    rollouts = make_rollouts(prompts, {0: [7, 1, 3, 2], 1: [2, 11, 5, 1], 2: [4, 4, 9, 3], 3: [6, 2, 1, 5]})
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        truth = [x.float() for x in rows_of(exact, rollouts)]
        ref = rows_of(other_exact, rollouts)
    made: list[tuple[Tensor, Tensor]] = []
    for i, (rollout, logits) in enumerate(zip(rollouts, truth, strict=True)):
        rollout.reward = None if i == 5 else float(torch.rand((), generator=g))
        ids = torch.tensor(rollout.response_ids)[:, None]
        old = (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids)[:, 0] + 0.2 * torch.randn(len(ids), generator=g)
        made.append((old, old + 0.5 * torch.randn(len(ids), generator=g)))
        rollout.rollout_logprobs = made[-1][1].tolist()
    set_advantages(rollouts, ADVANTAGES["grpo"], config)

    plain = rows_of(exact, rollouts)
    responses = [Response(r, x, o.double(), s.double(), q)
                 for r, x, (o, s), q in zip(rollouts, plain, made, ref, strict=True)]  # fmt: skip
    reference(responses, rollouts, config).backward()

    register("sdpa")
    old_of = {(r.group, r.sample): old for r, (old, _) in zip(rollouts, made, strict=True)}
    for m in (model, other):
        _set_attention(m, "sdpa")
    algorithm, count = config.algorithm, 0
    for rank in plan_minibatch(rollouts, [r.group % 2 for r in rollouts], 2, 24):
        for pieces in rank:
            microbatch = pack(pieces, prompts, None, with_mask=True)
            microbatch.take_advantages()
            inputs = microbatch.model_inputs(torch.device("cpu"))
            options: dict[str, Any] = {"entropy_grad": algorithm.entropy_coef > 0}
            base = Head(temperature=TEMPERATURE, chunk_tokens=7)
            ref_logprobs = None
            with torch.no_grad():
                if algorithm.kl_coef > 0 and algorithm.kl_penalty == "full":
                    options["ref_hidden"] = _packed_forward(other, *inputs, microbatch.labels, None)
                    options["ref_lm_head"] = other.lm_head
                elif algorithm.kl_coef > 0:
                    ref_logprobs = _packed_forward(other, *inputs, microbatch.labels, base).logprobs
            head = Head(temperature=TEMPERATURE, chunk_tokens=7, **options)
            scored = _packed_forward(model, *inputs, microbatch.labels, head)
            kl = scored.kl if scored.kl is not None else kl_to_reference(scored.logprobs, ref_logprobs, algorithm)
            tokens = Tokens(
                logprobs=scored.logprobs, entropy=scored.entropy,
                old_logprobs=torch.cat([old_of[r.group, r.sample] for r in microbatch.rollouts]),
                rollout_logprobs=microbatch.rollout_logprobs, advantages=microbatch.advantages,
                owners=microbatch.owners(), loss_mask=microbatch.weights > 0, weights=microbatch.weights, kl=kl,
            )  # fmt: skip
            microbatch_loss(tokens, LOSSES[algorithm.loss], kl_coef=algorithm.kl_coef, config=algorithm,
                            global_valid_tokens=valid_tokens(rollouts, config)[0])[0].backward()  # fmt: skip
            count += 1
    assert count > 4
    got = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    expected = torch.cat([p.grad.flatten() for p in exact.parameters()])
    # Float32's own rounding through the model's layers: the loss alone is held to 1e-6 above.
    assert (got - expected).norm() < 4e-6 * expected.norm()
