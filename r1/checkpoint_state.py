"""What a checkpoint holds, by name: model and optimizer tensors as shards, the schedule, and a rank's RNG."""

import copy
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from r1.policy.lora_weights import is_adapter
from r1.policy.offload import CPU, HostMemory, await_copies
from r1.policy.optim import set_rates

_log = logging.getLogger(__name__)
_GROUP_STATE = ("setup", "step", "kahan_sum")  # what torch-optimi (0.3.3) keeps in a group, not beside a parameter


class Learner(Protocol):
    """A model in training with its optimizer and schedule: the policy, or a critic beside it."""

    @property
    def model(self) -> PreTrainedModel: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def scheduler(self) -> LambdaLR: ...


@runtime_checkable
class Quantizing(Protocol):
    """An optimizer that keeps states in fewer bits, which a checkpoint holds as plain tensors."""

    def plain(self, value: Any) -> Any: ...
    def quantized(self, parameter: Tensor, key: str, value: Any) -> Any: ...


def under(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """values under the name of a part of the run; the policy's names stand alone."""
    return dict(values) if part == "policy" else {f"{part}.{name}": value for name, value in values.items()}


def of(part: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What `under` put there, by its own names."""
    if part == "policy":
        return {name: value for name, value in values.items() if name.startswith(("model.", "optimizer."))}
    return {name.removeprefix(f"{part}."): value for name, value in values.items() if name.startswith(f"{part}.")}


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each once: of tied ones the first name; with adapters, what trains."""
    # state_dict and not named_parameters: it first reshards what FSDP2 left gathered after a forward pass.
    named, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    if any(is_adapter(name) for name in named):  # the rest is model.path's
        return {name: tensor for name, tensor in named.items() if tensor.requires_grad}
    return named


def model_values(model: nn.Module) -> dict[str, Any]:
    """{"model.<name>": tensor}, the model's own memory: loading into them loads the model."""
    return {f"model.{name}": tensor.detach() for name, tensor in _named_tensors(model).items()}


def optimizer_values(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """{"optimizer.<parameter>.<state>": value} of every parameter that has states yet."""
    names = {id(tensor): name for name, tensor in _named_tensors(model).items()}
    values = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        assert name is not None, f"the optimizer trains a parameter of shape {tuple(parameter.shape)} outside the model"
        for key, value in state.items():
            plain = optimizer.plain(value) if isinstance(optimizer, Quantizing) else value
            values[f"optimizer.{name}.{key}"] = plain
    return values


def staged(values: dict[str, Any], memory: HostMemory) -> dict[str, Any]:
    """A copy in host memory that training does not touch, shards as shards; it lasts until the next one."""
    copies = {
        name: memory.hold(name, value) if isinstance(value, Tensor) and value.ndim > 0 else copy.deepcopy(value)
        for name, value in values.items()
    }
    await_copies()
    return copies


def empty_optimizer_values(model: nn.Module, optimizer: Optimizer, there: dict[str, Any]) -> dict[str, Any]:
    """Room for every optimizer value in the checkpoint that belongs to a parameter this optimizer trains.

    Args:
        there: the checkpoint's metadata, by name.
    """
    trained = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    parameters = {name: tensor for name, tensor in _named_tensors(model).items() if id(tensor) in trained}
    values = {}
    for full_name, entry in there.items():
        name, _, _ = full_name.removeprefix("optimizer.").rpartition(".")
        if not full_name.startswith("optimizer.") or name not in parameters:
            continue
        parameter = parameters[name]
        if not isinstance(entry, TensorStorageMetadata):
            values[full_name] = None
        elif entry.size == parameter.shape:
            values[full_name] = torch.zeros_like(parameter.detach(), dtype=entry.properties.dtype)
        else:
            device = counter_device(trained[id(parameter)], parameter)
            values[full_name] = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
    return values


def counter_device(group: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """Where step counts are: torch's fused and capturable optimizers want them beside the parameter, the others on CPU.

    A parameter that waits in host memory, as a critic's do while a checkpoint is loaded, is on the GPU at every step.
    """
    if not (group.get("fused") or group.get("capturable")):
        return CPU
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else parameter.device


def set_optimizer_values(model: nn.Module, optimizer: Optimizer, values: dict[str, Any]) -> None:
    """Replace the optimizer's states by those of values; the other parameters have none, as before a first step."""
    parameters = _named_tensors(model)
    optimizer.state.clear()
    for full_name, value in values.items():
        if full_name.startswith("optimizer."):
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            parameter = parameters[name]
            state = optimizer.quantized(parameter, key, value) if isinstance(optimizer, Quantizing) else value
            optimizer.state[parameter][key] = state


def small_state(learner: Learner) -> dict[str, Any]:
    """The schedule, and what an optimizer remembers for each group as a whole; its settings come from the config."""
    named = enumerate(learner.optimizer.param_groups)
    groups = {group.get("name", i): {key: group[key] for key in _GROUP_STATE if key in group} for i, group in named}
    return {"scheduler": learner.scheduler.state_dict(), "groups": groups}


def set_small_state(learner: Learner, saved: dict[str, Any]) -> None:
    """Put small_state's values back."""
    for i, group in enumerate(learner.optimizer.param_groups):
        group.update(saved["groups"].get(group.get("name", i), {}))  # no such group: its parameters were frozen
    load_schedule(learner.optimizer, learner.scheduler, saved["scheduler"])


def room_for(path: Path, model: nn.Module, optimizer: Optimizer | None, there: dict[str, Any]) -> dict[str, Any]:
    """The tensors to load into: the model's own, and new ones for an optimizer's states.

    Args:
        path: of the checkpoint, for messages.
        there: the checkpoint's metadata of this model, by name.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    values = model_values(model)
    check_names(path, values, there)
    return values if optimizer is None else values | empty_optimizer_values(model, optimizer, there)


def check_names(path: Path, values: dict[str, Any], there: dict[str, Any]) -> None:
    """Raise ValueError unless the checkpoint has exactly the model's tensors, in their shapes."""
    saved = {name for name in there if name.startswith("model.")}
    problems = [f"{name} is not in the checkpoint" for name in values if name not in saved]
    problems += [f"{name} is not in the model" for name in sorted(saved - values.keys())]
    problems += [
        f"{name} is {list(there[name].size)} in the checkpoint and {list(value.shape)} in the model"
        for name, value in values.items()
        if name in saved and there[name].size != value.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"{path} is of another model: {'; '.join(p.removeprefix('model.') for p in problems[:3])}{more}; "
            "resume with the model.path and model.override_config that it was trained with"
        )


def load_schedule(optimizer: Optimizer, scheduler: LambdaLR, saved: dict[str, Any]) -> None:
    """Go on at the saved place of the schedule, which is the config's now, as are the rates."""
    bases = list(scheduler.base_lrs)
    scheduler.load_state_dict(saved)
    scheduler.base_lrs = bases
    new, old = [float(base) for base in bases], [float(base) for base in saved["base_lrs"]]
    if new != old:
        _log.warning("optim.lr is %s now and was %s in the checkpoint; the new one is used", new, old)
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    rates = [base * factor for base, factor in zip(new, factors, strict=True)]
    set_rates(optimizer, rates)
    scheduler._last_lr = rates  # pyright: ignore[reportAttributeAccessIssue]


def rng_state() -> dict[str, Any]:
    """This rank's random number generators, as values that torch.load reads with weights_only."""
    numpy_state: Any = np.random.get_state()
    kind, keys, position, has_gauss, gauss = numpy_state
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_rng_state(state: dict[str, Any]) -> None:
    """Put rng_state's generators back; one saved on a CPU leaves a GPU's alone."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
