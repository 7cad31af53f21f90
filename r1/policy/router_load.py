"""How evenly the routers of a mixture-of-experts model spread the trained tokens over their experts, layer by layer."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from r1.policy.attention import to_device
from r1.policy.model import text_layers


class RouterLoad:
    """Counts the routers' choices where it is asked to; does nothing in a model without experts.

    A token that is trained counts once, with the experts that computed the position which predicts it: however groups
    are packed, split and spread over ranks, the sums are the same.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._device = device
        self._positions: Tensor | None = None  # packed positions to count in the forward pass under way
        self._counts: dict[int, Tensor] = {}  # by layer: [experts] int64
        for number, layer in enumerate(text_layers(model)):
            mlp: Any = layer.mlp
            if hasattr(mlp, "experts"):
                self._counts[number] = torch.zeros(mlp.experts.num_experts, dtype=torch.int64, device=device)
                mlp.gate.register_forward_hook(self._hook(self._counts[number]))

    def _hook(self, counts: Tensor) -> Any:
        def count(router: Any, inputs: Any, output: Any) -> None:
            if self._positions is not None:
                chosen = output[-1][self._positions].flatten()  # of [tokens, experts per token]
                counts.scatter_add_(0, chosen, torch.ones_like(chosen))

        return count

    @contextlib.contextmanager
    def counting(self, positions: Tensor) -> Iterator[None]:
        """Count one forward pass at these packed positions; what backward passes compute again is not counted."""
        if self._counts:
            self._positions = to_device(positions, self._device)
        try:
            yield
        finally:
            self._positions = None

    def take_metrics(self) -> dict[str, float]:
        """Of what was counted since the last call, on all ranks; collective. {} if that is nothing.

        moe/layer_<number>/max_share: the busiest expert's share of a layer's choices, 1 / experts where all are even;
        moe/layer_<number>/entropy of the shares, over that of even ones: 1 is even, 0 one expert alone. moe/max_share
        and moe/entropy are their means over layers.
        """
        if not self._counts:
            return {}
        counts = torch.stack(list(self._counts.values())).double()
        for own in self._counts.values():
            own.zero_()
        dist.all_reduce(counts)
        if float(counts.sum()) == 0:
            return {}
        shares = counts / counts.sum(dim=1, keepdim=True)
        entropy = torch.special.entr(shares).sum(dim=1) / math.log(shares.shape[1])
        figures = {"max_share": shares.max(dim=1).values.tolist(), "entropy": entropy.tolist()}
        metrics = {f"moe/{name}": sum(values) / len(values) for name, values in figures.items()}
        for name, values in figures.items():
            metrics |= {f"moe/layer_{n:02}/{name}": v for n, v in zip(self._counts, values, strict=True)}
        return metrics
