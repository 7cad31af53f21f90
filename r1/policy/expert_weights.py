"""Weights of experts, which lie otherwise in files than in memory: one tensor for each expert, or turned.

In memory a layer's experts are two tensors, gate_up_proj [experts, 2 x width, hidden] and down_proj [experts, hidden,
width]. Qwen3's files hold every expert's matrices alone; Qwen3-VL's hold the two tensors with their last two
dimensions swapped, and so does vLLM expect them, while transformers 5.19 saves them as they are in memory.
"""

import re
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

Place = tuple[Any, str]  # an open safetensors file and a name in it
_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def published_layout(name: str, tensor: Tensor, model_type: str) -> Tensor:
    """A parameter in the layout of its family's published files, which engines read; a view, if it differs."""
    return tensor.transpose(1, 2) if model_type == "qwen3_vl_moe" and _EXPERTS.search(name) else tensor


def expert_places(converter: WeightConverter) -> "StackedExperts | TurnedExperts | None":
    """Room for the places of one parameter that the converter makes; None if it does other things than these."""
    steps = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
    if steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        return StackedExperts(converter.source_patterns)
    return TurnedExperts() if [kind for kind, _ in steps] == [Transpose] else None


class StackedExperts:
    """A parameter [experts, rows, columns] whose experts lie alone, each as one matrix or several below each other."""

    def __init__(self, patterns: list[str]) -> None:
        """patterns: what the names of an expert's matrices match, from the upper to the lower: gate, then up."""
        self._patterns = patterns
        self._places: dict[int, dict[int, Place]] = {}  # by expert and pattern

    def add(self, place: Place, pattern: str) -> None:
        number = re.search(r"experts\.(\d+)\.", place[1])
        assert number is not None, f"{place[1]} names no expert"
        self._places.setdefault(int(number[1]), {})[self._patterns.index(pattern)] = place

    def fits(self, shape: torch.Size) -> bool:
        """Whether all matrices of a parameter of this shape are there."""
        parts = range(len(self._patterns))
        whole = all(expert.keys() == set(parts) for expert in self._places.values())
        shapes = {tuple(_shape_of(place)) for expert in self._places.values() for place in expert.values()}
        expected = {(shape[1] // len(parts), shape[2])}
        return whole and self._places.keys() == set(range(shape[0])) and shapes == expected

    def read(self, rows: slice, shape: torch.Size) -> Tensor:
        """These experts, in the files' dtype; no others are read."""
        chosen = [self._places[expert] for expert in range(shape[0])[rows]]
        matrices = [[file.get_tensor(key) for _, (file, key) in sorted(expert.items())] for expert in chosen]
        return torch.stack([torch.cat(parts) for parts in matrices])


class TurnedExperts:
    """A parameter [experts, rows, columns] that lies as [experts, columns, rows], or as it is."""

    def add(self, place: Place, pattern: str) -> None:
        self._place = place

    def fits(self, shape: torch.Size) -> bool:
        return _shape_of(self._place) in ([*shape], [shape[0], shape[2], shape[1]])

    def read(self, rows: slice, shape: torch.Size) -> Tensor:
        file, key = self._place
        part = file.get_slice(key)[rows]
        return part if _shape_of(self._place) == [*shape] else part.transpose(1, 2)


def _shape_of(place: Place) -> list[int]:
    return list(place[0].get_slice(place[1]).get_shape())
