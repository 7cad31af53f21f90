"""torchao's AdamW for sharded bfloat16 weights: stochastic rounding, and states in 8 bits. Needs r1's extra torchao."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim import _AdamW as TorchaoAdamW
from torchao.optim.subclass_8bit import OptimState8bit

from r1.parallel import local_part


class _OnShards:
    """What torchao's optimizers lack for FSDP2's shards."""

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        # Bfloat16 states stop falling at beta2 = 0.999, and torchao 0.18 cannot use them on DTensors uncompiled.
        return super()._new_buffer(p.float(), signed)  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Round by the number of the step alone: ranks that hold copies of a shard (HSDP) must round it alike."""
        taken = max((int(state["step"]) for state in self.state.values()), default=0)
        on_gpu = self.param_groups[0]["params"][0].device.type == "cuda"
        devices = [torch.cuda.current_device()] if on_gpu else []
        stance = torch.compiler.set_stance("default" if on_gpu else "force_eager")  # a CPU may have no compiler
        with torch.random.fork_rng(devices), stance:
            torch.manual_seed(taken)
            super().step(closure)  # pyright: ignore[reportAttributeAccessIssue]


class AdamWStochastic(_OnShards, TorchaoAdamW):
    """AdamW with float32 states; bfloat16 weights are rounded up or down by chance, right in the mean."""


class AdamW8bit(_OnShards, TorchaoAdamW8bit):
    """AdamW with both states in 8 bits, in blocks of 256 (arXiv 2110.02861); small tensors keep float32 ones."""

    def plain(self, value: Any) -> Any:
        """A state for a checkpoint, in host memory: shards of 8-bit ones could not be cut anew for other ranks.

        `quantized` makes the very same state of it: a block's largest value is stored as 1 or -1 times its scale, so
        that the scale is found again, though 8 bits hold -0.993 for the latter.
        """
        local: Any = local_part(value)
        if not isinstance(local, OptimState8bit):
            return value
        table = local.qmap.clone()
        table[0] = -1.0 if local.signed else table[0]
        blocks = table[local.codes.int()].view(len(local.scale), -1) * local.scale[:, None]
        return _like(blocks.view(local.codes.shape), value).cpu()

    def quantized(self, parameter: Tensor, key: str, value: Any) -> Any:
        """What `plain` was made of."""
        if key not in ("exp_avg", "exp_avg_sq"):
            return value
        state = self._new_buffer(parameter, signed=key == "exp_avg")
        state.copy_(value)
        return state


def _like(local: Tensor, value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return local
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
