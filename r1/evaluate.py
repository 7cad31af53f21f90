"""Validation: sample every validation set with the current weights and average what the reward function says."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from r1.config import Config
from r1.data.loader import Loader
from r1.parallel import Ranks, gather_objects
from r1.rewards.runner import RewardRunner
from r1.rollout.engines import Engine
from r1.rollout.responses import decode_responses, reward_inputs, sample_record
from r1.types import SamplingParams


def evaluate(
    config: Config,
    ranks: Ranks,
    engine: Engine,
    val_sets: Sequence[Loader],
    rewards: RewardRunner,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Means over each validation set, with an engine that is awake and holds the weights; collective.

    Returns:
        Metrics `val/<set>/reward` (the mean of "overall"), `val/<set>/<key>` for the reward function's other keys,
        `val/<set>/response_length` in tokens and `val/<set>/failed_frac`, the share of responses without a reward,
        which count as 0; and some of this rank's samples for the log.
    """
    val = config.rollout.val
    sampling = SamplingParams(
        n=val.n,
        temperature=val.temperature,
        top_p=val.top_p,
        top_k=val.top_k,
        max_tokens=config.data.max_response_length,
        seed=config.rollout.seed,
    )
    metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    for loader in val_sets:
        size = loader.num_rows if config.data.val_batch_size == -1 else config.data.val_batch_size
        results: list[tuple[dict[str, float] | None, int]] = []
        for start in range(0, loader.num_rows, size):
            rows = list(range(start, min(start + size, loader.num_rows)))
            share = ranks.engine_share(len(rows))
            prompts = loader.prepare(rows[share])
            rollouts = engine.generate(prompts, rows[share], sampling)
            if not ranks.speaks_for_engine:
                continue
            decode_responses(rollouts, tokenizer, skip_special_tokens=config.reward.skip_special_tokens)
            graded = rewards.submit(reward_inputs(rollouts, prompts, start + share.start)).result()
            for rollout, rewards_of in zip(rollouts, graded, strict=True):
                rollout.rewards = rewards_of
            results += [(r.rewards, len(r.response_ids)) for r in rollouts]
            if start == 0:
                shown = rollouts[: config.trainer.samples_to_log]
                samples += [{"set": loader.name} | sample_record(r, prompts[r.group - share.start]) for r in shown]
        gathered = [x for part in gather_objects(results) for x in part]
        metrics |= _summary(loader.name, gathered)
    return metrics, samples


def _summary(name: str, results: Sequence[tuple[dict[str, float] | None, int]]) -> dict[str, float]:
    keys = sorted({key for scored, _ in results if scored is not None for key in scored} | {"overall"})
    total = max(len(results), 1)
    means = {
        f"val/{name}/{'reward' if key == 'overall' else key}": sum((s or {}).get(key, 0.0) for s, _ in results) / total
        for key in keys
    }
    means[f"val/{name}/response_length"] = sum(length for _, length in results) / total
    means[f"val/{name}/failed_frac"] = sum(scored is None for scored, _ in results) / total
    return means
