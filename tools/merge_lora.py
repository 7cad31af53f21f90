"""A LoRA run's weights: its adapters merged into the model they were trained on, or alone in peft's format."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from r1.checkpoint_files import CONFIG, MARKER
from r1.config import LoraConfig
from r1.policy.lora import add_adapters, peft_config
from r1.policy.lora_weights import ADAPTER, base_name, file_name, is_adapter, merged_weight
from r1.policy.weights import WeightFiles
from tools.merge_files import Shards, checked


def lora_of(checkpoint: Path) -> LoraConfig | None:
    """model.lora of the run that made the checkpoint; None: it trained the whole model."""
    fields: dict[str, Any] = json.loads((checkpoint / CONFIG).read_text())["model"].get("lora", {"rank": 0})
    if fields["rank"] == 0:
        return None
    return LoraConfig(**{name: _as_written(value) for name, value in fields.items()})


def _as_written(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def base_of(checkpoint: Path) -> str:
    """model.path of the run that made the checkpoint."""
    return json.loads((checkpoint / CONFIG).read_text())["model"]["path"]


class Merged:
    """The model that base and adapters amount to, tensor by tensor."""

    def __init__(self, shards: Shards, model: PreTrainedModel, adapted: PreTrainedModel, base: str) -> None:
        """model without and adapted with adapters are on the meta device; base is a folder or hub id.

        Raises:
            ValueError: base has no readable weights of this model.
        """
        try:
            files = WeightFiles.find(base, model)
        except HFValidationError:  # a folder that is not there
            files = None
        if files is None:
            raise ValueError(
                f"the adapters were trained on {base}, which is not there or has no plain safetensors of this model; "
                "say with --base where it is"
            )
        self._files, self._shards = files, shards
        self._layers: dict[str, tuple[str, Any]] = {}
        self._copies: dict[str, str] = {}
        for name, _ in adapted.named_parameters():
            if name.endswith(".base_layer.weight"):
                layer = name.removesuffix(".base_layer.weight")
                self._layers[base_name(name)] = (layer, adapted.get_submodule(layer))
            elif f".modules_to_save.{ADAPTER}." in name:
                self._copies[base_name(name)] = name
        names = [n for n, _ in model.named_parameters()]
        state = model.state_dict()
        self.tensors = {n: state[n] for n in [*names, *(n for n, _ in model.named_buffers() if n in state)]}

    def read(self, name: str) -> Tensor:
        """A whole tensor; a merged one in float32, the others as they are stored."""
        if name in self._copies:
            return self._shards.read(self._copies[name])
        weight = self._files.read(name)
        if name not in self._layers:
            return weight
        prefix, layer = self._layers[name]
        magnitude = f"{prefix}.lora_magnitude_vector.{ADAPTER}.weight"
        return merged_weight(
            weight,
            self._shards.read(f"{prefix}.lora_A.{ADAPTER}.weight"),
            self._shards.read(f"{prefix}.lora_B.{ADAPTER}.weight"),
            layer.scaling[ADAPTER],
            self._shards.read(magnitude) if magnitude in self._shards.tensors else None,
        )


def put_adapters(shards: Shards, model: PreTrainedModel, lora: LoraConfig) -> None:
    """Give the empty model the adapters of the checkpoint's config; ValueError unless those are saved."""
    add_adapters(model, lora, torch.float32)
    wanted = {name: p.shape for name, p in model.named_parameters() if is_adapter(name)}
    found = {name: tensor.shape for name, tensor in shards.tensors.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise ValueError(
            f"{shards.checkpoint} holds other adapters than this version of transformers makes room for: {wrong[:3]}; "
            f"install the version that its {MARKER} names"
        )


def write_adapter(
    shards: Shards, model: PreTrainedModel, lora: LoraConfig, base: str, output: Path, dtype: torch.dtype
) -> int:
    """Write adapter_model.safetensors and adapter_config.json as peft does; returns the number of tensors.

    model is empty and without adapters.
    """
    settings = peft_config(model, lora)
    settings.base_model_name_or_path, settings.inference_mode = base, True
    put_adapters(shards, model, lora)
    output.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(str(output))
    tensors = {file_name(name): checked(name, shards.read(name), dtype).contiguous() for name in shards.tensors}
    save_file(tensors, output / "adapter_model.safetensors", metadata={"format": "pt"})
    return len(tensors)
