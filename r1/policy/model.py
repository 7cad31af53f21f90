"""Load a model, shard it with FSDP2, and give it a forward pass over packed microbatches."""

import importlib.util
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from r1.config import ModelConfig
from r1.parallel import set_whole
from r1.policy.attention import PACKED, VISION, Packing
from r1.policy.logprobs import Head, Scored, score_tokens
from r1.policy.lora import add_adapters, set_dropout, start_adapters
from r1.policy.lora_weights import base_name
from r1.policy.parts import part_of
from r1.policy.vision_tower import adapt_vision_tower
from r1.policy.weights import fill_shards, find_on_all_ranks

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""model_type values whose packed forward is proven equal to separate rows by tests."""


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The model's config with override_config applied.

    Raises:
        ValueError: the folder or hub id cannot be read, the family is not supported, or an override names no field.
    """
    try:
        hf_config = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model.path={config.path!r} is no model folder and no reachable hub id: {reason}") from None
    if hf_config.model_type not in FAMILIES:
        raise ValueError(
            f"model.path={config.path!r} is of family {hf_config.model_type!r}; supported: {', '.join(FAMILIES)}"
        )
    text = hf_config.get_text_config()
    for name, value in config.override_config.items():
        holder = hf_config if hasattr(hf_config, name) else text
        if not hasattr(holder, name):
            raise ValueError(f"model.override_config: {type(hf_config).__name__} has no field {name!r}")
        setattr(holder, name, value)
    if "sliding_attention" in (getattr(text, "layer_types", None) or []):
        raise ValueError(
            f"model.path={config.path!r} uses sliding-window attention, which packing does not support; where the "
            'window is never reached, set model.override_config={"use_sliding_window": False, "layer_types": […]}'
        )
    return hf_config


def _packed_forward(
    self: Any, inputs: dict[str, Any], packing: Packing, hidden_index: Tensor, labels: Tensor, head: Head | None
) -> Scored | Tensor:
    """Score labels predicted from packed positions hidden_index; without a head, their hidden states [R, H].

    Everything that uses parameters runs in here: outside the root's forward FSDP2 holds them as shards.
    """
    # use_cache=False and no attention_mask: anything else makes transformers build a mask of its own.
    hidden = self.model(**inputs, packing=packing, use_cache=False).last_hidden_state[0]
    if head is None:
        return hidden[hidden_index]
    return score_tokens(hidden[hidden_index], self.lm_head, labels, head)


def _value_forward(self: Any, inputs: dict[str, Any], packing: Packing, hidden_index: Tensor) -> Tensor:
    """[R] float32: the value before each response token."""
    hidden = self.model(**inputs, packing=packing, use_cache=False).last_hidden_state[0]
    return self.lm_head(hidden[hidden_index]).float()[:, 0]


def _build(config: ModelConfig, hf_config: PretrainedConfig, dtype: torch.dtype, *, weights: bool) -> PreTrainedModel:
    auto = AutoModelForImageTextToText if hasattr(hf_config, "vision_config") else AutoModelForCausalLM
    if weights:
        return auto.from_pretrained(
            config.path,
            config=hf_config,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            low_cpu_mem_usage=True,
        )
    with torch.device("meta"):
        return auto.from_config(hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code)


def uses_liger(config: ModelConfig, device: torch.device) -> bool:
    """Whether RMSNorm, SwiGLU and rotary embeddings run as liger-kernel's Triton kernels (arXiv 2410.10989).

    Raises:
        ValueError: config.liger_kernel asks for what cannot run.
    """
    can = device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    if config.liger_kernel and not can:
        raise ValueError(
            "model.liger_kernel=True needs a CUDA GPU and the package liger-kernel, which r1[gpu] installs; drop it"
        )
    return can if config.liger_kernel is None else config.liger_kernel


def _set_attention(model: PreTrainedModel, backend: str) -> None:
    model.config.get_text_config()._attn_implementation = PACKED
    visual = getattr(model.model, "visual", None)
    if visual is not None:
        # Set by hand: transformers' setter would try to import flash-attn for a name with "flash" in it.
        name = "sdpa" if backend == "sdpa" else VISION
        model.config.vision_config._attn_implementation = name
        for module in visual.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = name
    for module in (getattr(model.model, "language_model", model.model)).modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = PACKED


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Every transformer layer, of the vision tower too, in forward order: the units that FSDP2 shards."""
    base: Any = model.model
    return (list(base.visual.blocks) if hasattr(base, "visual") else []) + text_layers(model)


def text_layers(model: nn.Module) -> list[nn.Module]:
    """The language model's layers, in forward order."""
    base: Any = model.model
    return list(getattr(base, "language_model", base).layers)


@torch.no_grad()
def _fill(model: nn.Module, full: nn.Module | None, device: torch.device) -> None:
    """Give every rank its shard of rank 0's weights and all of its buffers, tensor by tensor."""
    source = {} if full is None else {**dict(full.named_parameters()), **dict(full.named_buffers())}
    for name, target in [*model.named_parameters(), *model.named_buffers()]:
        whole = torch.zeros(target.shape, dtype=target.dtype, device=device)
        if base_name(name) in source:  # all but a value head, which starts at 0, and adapters
            whole.copy_(source[base_name(name)])
        if dist.is_initialized():
            dist.broadcast(whole, 0)
        set_whole(target, whole)


def _choose_trained(model: PreTrainedModel, config: ModelConfig, master: torch.dtype, *, trainable: bool) -> None:
    """Freeze what does not train; adapters, if any, are put in, in dtype master."""
    if not trainable:
        model.requires_grad_(False)
    elif config.lora.rank:
        add_adapters(model, config.lora, master)
    elif config.freeze_vision_tower:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part_of(name) != "vision_tower")  # the projector goes on learning


def load_model(
    config: ModelConfig,
    mesh: DeviceMesh,
    device: torch.device,
    backend: str,
    *,
    trainable: bool,
    value_head: bool = False,
) -> PreTrainedModel:
    """The model, sharded over the mesh, whose forward is `_packed_forward`, or `_value_forward` with a value head.

    Every rank reads its own rows from safetensors files. Where they are not plain (r1/policy/weights.py), rank 0 reads
    the weights into host memory and hands out one tensor at a time.
    Trainable weights are float32 under precision amp and float32; frozen ones, all but the adapters with model.lora,
    are kept in the dtype they compute in.
    """
    hf_config = load_model_config(config)
    compute = torch.float32 if config.precision == "float32" else torch.bfloat16
    master, adapted = torch.float32 if config.precision == "amp" else compute, trainable and config.lora.rank > 0
    dtype = master if trainable and not adapted else compute
    model = _build(config, hf_config, dtype, weights=False)
    files = find_on_all_ranks(config.path, model, fresh=frozenset({"lm_head.weight"} if value_head else ()))
    reads_all = files is None and (not dist.is_initialized() or dist.get_rank() == 0)
    full = _build(config, hf_config, dtype, weights=True) if reads_all else None
    _set_attention(model, backend)
    liger = uses_liger(config, device)
    if hasattr(model.model, "visual"):
        adapt_vision_tower(model.model.visual, liger=liger)
    if liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    if value_head:
        if full is not None:
            del full.lm_head
        with torch.device("meta"):
            model.lm_head = nn.Linear(model.lm_head.in_features, 1, bias=False, dtype=dtype)
    model.forward = types.MethodType(_value_forward if value_head else _packed_forward, model)
    _choose_trained(model, config, master, trainable=trainable)
    if trainable and config.gradient_checkpointing is not False:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(trainable)  # transformers checkpoints in training mode only; the families here have no dropout
    set_dropout(model, False)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # Embeddings and LM head stay with the root: tied ones must be one unit, and the head runs inside its forward.
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    if files is not None:
        fill_shards(model, files)
    else:
        _fill(model, full, device)
    if adapted:
        start_adapters(model, config.lora)
    return model
