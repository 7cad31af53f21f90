"""What is reported of how evenly routers spread tokens over experts, against counts made by hand."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from r1.policy.router_load import RouterLoad
from tests.tiny import make_config

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)


class FixedRouter(nn.Module):
    """Sends token t to the experts that it was told."""

    def __init__(self, choices: list[list[int]]) -> None:
        super().__init__()
        self.choices = torch.tensor(choices)

    def forward(self, hidden: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, self.choices


def model_of(*layers: list[list[int]] | None) -> Any:
    """A model whose layers route as given; None is a dense one. Four experts."""
    model: Any = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList()
    for choices in layers:
        layer = nn.Module()
        layer.mlp = nn.Module()
        if choices is not None:
            layer.mlp.experts, layer.mlp.gate = nn.Module(), FixedRouter(choices)
            layer.mlp.experts.num_experts = 4
        model.model.layers.append(layer)
    return model


def run(model: Any) -> None:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate(torch.zeros(3, 2))


def test_shares_by_hand() -> None:
    model = model_of([[0, 1], [2, 3], [0, 2]], None, [[0, 1], [0, 1], [0, 1]])
    load = RouterLoad(model, CPU)
    with load.counting(torch.tensor([0, 2, 2])):  # position 0 predicts one trained token, position 2 two of them
        run(model)
    run(model)  # as in a backward pass that computes it again
    # Layer 0 chose 0 1, 0 2, 0 2: of six, expert 0 three, 1 one, 2 two. Layer 2 chose 0 and 1 three times each.
    entropy = -(1 / 2 * math.log(1 / 2) + 1 / 6 * math.log(1 / 6) + 1 / 3 * math.log(1 / 3)) / math.log(4)
    assert load.take_metrics() == pytest.approx(
        {
            "moe/layer_00/max_share": 0.5,
            "moe/layer_00/entropy": entropy,
            "moe/layer_02/max_share": 0.5,
            "moe/layer_02/entropy": 0.5,  # log 2 / log 4
            "moe/max_share": 0.5,
            "moe/entropy": (entropy + 0.5) / 2,
        }
    )
    assert load.take_metrics() == {}  # counted anew


def test_nothing_is_reported_without_trained_tokens_or_without_experts() -> None:
    model = model_of([[0, 1], [2, 3], [0, 2]])
    load = RouterLoad(model, CPU)
    with load.counting(torch.zeros(0, dtype=torch.int64)):
        run(model)
    assert load.take_metrics() == {}
    assert RouterLoad(model_of(None, None), CPU).take_metrics() == {}


def test_choices_are_the_models_own() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("qwen3_moe"), dtype=torch.float32)
    load, ids = RouterLoad(model, CPU), torch.arange(12)[None]
    with load.counting(torch.arange(3, 12)):
        logits = model(input_ids=ids, output_router_logits=True).router_logits
    metrics = load.take_metrics()
    for number, layer in enumerate(logits):
        counts = layer[3:].topk(2).indices.flatten().bincount(minlength=6)
        assert metrics[f"moe/layer_{number:02}/max_share"] == pytest.approx(float(counts.max()) / 18)
