"""What leaves the GPU while the engine samples."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from r1.config import AlgorithmConfig, Config
from r1.parallel import local_part
from r1.policy import offload
from r1.policy.offload import (
    HostMemory,
    Offload,
    local_bytes,
    plan_offload,
    state_tensors,
    store_model,
    store_optimizer,
)

AUTO = dict.fromkeys(("params", "optimizer", "reference"))


def test_what_fits_beside_the_engine_stays_and_the_dearest_to_move_comes_first():
    sizes = {"params": 12, "optimizer": 25, "reference": 6}
    assert plan_offload(sizes, AUTO, 43) == {"params": False, "optimizer": False, "reference": False}
    assert plan_offload(sizes, AUTO, 42) == {"params": False, "optimizer": False, "reference": True}
    assert plan_offload(sizes, AUTO, 20) == {"params": False, "optimizer": True, "reference": False}
    assert plan_offload(sizes, AUTO, 11) == {"params": True, "optimizer": True, "reference": False}


def test_a_choice_of_the_config_stands():
    sizes = {"params": 12, "optimizer": 25, "reference": 6}
    wanted = {"params": True, "optimizer": False, "reference": None}
    assert plan_offload(sizes, wanted, 26) == {"params": True, "optimizer": False, "reference": True}


def test_states_stay_the_same_through_host_memory_and_counters_stay_where_they_are():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    memory = HostMemory()
    for _ in range(3):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        before = [t.clone() for t in state_tensors(optimizer)]
        store_optimizer(optimizer, memory)
        assert all(torch.equal(a, b) for a, b in zip(before, state_tensors(optimizer), strict=True))
    assert local_bytes(state_tensors(optimizer)) == 2 * 4 * (6 + 2)


class LateMemory(HostMemory):
    """Copies that are there once they are awaited, as those from a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[tuple[Tensor, Tensor]] = []

    def hold(self, key: object, tensor: Tensor, *, changed: bool = True) -> Tensor:
        if key not in self._held or changed:
            held = self._held.setdefault(key, torch.full_like(tensor, torch.nan))
            self.under_way.append((held, tensor.detach().clone()))
        return self._held[key]

    def finish(self) -> None:
        for held, value in self.under_way:
            held.copy_(value)
        self.under_way = []


class Padding(nn.Module):
    """A model with tied weights that copies what `_apply` brings, as FSDP2 does with shards that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(5, 3), nn.Linear(3, 2), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("angles", torch.arange(3.0))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Padding":
        super()._apply(fn, recurse)
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()
        return self


def change(model: nn.Module, parameters: list[Tensor]) -> list[Tensor]:
    """Back on the GPU, with these parameters 1 higher: all values, to compare with."""
    for parameter in model.parameters():
        parameter.data = parameter.data + float(any(parameter is p for p in parameters))
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def test_weights_are_the_last_ones_tied_and_unevenly_sharded_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, memory = Padding(), LateMemory()
    monkeypatch.setattr(offload, "await_copies", memory.finish)
    for _ in range(3):
        wanted = change(model, list(model.parameters()))
        store_model(model, memory)
        torch.testing.assert_close(list(model.state_dict().values()), wanted, rtol=0, atol=0)
        assert model.head.weight is model.embedding.weight
    assert len(memory._held) == 4  # tied weights have one copy


class Bare(Padding):
    """Without FSDP2, whose methods do nothing."""

    def reshard(self) -> None: ...


def make_offload(monkeypatch: pytest.MonkeyPatch, model: Bare, reference: Bare, algorithm: AlgorithmConfig) -> Offload:
    monkeypatch.setattr(Offload, "_leaves", lambda self, name: True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return Offload(Config(algorithm=algorithm), torch.device("cpu"), model, optimizer, reference)


def test_frozen_weights_of_a_loaded_checkpoint_stay_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Bare()
    model.norm.requires_grad_(False)
    moves = make_offload(monkeypatch, model, Bare(), AlgorithmConfig())
    moves.store_params()
    loaded = change(model, list(model.parameters()))
    moves.after_load()
    torch.testing.assert_close(change(model, []), loaded, rtol=0, atol=0)
    moves.store_params()
    torch.testing.assert_close(list(model.state_dict().values()), loaded, rtol=0, atol=0)


def test_a_reference_that_moved_in_host_memory_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Bare().requires_grad_(False)
    moves = make_offload(monkeypatch, Bare(), reference, AlgorithmConfig(reference_update_steps=1))
    moves.store_reference()
    moved = change(reference, list(reference.parameters()))
    moves.store_reference()
    torch.testing.assert_close(list(reference.state_dict().values()), moved, rtol=0, atol=0)


def test_sharded_weights_are_stored_again_while_gradients_are_recorded() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, memory = nn.Linear(4, 4, bias=False), HostMemory()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for _ in range(3):
            model._apply(lambda tensor: tensor.detach().clone())  # as if it came from the GPU
            with torch.no_grad():
                model.weight.add_(1)
            wanted = local_part(model.weight).clone()
            store_model(model, memory)
            torch.testing.assert_close(local_part(model.weight), wanted, rtol=0, atol=0)
    finally:
        dist.destroy_process_group()
