"""Weights of experts, which lie otherwise in files than in memory: one tensor for each expert, or turned.

In memory a layer's experts are two tensors, gate_up_proj [experts, 2 x width, hidden] and down_proj [experts, hidden,
width]. Qwen3's files hold every expert's matrices alone; Qwen3-VL's hold the two tensors with their last two
dimensions swapped, and so does vLLM expect them, while transformers 5.19 saves them as they are in memory.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

Place = tuple[Any, str]  # an open safetensors file and a name in it
_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def published_layout(name: str, tensor: Tensor, model_type: str) -> Tensor:
    """A parameter in the layout of its family's published files, which engines read; a view, if it differs."""
    return tensor.transpose(1, 2) if model_type == "qwen3_vl_moe" and _EXPERTS.search(name) else tensor


class ExpertPlaces:
    """Where the tensors of one parameter lie whose file layout transformers converts on loading."""

    def __init__(self, converter: WeightConverter) -> None:
        """converter: one that `known` knows."""
        self._patterns = converter.source_patterns
        self._places: dict[int, dict[int, Place]] = {}  # by expert, and there by pattern: gate, then up

    @staticmethod
    def known(converter: WeightConverter) -> bool:
        """Whether it only stacks experts, joins their matrices, or turns stacked ones."""
        steps = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
        stacks = [(MergeModulelist, 0), (Concatenate, 1)]
        return steps in (stacks, stacks[:1]) or [kind for kind, _ in steps] == [Transpose]

    def add(self, place: Place, pattern: str) -> None:
        number = re.search(r"experts\.(\d+)\.", place[1])
        self._places.setdefault(int(number[1]) if number else -1, {})[self._patterns.index(pattern)] = place

    def shape(self) -> list[int] | None:
        """Of the parameter in memory, or with its last two dimensions swapped; None if a part is missing."""
        if self._places.keys() == {-1}:
            return self._shape_of(self._places[-1][0])
        count, parts = len(self._places), range(len(self._patterns))
        if self._places.keys() != set(range(count)) or any(p.keys() != set(parts) for p in self._places.values()):
            return None
        shapes = {tuple(self._shape_of(expert[part])) for expert in self._places.values() for part in parts}
        return [count, len(parts) * min(shapes)[0], min(shapes)[1]] if len(shapes) == 1 else None

    def fits(self, shape: Iterable[int]) -> bool:
        """Whether a parameter of this shape can be read."""
        own, wanted = self.shape(), list(shape)
        return own is not None and (own == wanted or (-1 in self._places and _swapped(own) == wanted))

    def read(self, rows: slice, shape: Iterable[int]) -> Tensor:
        """Experts of a parameter of this shape, in the files' dtype; no others are read."""
        if -1 in self._places:
            opened, key = self._places[-1][0]
            part = opened.get_slice(key)[rows]
            return part if self.shape() == list(shape) else part.transpose(1, 2)
        chosen = [self._places[expert] for expert in range(len(self._places))[rows]]
        parts = range(len(self._patterns))
        return torch.stack([torch.cat([e[p][0].get_tensor(e[p][1]) for p in parts]) for e in chosen])

    @staticmethod
    def _shape_of(place: Place) -> list[int]:
        return list(place[0].get_slice(place[1]).get_shape())


def _swapped(shape: list[int]) -> list[int]:
    return [*shape[:-2], shape[-1], shape[-2]]
