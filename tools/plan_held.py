"""What one rank holds of a model: weights, gradients and states, counted exactly from a model without storage that is
frozen and adapted as in training."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from r1.config import Config, ModelConfig
from r1.policy.lora import add_adapters
from r1.policy.model import layers_of
from r1.policy.optim import parameter_groups

STATE_BYTES = {
    ("adamw", 4): 8, ("adamw", 2): 6, ("adamw_stochastic", 4): 8, ("adamw_stochastic", 2): 8,
    ("adamw_8bit", 4): 2.03, ("adamw_8bit", 2): 2.03, ("muon", 4): 8,
}  # fmt: skip
"""Bytes of optimizer states a trained parameter, by strategy and bytes of the weight; muon's matrices: MUON_BYTES."""
MUON_BYTES = 4
_last_model: list[tuple[PreTrainedConfig, ModelConfig, PreTrainedModel]] = []


@dataclass(frozen=True, kw_only=True)
class Machines:
    num_gpus: int
    per_node: int
    gpu_gib: float
    name: str  # as the user wrote it


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Numbers in a part of the model that FSDP2 gathers at once."""

    all: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one rank, or counts of the whole model."""

    parameters: int  # of the whole model
    trained: int
    shard: int  # ranks that share one copy of the weights
    weights: float
    gradients: float
    states: float
    reference: float
    root: Unit  # embeddings and LM head, gathered all through a pass
    layer: Unit  # the largest
    head: Unit  # the LM head's matrix alone
    tensor: int  # numbers in the largest weight
    critic: float  # weights and states of gae's value model
    engine: float  # weights in vLLM


def empty_model(hf_config: PreTrainedConfig, config: Config) -> PreTrainedModel:
    """The policy on the meta device: dtypes, adapters and what is frozen as in r1/policy/model.py."""
    for known, settings, model in _last_model:
        if known is hf_config and settings == config.model:
            return model
    compute = torch.float32 if config.model.precision == "float32" else torch.bfloat16
    master, adapted = torch.float32 if config.model.precision == "amp" else compute, config.model.lora.rank > 0
    auto: Any = AutoModelForImageTextToText if hasattr(hf_config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(hf_config, dtype=compute if adapted else master)
    if adapted:
        add_adapters(model, config.model.lora, master)
    elif config.model.freeze_vision_tower and hasattr(model.model, "visual"):
        for name, parameter in model.model.visual.named_parameters():
            parameter.requires_grad_("merger" in name)
    _last_model[:] = [*_last_model[-3:], (hf_config, config.model, model)]  # plans differ in other settings mostly
    return model


def local(parameters: Iterable[Tensor], shard: int, bytes_of: Callable[[Tensor], float] = Tensor.element_size) -> float:
    """Bytes of the largest rank's rows."""
    total = 0.0
    for p in parameters:
        rows = math.ceil(p.shape[0] / shard) * (p.numel() // p.shape[0]) if p.numel() else 0
        total += rows * bytes_of(p)
    return total


def count(parameters: Iterable[Tensor]) -> Unit:
    some = list(parameters)
    return Unit(all=sum(p.numel() for p in some), trained=sum(p.numel() for p in some if p.requires_grad))


def states_of(model: PreTrainedModel, config: Config, shard: int) -> float:
    """Bytes of one rank's optimizer states."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optim.strategy != "muon":
        return local(trained, shard, lambda p: STATE_BYTES[config.optim.strategy, p.element_size()])
    groups = parameter_groups(model, config.optim)
    muon = {id(p) for group in groups if group["name"].endswith("_muon") for p in group["params"]}
    return local(trained, shard, lambda p: MUON_BYTES if id(p) in muon else 8)


def hold(hf_config: PreTrainedConfig, config: Config, machines: Machines) -> Held:
    """Sizes of what one rank holds of its model."""
    model: Any = empty_model(hf_config, config)
    shard = machines.num_gpus if config.parallel.fsdp_size == -1 else config.parallel.fsdp_size
    layers = layers_of(model)
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    base = [p for n, p in model.named_parameters() if ".lora_" not in n]
    separate = config.algorithm.kl_coef > 0 and config.model.lora.rank == 0
    compute = 4 if config.model.precision == "float32" else 2
    weights, states = local(model.parameters(), shard), states_of(model, config, shard)
    engine_bytes = 4 if config.engine_dtype == "float32" else 2
    return Held(
        parameters=sum(p.numel() for p in base),
        trained=count(model.parameters()).trained,
        shard=shard,
        weights=weights,
        gradients=local((p for p in model.parameters() if p.requires_grad), shard),
        states=states,
        reference=local(base, shard, lambda _: compute) if separate else 0.0,
        root=count(p for p in model.parameters() if id(p) not in in_layers),
        layer=max((count(layer.parameters()) for layer in layers), key=lambda unit: unit.all),
        head=count(model.lm_head.parameters()),
        tensor=max(p.numel() for p in base),
        critic=weights + states if config.algorithm.advantage == "gae" else 0.0,
        engine=sum(p.numel() for p in base) * engine_bytes / config.rollout.tensor_parallel_size,
    )
