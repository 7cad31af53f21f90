"""Names of a model's parameters with and without adapters, and the weights that adapters amount to; without peft."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from r1.parallel import local_part, whole

ADAPTER = "default"  # peft's name for the only one
_COPY = f".modules_to_save.{ADAPTER}."


def base_name(name: str) -> str:
    """The name that a parameter of a model with adapters has without them; an adapter's own keeps its name."""
    return name.replace(".base_layer.", ".").replace(_COPY, ".").replace(".original_module.", ".")


def is_adapter(name: str) -> bool:
    """Whether a parameter is of an adapter, or of a copy that trains in a module's place."""
    return ".lora_" in name or _COPY in name


def file_name(name: str) -> str:
    """The name of an adapter's parameter in peft's files."""
    name = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
    return "base_model.model." + name.replace(_COPY, ".").replace(f".{ADAPTER}.", ".")


def merged_weight(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, magnitude: Tensor | None = None
) -> Tensor:
    """Rows of W + scaling B A, each scaled to its magnitude's length where there is one (DoRA); float32.

    Args:
        weight: [out, in], any rows of it; lora_b [out, rank] and magnitude [out] are of the same rows.
        lora_a: [rank, in].
    """
    merged = torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scaling)
    return merged if magnitude is None else merged * (magnitude.float() / merged.norm(dim=1))[:, None]


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter) of the model that the adapters amount to, by the names it has without them.

    A weight with an adapter comes as a new float32 tensor, sharded like the old one: every rank computes its own rows.
    All others are the model's own. Collective: each adapter's A is gathered.
    """
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        if name.endswith(".base_layer.weight"):
            yield base_name(name), _merged(model.get_submodule(name.removesuffix(".base_layer.weight")))
        else:
            yield base_name(name), parameter


@torch.no_grad()
def _merged(layer: Any) -> Tensor:
    weight, lora_a = layer.base_layer.weight, layer.lora_A[ADAPTER].weight
    magnitude = local_part(layer.lora_magnitude_vector[ADAPTER].weight) if layer.lora_magnitude_vector else None
    rows = merged_weight(
        local_part(weight),
        whole(lora_a),
        local_part(layer.lora_B[ADAPTER].weight),
        layer.scaling[ADAPTER],
        magnitude,
    )
    if not isinstance(weight, DTensor):
        return rows
    return DTensor.from_local(
        rows, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
