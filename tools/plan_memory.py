"""What a run holds in memory, phase by phase, from the shapes of its model and the decisions of r1's own code.

CONTEXT_GIB, ENGINE_EXTRA_GIB and ALLOCATOR are fitted to the peaks of an H200 (torch 2.11, vllm 0.26) that
tests/test_tools_plan.py compares the plan with: on other hardware and versions expect more than its tenth.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from r1.config import Config
from r1.policy.offload import RESERVE_GIB, plan_offload
from tools.plan_held import Held, Machines, hold
from tools.plan_passes import activations, gathered, logits

GIB = 1 << 30
USABLE = 0.99  # of the gigabytes in a GPU's name, in GiB: 80 GB are 79.2, 141 GB 139.6 (nvidia-smi of both)
CONTEXT_GIB = 1.2  # CUDA's context, kernels and workspaces of the trainer
ENGINE_EXTRA_GIB = 2.5  # what an engine adds beyond its share, asleep or awake: CUDA graphs, kernels, workspaces
ENGINE_GIB = 2.5  # what vLLM's profiling run sets aside of its share for activations
ALLOCATOR = 1.04  # reserved over allocated, of the trainer's part
HOST_RANK_GIB = 6.0  # libraries of one rank and of its reward processes
HOST_IMAGES_GIB = 3.0  # prompts prepared ahead and the engine's pictures (2 GiB and 1 GiB caches)


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


def plan(hf_config: PreTrainedConfig, config: Config, machines: Machines) -> Plan:
    """Memory of every phase on the fullest rank."""
    held, limit = hold(hf_config, config, machines), machines.gpu_gib * GIB
    share, text = config.rollout.gpu_memory_utilization, hf_config.get_text_config()
    leaves = plan_offload(
        {"params": int(held.weights), "optimizer": int(held.states), "reference": int(held.reference)},
        {name: getattr(config.parallel, f"offload_{name}") for name in ("params", "optimizer", "reference")},
        limit * (1 - share) - RESERVE_GIB * GIB,
    )
    cache = share * limit - held.engine - ENGINE_GIB * GIB
    if config.rollout.kv_cache_gib is not None:
        cache = config.rollout.kv_cache_gib * GIB
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = max(1, text.num_key_value_heads // config.rollout.tensor_parallel_size)
    token = 2 * text.num_hidden_layers * heads * head_dim * (4 if config.engine_dtype == "float32" else 2)
    return Plan(
        phases=phases_of(hf_config, config, held, leaves, engine=held.engine + ENGINE_GIB * GIB + cache),
        host=host_memory(held, config, machines, leaves, sees=hasattr(hf_config, "vision_config")),
        held=held, leaves=leaves, kv_tokens=int(cache / token), limit=limit,
    )  # fmt: skip


def phases_of(
    hf_config: PreTrainedConfig, config: Config, held: Held, leaves: dict[str, bool], *, engine: float
) -> dict[str, dict[str, float]]:
    """Bytes by phase and part; engine: of the awake engine, its KV cache with it."""
    full_kl = config.algorithm.kl_penalty == "full"
    always = {"CUDA context": CONTEXT_GIB * GIB, "engine, asleep too": ENGINE_EXTRA_GIB * GIB}
    kept = {"weights": 0 if leaves["params"] else held.weights, "optimizer": 0 if leaves["optimizer"] else held.states,
            "reference": 0 if leaves["reference"] else held.reference}  # fmt: skip
    score = {"weights": held.weights, "optimizer": kept["optimizer"], "reference": held.reference,
             "gathered": gathered(held, config, training=False),
             "logits": logits(hf_config, held, config, training=False),
             "activations": activations(hf_config, config, training=False)}  # fmt: skip
    learn = {"weights": held.weights, "gradients": held.gradients, "optimizer": held.states,
             "reference": held.reference if full_kl else kept["reference"],
             "gathered": gathered(held, config, training=True),
             "logits": logits(hf_config, held, config, training=True),
             "activations": activations(hf_config, config, training=True)}  # fmt: skip
    in_flight = held.tensor * (1 + 1 / held.shard)  # whole, and before that a shard in the engine's dtype
    sync = kept | {"weights": held.weights,
                   "tensor in flight": in_flight * (4 if config.engine_dtype == "float32" else 2)}  # fmt: skip
    trainer = {"sync": sync, "rollout": kept, "logprobs": score, "update": learn}
    if held.critic:
        parts = ("gradients", "gathered", "activations")
        trainer["critic"] = kept | {"weights": held.weights, "critic": held.critic} | {n: learn[n] for n in parts}
    of_engine = {"sync": {"engine": held.engine}, "rollout": {"engine": engine}}
    return {
        phase: always | of_engine.get(phase, {}) | {name: size * ALLOCATOR for name, size in parts.items()}
        for phase, parts in trainer.items()
    }


def saved_by_rank(held: Held, config: Config) -> float:
    """Bytes of one rank's shards in a checkpoint: weights, of LoRA the adapters, and the optimizer's states."""
    weights = held.gradients if config.model.lora.rank else held.weights
    return weights + (0 if config.checkpoint.save_model_only else held.states)


def host_memory(
    held: Held, config: Config, machines: Machines, leaves: dict[str, bool], *, sees: bool
) -> dict[str, float]:
    """Bytes of one node: its ranks' page-locked copies of what leaves the GPU, and a checkpoint being written."""
    ranks = min(machines.per_node, machines.num_gpus)
    sizes = {"params": held.weights, "optimizer": held.states, "reference": held.reference}
    parts = {f"{name}, offloaded": ranks * size for name, size in sizes.items() if leaves[name]}
    if config.checkpoint.asynchronous:
        parts["checkpoint being written"] = ranks * saved_by_rank(held, config)
    if held.critic:
        parts["critic"] = ranks * held.critic
    parts["processes"] = ranks * (HOST_RANK_GIB + (HOST_IMAGES_GIB if sees else 0)) * GIB
    return parts
