"""The rollout stage: sync weights into the engine, sample this rank's share of a step, and start its grading."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from r1.config import Config
from r1.data.loader import Loader
from r1.parallel import Ranks, gather_objects
from r1.policy.policy import Policy
from r1.rewards.runner import PendingRewards, RewardRunner
from r1.rollout.engines import ENGINES
from r1.rollout.responses import decode_responses, gather_rollouts, reward_inputs, sample_record
from r1.rollout.weight_sync import stream_weights
from r1.types import Prompt, Rollout, SamplingParams


class StepPrompts(Mapping[int, Prompt]):
    """A step's prompts by group; those that another rank sampled are prepared when they are looked up."""

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
        self.local: list[Rollout] = []  # of the step under way, sampled here

    def sync(self) -> None:
        """Wake the engine with the policy's current weights; nothing to do when it is awake with them."""
        if self.synced == self.policy.version:
            return
        self.policy.after_sampling()  # whole again on this device, if a validation left it in host memory
        self.engine.wake()
        self.engine.load_weights(self._weights())
        self.synced = self.policy.version

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from stream_weights(self.policy.model, dtype=getattr(torch, self.config.engine_dtype))
        # The engine takes its KV cache as soon as the last tensor is in.
        self.policy.before_cache()

    def sample(self, loader: Loader, step: int) -> tuple[list[Rollout], list[int], StepPrompts, PendingRewards]:
        """Sample step `step`, put the engine to sleep and hand its responses to the graders.

        Returns:
            All ranks' rollouts in (group, sample) order, the rank that sampled each, the step's prompts, and the
            grading of this rank's own, under way.
        """
        rows = loader.rows_at(step)
        share = self.ranks.engine_share(len(rows))
        prompts = loader.prepare(rows[share])
        rollout = self.config.rollout
        sampling = SamplingParams(
            n=rollout.n,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=self.config.data.max_response_length,
            ignore_eos=rollout.ignore_eos,
            seed=zlib.crc32(f"{rollout.seed}/{step}".encode()),
        )
        local = self.engine.generate(prompts, range(share.start, share.stop), sampling)
        self.engine.sleep()
        self.synced = None
        self.policy.after_sampling()
        self.local = local if self.ranks.speaks_for_engine else []
        for item in self.local:
            item.policy_version = self.policy.version
        decode_responses(self.local, self.tokenizer, skip_special_tokens=self.config.reward.skip_special_tokens)
        pending = self.rewards.submit(reward_inputs(self.local, prompts, share.start))
        rollouts, homes = gather_rollouts(self.local, self.ranks)
        return rollouts, homes, StepPrompts(loader, rows), pending

    def set_rewards(self, rollouts: Sequence[Rollout], pending: PendingRewards) -> list[str]:
        """Wait for this rank's grades and exchange them: fills rewards and reward of all rollouts on every rank.

        Returns:
            One line for each response of any rank that could not be graded.
        """
        for rollout, graded in zip(self.local, pending.result(), strict=True):
            rollout.rewards = graded
        mine = [(r.group, r.sample, r.rewards) for r in self.local], pending.failures
        graded, failures = {}, []
        for rows, lines in gather_objects(mine):
            graded |= {(group, sample): rewards for group, sample, rewards in rows}
            failures += lines
        for rollout in rollouts:
            rollout.rewards = graded[rollout.group, rollout.sample]
            rollout.reward = None if rollout.rewards is None else rollout.rewards["overall"]
        return failures

    def close(self) -> None:
        """End the engine; the process group goes with it."""
        self.engine.close()

    def samples(self, prompts: Mapping[int, Prompt]) -> list[dict[str, Any]]:
        """Records of a few of this rank's rollouts of the step, for samples.jsonl."""
        return [sample_record(r, prompts[r.group]) for r in self.local[: self.config.trainer.samples_to_log]]
