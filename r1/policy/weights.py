"""Read a model's weights from safetensors files: each rank its own rows, and no rank the whole model.

Run with transformers 5.19; its renaming of a checkpoint's names has the same signature in 5.17.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from r1.parallel import gather_objects, local_part
from r1.policy.expert_weights import Place, StackedExperts, TurnedExperts, expert_places
from r1.policy.lora_weights import base_name

Experts = StackedExperts | TurnedExperts
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles:
    """The safetensors files of a model, by the names its parameters have in memory."""

    def __init__(self, places: dict[str, Place], experts: dict[str, tuple[Experts, torch.Size]]) -> None:
        """places: for each parameter the open file and its name there; experts: of those in another layout, shapes."""
        self._places, self._experts = places, experts

    @classmethod
    def find(cls, path: str, model: PreTrainedModel, *, fresh: frozenset[str] = frozenset()) -> "WeightFiles | None":
        """The files of model's parameters and persistent buffers.

        None where they are not plain: no safetensors, quantized, or a tensor that is missing, of another shape, or
        converted on loading in another way than experts are (r1/policy/expert_weights.py).

        Args:
            path: folder or hub id; of a hub id the files are fetched, by one process of a host at a time.
            model: of the class that loads them, on the meta device.
            fresh: names that no file needs to hold.
        """
        if getattr(model.config, "quantization_config", None) is not None:
            return None
        wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in fresh}
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters: list[Any] = [t for t in transforms if not isinstance(t, WeightRenaming)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        places: dict[str, Place] = {}
        experts: dict[str, Experts] = {}
        for file in _files(path):
            opened = safe_open(file, framework="pt")
            for key in opened.keys():
                name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
                if name not in wanted:
                    continue
                if pattern is not None:
                    found = experts.get(name) or expert_places(by_pattern[pattern])
                    if found is None:
                        return None
                    experts[name] = found
                    found.add((opened, key), pattern)
                elif list(opened.get_slice(key).get_shape()) == list(wanted[name].shape):
                    places[name] = (opened, key)
        fitting = {n: (e, wanted[n].shape) for n, e in experts.items() if e.fits(wanted[n].shape)}
        own = {name for name, _ in model.named_parameters()} | {n for n, _ in model.named_buffers() if n in wanted}
        return cls(places, fitting) if own - fresh <= places.keys() | fitting.keys() else None

    def __contains__(self, name: str) -> bool:
        return name in self._places or name in self._experts

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Rows of a tensor, in the file's dtype, in host memory; no others are read."""
        if name in self._experts:
            places, shape = self._experts[name]
            return places.read(rows, shape)
        opened, key = self._places[name]
        part = opened.get_slice(key)
        return part[rows] if part.get_shape() else opened.get_tensor(key)


def _files(path: str) -> list[Path]:
    """The safetensors files of a folder or hub id; [] where there are none."""
    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, allow_patterns=["model*.safetensors", INDEX]))
        except OSError:  # not reachable: transformers, asked next, explains it best
            return []
    if (folder / INDEX).is_file():
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []


def find_on_all_ranks(path: str, model: PreTrainedModel, *, fresh: frozenset[str] = frozenset()) -> WeightFiles | None:
    """WeightFiles.find, or None on all ranks if it is on one; collective."""
    found = WeightFiles.find(path, model, fresh=fresh) if resets_buffers(model) else None
    everywhere = not dist.is_initialized() or all(gather_objects(found is not None))
    return found if everywhere else None


def resets_buffers(model: PreTrainedModel) -> bool:
    """Whether reset_buffers can compute all that no file holds: rotary frequencies, in every family here."""
    kept = model.state_dict().keys()
    return all(
        name in kept or "RotaryEmbedding" in type(model.get_submodule(name.rpartition(".")[0])).__name__
        for name, _ in model.named_buffers()
    )


def reset_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds, as transformers does for a model that came from the meta device."""
    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.full_like(buffer, torch.nan))
            model._init_weights(module)
            for name, buffer in module.named_buffers(recurse=False):
                assert bool(buffer.isfinite().all()), f"transformers left {type(module).__name__}.{name} unset"


@torch.no_grad()
def fill_shards(model: PreTrainedModel, files: WeightFiles) -> None:
    """Fill this rank's shards from the files and compute the buffers; names that the files lack become 0.

    No collective and no copy of the model: a rank reads the rows that FSDP2 gave it, one parameter at a time.
    """
    reset_buffers(model)
    kept = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    for name, target in [*model.named_parameters(), *buffers]:
        local = local_part(target)
        if base_name(name) not in files:
            local.zero_()
        elif local.numel():
            local.copy_(files.read(base_name(name), _rows(target)))


def _rows(target: Tensor) -> slice:
    """The rows of a parameter that FSDP2, which shards the first dimension, keeps on this rank."""
    if not isinstance(target, DTensor):
        return slice(None)
    start, stop = 0, target.shape[0]
    for axis, placement in enumerate(target.placements):
        if placement.is_shard():
            assert placement.is_shard(0), f"expected shards of dimension 0, got {placement}"
            size = -(-(stop - start) // target.device_mesh.size(axis))  # as torch.chunk: the last may be short or empty
            low = min(start + target.device_mesh.get_local_rank(axis) * size, stop)
            start, stop = low, min(low + size, stop)
    return slice(start, stop)
