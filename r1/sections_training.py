"""Sections of a config about the run: algorithm, checkpoint, trainer.

Each field is followed by its meaning; each rule says what would fit.
"""

import datetime
import re
from dataclasses import dataclass
from typing import Literal

from r1.sections import require
from r1.sections_types import check_types


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage: str = "grpo"
    """grpo, rloo, passk, remax, reinforce_plus_plus, reinforce_plus_plus_baseline, gae (PPO), or path.py:function."""
    advantage_std: Literal["group", "batch", "none"] = "group"
    """What grpo divides by: its group's standard deviation (GRPO), the batch's, or nothing (Dr. GRPO)."""
    gamma: float = 1.0
    """Discount of later rewards (reinforce_plus_plus, gae)."""
    lam: float = 1.0
    """GAE's lambda."""
    loss: str = "ppo"
    """ppo, gspo, gspo_token, cispo, sapo, or path.py:function."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.3
    """The ratio is clipped above at 1 + clip_high."""
    clip_dual: float = 3.0
    """With a negative advantage the ratio counts as at most this (dual clip, arXiv 1912.09729; as two-sided clip,
    arXiv 2505.07291)."""
    tau_positive: float = 1.0
    """SAPO: steepness of the gate where the advantage is positive."""
    tau_negative: float = 1.05
    """SAPO: steepness of the gate where it is negative."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"] = "token_mean"
    """Over a minibatch: the mean over tokens; over responses of their token means; or over responses of their token
    sums divided by data.max_response_length (Dr. GRPO)."""
    mask_truncated: bool = False
    """Leave responses that were cut at max_response_length out of the loss (DAPO's overlong filtering)."""
    drop_tied_groups: bool = False
    """Leave groups whose rewards are all equal out of the loss and its denominator."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which is subtracted from the loss."""
    kl_coef: float = 0.01
    """Weight of the KL to the frozen reference; 0 loads no reference."""
    kl_penalty: Literal["k1", "abs", "k2", "k3", "full"] = "k3"
    """Estimator of that KL, name in r1.algorithms.kl.KL_PENALTIES; full sums over the vocabulary."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is charged."""
    kl_target: float | None = None
    """Adapt kl_coef so that the measured KL comes to this (arXiv 1909.08593); None: a fixed coefficient."""
    kl_horizon: float = 10000.0
    """Responses over which an adaptive kl_coef moves by a factor of e per unit of error."""
    reference_update_steps: int | None = None
    """Move the reference to the policy every so many steps; None: it stays."""
    reference_polyak: float = 1.0
    """How far it moves each time; 1 copies the policy. Its bfloat16 weights do not follow steps below 0.5."""
    filter_by: Literal["off", "mean", "std"] = "off"
    """Dynamic sampling (DAPO, arXiv 2503.14476): keep groups whose mean or standard deviation of filter_key lies
    strictly between filter_low and filter_high, and sample more prompts until the batch is full."""
    filter_key: str = "overall"
    """Key of the reward function's result that decides."""
    filter_low: float = 0.01
    filter_high: float = 0.99
    filter_max_tries: int = 20
    """Batches drawn for one step before the run stops with the counts."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """recompute: the trainer's own, by a forward pass; rollout: the sampler's, which saves that pass."""
    correction: Literal["off", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"] = "off"
    """What to do about the gap between sampler and trainer, name in r1.algorithms.correction.CORRECTIONS."""
    correction_low: float = 0.5
    """Ratios trainer / sampler below this are masked (token_mask, sequence_mask)."""
    correction_high: float = 2.0
    """Ratios above this are truncated, or masked."""
    critic_lr: float = 1e-5
    """Learning rate of gae's value model."""
    critic_clip: float = 0.5
    """A value moves at most this far from the old one before its loss is clipped."""
    critic_warmup_steps: int = 0
    """Steps in which only the critic learns."""

    def __post_init__(self) -> None:
        check_types(self, "algorithm")
        for name, low, high in (("clip_low", 0, 1), ("clip_high", 0, None), ("clip_dual", 1, None)):
            value = getattr(self, name)
            bounds = f"in ({low}, {high})" if high is not None else f"above {low}"
            require(low < value and (high is None or value < high), f"algorithm.{name} must be {bounds}, got {value}")
        for name in ("gamma", "lam", "reference_polyak"):
            require(0 <= getattr(self, name) <= 1, f"algorithm.{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("kl_coef", "entropy_coef"):
            value = getattr(self, name)
            require(value >= 0, f"algorithm.{name} must be >= 0 (the sign is in the loss), got {value}")
        for name in ("tau_positive", "tau_negative", "kl_horizon", "critic_lr", "critic_clip", "filter_max_tries"):
            require(getattr(self, name) > 0, f"algorithm.{name} must be above 0, got {getattr(self, name)}")
        target, every = self.kl_target, self.reference_update_steps
        require(target is None or target > 0, f"algorithm.kl_target must be above 0 or None, got {target}")
        require(
            every is None or every >= 1, f"algorithm.reference_update_steps must be at least 1 or None, got {every}"
        )
        for name in ("kl_target", "reference_update_steps"):
            require(
                self.kl_coef > 0 or getattr(self, name) is None,
                f"algorithm.{name}={getattr(self, name)} needs the reference, which algorithm.kl_coef=0 does not load; "
                f"set kl_coef above 0, or {name}=None",
            )
        warmup = self.critic_warmup_steps
        require(warmup >= 0, f"algorithm.critic_warmup_steps must be at least 0, got {warmup}")
        require(
            warmup == 0 or self.advantage == "gae",
            f"algorithm.critic_warmup_steps={warmup} would train nothing for as many steps: only "
            f"algorithm.advantage='gae' has a critic, got {self.advantage!r}",
        )
        low, high = self.filter_low, self.filter_high
        require(low < high, f"algorithm.filter_low={low} must be below algorithm.filter_high={high}")
        low, high = self.correction_low, self.correction_high
        require(0 <= low < high, f"algorithm.correction_low={low} must be below algorithm.correction_high={high}")
        require(
            self.kl_penalty != "full" or self.kl_in == "loss",
            "algorithm.kl_penalty='full' works with kl_in='loss' only; use k1, k2, k3 or abs in the reward",
        )
        require(
            self.old_logprobs == "recompute" or self.correction == "off",
            f"algorithm.correction={self.correction!r} compares the trainer's old logprobs with the sampler's, which "
            "old_logprobs='rollout' makes the same; set one of the two back",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save_freq: int = -1
    """Save every so many steps; the last step is always saved; -1: only the last."""
    save_limit: int = 3
    """Keep this many of the newest checkpoints; -1: all."""
    best_metric: str | None = None
    """Also keep the best by this logged metric, e.g. "val/geo3k/reward"; a checkpoint counts with the value of its own
    step, so let save_freq be a multiple of trainer.val_freq. tools/merge.py then takes the best."""
    best_mode: Literal["max", "min"] = "max"
    """Whether a high or a low best_metric is good."""
    best_limit: int = 1
    """Keep this many of the best; they may also be among the newest."""
    save_model_only: bool = False
    """Leave out the optimizer's states (two thirds of a checkpoint): to be used, not to be resumed well."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in host memory as large as the rank's share; False: wait, no copy."""
    load_path: str | None = None
    """Start from this checkpoint (…/checkpoints/step_000050), from the newest of this run folder, or "best": from this
    run's best. Started again with the same load_path, the run goes on from what it has saved since."""
    resume: bool = True
    """Go on from the run folder's latest complete checkpoint, if it has one."""
    deadline: str | None = None
    """Save and stop with exit code 75 before this time: "3h30m" after the start (d, h, m, s), or an ISO date and time
    ("2030-01-31T08:00", local time). No step is begun that would end later, with its save, by what the last of each
    took."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        for name in ("save_freq", "save_limit"):
            value = getattr(self, name)
            require(value == -1 or value >= 1, f"checkpoint.{name} must be -1 or at least 1, got {value}")
        require(self.best_limit >= 1, f"checkpoint.best_limit must be at least 1, got {self.best_limit}")
        require(
            self.load_path != "best" or self.best_metric is not None,
            'checkpoint.load_path="best" needs checkpoint.best_metric, e.g. "val/geo3k/reward"',
        )
        if self.deadline is not None:
            time_of_deadline(self.deadline, since=0.0)


def time_of_deadline(deadline: str, *, since: float) -> float:
    """The deadline as seconds since the epoch, as time.time() counts; durations start at since.

    Raises:
        ValueError: it is neither a duration nor an ISO date and time.
    """
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", deadline)
    if deadline and parts is not None:
        return since + sum(
            int(part or 0) * unit for part, unit in zip(parts.groups(), (86400, 3600, 60, 1), strict=True)
        )
    try:
        return datetime.datetime.fromisoformat(deadline).timestamp()
    except ValueError:
        raise ValueError(
            f'checkpoint.deadline must be a duration like "3h30m" or an ISO time like "2030-01-31T08:00", '
            f"got {deadline!r}"
        ) from None


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
    """Validate before the first step; a resumed run did."""
    val_only: bool = False
    """Validate once and stop."""
    samples_to_log: int = 4
    """Responses written to samples.jsonl each step, and at each validation."""
    deterministic: bool = False
    """Deterministic kernels: slower, equal runs bit for bit."""
    progress: bool = True
    """Progress bars for rollout and update, on a terminal."""
    profile_steps: tuple[int, ...] = ()
    """Steps that are recorded, as a trace and on a GPU a memory history, in the run folder's profile/; the first step
    compiles and allocates, so take later ones."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that record them."""

    def __post_init__(self) -> None:
        check_types(self, "trainer")
        for name in ("experiment_name", "output_dir"):
            require(bool(getattr(self, name)), f"trainer.{name} is empty; the run folder is output_dir/experiment_name")
        for name, value in (("samples_to_log", self.samples_to_log), ("profile_ranks", min((*self.profile_ranks, 0)))):
            require(value >= 0, f"trainer.{name} must be at least 0, got {value}")
        require(0 <= self.seed < 2**63, f"trainer.seed must be at least 0 and below 2**63, got {self.seed}")
        known = ("console", "file", "tensorboard", "wandb", "swanlab", "mlflow")
        for name in self.loggers:
            require(name in known, f"trainer.loggers: {name!r} is not one of {', '.join(known)}")
        require(self.val_freq == -1 or self.val_freq >= 1, f"trainer.val_freq must be -1 or >= 1, got {self.val_freq}")
        require(self.total_epochs >= 1, f"trainer.total_epochs must be at least 1, got {self.total_epochs}")
        low = min((*self.profile_steps, 1))
        require(low >= 1, f"trainer.profile_steps counts from 1, got {low}")
        require(
            self.max_steps is None or self.max_steps >= 1,
            f"trainer.max_steps must be at least 1, got {self.max_steps}; to validate only, set trainer.val_only",
        )
