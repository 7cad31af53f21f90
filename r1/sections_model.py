"""Sections of a config about the model and how it is trained: model, optim, update, parallel.

Each field is followed by its meaning; each rule says what would fit.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from r1.sections import require


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
    gradient_checkpointing: bool = True
    """Recompute each layer in the backward pass instead of keeping its activations."""
    freeze_vision_tower: bool = False
    """Train the language model and the projector only."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up, over the run's steps."""
    warmup_ratio: float = 0.0
    """Share of the run's steps with a linearly rising rate."""
    warmup_steps: int | None = None
    """Steps of warm-up; overrides warmup_ratio."""
    min_lr_ratio: float = 0.0
    """The linear and cosine schedules end at this share of lr."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optim.lr must be above 0, got {self.lr}")
        require(self.weight_decay >= 0, f"optim.weight_decay must be >= 0, got {self.weight_decay}")
        for name, value in (("warmup_ratio", self.warmup_ratio), ("min_lr_ratio", self.min_lr_ratio)):
            require(0 <= value <= 1, f"optim.{name} must be in [0, 1], got {value}")
        require(all(0 <= b < 1 for b in self.betas), f"optim.betas must be in [0, 1), got {self.betas}")


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    global_batch_size: int = 128
    """Prompts per optimizer step, over all ranks; rollout_batch_size / global_batch_size optimizer steps per pass."""
    ppo_epochs: int = 1
    """Passes over a step's rollouts."""
    max_tokens_per_microbatch: int = 16384
    """Tokens of one packed forward and backward pass on one rank; groups over it are split."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm over all parameters and ranks."""
    logprob_chunk_tokens: int = 4096
    """Response positions per pass of the LM head: bounds memory to this times the vocabulary."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "ppo_epochs", "max_tokens_per_microbatch", "logprob_chunk_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"update.{name} must be at least 1, got {value}")
        require(self.max_grad_norm > 0, f"update.max_grad_norm must be above 0, got {self.max_grad_norm}")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    fsdp_size: int = -1
    """Ranks that share one copy of the weights (the rest replicate, HSDP); -1: all ranks."""
    offload_params: bool = False
    """Keep the policy's weights in host memory while the engine samples."""
    offload_optimizer: bool = True
    """Keep the optimizer's states in host memory except while the policy updates."""
    offload_reference: bool = True
    """Keep the reference's weights in host memory except while it scores."""
    timeout_s: float = 1800.0
    """A collective that waits longer ends the run."""
