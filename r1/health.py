"""What recent metrics say is going wrong in a run, and what people do about it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

RECENT = 5
"""Steps that a judgement is about: their mean, so that one odd step is not news."""
SOLVED = 0.95
"""Mean accuracy (or reward) from which low entropy and tied groups are what learning looks like when it is done."""


class Trouble(NamedTuple):
    """One thing that goes wrong."""

    name: str  # short, the same at every step
    what: str  # with its numbers
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}. {self.advice}"


def health(history: Sequence[Mapping[str, float | None]]) -> list[Trouble]:
    """Name what is wrong; [] for a healthy run.

    Args:
        history: metrics of training steps, oldest first: the run's first ones and its latest are enough. Judged are
            the last 5, some against the first 5; with fewer than 5 steps there is no judgement.
    """
    history = [metrics for metrics in history if metrics.get("reward/failed_frac") is not None]
    if len(history) < RECENT:
        return []
    first, last = _Means(history[:RECENT]), _Means(history[-RECENT:])
    compare = len(history) >= 2 * RECENT
    troubles = [_tied(last), _failed(last), _unreadable(last), _cut(last), _skipped(history[-2 * RECENT :])]
    troubles += [_clipped(last), _slow_rewards(last), _mismatch(first, last, compare)]
    if compare:
        troubles.append(_entropy(first, last))
    return [trouble for trouble in troubles if trouble is not None]


class _Means:
    """Means of some steps' metrics; 0 where no step has one, as a share of nothing is."""

    def __init__(self, steps: Sequence[Mapping[str, float | None]]) -> None:
        self.steps = steps

    def __call__(self, name: str, missing: float = 0.0) -> float:
        values = [v for step in self.steps if (v := step.get(name)) is not None and math.isfinite(v)]
        return statistics.fmean(values) if values else missing

    @property
    def is_solved(self) -> bool:
        return self("reward/accuracy", self("reward/mean")) >= SOLVED


def _tied(last: _Means) -> Trouble | None:
    share = last("reward/zero_std_frac")
    if share < 0.9:
        return None
    if last.is_solved:
        advice = "The task is solved: stop here, or give harder prompts"
    else:
        advice = (
            "Look at the responses in samples.jsonl: prompts too hard or too easy, or a reward that never changes; "
            'try a larger rollout.n, or algorithm.filter_by="std"'
        )
    return Trouble("groups tied", f"{share:.0%} of groups have equal rewards and teach nothing", advice)


def _failed(last: _Means) -> Trouble | None:
    share = last("reward/failed_frac")
    if share < 0.02:
        return None
    return Trouble(
        "rewards fail",
        f"{share:.0%} of responses could not be graded and are left out",
        "The warnings name them; raise reward.timeout_s or reward.memory_mb, or mend the reward function",
    )


def _unreadable(last: _Means) -> Trouble | None:
    share = last("reward/gold_unparsable")
    if share < 0.02:
        return None
    return Trouble(
        "answers unreadable",
        f"the grader cannot read the data's own answer for {share:.0%} of responses, which are always wrong",
        "Mend or drop those rows: the warnings name them",
    )


def _cut(last: _Means) -> Trouble | None:
    share = last("response/clip_frac")
    if share < 0.2:
        return None
    return Trouble(
        "responses cut",
        f"{share:.0%} of responses reach data.max_response_length",
        "Raise it, or teach brevity: the overlong reward; algorithm.mask_truncated leaves them out",
    )


def _skipped(recent: Sequence[Mapping[str, float | None]]) -> Trouble | None:
    count = sum(step.get("policy/skipped_steps") or 0.0 for step in recent)
    if not count:
        return None
    return Trouble(
        "gradients skipped",
        f"{count:.0f} updates of the last {len(recent)} steps had a gradient that was not finite",
        'Lower optim.lr; with model.precision="bf16" try "amp"; from a custom loss, look for log(0) or 0/0',
    )


def _clipped(last: _Means) -> Trouble | None:
    share = last("policy/clip_frac_low") + last("policy/clip_frac_high")
    if share < 0.3:
        return None
    return Trouble(
        "ratios clipped",
        f"{share:.0%} of tokens are clipped: updates go far from the policy that sampled",
        "Lower optim.lr or update.ppo_epochs, or raise update.global_batch_size",
    )


def _slow_rewards(last: _Means) -> Trouble | None:
    seconds, step_seconds = last("time/reward_s"), last("time/step_s")
    if seconds < 1 or seconds < 0.3 * step_seconds:
        return None
    return Trouble(
        "rewards slow",
        f"each step waits {seconds:.0f} of its {step_seconds:.0f} s for rewards",
        "Raise reward.num_workers, or make the reward function faster",
    )


def _mismatch(first: _Means, last: _Means, compare: bool) -> Trouble | None:
    """More than rounding explains (in bfloat16 0.001 to 0.03 nats), or grown well beyond its start."""
    now, start = last("mismatch/abs_mean"), first("mismatch/abs_mean")
    grown = compare and now > 0.01 and now > 3 * start
    if now < 0.1 and not grown:
        return None
    return Trouble(
        "mismatch rising" if grown else "mismatch high",
        f"sampler and trainer differ by {now:.3f} nats a token" + (f", {start:.3f} at first" if grown else ""),
        'Lower optim.lr; algorithm.correction="token_truncate" bounds the harm; rollout.dtype="float32" shows if it is '
        "rounding",
    )


def _entropy(first: _Means, last: _Means) -> Trouble | None:
    now, start = last("policy/entropy", math.nan), first("policy/entropy", math.nan)
    change = f"{start:.3f} nats a token at first, {now:.3f} now"
    if now < 0.03 and now < 0.1 * start and not last.is_solved:
        return Trouble(
            "entropy collapse",
            change,
            "Responses of a group become equal: raise algorithm.clip_high or entropy_coef, lower optim.lr, "
            "or sample with rollout.temperature 1",
        )
    if now > 3 * start and now > start + 1:
        return Trouble(
            "entropy rising", change, "The policy turns random: lower optim.lr or entropy_coef, raise algorithm.kl_coef"
        )
    return None
