"""Numbers of a step: rewards and lengths, the gap between sampler and trainer, times, memory and speed."""

import contextlib
import math
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from r1.config import Config
from r1.metrics_flops import Packed, mfu, update_flops
from r1.parallel import Ranks, gather_objects
from r1.types import Rollout


class ScoredMicrobatch(Packed, Protocol):
    """The part of a microbatch that metrics are made of."""

    rollout_logprobs: Tensor  # [R]
    old_logprobs: Tensor | None  # [R]

    def own(self, values: Tensor) -> Tensor: ...


class GpuMemory:
    """The most memory that this process's GPU holds from now on, by the driver's count; the process is alone on it.

    Torch counts the pool of a sleeping engine as reserved, though it holds nothing, and does not see what others
    allocate: the gap between the driver's count and torch's, at the begin and the end, sets both right.
    """

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._gap = _driver_minus_torch()

    def peak_gib(self) -> float:
        return (torch.cuda.max_memory_reserved() + max(self._gap, _driver_minus_torch())) / 2**30


def _driver_minus_torch() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class Timer:
    """Seconds and peak memory of a step's phases: `with timer("rollout"): …` becomes time/rollout_s."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._peaks_gib: dict[str, float] = {}
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block, and add it to the phase's time; on a GPU until its work is done."""
        memory = GpuMemory() if torch.cuda.is_initialized() else None
        began = time.perf_counter()
        try:
            yield
        finally:
            if memory is not None:
                torch.cuda.synchronize()
                self._peaks_gib[phase] = max(self._peaks_gib.get(phase, 0.0), memory.peak_gib())
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """time/<phase>_s, and time/step_s since the timer was made."""
        times = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        return times | {"time/step_s": time.perf_counter() - self._began}

    def memory(self) -> dict[str, float]:
        """mem/peak_gib, on a GPU also mem/<phase>_peak_gib; of this rank."""
        phases = {f"mem/{phase}_peak_gib": peak for phase, peak in self._peaks_gib.items()}
        return phases | {"mem/peak_gib": max(phases.values()) if phases else peak_memory_gib()}


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards and lengths of a step's rollouts; {} for none.

    reward/mean, reward/std (over all responses, n - 1), reward/std_in_group (n - 1, the mean over groups with two
    rewards or more), reward/<key> for each further key of the reward function, reward/failed_frac (without a reward),
    reward/zero_std_frac (groups that teach nothing: their rewards are tied, or there is at most one),
    response/length_{mean,min,max} in tokens, response/clip_frac (cut at the longest length), prompt/length_{mean,max}
    over groups.
    """
    if not rollouts:
        return {}
    groups: dict[int, list[float]] = {r.group: [] for r in rollouts}
    for r in rollouts:
        if r.reward is not None:
            groups[r.group].append(r.reward)
    scored = [r.reward for r in rollouts if r.reward is not None]
    metrics = {"reward/mean": statistics.fmean(scored)} if scored else {}
    if len(scored) >= 2:
        metrics["reward/std"] = statistics.stdev(scored)
    if deviations := [statistics.stdev(group) for group in groups.values() if len(group) >= 2]:
        metrics["reward/std_in_group"] = statistics.fmean(deviations)
    for key in sorted({key for r in rollouts for key in r.rewards or {}} - {"overall"}):
        metrics[f"reward/{key}"] = statistics.fmean(r.rewards[key] for r in rollouts if r.rewards and key in r.rewards)
    metrics["reward/failed_frac"] = 1 - len(scored) / len(rollouts)
    metrics["reward/zero_std_frac"] = statistics.fmean(len(set(group)) <= 1 for group in groups.values())
    lengths = [len(r.response_ids) for r in rollouts]
    prompts = list({r.group: len(r.prompt_ids) for r in rollouts}.values())
    return metrics | {
        "response/length_mean": statistics.fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/length_min": float(min(lengths)),
        "response/clip_frac": statistics.fmean(r.truncated for r in rollouts),
        "prompt/length_mean": statistics.fmean(prompts),
        "prompt/length_max": float(max(prompts)),
    }


def mismatch_sums(old_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, float]:
    """What mismatch_from_sums needs of some tokens, on one rank. Both [T] nats.

    Args:
        old_logprobs: the trainer's, for the weights that sampled.
        rollout_logprobs: the sampler's own.
    """
    difference = old_logprobs.detach().double().cpu() - rollout_logprobs.detach().double().cpu()
    ratio = difference.clamp(-20, 20).exp()  # one broken token must not turn the sums into infinity
    return {
        "tokens": float(difference.numel()),
        "abs": float(difference.abs().sum()),
        "k1": float(-difference.sum()),
        "k3": float((ratio - 1 - difference.clamp(-20, 20)).sum()),
        "ratio": float(ratio.sum()),
        "ratio_squared": float(ratio.square().sum()),
        "abs_max": float(difference.abs().max()) if difference.numel() else 0.0,
    }


def mismatch_from_sums(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Join mismatch_sums of microbatches and ranks; {} where they hold no token.

        d = old_logprobs - rollout_logprobs, of tokens that the sampler drew

    mismatch/abs_mean and abs_max of |d|; kl_k1 = mean(-d) and kl_k3 = mean(exp(d) - 1 - d), both estimate
    KL(sampler || trainer) (joschu.net/blog/kl-approx.html); perplexity_ratio = exp(mean(-d)), the trainer's over the
    sampler's; ess = mean(w)^2 / mean(w^2) with w = exp(d): the share of tokens that importance weights would leave.
    """
    parts = [part for part in parts if part["tokens"]]
    if not parts:
        return {}
    total = {key: math.fsum(part[key] for part in parts) for key in parts[0]}
    tokens = total["tokens"]
    return {
        "mismatch/abs_mean": total["abs"] / tokens,
        "mismatch/abs_max": max(part["abs_max"] for part in parts),
        "mismatch/kl_k1": total["k1"] / tokens,
        "mismatch/kl_k3": total["k3"] / tokens,
        "mismatch/perplexity_ratio": math.exp(min(total["k1"] / tokens, 700.0)),
        "mismatch/ess": total["ratio"] ** 2 / (tokens * total["ratio_squared"]),
    }


def peak_memory_gib() -> float:
    """Most host memory that this process had resident since its start."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def step_metrics(
    rollouts: Sequence[Rollout],
    minibatches: Sequence[Sequence[ScoredMicrobatch]],
    timer: Timer,
    model: PreTrainedModel,
    config: Config,
    ranks: Ranks,
) -> dict[str, float]:
    """All metrics of a step but the update's own, the same on every rank but for the times; collective.

    Args:
        rollouts: of all ranks.
        minibatches: this rank's, with old_logprobs set.
        timer: has timed the phases; time/step_s ends here, before validation and saving.
        model: the policy, for its size.
    """
    microbatches = [m for minibatch in minibatches for m in minibatch]
    mine = {
        "mismatch": [
            mismatch_sums(m.own(m.old_logprobs), m.own(m.rollout_logprobs))
            for m in microbatches
            if m.old_logprobs is not None
        ],
        "flops": update_flops(model, microbatches),
        "deferred": update_flops(model, minibatches[0]) if config.defers_old_logprobs else 0.0,
        "packed": sum(m.input_ids.numel() for m in microbatches),
        "memory": timer.memory(),
    }
    every = gather_objects(mine)
    copies = ranks.sequence_parallel_size  # of each microbatch: one on every rank of its group
    metrics = rollout_metrics(rollouts) | mismatch_from_sums(part for rank in every for part in rank["mismatch"])
    metrics |= timer.metrics()
    tokens = sum(len(r.prompt_ids) + len(r.response_ids) for r in rollouts)
    metrics["perf/tokens_per_s_per_gpu"] = tokens / (metrics["time/step_s"] * ranks.world_size)
    packed = sum(rank["packed"] for rank in every) / copies
    metrics["perf/computed_tokens_per_s_per_gpu"] = packed / (metrics["time/step_s"] * ranks.world_size)
    device_name = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
    flops, algorithm = sum(rank["flops"] for rank in every) / copies, config.algorithm
    passes = (algorithm.old_logprobs == "recompute") + (algorithm.kl_coef > 0 and algorithm.kl_penalty != "full")
    deferred = sum(rank["deferred"] for rank in every) / copies
    scored = (flops * passes - deferred) / 3  # forward: a third of forward and backward
    phases = {"perf/mfu": ("update", flops * config.update.ppo_epochs), "perf/mfu_logprobs": ("logprobs", scored)}
    for name, (phase, work) in phases.items():
        share = mfu(work, timer.seconds.get(phase, 0.0), ranks.world_size, device_name)
        if share:
            metrics[name] = share
    return metrics | {name: max(rank["memory"][name] for rank in every) for name in timer.memory()}
