"""Sections of a config about training: model, algorithm, optim, update, parallel, checkpoint, trainer.

Each field is followed by its meaning; each rule says what would fit. r1/sections.py has the other sections.
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
class AlgorithmConfig:
    advantage: Literal["grpo"] = "grpo"
    """Name in r1.algorithms.advantage.ADVANTAGES."""
    normalize_std: bool = True
    """Divide a group's advantages by its standard deviation (GRPO); False is Dr. GRPO's."""
    loss: Literal["ppo"] = "ppo"
    """Name in r1.algorithms.loss.LOSSES."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.3
    """The ratio is clipped above at 1 + clip_high."""
    clip_dual: float = 3.0
    """With a negative advantage the loss is at most -clip_dual * advantage (arXiv 1912.09729)."""
    kl_coef: float = 0.01
    """Weight of the KL to the frozen reference in the loss; 0 loads no reference."""
    kl_penalty: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimator of that KL, name in r1.algorithms.kl.KL_PENALTIES."""

    def __post_init__(self) -> None:
        require(0 < self.clip_low < 1, f"algorithm.clip_low must be in (0, 1), got {self.clip_low}")
        require(self.clip_high > 0, f"algorithm.clip_high must be above 0, got {self.clip_high}")
        require(self.clip_dual > 1, f"algorithm.clip_dual must be above 1, got {self.clip_dual}")
        require(self.kl_coef >= 0, f"algorithm.kl_coef must be >= 0 (it is subtracted as a cost), got {self.kl_coef}")


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


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save_freq: int = -1
    """Save every so many steps; the last step is always saved; -1: only the last."""
    save_limit: int = 3
    """Keep this many of the newest checkpoints; -1: all."""
    load_path: str | None = None
    """Start from this checkpoint folder (…/checkpoints/step_000050) instead of the run's latest."""
    resume: bool = True
    """Go on from the run folder's latest complete checkpoint, if it has one."""

    def __post_init__(self) -> None:
        for name in ("save_freq", "save_limit"):
            value = getattr(self, name)
            require(value == -1 or value >= 1, f"checkpoint.{name} must be -1 or at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    total_epochs: int = 15
    """Passes over the training rows."""
    max_steps: int | None = None
    """Stop after so many steps; overrides total_epochs."""
    seed: int = 1
    """Seed of everything not seeded elsewhere."""
    project_name: str = "r1"
    experiment_name: str = "demo"
    output_dir: str = "runs"
    """The run folder is output_dir/experiment_name."""
    loggers: tuple[str, ...] = ("console", "file", "tensorboard")
    """console, file (metrics.jsonl), tensorboard, wandb, swanlab, mlflow."""
    val_freq: int = 5
    """Validate every so many steps; -1: only before and after."""
    val_before_train: bool = True
    val_only: bool = False
    """Validate once and stop."""
    samples_to_log: int = 4
    """Responses written to samples.jsonl each step, and at each validation."""
    deterministic: bool = False
    """Deterministic kernels: slower, equal runs bit for bit."""
    progress: bool = True
    """Progress bars for rollout and update."""

    def __post_init__(self) -> None:
        known = ("console", "file", "tensorboard", "wandb", "swanlab", "mlflow")
        for name in self.loggers:
            require(name in known, f"trainer.loggers: {name!r} is not one of {', '.join(known)}")
        require(self.val_freq == -1 or self.val_freq >= 1, f"trainer.val_freq must be -1 or >= 1, got {self.val_freq}")
        require(self.total_epochs >= 1, f"trainer.total_epochs must be at least 1, got {self.total_epochs}")
        require(
            self.max_steps is None or self.max_steps >= 1,
            f"trainer.max_steps must be at least 1, got {self.max_steps}; to validate only, set trainer.val_only",
        )
