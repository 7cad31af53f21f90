"""Sections of a config about what is sampled and how it is graded: data, rollout, reward.

Each field is followed by its meaning; each rule says what would fit. r1/sections_model.py and
r1/sections_training.py have the other sections.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from r1.sections_types import check_types


def require(ok: bool, message: str) -> None:
    """Raise ValueError(message) unless ok."""
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_files: str | tuple[str, ...] = "hiyouga/geometry3k@train"
    """Hub id, file (json, jsonl, parquet, arrow), folder, saved data set or glob; `@split` picks a split (default
    train). Several are mixed: each row once an epoch, or by weights, as in ("a.jsonl*0.7", "b.jsonl*0.3")."""
    val_files: tuple[str, ...] = ("hiyouga/geometry3k@test",)
    """Validation sets, each as train_files; named as in `geo3k=hiyouga/geometry3k@test`, else after the file."""
    prompt_key: str = "problem"
    """Column with the prompt, text or chat messages; `<image>` in the user's text marks each image's place."""
    answer_key: str = "answer"
    """Column handed to the reward function as ground_truth."""
    image_key: str = "images"
    """Column with the list of images; may be absent, or empty in some rows."""
    video_key: str = "videos"
    """Column with the list of videos, or with one video's frames; `<video>` marks each one's place."""
    video_fps: float = 2.0
    """Frames taken a second of video; a list of frames is taken to have this rate."""
    video_max_frames: int = 32
    """Most frames taken of one video, spread evenly. min_pixels and max_pixels bound each frame; for Qwen3-VL, as in
    its own processor, all frames together."""
    image_dir: str | None = None
    """Folder that relative paths of images and videos start from; None: the data file's own folder."""
    system_prompt: str | None = None
    """System message put before every prompt that does not begin with one of its own."""
    format_prompt: str | None = None
    """Path of a jinja template that is rendered with `content` (the prompt; of chat messages the user's last)."""
    override_chat_template: str | None = None
    """Path of a jinja file that replaces the tokenizer's chat template."""
    chat_template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Variables of the chat template, in training and validation alike, as in {"enable_thinking": False}."""
    max_prompt_length: int = 2048
    """Tokens of a prompt, image tokens counted; longer ones: see overlong_prompts."""
    max_response_length: int = 2048
    """Tokens of a response; sampling stops there."""
    overlong_prompts: Literal["filter", "error", "truncate_left"] = "filter"
    """filter: drop rows with longer prompts, counted and printed. error: stop and name the first. truncate_left: keep
    the last tokens; images are never cut."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used. error: stop before training and name it. skip: name it, count it, train without it."""
    check_images: bool = True
    """Decode every image once before training. False reads headers only: other damage is then met in its step, where
    on_bad_row=skip puts another row in its place."""
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
        if isinstance(self.val_files, (str, Path)):  # one set may be written without its comma
            object.__setattr__(self, "val_files", (self.val_files,) if self.val_files else ())
        check_types(self, "data")
        require(bool(self.train_files), "data.train_files is empty; give a hub id, a file or a folder")
        for name in ("prompt_key", "answer_key"):
            require(bool(getattr(self, name)), f"data.{name} is empty; name a column")
        require(self.seed >= 0, f"data.seed must be at least 0, got {self.seed}")
        weighted = [s for s in self.val_files if re.search(r"\*\d*\.?\d+$", s)]
        require(not weighted, f"data.val_files has a weight in {weighted[:1]}; every validation row is used: drop it")
        reserved = {"conversation", "messages", "chat_template", "tokenize", "add_generation_prompt"}
        taken = sorted(reserved & set(self.chat_template_kwargs))
        require(not taken, f"data.chat_template_kwargs must not set {', '.join(taken)}: r1 does; take it out")
        for name in ("max_prompt_length", "max_response_length", "rollout_batch_size", "num_workers", "min_pixels"):
            value = getattr(self, name)
            require(value >= 1, f"data.{name} must be at least 1, got {value}")
        require(self.video_fps > 0, f"data.video_fps must be above 0, got {self.video_fps}")
        require(self.video_max_frames >= 2, f"data.video_max_frames must be at least 2, got {self.video_max_frames}")
        size, low, high = self.val_batch_size, self.min_pixels, self.max_pixels
        require(size == -1 or size >= 1, f"data.val_batch_size must be -1 (all) or at least 1, got {size}")
        require(low <= high, f"data.min_pixels={low} is above data.max_pixels={high}; swap or lower it")


@dataclass(frozen=True, kw_only=True)
class ValSamplingConfig:
    n: int = 1
    """Responses per validation prompt. The mean over them is reported; from 2 on also mean@n, maj@n and pass@k."""
    temperature: float = 0.6
    """0 is greedy."""
    top_p: float = 0.95
    top_k: int = -1
    correct_key: str = "accuracy"
    """Key of the reward function's result that is above 0.5 where a response is right, for mean@n, maj@n and pass@k;
    with several functions as in "math/accuracy". Where no result has it, these are left out."""

    def __post_init__(self) -> None:
        check_types(self, "rollout.val")
        require(self.n >= 1, f"rollout.val.n must be at least 1, got {self.n}")
        hot = self.temperature
        require(0 <= hot < math.inf, f"rollout.val.temperature must be >= 0 and finite, got {hot}")
        require(
            self.n == 1 or self.temperature > 0,
            f"rollout.val.n={self.n} greedy responses would all be the same; set rollout.val.temperature above 0",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: Literal["vllm", "hf"] = "vllm"
    """vllm, or hf: transformers.generate, a slow reference for machines without vLLM."""
    n: int = 5
    """Responses per prompt: the group."""
    temperature: float = 1.0
    """Applied to the trainer's logprobs as well."""
    top_p: float = 1.0
    """Below 1 the sampler's logprobs are of the cut distribution: mismatch/* is then not zero by design, and they may
    be neither old logprobs nor what a correction compares with. The same holds for top_k."""
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
    limit_videos: int = 0
    """Most videos in one prompt; rows with more are refused at start. vLLM sets memory aside for the largest."""
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
        check_types(self, "rollout")
        require(self.n >= 1, f"rollout.n must be at least 1, got {self.n}")
        hot = self.temperature
        require(0 < hot < math.inf, f"rollout.temperature must be above 0 in training and finite, got {hot}")
        for name, low in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("limit_images", 0), ("limit_videos", 0)):
            require(getattr(self, name) >= low, f"rollout.{name} must be at least {low}, got {getattr(self, name)}")
        require(self.seed >= 0, f"rollout.seed must be at least 0, got {self.seed}")
        for name, value in (("kv_cache_gib", self.kv_cache_gib), ("max_model_len", self.max_model_len)):
            require(value is None or value > 0, f"rollout.{name} must be above 0 or None, got {value}")
        for name, p, k in (("rollout", self.top_p, self.top_k), ("rollout.val", self.val.top_p, self.val.top_k)):
            require(0 < p <= 1, f"{name}.top_p must be in (0, 1], got {p}")
            require(k == -1 or k >= 1, f"{name}.top_k must be -1 (all tokens) or at least 1, got {k}")
        share, tp = self.gpu_memory_utilization, self.tensor_parallel_size
        require(0 < share < 1, f"rollout.gpu_memory_utilization must be in (0, 1), got {share}")
        require(self.limit_videos == 0 or self.engine == "vllm", "rollout.limit_videos needs rollout.engine = 'vllm'")
        require(tp >= 1, f"rollout.tensor_parallel_size must be at least 1, got {tp}")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    function: str | dict[str, float] = "math"
    """Built in: math, r1v, dapo, choice, iou, format, overlong, repetition, cosine. Yours: path/to/file.py:function
    (function `main` when no colon). Several with their weights: {"math": 1.0, "repetition": 0.2}."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments given to every call; with several functions by name, {"repetition": {"size": 4}}."""
    timeout_s: float | None = None
    """Limit of one call; None: 1 s where all functions are built in, else 10 s. A batch that takes longer is graded
    again response by response, each with this limit."""
    memory_mb: int = 512
    """What grading may take beyond the memory that a process holds with its functions loaded (Linux); 0: no limit."""
    batch_size: int = 16
    """Most responses per call; an async sequential function works on that many at once in each process."""
    num_workers: int = 2
    """Worker processes per rank."""
    on_error: Literal["exclude", "raise"] = "exclude"
    """A response whose reward raised, hung or is not finite: leave it out and count it, or stop the run."""
    skip_special_tokens: bool = True
    """Decode responses without special tokens; tokens added for thinking or answers stay either way."""

    def __post_init__(self) -> None:
        check_types(self, "reward")
        require(
            bool(self.function) and all(self.functions),
            "reward.function is empty; give math, path/to/file.py:function or {name: weight, ...}",
        )
        for name, weight in self.functions.items():
            require(math.isfinite(weight), f"reward.function: the weight of {name!r} must be finite, got {weight}")
        if isinstance(self.function, dict):
            for name, value in self.kwargs.items():
                require(
                    name in self.function and isinstance(value, dict),
                    f"reward.kwargs[{name!r}]: with several functions it holds a dict for each by name; the names are "
                    f"{list(self.function)}",
                )
        require(self.timeout_s is None or self.timeout_s > 0, f"reward.timeout_s must be above 0, got {self.timeout_s}")
        require(self.memory_mb >= 0, f"reward.memory_mb must be at least 0 (no limit), got {self.memory_mb}")
        require(self.batch_size >= 1, f"reward.batch_size must be at least 1, got {self.batch_size}")
        require(self.num_workers >= 1, f"reward.num_workers must be at least 1, got {self.num_workers}")

    @property
    def functions(self) -> dict[str, float]:
        """Every reward function with its weight."""
        return self.function if isinstance(self.function, dict) else {self.function: 1.0}

    @property
    def limit_s(self) -> float:
        """timeout_s, or its default."""
        if self.timeout_s is not None:
            return self.timeout_s
        return 10.0 if any("/" in name or ".py" in name for name in self.functions) else 1.0

    def kwargs_of(self, name: str) -> dict[str, Any]:
        """The keyword arguments of one of the functions."""
        return self.kwargs.get(name, {}) if isinstance(self.function, dict) else self.kwargs
