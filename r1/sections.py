"""Sections of a config about what is sampled and how it is graded: data, rollout, reward.

Each field is followed by its meaning; each rule says what would fit. r1/sections_training.py has the other sections.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


def require(ok: bool, message: str) -> None:
    """Raise ValueError(message) unless ok."""
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_files: str = "hiyouga/geometry3k@train"
    """Hub id, file (json, jsonl, parquet) or folder; `@split` picks a split (default train)."""
    val_files: tuple[str, ...] = ("hiyouga/geometry3k@test",)
    """Validation sets, each as train_files; named as in `geo3k=hiyouga/geometry3k@test`, else after the file."""
    prompt_key: str = "problem"
    """Column with the prompt; `<image>` in it marks each image's place."""
    answer_key: str = "answer"
    """Column handed to the reward function as ground_truth."""
    image_key: str = "images"
    """Column with the list of images; may be absent, or empty in some rows."""
    image_dir: str | None = None
    """Folder that relative image paths start from; None: the data file's own folder."""
    system_prompt: str | None = None
    """System message put before every prompt."""
    format_prompt: str | None = None
    """Path of a jinja template that is rendered with `content` (the prompt)."""
    override_chat_template: str | None = None
    """Path of a jinja file that replaces the tokenizer's chat template."""
    max_prompt_length: int = 2048
    """Tokens of a prompt, image tokens counted; longer ones: see overlong_prompts."""
    max_response_length: int = 2048
    """Tokens of a response; sampling stops there."""
    overlong_prompts: Literal["filter", "error"] = "filter"
    """filter: drop rows with longer prompts, counted and printed. error: stop and name the first."""
    rollout_batch_size: int = 512
    """Prompts per step, over all ranks."""
    val_batch_size: int = 1024
    """Prompts per validation call of the engine, over all ranks (bounds host memory); -1: the whole set at once."""
    shuffle: bool = True
    """Draw training rows in a random order that depends on seed and epoch only."""
    seed: int = 1
    """Seed of the order of the data."""
    min_pixels: int = 262144
    """Smaller images are scaled up to this many pixels."""
    max_pixels: int = 4194304
    """Larger images are scaled down to this many pixels, keeping their aspect ratio."""
    num_workers: int = 8
    """Threads that decode and resize images, per rank."""

    def __post_init__(self) -> None:
        if isinstance(self.val_files, str):  # one set may be written without its comma
            object.__setattr__(self, "val_files", (self.val_files,) if self.val_files else ())
        for name in ("max_prompt_length", "max_response_length", "rollout_batch_size", "num_workers", "min_pixels"):
            value = getattr(self, name)
            require(value >= 1, f"data.{name} must be at least 1, got {value}")
        size, low, high = self.val_batch_size, self.min_pixels, self.max_pixels
        require(size == -1 or size >= 1, f"data.val_batch_size must be -1 (all) or at least 1, got {size}")
        require(low <= high, f"data.min_pixels={low} is above data.max_pixels={high}; swap or lower it")


@dataclass(frozen=True, kw_only=True)
class ValSamplingConfig:
    n: int = 1
    """Responses per validation prompt; the mean over them is reported."""
    temperature: float = 0.6
    """0 is greedy."""
    top_p: float = 0.95
    top_k: int = -1


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: Literal["vllm", "hf"] = "vllm"
    """vllm, or hf: transformers.generate, a slow reference for machines without vLLM."""
    n: int = 5
    """Responses per prompt: the group."""
    temperature: float = 1.0
    """Applied to the trainer's logprobs as well."""
    top_p: float = 1.0
    """Below 1 the sampler's logprobs are of the cut distribution, so mismatch/* is then not zero by design."""
    top_k: int = -1
    """-1: all tokens."""
    ignore_eos: bool = False
    """Always sample max_response_length tokens (benchmarks)."""
    seed: int = 1
    """With the step, the prompt and the sample it gives each request its own seed."""
    val: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    """Sampling at validation."""
    limit_images: int = 1
    """Most images in one prompt; rows with more are refused at start."""
    tensor_parallel_size: int = 1
    """GPUs that share one engine; the other ranks are data-parallel."""
    gpu_memory_utilization: float = 0.6
    """Share of GPU memory for vLLM's weights and KV cache while it is awake."""
    kv_cache_gib: float | None = None
    """Size of the KV cache; None: from gpu_memory_utilization (0.25 GiB on CPU)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """auto: float32 where model.precision is float32, else bfloat16."""
    enforce_eager: bool = False
    """No CUDA graphs: slower sampling, faster start."""
    max_model_len: int | None = None
    """Context length of the engine; None: max_prompt_length + max_response_length."""
    max_num_seqs: int = 512
    """Requests decoded at once."""
    max_num_batched_tokens: int = 8192
    """Tokens per engine step."""

    def __post_init__(self) -> None:
        require(self.n >= 1, f"rollout.n must be at least 1, got {self.n}")
        require(self.temperature > 0, f"rollout.temperature must be above 0 in training, got {self.temperature}")
        for name, p, k in (("rollout", self.top_p, self.top_k), ("rollout.val", self.val.top_p, self.val.top_k)):
            require(0 < p <= 1, f"{name}.top_p must be in (0, 1], got {p}")
            require(k == -1 or k >= 1, f"{name}.top_k must be -1 (all tokens) or at least 1, got {k}")
        require(self.val.temperature >= 0, f"rollout.val.temperature must be >= 0, got {self.val.temperature}")
        share, tp = self.gpu_memory_utilization, self.tensor_parallel_size
        require(0 < share < 1, f"rollout.gpu_memory_utilization must be in (0, 1), got {share}")
        require(tp >= 1, f"rollout.tensor_parallel_size must be at least 1, got {tp}")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    function: str = "math"
    """Built in: math, r1v, dapo. Yours: path/to/file.py:function (function `main` when no colon)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments given to every call."""
    timeout_s: float = 10.0
    """Limit of one call. A batch that takes longer is graded again response by response, each with this limit."""
    num_workers: int = 2
    """Worker processes per rank."""
    on_error: Literal["exclude", "raise"] = "exclude"
    """A response whose reward raised, hung or is not finite: leave it out and count it, or stop the run."""
    skip_special_tokens: bool = True
    """Decode responses without special tokens; tokens added for thinking or answers stay either way."""

    def __post_init__(self) -> None:
        require(bool(self.function), "reward.function is empty; give math, r1v, dapo or path/to/file.py:function")
        require(self.timeout_s > 0, f"reward.timeout_s must be above 0, got {self.timeout_s}")
        require(self.num_workers >= 1, f"reward.num_workers must be at least 1, got {self.num_workers}")
