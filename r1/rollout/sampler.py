"""The rollout stage: sync weights into the engine, sample this rank's share of a step, and start its grading."""

import contextlib
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from r1.algorithms.groups import keeps_group
from r1.config import Config
from r1.data.loader import Loader
from r1.parallel import Ranks, gather_objects
from r1.policy.policy import Policy
from r1.rewards.runner import PendingRewards, RewardRunner
from r1.rollout.engines import ENGINES, Engine
from r1.rollout.responses import decode_responses, gather_rollouts, reward_inputs, sample_record
from r1.rollout.weight_sync import stream_weights
from r1.types import Prompt, Rollout, SamplingParams


@dataclass(kw_only=True)
class Batch:
    """One draw of prompts with its rollouts; or the groups kept from several draws, as one."""

    rows: list[int]  # of each group, positions in the loader
    rollouts: list[Rollout]  # of all ranks, in (group, sample) order
    homes: list[int]  # for each rollout, the rank that sampled it
    local: list[Rollout]  # those sampled here, with their text
    pending: list[PendingRewards]  # grading under way, of local and then of the greedy responses; [] when it is done
    greedy: list[Rollout] = field(default_factory=list)  # ReMax: one for each prompt sampled here
    drawn: int = 0  # groups sampled for this batch; more than it holds with dynamic sampling
    failures: list[str] = field(default_factory=list)  # one line for each response that could not be graded


class BatchPrompts(Mapping[int, Prompt]):
    """A batch's prompts by group; those that another rank sampled are prepared when they are looked up."""

    def __init__(self, loader: Loader, rows: Sequence[int]) -> None:
        self._loader, self._rows = loader, rows

    def __getitem__(self, group: int) -> Prompt:
        return self._loader.prepare([self._rows[group]])[0]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._rows)))

    def __len__(self) -> int:
        return len(self._rows)


class Sampler:
    """One rank's engine, and what surrounds it in a step. Every method but `samples` is collective."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardRunner,
        mm_processor_kwargs: dict[str, Any] | None,
    ) -> None:
        self.config, self.ranks, self.policy = config, ranks, policy
        self.tokenizer, self.rewards = tokenizer, rewards
        policy.before_cache()
        self.engine = ENGINES[config.rollout.engine](
            config.model.path, config, mm_processor_kwargs=mm_processor_kwargs, device=ranks.device
        )
        self.engine.sleep()
        policy.after_sampling()
        self.synced: int | None = None  # policy version that the engine holds while it is awake
        self.draws = 0  # batches of prompts drawn so far: where the data stands; more than steps with dynamic sampling
        self._seconds: dict[str, float] = {}

    def sync(self) -> None:
        """Wake the engine with the policy's current weights; nothing to do when it is awake with them."""
        if self.synced == self.policy.version:
            return
        self.policy.after_sampling()  # whole again on this device, if a validation left it in host memory
        with self._timed("wake"):
            self.engine.wake()
        self.engine.load_weights(self._weights())
        self.synced = self.policy.version

    @contextlib.contextmanager
    def awake(self) -> Iterator[Engine]:
        """The engine with the policy's current weights, for a validation.

        Asleep afterwards, so that the next step finds it as a run does that has just resumed: with nothing kept of the
        prompts that it has seen.
        """
        self.sync()
        yield self.engine
        self._rest()
        self._seconds = {}  # a validation's are in no step's time

    def _rest(self) -> None:
        with self._timed("sleep"):
            self.engine.sleep()
        self.synced = None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from stream_weights(self.policy.model, dtype=getattr(torch, self.config.engine_dtype))
        # The engine takes its KV cache as soon as the last tensor is in.
        self.policy.before_cache()

    @contextlib.contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[call] = self._seconds.get(call, 0.0) + time.perf_counter() - began

    def take_metrics(self, batch: Batch) -> dict[str, float]:
        """rollout/groups_drawn, and engine/{wake,generate,sleep}_s since the last time, which are shares of
        time/weight_sync_s and time/rollout_s."""
        seconds, self._seconds = self._seconds, {}
        return {"rollout/groups_drawn": float(batch.drawn)} | {f"engine/{k}_s": value for k, value in seconds.items()}

    def sample(self, loader: Loader) -> Batch:
        """Sample the next batch and put the engine to sleep; its grading goes on.

        With dynamic sampling, batches are drawn and graded until enough of their groups pass the filter, in the same
        order on every rank: what passes is a function of the rewards, which all ranks hold.

        Raises:
            ValueError: filter_max_tries batches did not fill one.
        """
        algorithm = self.config.algorithm
        if algorithm.filter_by == "off":
            batch = self._draw(loader)
            batch.drawn = len(batch.rows)
        else:
            need, kept, seen = self.config.data.rollout_batch_size, [], 0
            for _ in range(algorithm.filter_max_tries):
                draw = self._draw(loader)
                self.set_rewards(draw)
                seen += len(draw.rows)
                kept.append(
                    _only(draw, [g for g in range(len(draw.rows)) if keeps_group(_rewards(draw, g), algorithm)])
                )
                if sum(len(b.rows) for b in kept) >= need:
                    break
            batch = replace(_join(kept, need), drawn=seen)
            if len(batch.rows) < need:
                raise ValueError(
                    f"dynamic sampling kept {len(batch.rows)} of {seen} groups in algorithm.filter_max_tries="
                    f"{algorithm.filter_max_tries} batches, and {need} are needed: {algorithm.filter_by} of "
                    f"{algorithm.filter_key!r} must lie between {algorithm.filter_low} and {algorithm.filter_high}. "
                    "The task is too easy or too hard for the model, or the bounds or rollout.n too tight"
                )
        self._rest()
        if algorithm.filter_by != "off" or self.draws < self.config.num_steps(loader.num_rows):
            # Made while this batch trains.
            loader.prefetch(self.draws + 1, self.ranks.learner_share(len(batch.rows)), keep=batch.rows)
        self.policy.after_sampling()
        return batch

    def _draw(self, loader: Loader) -> Batch:
        """Sample the next rollout_batch_size prompts with the awake engine and hand the responses to the graders."""
        self.draws += 1
        rows = loader.rows_at(self.draws)
        share = self.ranks.engine_share(len(rows))
        prompts = loader.prepare(rows[share])
        groups = range(share.start, share.stop)
        rollout = self.config.rollout
        sampling = SamplingParams(
            n=rollout.n,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=self.config.data.max_response_length,
            ignore_eos=rollout.ignore_eos,
            seed=zlib.crc32(f"{rollout.seed}/{self.draws}".encode()),
        )
        with self._timed("generate"):
            sampled = self.engine.generate(prompts, groups, sampling)
        local = self._own(sampled)
        pending = [self.rewards.submit(reward_inputs(local, prompts, share.start))]
        greedy: list[Rollout] = []
        if self.config.algorithm.advantage == "remax":
            greedy = self._own(self.engine.generate(prompts, groups, replace(sampling, n=1, temperature=0.0)))
            pending.append(self.rewards.submit(reward_inputs(greedy, prompts, share.start)))
        rollouts, homes = gather_rollouts(local, self.ranks)
        return Batch(rows=rows, rollouts=rollouts, homes=homes, local=local, pending=pending, greedy=greedy)

    def _own(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Those this rank hands on, decoded; of a tensor-parallel group one rank does."""
        own = rollouts if self.ranks.speaks_for_engine else []
        decode_responses(own, self.tokenizer, skip_special_tokens=self.config.reward.skip_special_tokens)
        return own

    def set_rewards(self, batch: Batch) -> None:
        """Wait for this rank's grades and exchange them: fills rewards of the batch's rollouts on every rank."""
        if not batch.pending:
            return
        for rollouts, pending in zip((batch.local, batch.greedy), batch.pending, strict=False):
            for rollout, graded in zip(rollouts, pending.result(), strict=True):
                rollout.rewards = graded
            batch.failures += pending.failures
        mine = (
            {(r.group, r.sample): r.rewards for r in batch.local},
            {r.group: float("nan") if r.rewards is None else r.rewards["overall"] for r in batch.greedy},
            batch.failures,
        )
        batch.pending, batch.failures = [], []
        for rewards, baselines, lines in gather_objects(mine):
            batch.failures += lines
            for rollout in batch.rollouts:
                if (rollout.group, rollout.sample) in rewards:
                    rollout.rewards = rewards[rollout.group, rollout.sample]
                    rollout.reward = None if rollout.rewards is None else rollout.rewards["overall"]
                if rollout.group in baselines:
                    rollout.baseline = baselines[rollout.group]

    def close(self) -> None:
        """End the engine; the process group goes with it."""
        self.engine.close()

    def samples(self, batch: Batch, prompts: Mapping[int, Prompt]) -> list[dict[str, Any]]:
        """Records of a few of this rank's rollouts of the step, for samples.jsonl."""
        return [sample_record(r, prompts[r.group]) for r in batch.local[: self.config.trainer.samples_to_log]]


def _rewards(batch: Batch, group: int) -> list[dict[str, float] | None]:
    return [r.rewards for r in batch.rollouts if r.group == group]


def _only(batch: Batch, groups: Sequence[int]) -> Batch:
    """The batch with these groups alone."""
    chosen = set(groups)
    rows = [(r, h) for r, h in zip(batch.rollouts, batch.homes, strict=True) if r.group in chosen]
    return replace(
        batch, rollouts=[r for r, _ in rows], homes=[h for _, h in rows],
        local=[r for r in batch.local if r.group in chosen], rows=[batch.rows[g] for g in groups],
    )  # fmt: skip


def _join(batches: Sequence[Batch], size: int) -> Batch:
    """The first size groups of several batches as one, renumbered."""
    joined = Batch(rows=[], rollouts=[], homes=[], local=[], pending=[])
    for batch in batches:
        names = {g: len(joined.rows) + i for i, g in enumerate(dict.fromkeys(r.group for r in batch.rollouts))}
        joined.failures += batch.failures
        joined.rows += batch.rows
        joined.homes += batch.homes
        for rollouts, target in ((batch.rollouts, joined.rollouts), (batch.local, joined.local)):
            # Copies: a rank's own rollouts and their twins among all may be the same objects.
            target += [replace(r, group=names[r.group]) for r in rollouts]
    return _only(joined, range(min(size, len(joined.rows))))
