"""The ranks of `bench.py parts`, under torchrun: they time each part of a step with the trainer's own classes."""

import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from r1.config import Config, load_config
from r1.data.setup import load_data
from r1.faults import is_out_of_memory, run_rank
from r1.parallel import gather_objects, init_ranks, seed_everything
from r1.policy.policy import Policy
from r1.policy.recompute import Recompute
from r1.rollout.engines import ENGINES, Engine
from r1.rollout.sampler import BatchPrompts
from r1.rollout.weight_sync import stream_weights
from r1.types import SamplingParams
from tools.bench_model import SPECIAL_TOKENS
from tools.bench_parts_measure import Bench
from tools.bench_parts_trainer import made_rollouts, trainer_parts
from tools.bench_work import Work

SIZES_ONLY = ("max_tokens_per_microbatch", "logprob_chunk_tokens")
"""Of config.update, what a policy reads anew each time: variants in these alone share one."""


def make_engine(config: Config, bench: Bench, policy: Policy) -> Engine:
    """As r1.rollout.sampler.Sampler makes it: beside the policy, and put to sleep."""
    policy.before_cache()
    kwargs = bench.loader.renderer.mm_processor_kwargs
    engine = ENGINES[config.rollout.engine](
        config.model.path, config, mm_processor_kwargs=kwargs, device=bench.ranks.device
    )
    engine.sleep()
    policy.after_sampling()
    return engine


class Turns:
    """The engine's way to sleep and back, as a step takes it: doze and load in turn."""

    def __init__(self, config: Config, policy: Policy, engine: Engine) -> None:
        self._config, self._policy, self._engine = config, policy, engine
        self._dozing = False

    def doze(self) -> None:
        """Go to sleep, give the policy the GPU, and wake as far as weights can come in."""
        if not self._dozing:
            self._engine.sleep()
            self._policy.after_sampling()
            self._engine.wake()
            self._dozing = True

    def load(self) -> None:
        """Bring the weights; the engine is awake then."""
        if self._dozing:
            self._engine.load_weights(self._weights())
            self._dozing = False

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from stream_weights(self._policy.model, dtype=getattr(torch, self._config.engine_dtype))
        self._policy.before_cache()


def engine_parts(config: Config, bench: Bench, policy: Policy, engine: Engine) -> None:
    """Sampling alone, the way to sleep and back, and the weight sync; the engine is asleep before and after."""
    turns = Turns(config, policy, engine)
    draw = iter(range(1, 2 + bench.repeats))
    sizes: list[tuple[int, int]] = []  # of each time: this rank's tokens of prompts and of responses
    batch: list[Any] = []

    def before_sampling() -> None:  # other prompts each time, and no prefix of theirs in the cache
        rows = bench.loader.rows_at(next(draw))
        share = bench.ranks.engine_share(len(rows))
        batch[:] = [bench.loader.prepare(rows[share]), range(share.start, share.stop)]
        turns.doze()
        turns.load()

    def sample() -> None:
        rollouts = engine.generate(batch[0], batch[1], sampling_of(config))
        own = rollouts if bench.ranks.speaks_for_engine else []
        sizes.append((sum(len(r.prompt_ids) for r in own), sum(len(r.response_ids) for r in own)))

    found = bench.measure(sample, before_sampling)
    times = len(found["seconds"])
    every = [[sum(column) for column in zip(*ranks, strict=True)] for ranks in zip(*gather_objects(sizes), strict=True)]
    # The time in the middle is the median; its responses are the ones to count.
    order = sorted(range(times), key=lambda i: found["seconds"][i])
    middle = [every[-times:][i] for i in order[(times - 1) // 2 : times // 2 + 1]]
    prompts, responses = (sum(column) / len(middle) for column in zip(*middle, strict=True))
    bench.write("rollout", **found, counted_tokens=prompts + responses, response_tokens=responses)
    bench.write("sleep_wake", **bench.measure(turns.doze, turns.load))
    bench.write("weight_sync", **bench.measure(turns.load, turns.doze))
    engine.sleep()
    policy.after_sampling()


def sampling_of(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
    )


def same_but_sizes(one: Config, other: Config) -> bool:
    """Whether one policy serves both."""
    return one == replace(other, update=replace(other.update, **{n: getattr(one.update, n) for n in SIZES_ONLY}))


def main(request_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    work, names = Work(**request["work"]), list(request["variants"])
    configs = [load_config(request["config"], request["variants"][name]) for name in names]
    ranks = init_ranks(configs[0].parallel, configs[0].rollout.tensor_parallel_size)
    seed_everything(configs[0].trainer.seed, deterministic=configs[0].trainer.deterministic)
    tokenizer, _, loader, _ = load_data(configs[0])
    bench = Bench(ranks, loader, request["repeats"], Path(request["results"]))
    rows = loader.rows_at(1)
    rollouts = made_rollouts(work, configs[0], BatchPrompts(loader, rows), len(tokenizer) - len(SPECIAL_TOKENS))
    policy: Policy | None = None
    engine: Engine | None = None
    for name, config in zip(names, configs, strict=True):
        bench.variant = name
        if policy is None or not same_but_sizes(policy.config, config):
            policy = None
            gc.collect()
            torch._dynamo.reset()
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            began = time.perf_counter()
            policy = Policy(config, ranks, work.steps)
            bench.write("loading", seconds=[time.perf_counter() - began])
        else:
            # It measured what memory is left beside other sizes.
            policy.recompute = Recompute(policy.model, ranks, config.model.gradient_checkpointing)
        policy.config = config
        if engine is None and "rollout" not in request["skip"]:
            engine = make_engine(config, bench, policy)
            engine_parts(config, bench, policy, engine)
        if "trainer" in request["skip"]:
            continue
        profile = Path(request["profile"][name]) if request["profile"] else None
        try:
            trainer_parts(config, bench, policy, rollouts, rows, profile)
        except RuntimeError as error:
            if not is_out_of_memory(error) or ranks.world_size > 1:  # other ranks would wait in a collective
                raise
            bench.write("failed", error=str(error).splitlines()[0])
            traceback.clear_frames(error.__traceback__)
            policy = None
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    run_rank(lambda: main(sys.argv[1]))
