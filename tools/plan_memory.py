"""What a run holds in memory, phase by phase, from the shapes of its model and the decisions of r1's own code.

Weights, gradients and states are counted exactly, from a model without storage that is frozen and adapted as in
training; activations and buffers are estimated with the constants below, each with its source.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from r1.config import Config, ModelConfig
from r1.policy.lora import add_adapters
from r1.policy.model import layers_of
from r1.policy.offload import RESERVE_GIB, plan_offload
from r1.policy.optim import parameter_groups

GIB = 1 << 30
USABLE = 0.99  # of the gigabytes in a GPU's name, in GiB: 80 GB are 79.2, 141 GB 139.6 (nvidia-smi of both)
ASLEEP_GIB = 3.7  # CUDA context and graphs beside a sleeping engine (H200, vllm 0.26)
ENGINE_GIB = 2.5  # what vLLM's profiling run sets aside of its share for activations and graphs
GATHERED_LAYERS = 3  # FSDP2: the layer that computes, the next one, and the buffer that it arrives in
LOGIT_BYTES = 22  # a logit of a chunk: in bfloat16, and five float32 copies of it (r1/policy/logprobs.py)
LAYER_PEAK = 1.5  # backward of a recomputed layer over what the layer keeps: gradients of its widest tensors
IMAGE_SHARE = 0.3  # of packed tokens that are a picture's, for models that see; a token is four patches
ALLOCATOR = 1.04  # reserved over allocated, of the trainer's part
HOST_RANK_GIB = 6.0  # libraries of one rank and of its reward processes
HOST_IMAGES_GIB = 3.0  # prompts prepared ahead and the engine's pictures (2 GiB and 1 GiB caches)
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
class Held:
    """Bytes of one rank, or counts of the whole model."""

    parameters: int  # of the whole model
    trained: int
    weights: float
    gradients: float
    states: float
    reference: float
    root: int  # numbers in the unit of embeddings and LM head, which is gathered all through a pass
    layer: int  # numbers in the largest layer
    tensor: int  # numbers in the largest weight
    critic: float  # weights and states of gae's value model
    engine: float  # weights in vLLM


@dataclass(frozen=True, kw_only=True)
class Plan:
    phases: dict[str, dict[str, float]]  # bytes of one rank's GPU by phase and part
    host: dict[str, float]  # bytes of one node
    held: Held
    leaves: dict[str, bool]  # what is in host memory while the engine samples
    kv_tokens: int  # of one engine; below 0 its weights do not fit
    limit: float  # bytes of a GPU

    @property
    def peak(self) -> float:
        return max(sum(parts.values()) for parts in self.phases.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    def shortage(self, need_tokens: int) -> float:
        """Bytes that are missing: GPU memory, and KV cache for one response of full length."""
        return max(0.0, self.peak - self.limit) + (GIB * max(0.0, 1 - self.kv_tokens / need_tokens))


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


def local(parameters: Iterable[Tensor], shard: int, bytes_of: Any = None) -> float:
    """Bytes of the largest rank's rows; bytes_of a parameter's number, its dtype's by default."""
    total = 0.0
    for p in parameters:
        rows = math.ceil(p.shape[0] / shard) * (p.numel() // p.shape[0]) if p.numel() else 0
        total += rows * (p.element_size() if bytes_of is None else bytes_of(p))
    return total


def states_of(model: PreTrainedModel, config: Config, shard: int) -> float:
    """Bytes of one rank's optimizer states."""
    if config.optim.strategy != "muon":
        trained = [p for p in model.parameters() if p.requires_grad]
        return local(trained, shard, lambda p: STATE_BYTES[config.optim.strategy, p.element_size()])
    muon = {
        id(p)
        for group in parameter_groups(model, config.optim)
        if group["name"].endswith("_muon")
        for p in group["params"]
    }
    return local(
        [p for p in model.parameters() if p.requires_grad], shard, lambda p: MUON_BYTES if id(p) in muon else 8
    )


def hold(hf_config: PreTrainedConfig, config: Config, machines: Machines) -> Held:
    """Sizes of what one rank holds of its model."""
    model = empty_model(hf_config, config)
    shard = machines.num_gpus if config.parallel.fsdp_size == -1 else config.parallel.fsdp_size
    trained = [p for p in model.parameters() if p.requires_grad]
    layers = layers_of(model)
    in_layers = {id(p) for layer in layers for p in layer.parameters()}
    base = [p for n, p in model.named_parameters() if ".lora_" not in n]
    separate = config.algorithm.kl_coef > 0 and config.model.lora.rank == 0
    compute = 4 if config.model.precision == "float32" else 2
    weights, states = local(model.parameters(), shard), states_of(model, config, shard)
    engine_bytes = 4 if config.engine_dtype == "float32" else 2
    return Held(
        parameters=sum(p.numel() for p in base),
        trained=sum(p.numel() for p in trained),
        weights=weights,
        gradients=local(trained, shard),
        states=states,
        reference=local(base, shard, lambda _: compute) if separate else 0.0,
        root=sum(p.numel() for p in model.parameters() if id(p) not in in_layers),
        layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        tensor=max(p.numel() for p in base),
        critic=weights + states if config.algorithm.advantage == "gae" else 0.0,
        engine=sum(p.numel() for p in base) * engine_bytes / config.rollout.tensor_parallel_size,
    )


def layer_bytes(text: Any, compute: int) -> float:
    """Bytes a token that one decoder layer keeps for its backward pass.

    Two norms (input in float32, output, and the residual beside it), queries, keys and values before and after rotary
    and gathered for the kernel, the kernel's output, and gate, activated gate, up and product of the MLP; of each
    expert a token is sent to, also the token's copy and the expert's output. Within 4% of what autograd saves of a
    layer of Qwen2.5-3B and 7B, Qwen3-4B and Llama-8B (counted on the meta device).
    """
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    q, kv = text.num_attention_heads * head_dim, text.num_key_value_heads * head_dim
    experts = getattr(text, "num_experts_per_tok", 0) or 0
    mlp = experts * (text.moe_intermediate_size + text.hidden_size / 2) if experts else text.intermediate_size
    head_norms = (q + kv) * (4 + compute) if "qwen3" in text.model_type else 0
    return 2 * text.hidden_size * (4 + 2 * compute) + compute * (5 * q + 6 * kv) + head_norms + compute * 4 * mlp


def activations(hf_config: PreTrainedConfig, config: Config, *, training: bool) -> float:
    """Bytes at the token budget: inputs of all layers and one recomputed, or all of them whole; forward only: one."""
    text, tokens = hf_config.get_text_config(), config.update.max_tokens_per_microbatch
    compute = 4 if config.model.precision == "float32" else 2
    layer = tokens * layer_bytes(text, compute)
    stream = tokens * text.hidden_size * compute
    vision = getattr(hf_config, "vision_config", None)
    patches = 4 * IMAGE_SHARE * tokens if vision is not None else 0.0
    width = (getattr(vision, "embed_dim", None) or vision.hidden_size) if vision is not None else 0
    tower = patches * width * compute * (vision.depth if training else 8) if vision is not None else 0.0
    if not training:
        return layer + 4 * stream + tower
    if config.model.gradient_checkpointing is False:
        whole = patches * width * compute * 16 * vision.depth if vision is not None else 0.0
        return text.num_hidden_layers * layer + 4 * stream + whole
    return text.num_hidden_layers * stream + LAYER_PEAK * layer + 4 * stream + tower


def gathered(held: Held, config: Config, *, training: bool) -> float:
    """Bytes of whole weights that a pass holds beside its shards, and in training of their gradients before they are
    reduced: bfloat16 ones and the float32 buffer they are summed in."""
    compute = 4 if config.model.precision == "float32" else 2
    total = (held.root + GATHERED_LAYERS * held.layer) * compute
    if training and config.model.lora.rank == 0:
        total += (held.root + held.layer) * (compute + 4)
    return total


def plan(hf_config: PreTrainedConfig, config: Config, machines: Machines) -> Plan:
    """Memory of every phase on the fullest rank."""
    held, limit = hold(hf_config, config, machines), machines.gpu_gib * GIB
    share, text = config.rollout.gpu_memory_utilization, hf_config.get_text_config()
    leaves = plan_offload(
        {"params": int(held.weights), "optimizer": int(held.states), "reference": int(held.reference)},
        {name: getattr(config.parallel, f"offload_{name}") for name in ("params", "optimizer", "reference")},
        limit * (1 - share) - RESERVE_GIB * GIB,
    )
    full_kl = config.algorithm.kl_penalty == "full"
    chunk = config.update.logprob_chunk_tokens * text.vocab_size * LOGIT_BYTES * (2 if full_kl else 1)
    asleep = {"context, sleeping engine": ASLEEP_GIB * GIB}
    kept = {"weights": 0 if leaves["params"] else held.weights, "optimizer": 0 if leaves["optimizer"] else held.states,
            "reference": 0 if leaves["reference"] else held.reference}  # fmt: skip
    score = {"weights": held.weights, "optimizer": kept["optimizer"], "reference": held.reference,
             "gathered": gathered(held, config, training=False), "logits": chunk / 2,
             "activations": activations(hf_config, config, training=False)}  # fmt: skip
    learn = {"weights": held.weights, "gradients": held.gradients, "optimizer": held.states,
             "reference": held.reference if full_kl else kept["reference"],
             "gathered": gathered(held, config, training=True), "logits": chunk,
             "activations": activations(hf_config, config, training=True)}  # fmt: skip
    sync = {"weights": held.weights, "optimizer": kept["optimizer"], "reference": kept["reference"],
            "tensor in flight": held.tensor * (4 + 2)}  # fmt: skip
    phases = {
        "sync": asleep | {"engine": held.engine} | sync,
        "rollout": asleep | {"engine": share * limit - ASLEEP_GIB * GIB} | kept,
        "logprobs": asleep | {name: value * ALLOCATOR for name, value in score.items()},
        "update": asleep | {name: value * ALLOCATOR for name, value in learn.items()},
    }
    if held.critic:
        trained = held.critic + held.gradients + learn["gathered"] + learn["activations"]
        phases["critic"] = asleep | kept | {"weights": held.weights, "critic": trained * ALLOCATOR}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = max(1, text.num_key_value_heads // config.rollout.tensor_parallel_size)
    token = 2 * text.num_hidden_layers * heads * head_dim * (4 if config.engine_dtype == "float32" else 2)
    cache = share * limit - held.engine - ENGINE_GIB * GIB
    if config.rollout.kv_cache_gib is not None:
        cache = config.rollout.kv_cache_gib * GIB
    return Plan(
        phases=phases, host=host_memory(held, config, machines, leaves, sees=hasattr(hf_config, "vision_config")),
        held=held, leaves=leaves, kv_tokens=int(cache / token), limit=limit,
    )  # fmt: skip


def host_memory(
    held: Held, config: Config, machines: Machines, leaves: dict[str, bool], *, sees: bool
) -> dict[str, float]:
    """Bytes of one node: its ranks' page-locked copies of what leaves the GPU, and a checkpoint being written."""
    ranks = min(machines.per_node, machines.num_gpus)
    sizes = {"params": held.weights, "optimizer": held.states, "reference": held.reference}
    parts = {f"{name}, offloaded": ranks * size for name, size in sizes.items() if leaves[name]}
    saved = held.gradients if config.model.lora.rank else held.weights  # of LoRA the adapters
    if config.checkpoint.asynchronous:
        parts["checkpoint being written"] = ranks * (saved + (0 if config.checkpoint.save_model_only else held.states))
    if held.critic:
        parts["critic"] = ranks * held.critic
    parts["processes"] = ranks * (HOST_RANK_GIB + (HOST_IMAGES_GIB if sees else 0)) * GIB
    return parts
