"""Move a sharded model or an optimizer's states between GPU and host memory; nothing to do on CPU."""

from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that the root unit keeps after a forward pass."""
    cast(FSDPModule, model).reshard()


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move this rank's shards; gathered copies are freed first."""
    reshard(model)
    model.to(device, non_blocking=False)


def move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:  # step counters stay where they are
                state[name] = value.to(device, non_blocking=False)


def free_cache(device: torch.device) -> None:
    """Hand cached GPU memory back, so that the engine in this process can map it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
