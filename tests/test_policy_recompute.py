"""How many layers keep their activations, on a GPU of 100 bytes whose counts are made up."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from r1.policy import recompute
from r1.policy.recompute import Recompute


class Layer(nn.Module):
    """Keeps 10 bytes a token; its input has 2 (one bfloat16 number)."""

    gradient_checkpointing = True

    def __init__(self, gpu: dict[str, int]) -> None:
        super().__init__()
        self.gpu = gpu

    def forward(self, hidden: Tensor) -> Tensor:
        self.gpu["allocated"] += 10 * hidden.numel() if not self.gradient_checkpointing else 0
        return hidden


def make(monkeypatch: pytest.MonkeyPatch) -> tuple[Recompute, list[Layer], dict[str, int]]:
    """A model of four layers on a GPU with 100 bytes, of which 0 are taken between microbatches."""
    gpu = {"allocated": 0, "peak": 0}
    layers = [Layer(gpu) for _ in range(4)]
    monkeypatch.setattr(recompute, "SPARE", 0.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 - gpu["allocated"], 100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: gpu["allocated"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: gpu["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: gpu["peak"])
    model: Any = SimpleNamespace(model=SimpleNamespace(layers=layers))
    ranks: Any = SimpleNamespace(device=torch.device("cuda"), sequence=None)
    return Recompute(model, ranks, None), layers, gpu


def keeping(recompute: Recompute, layers: list[Layer], gpu: dict[str, int], num_tokens: int) -> list[bool]:
    """Which layers keep a microbatch's activations."""
    recompute.begin_microbatch(num_tokens)
    kept = [not layer.gradient_checkpointing for layer in layers]
    for layer in layers:
        layer(torch.zeros(1, num_tokens, 1, dtype=torch.bfloat16))
    gpu["allocated"] = 0
    return kept


def test_the_first_updates_recompute_and_measure_and_later_ones_keep_what_fits(monkeypatch) -> None:
    one = make(monkeypatch)
    assert keeping(*one, 2) == [False, False, False, True]  # measured
    assert keeping(*one, 2) == [False] * 4
    one[2]["peak"] = 50
    one[0].end_update(has_states=False)
    assert keeping(*one, 2) == [False] * 4  # the optimizer's states were not there yet
    one[0].end_update(has_states=True)
    assert keeping(*one, 2) == [True, True, False, False]  # 50 bytes free, 20 a layer
    assert keeping(*one, 1) == [True] * 4


def test_a_larger_microbatch_than_any_before_leaves_room_for_its_own_peak(monkeypatch) -> None:
    one = make(monkeypatch)
    keeping(*one, 1)
    one[2]["peak"] = 30
    one[0].end_update(has_states=True)
    assert keeping(*one, 1) == [True] * 4  # 70 bytes free
    # One token more: four inputs of 2 bytes, a layer of 10 and its gradients. 70 - 28 = 42 bytes, 20 a layer.
    assert keeping(*one, 2) == [True, True, False, False]
    assert keeping(*one, 4) == [False] * 4


def test_a_choice_of_the_config_is_left_alone(monkeypatch) -> None:
    _, layers, gpu = make(monkeypatch)
    model: Any = SimpleNamespace(model=SimpleNamespace(layers=layers))
    ranks: Any = SimpleNamespace(device=torch.device("cuda"), sequence=None)
    for wanted in (True, False):
        assert keeping(Recompute(model, ranks, wanted), layers, gpu, 5) == [False] * 4
