"""What leaves the GPU while the engine samples, and comes back: weights, optimizer states, the reference."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from r1.config import Config
from r1.parallel import local_part

_log = logging.getLogger(__name__)
CPU = torch.device("cpu")
GIB = 1 << 30
RESERVE_GIB = 6.0
"""Left free beside engine and trainer: CUDA context, NCCL, what the allocator cannot use, and a tensor in flight."""


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that the root unit keeps after a forward pass."""
    cast(FSDPModule, model).reshard()


def free_cache(device: torch.device) -> None:
    """Hand cached GPU memory back, so that the engine in this process can map it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's shards, wherever they are."""
    return sum(local_part(t).numel() * t.element_size() for t in tensors)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Its states, but for step counters, which stay where they are."""
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.ndim > 0]


class HostMemory:
    """Page-locked host memory of one model, optimizer or checkpoint, taken once and kept.

    Copies from and to it run at the speed of the bus, those of ordinary memory at a tenth of that: 25 GB of states
    of a 3B model took 15 s a step.
    """

    def __init__(self) -> None:
        self._held: dict[object, Tensor] = {}
        self._locked: list[Tensor] = []

    def __del__(self) -> None:
        for held in self._locked:  # else the addresses could not be locked again once others have them
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(held.untyped_storage().data_ptr())

    @torch.no_grad()
    def hold(self, key: object, tensor: Tensor, *, changed: bool = True) -> Tensor:
        """The tensor's copy in host memory; one that has not changed since it was last held is not copied again."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = tensor.detach().to(CPU, copy=True)
            if tensor.device.type == "cuda" and _page_lock(local_part(held)):
                self._locked.append(local_part(held))
        elif changed:
            local_part(held).copy_(local_part(tensor), non_blocking=True)
        return held


def await_copies() -> None:
    """Until copies between host and GPU are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _page_lock(tensor: Tensor) -> bool:
    """Lock memory that exists, as torch's own way makes a copy and knows plain tensors only."""
    if type(tensor) is not Tensor or tensor.numel() == 0:  # quantized states: several tensors in one, and small
        return False
    storage = tensor.untyped_storage()
    runtime: Any = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if error != 0:
        _log.warning("no page-locked host memory (CUDA error %d): offloading will be slow; see ulimit -l", error)
        with contextlib.suppress(RuntimeError):  # the error stays, and the next kernel would report it as its own
            torch.zeros(1, device="cuda")
    return error == 0


def room_beside_engine(config: Config, device: torch.device) -> float:
    """Bytes of this GPU that are the trainer's while the engine holds its share."""
    total = torch.cuda.get_device_properties(device).total_memory
    return total * (1 - config.rollout.gpu_memory_utilization) - RESERVE_GIB * GIB


def plan_offload(sizes: Mapping[str, int], wanted: Mapping[str, bool | None], room: float) -> dict[str, bool]:
    """Which of several things leave the GPU while the engine samples: those that were asked to, or do not fit.

    Args:
        sizes: bytes of each, the dearest to move first.
        wanted: by the same names; None leaves it to the room.
        room: bytes beside the engine.
    """
    leaves = {}
    for name, size in sizes.items():
        choice = wanted[name]
        leaves[name] = size > room if choice is None else choice
        room -= 0 if leaves[name] else size
    return leaves


def store_model(model: nn.Module, memory: HostMemory, *, changed: Callable[[Tensor], bool] = lambda _: True) -> None:
    """Move this rank's shards to host memory; gathered copies are freed first.

    Args:
        changed: whether a tensor may differ from its copy in host memory, if it has one.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = [*model.parameters(), *model.buffers()]  # tied ones once
    held = {id(tensor): memory.hold(key, tensor, changed=changed(tensor)) for key, tensor in enumerate(tensors)}
    await_copies()  # before FSDP2 sees them: what does not divide over the ranks it copies once more, to pad it
    model._apply(lambda tensor: held[id(tensor)])  # as model.to does, but into our memory


def fetch_model(model: nn.Module, device: torch.device) -> None:
    """Start moving this rank's shards to the device, if they are not there; nothing on CPU."""
    if device.type == "cuda":
        model.to(device, non_blocking=True)


def store_optimizer(optimizer: Optimizer, memory: HostMemory) -> None:
    """Move its states to host memory."""
    _move_states(optimizer, lambda key, tensor: memory.hold(key, tensor))
    await_copies()


def fetch_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Start moving its states to the device."""
    _move_states(optimizer, lambda key, tensor: tensor.to(device, non_blocking=True))


def _move_states(optimizer: Optimizer, move: Callable[[object, Tensor], Tensor]) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:  # step counters stay where they are
                state[name] = move((id(parameter), name), value)


class Offload:
    """Moves the policy's weights, its optimizer's states and its reference out of the engine's way, and back.

    Without a word in the config, what fits beside the engine stays, by its size at that moment.
    """

    def __init__(
        self, config: Config, device: torch.device, model: nn.Module, optimizer: Optimizer, reference: nn.Module | None
    ) -> None:
        self._config, self._device, self._model, self._optimizer = config, device, model, optimizer
        self._reference = None if reference is model else reference  # with adapters they are one
        self._memory = {name: HostMemory() for name in ("params", "optimizer", "reference")}
        self._copies = torch.cuda.Stream() if device.type == "cuda" else None

    def _leaves(self, name: str) -> bool:
        if self._device.type != "cuda":
            return False
        sizes = {
            "params": local_bytes(self._model.parameters()),
            "optimizer": local_bytes(state_tensors(self._optimizer)),
            "reference": 0 if self._reference is None else local_bytes(self._reference.parameters()),
        }
        wanted = {name: getattr(self._config.parallel, f"offload_{name}") for name in sizes}
        return plan_offload(sizes, wanted, room_beside_engine(self._config, self._device))[name]

    def store_params(self) -> None:
        if self._leaves("params"):
            # What is frozen is there already.
            store_model(self._model, self._memory["params"], changed=lambda tensor: tensor.requires_grad)

    def fetch_params(self) -> None:
        fetch_model(self._model, self._device)

    def store_reference(self) -> None:
        """Nothing is copied where its weights in host memory are as they were: where no step moves it."""
        if self._reference is not None:
            reshard(self._reference)
            if self._leaves("reference"):
                moves = self._config.algorithm.reference_update_steps is not None
                store_model(self._reference, self._memory["reference"], changed=lambda _: moves)
                free_cache(self._device)

    def fetch_reference(self) -> None:
        if self._reference is not None:
            fetch_model(self._reference, self._device)

    def store_optimizer(self) -> None:
        if self._leaves("optimizer"):
            store_optimizer(self._optimizer, self._memory["optimizer"])

    def fetch_optimizer(self) -> None:
        """Start copying the states in, if they are in host memory; forward and backward passes go on meanwhile."""
        if self._copies is not None:
            with torch.cuda.stream(self._copies):
                fetch_optimizer(self._optimizer, self._device)

    def await_optimizer(self) -> None:
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)

    def after_load(self) -> None:
        """A checkpoint has been loaded: its states leave the GPU, and copies of frozen weights are made anew."""
        if self._leaves("params"):
            store_model(self._model, self._memory["params"])
        self.store_optimizer()
        free_cache(self._device)
