import math
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from r1.checkpoint_state import optimizer_values, set_optimizer_values, set_small_state, small_state
from r1.config import Config, ModelConfig, OptimConfig
from r1.policy.offload import HostMemory
from r1.policy.optim import learning_rates, lr_factor, make_optimizer, make_scheduler, optimizer_step, parameter_groups
from tests.tiny import make_config

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
PLAIN = {"lr": 1e-3, "weight_decay": 0.0}


def empty(family: str) -> nn.Module:
    """A model of names and shapes alone."""
    auto = AutoModelForImageTextToText if "vl" in family else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(make_config(family))


def names_by_group(model: nn.Module, config: OptimConfig) -> dict[str, list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {g["name"]: [names[id(p)] for p in g["params"]] for g in parameter_groups(model, config)}


class Weight(nn.Module):
    """One matrix whose gradient is set by hand."""

    def __init__(self, *shape: int, dtype: torch.dtype, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, value, dtype=dtype))

    def step(self, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
        self.weight.grad = gradient.to(self.weight.dtype)
        optimizer.step()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_every_part_has_its_rate_and_no_parameter_is_lost(family: str) -> None:
    model, config = empty(family), OptimConfig(lr=3e-6, lr_vision_tower=1e-6, lr_projector=2e-6)
    groups, names = parameter_groups(model, config), names_by_group(model, config)
    assert sorted(n for part in names.values() for n in part) == sorted(n for n, _ in model.named_parameters())
    rates = {"language_model": 3e-6, "projector": 2e-6, "vision_tower": 1e-6}
    assert {g["name"].split(".")[0]: g["lr"] for g in groups} == rates
    assert all(".visual." in n and "merger" in n for n in names["projector.decayed"])
    assert all(".visual." in n and "merger" not in n for n in names["vision_tower.decayed"])
    assert {n for n in names["language_model.decayed"] if "visual" in n} == set()
    assert learning_rates(make_optimizer(model, config)) == {
        "policy/lr": 3e-6, "policy/lr_projector": 2e-6, "policy/lr_vision_tower": 1e-6
    }  # fmt: skip
    assert learning_rates(make_optimizer(model, OptimConfig(lr=3e-6))) == {"policy/lr": 3e-6}


def test_a_frozen_vision_tower_leaves_its_projector_and_adapters_are_found_under_other_names() -> None:
    model = empty("qwen2_5_vl")
    for name, parameter in model.model.visual.named_parameters():
        parameter.requires_grad_("merger" in name)
    assert {name.split(".")[0] for name in names_by_group(model, OptimConfig())} == {"language_model", "projector"}
    adapter = nn.Module()
    adapter.base_model = nn.Module()
    adapter.base_model.visual = nn.Linear(2, 2)
    adapter.base_model.visual_words = nn.Linear(2, 2, bias=False)  # a name that merely begins alike
    assert names_by_group(adapter, OptimConfig()) == {
        "language_model.decayed": ["base_model.visual_words.weight"],
        "vision_tower.decayed": ["base_model.visual.weight"],
        "vision_tower.undecayed": ["base_model.visual.bias"],
    }


def test_vectors_and_chosen_names_are_not_decayed() -> None:
    model = empty("qwen2")
    by_default = names_by_group(model, OptimConfig())
    assert all(name.endswith(("norm.weight", "bias")) for name in by_default["language_model.undecayed"])
    chosen = names_by_group(model, OptimConfig(undecayed=("embed_tokens", r"lm_head\.")))
    moved = set(chosen["language_model.undecayed"]) - set(by_default["language_model.undecayed"])
    assert moved == {"model.embed_tokens.weight", "lm_head.weight"}
    decays = {g["name"]: g["weight_decay"] for g in parameter_groups(model, OptimConfig(weight_decay=0.1))}
    assert decays == {"language_model.decayed": 0.1, "language_model.undecayed": 0.0}
    with pytest.raises(ValueError, match=r"optim\.undecayed: 'wte' finds no trainable parameter; they are named"):
        parameter_groups(model, OptimConfig(undecayed=("wte",)))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would be trained"):
        make_optimizer(model, OptimConfig())


def test_decay_by_hand() -> None:
    model = nn.Linear(1, 1).requires_grad_(True)
    model.weight.data.fill_(2.0)
    model.bias.data.fill_(2.0)
    optimizer = make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    model.weight.grad, model.bias.grad = torch.zeros(1, 1), torch.zeros(1)
    optimizer.step()
    assert (model.weight.item(), model.bias.item()) == (pytest.approx(2 * (1 - 0.1 * 0.5)), 2.0)


CHOICES: dict[str, Any] = {
    "float32": (torch.float32, "adamw", 5e-5),
    "kahan": (torch.bfloat16, "adamw", 4e-3),
    "stochastic": (torch.bfloat16, "adamw_stochastic", 4e-3),
    "8bit": (torch.float32, "adamw_8bit", 2e-3),
    "8bit_bf16": (torch.bfloat16, "adamw_8bit", 4e-3),
}


@pytest.mark.parametrize(("start", "change", "times", "expected"), [(1.0, 6e-4, 100, 0.94), (0.02, 1e-6, 1000, 0.019)])
@pytest.mark.parametrize("choice", CHOICES)
def test_N03_small_updates_survive_in_bf16_and_float32(choice, start, change, times, expected) -> None:
    dtype, strategy, tolerance = CHOICES[choice]
    if strategy != "adamw":
        pytest.importorskip("torchao")
    model = Weight(64, 64, dtype=dtype, value=start)  # so many that 8-bit states are in 8 bits
    # Adam's step is lr once its moments have settled on a constant gradient.
    optimizer = make_optimizer(model, OptimConfig(strategy=strategy, lr=change, weight_decay=0.0))
    for _ in range(times):
        model.step(optimizer, torch.ones(64, 64))
    weight = model.weight.detach().float()
    assert weight.mean().item() == pytest.approx(expected, rel=tolerance)
    if strategy == "adamw":  # no chance in it: every weight, not the mean alone
        assert (weight - expected).abs().max().item() <= tolerance * expected


@pytest.mark.parametrize("choice", ["float32", "kahan"])
def test_the_second_moment_follows_the_gradients_down(choice) -> None:
    # Bfloat16 states at beta2 = 0.999 would stay at 0.5 where 0.05 is due: steps a third as long for the rest of a run.
    model = Weight(8, 8, dtype=CHOICES[choice][0])
    optimizer = make_optimizer(model, OptimConfig(lr=1e-6, weight_decay=0.0))
    generator = torch.Generator().manual_seed(0)
    for step in range(1500):
        model.step(optimizer, (1.0 if step < 200 else 0.1) * torch.randn(8, 8, generator=generator))
    assert optimizer.state[model.weight]["exp_avg_sq"].float().mean().item() < 0.1


def test_bf16_says_that_beta2_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make_optimizer(Weight(2, 2, dtype=torch.bfloat16), OptimConfig(betas=(0.8, 0.999)))
    assert (optimizer.param_groups[0]["beta1"], optimizer.param_groups[0]["beta2"]) == (0.8, 0.99)
    assert "bfloat16 states cannot follow beta2=0.999, 0.99 is used" in caplog.text


def test_muon_orthogonalizes_matrices_and_leaves_the_rest_to_adamw() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("qwen3"), dtype=torch.float32)
    config = OptimConfig(strategy="muon", lr=1e-3, weight_decay=0.0)
    optimizer = make_optimizer(model, config)
    names = names_by_group(model, config)
    assert all(n.endswith("proj.weight") for n in names["language_model.decayed_muon"])
    assert set(names["language_model.decayed"]) == {"model.embed_tokens.weight", "lm_head.weight"}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.step()
    moved = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    matrix = moved["model.layers.0.mlp.up_proj.weight"]
    # Of size 0.2 lr sqrt(max(shape)) in every direction, the Newton-Schulz iteration's 0.7 to 1.2.
    singular = torch.linalg.svdvals(matrix) / (0.2 * 1e-3 * math.sqrt(max(matrix.shape)))
    assert 0.6 < singular.min() and singular.max() < 1.3
    for name in ("model.embed_tokens.weight", "model.norm.weight"):  # AdamW's first step is lr, whatever the gradient
        torch.testing.assert_close(moved[name], -1e-3 * gradients[name].sign(), rtol=1e-3, atol=1e-6)
    make_scheduler(optimizer, OptimConfig(strategy="muon", lr=1e-3, warmup_steps=3), 10)
    assert {g["lr"] for g in optimizer.param_groups} == {1e-3 / 4}
    with pytest.raises(ValueError, match="bfloat16 ones would lose its updates"):
        make_optimizer(model.bfloat16(), config)


def test_muon_leaves_routers_and_stacked_experts_to_adamw_and_both_decay() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config("qwen3_moe"), dtype=torch.float32)
    names = names_by_group(model, OptimConfig(strategy="muon"))
    assert {n.split(".")[-3] for n in names["language_model.decayed_muon"]} == {"self_attn"}
    kept = {n.partition(".mlp.")[2] for n in names["language_model.decayed"]} - {""}
    assert kept == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8bit_states_go_through_a_checkpoint_and_host_memory_unchanged(dtype) -> None:
    model = Weight(64, 65, dtype=dtype)  # 65 x 64 is not a multiple of 256, 8-bit or not
    wide = nn.ModuleDict({"a": model, "b": Weight(64, 256, dtype=dtype)})
    optimizer = make_optimizer(wide, OptimConfig(strategy="adamw_8bit", lr=1e-3))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for parameter in wide.parameters():
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * 1e-3).to(dtype)
        optimizer.step()
    parameter = wide["b"].weight
    values = optimizer_values(wide, optimizer)
    assert {v.dtype for k, v in values.items() if "exp_avg" in k} == {torch.float32}
    before = {k: optimizer.state[parameter][k] for k in ("exp_avg", "exp_avg_sq")}
    assert all(state.codes.dtype == torch.uint8 for state in before.values())
    set_optimizer_values(wide, optimizer, values)
    for key, state in before.items():
        now = optimizer.state[parameter][key]
        assert torch.equal(now.codes, state.codes) and torch.equal(now.scale, state.scale), key
        memory = HostMemory()
        held = memory.hold(key, state)
        assert held.codes.dtype == torch.uint8 and torch.equal(held.codes, state.codes)
        state.copy_(torch.randn(64, 256))
        assert torch.equal(memory.hold(key, state).codes, state.codes)


@needs_torchao
def test_stochastic_rounding_repeats_and_leaves_the_callers_random_numbers_alone() -> None:
    weights = []
    for _ in range(2):
        model = Weight(8, 8, dtype=torch.bfloat16, value=1.0)
        optimizer = make_optimizer(model, OptimConfig(strategy="adamw_stochastic", lr=1e-3))
        for _ in range(3):
            torch.manual_seed(len(weights))
            model.step(optimizer, torch.ones(8, 8))
            drawn = torch.rand(())
            torch.manual_seed(len(weights))
            assert torch.equal(drawn, torch.rand(()))
        weights.append(model.weight.detach())
        assert optimizer.state[model.weight]["exp_avg_sq"].dtype == torch.float32  # which follows any beta2
    assert torch.equal(*weights) and len(weights[0].unique()) > 1


def test_rules_that_strategy_and_precision_must_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"optim\.lr_projector must be above 0 and finite, got 0"):
        OptimConfig(lr_projector=0.0)
    with pytest.raises(ValueError, match=r"optim\.undecayed: '\(' is no regular expression"):
        OptimConfig(undecayed=("(",))
    with pytest.raises(ValueError, match=r"would lose its updates; set model\.precision='amp'"):
        Config(optim=OptimConfig(strategy="muon"), model=ModelConfig(precision="bf16"))
    monkeypatch.setattr("r1.sections_model.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'adamw_8bit' needs a package that is not installed: pip install torchao"):
        OptimConfig(strategy="adamw_8bit")
    monkeypatch.setattr("r1.sections_model.find_spec", lambda name: name)
    with pytest.raises(ValueError, match="'adamw_stochastic' rounds bfloat16 weights"):
        Config(optim=OptimConfig(strategy="adamw_stochastic"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_N04_a_gradient_that_is_not_finite_leaves_weights_and_states_as_they_are(bad) -> None:
    model = Weight(2, 2, dtype=torch.float32, value=1.0)
    optimizer = make_optimizer(model, OptimConfig(**PLAIN))
    model.weight.grad = torch.ones(2, 2)
    assert optimizer_step(model, optimizer, 1.0) == (2.0, True)
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[1.0, bad], [0.0, 0.0]])
    norm, stepped = optimizer_step(model, optimizer, 1.0)
    assert not math.isfinite(norm) and not stepped
    assert torch.equal(model.weight, before) and optimizer.state[model.weight]["step"] == 1
    model.weight.grad = torch.ones(2, 2)
    assert optimizer_step(model, optimizer, 1.0)[1]


def test_gradients_are_clipped_to_their_norm_over_all_parameters() -> None:
    model = nn.ModuleList([Weight(1, 1, dtype=torch.float32), Weight(1, 1, dtype=torch.float32)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model[0].weight.grad, model[1].weight.grad = torch.tensor([[3.0]]), torch.tensor([[4.0]])
    assert optimizer_step(model, optimizer, 0.5) == (5.0, True)
    assert [p.item() for p in model.parameters()] == pytest.approx([-0.3, -0.4], rel=1e-4)
    assert all(p.grad is None for p in model.parameters())


def test_schedules_by_hand() -> None:
    linear = OptimConfig(schedule="linear", warmup_steps=2, min_lr_ratio=0.1)
    assert [round(lr_factor(s, 6, linear), 4) for s in range(6)] == [0.3333, 0.6667, 1.0, 0.775, 0.55, 0.325]
    cosine = OptimConfig(schedule="cosine", min_lr_ratio=0.5)
    assert lr_factor(0, 4, cosine) == 1.0 and lr_factor(2, 4, cosine) == pytest.approx(0.75)
    assert lr_factor(1, 4, cosine) == pytest.approx(0.5 + 0.25 * (1 + math.sqrt(0.5)))
    assert lr_factor(7, 10, OptimConfig()) == 1.0
    # Past the end, as after a resume with fewer steps, the floor holds.
    assert lr_factor(9, 4, cosine) == 0.5 and lr_factor(9, 6, linear) == pytest.approx(0.1)
    # A share of the steps, or a number that goes before it; the whole run may be warm-up.
    share = OptimConfig(warmup_ratio=0.25)
    assert [lr_factor(s, 8, share) for s in range(3)] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert lr_factor(0, 8, OptimConfig(warmup_ratio=0.5, warmup_steps=0)) == 1.0
    assert lr_factor(3, 4, OptimConfig(warmup_ratio=1.0, schedule="cosine")) == 0.8


def test_every_group_follows_the_schedule_from_its_own_rate() -> None:
    model = empty("qwen2_5_vl")
    config = OptimConfig(lr=4e-6, lr_projector=8e-6, schedule="linear")
    optimizer = make_optimizer(model, config)
    scheduler = make_scheduler(optimizer, config, 4)
    optimizer.step()  # without gradients: nothing moves
    scheduler.step()
    assert learning_rates(optimizer) == pytest.approx({"policy/lr": 3e-6, "policy/lr_projector": 6e-6})


def test_a_resume_with_other_parts_and_rates_goes_on_at_the_place_of_the_schedule(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def learner(config: OptimConfig, *, frozen: bool) -> Any:
        model = empty("qwen2_5_vl")
        for parameter in model.model.visual.parameters():
            parameter.requires_grad_(not frozen)
        optimizer = make_optimizer(model, config)
        return SimpleNamespace(model=model, optimizer=optimizer, scheduler=make_scheduler(optimizer, config, 4))

    first = learner(OptimConfig(lr=4e-6, schedule="linear"), frozen=True)
    first.optimizer.step()
    first.scheduler.step()
    second = learner(OptimConfig(lr=4e-6, lr_vision_tower=8e-6, schedule="linear"), frozen=False)
    set_small_state(second, small_state(first))
    assert learning_rates(second.optimizer) == pytest.approx({"policy/lr": 3e-6, "policy/lr_vision_tower": 6e-6})
    assert "the new one is used" in caplog.text
    second.optimizer.step()
    second.scheduler.step()
    assert learning_rates(second.optimizer) == pytest.approx({"policy/lr": 2e-6, "policy/lr_vision_tower": 4e-6})
