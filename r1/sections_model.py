"""Sections of a config about the model and how it is trained: model, optim, update, parallel.

Each field is followed by its meaning; each rule says what would fit.
"""

import math
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from r1.sections import require
from r1.sections_types import check_types


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = 0
    """Rank of the adapters that train in place of the weights (LoRA, arXiv 2106.09685); 0: off."""
    alpha: float = 64.0
    """An adapter adds alpha / rank times B A to its weight."""
    dropout: float = 0.0
    """Share of an adapter's inputs that an update leaves out; sampling, old and reference logprobs leave out none."""
    parts: tuple[Literal["language", "projector", "vision"], ...] = ("language",)
    """Where adapters go; the projector is what joins the vision tower to the language model."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Linear layers of `parts` that get one: all, or names ("q_proj") and regular expressions of whole names. Experts
    are no linear layers."""
    exclude_modules: str | tuple[str, ...] = ()
    """Names and regular expressions of those that get none."""
    use_dora: bool = False
    """Also train the length of each row of an adapted weight (DoRA, arXiv 2402.09353)."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that train whole beside the adapters, e.g. "merger"."""
    adapter_path: str | None = None
    """Folder or hub id of a peft adapter to start from; the reference is model.path without it."""

    def __post_init__(self) -> None:
        check_types(self, "model.lora")
        require(self.rank >= 0, f"model.lora.rank must be at least 0 (0: no LoRA), got {self.rank}")
        require(self.alpha > 0, f"model.lora.alpha must be above 0 (0 would train nothing), got {self.alpha}")
        require(0 <= self.dropout < 1, f"model.lora.dropout must be in [0, 1), got {self.dropout}")
        require(len(self.parts) > 0, 'model.lora.parts is empty; give some of "language", "projector", "vision"')
        require(
            self.rank > 0 or self.adapter_path is None,
            f"model.lora.adapter_path={self.adapter_path!r} needs model.lora.rank: that of the adapter",
        )
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            for pattern in (value,) if isinstance(value, str) else value:
                require(_compiles(pattern), f"model.lora.{name}: {pattern!r} is no regular expression")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Hub id or folder of the model to train."""
    tokenizer_path: str | None = None
    """Hub id or folder of the tokenizer and processor; None: as `path`."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config to replace, e.g. {"tie_word_embeddings": False}."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    precision: Literal["amp", "bf16", "float32"] = "amp"
    """amp: float32 master weights, bfloat16 compute, float32 gradient reduction. bf16: bfloat16 weights and
    optimizer states, with Kahan summation. float32: all float32 (CPU, tests)."""
    attention: Literal["auto", "flash_attn", "varlen", "sdpa"] = "auto"
    """auto: flash-attn where installed, else PyTorch's varlen kernel, else SDPA with a mask (CPU)."""
    gradient_checkpointing: bool | None = None
    """Recompute each layer in the backward pass instead of keeping its activations; None: of as few layers as the
    GPU's memory asks for, which is measured during the first steps (r1/policy/recompute.py)."""
    liger_kernel: bool | None = None
    """Fused kernels for norms, SwiGLU and rotary embeddings; None: on a GPU where liger-kernel is installed."""
    freeze_vision_tower: bool = False
    """Train the language model and the projector only."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that train in place of the weights."""

    def __post_init__(self) -> None:
        check_types(self, "model")
        require(bool(self.path), "model.path is empty; give a hub id or a folder")
        require(
            not (self.freeze_vision_tower and self.lora.rank and "vision" in self.lora.parts),
            'model.freeze_vision_tower contradicts "vision" in model.lora.parts; take one of them out',
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    strategy: Literal["adamw", "adamw_stochastic", "adamw_8bit", "muon"] = "adamw"
    """adamw: with float32 states; under model.precision="bf16" with bfloat16 states and Kahan summation, 10 bytes a
    parameter with weights and gradients. adamw_stochastic: bf16 weights rounded by chance, float32 states, 12 bytes.
    adamw_8bit: states in 8 bits, 6 bytes a parameter under bf16, 10 under amp. muon: momentum of the layers' matrices
    orthogonalized (arXiv 2502.16982), AdamW for the rest; not for bf16. The middle two need `pip install torchao`."""
    lr: float = 1e-6
    """Peak learning rate."""
    lr_vision_tower: float | None = None
    """The vision tower's own; None: as lr."""
    lr_projector: float | None = None
    """That of the layers from the vision tower to the language model (its merger); None: as lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the means of gradients and of their squares. Bfloat16 states (adamw under bf16) cannot follow a second
    one above 0.99, which is then used."""
    eps: float = 1e-8
    weight_decay: float = 1e-2
    """Of matrices; never of vectors, which are norms and biases."""
    undecayed: tuple[str, ...] = ()
    """Regular expressions; parameters whose name one of them finds are not decayed either, e.g. "embed_tokens"."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up, over the run's steps."""
    warmup_ratio: float = 0.0
    """Share of the run's steps with a linearly rising rate."""
    warmup_steps: int | None = None
    """Steps of warm-up; overrides warmup_ratio."""
    min_lr_ratio: float = 0.0
    """The linear and cosine schedules end at this share of lr."""

    def __post_init__(self) -> None:
        check_types(self, "optim")
        for name in ("lr", "lr_vision_tower", "lr_projector", "eps"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"optim.{name} must be above 0 and finite, got {value}")
        steps = self.warmup_steps
        require(steps is None or steps >= 0, f"optim.warmup_steps must be at least 0 or None, got {steps}")
        require(self.weight_decay >= 0, f"optim.weight_decay must be >= 0, got {self.weight_decay}")
        for name, value in (("warmup_ratio", self.warmup_ratio), ("min_lr_ratio", self.min_lr_ratio)):
            require(0 <= value <= 1, f"optim.{name} must be in [0, 1], got {value}")
        require(all(0 <= b < 1 for b in self.betas), f"optim.betas must be in [0, 1), got {self.betas}")
        for pattern in self.undecayed:
            require(_compiles(pattern), f"optim.undecayed: {pattern!r} is no regular expression")
        require(
            self.strategy not in ("adamw_8bit", "adamw_stochastic") or find_spec("torchao") is not None,
            f"optim.strategy={self.strategy!r} needs a package that is not installed: pip install torchao",
        )


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    global_batch_size: int = 128
    """Prompts per optimizer step, over all ranks; rollout_batch_size / global_batch_size optimizer steps per pass."""
    ppo_epochs: int = 1
    """Passes over a step's rollouts."""
    max_tokens_per_microbatch: int = 20480
    """Tokens of one packed forward and backward pass on one rank; groups over it are split. The ranks of
    parallel.sequence_parallel_size share a microbatch of as many times that."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm over all parameters and ranks."""
    logprob_chunk_tokens: int = 4096
    """Response positions per pass of the LM head: bounds memory to this times the vocabulary."""

    def __post_init__(self) -> None:
        check_types(self, "update")
        for name in ("global_batch_size", "ppo_epochs", "max_tokens_per_microbatch", "logprob_chunk_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"update.{name} must be at least 1, got {value}")
        require(self.max_grad_norm > 0, f"update.max_grad_norm must be above 0, got {self.max_grad_norm}")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    fsdp_size: int = -1
    """Ranks that share one copy of the weights (the rest replicate, HSDP); -1: all ranks."""
    sequence_parallel_size: int = 1
    """Consecutive ranks that train on one microbatch together, each on its part of the tokens (Ulysses, arXiv
    2309.14509): for responses whose activations one GPU cannot hold. The weights are sharded as without it."""
    offload_params: bool | None = None
    """Keep the policy's weights in host memory while the engine samples; None: where they do not fit beside it."""
    offload_optimizer: bool | None = None
    """Keep the optimizer's states in host memory except while the policy updates; None: as for offload_params."""
    offload_reference: bool | None = None
    """Keep the reference's weights in host memory except while it scores; None: as for offload_params."""
    timeout_s: float = 1800.0
    """A collective that waits longer ends the run."""

    def __post_init__(self) -> None:
        check_types(self, "parallel")
        require(self.timeout_s > 0, f"parallel.timeout_s must be above 0, got {self.timeout_s}")
        size = self.sequence_parallel_size
        require(size >= 1, f"parallel.sequence_parallel_size must be at least 1 (1: off), got {size}")
