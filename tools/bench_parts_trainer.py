"""The trainer's parts of a step, on made-up rollouts of the lengths that are sampled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import r1.policy.policy
from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.groups import set_advantages, valid_tokens
from r1.algorithms.named import function_of
from r1.config import Config
from r1.metrics_flops import update_flops
from r1.parallel import gather_objects
from r1.policy.optim import optimizer_step
from r1.policy.packing import Microbatch
from r1.policy.policy import Policy
from r1.rollout.sampler import BatchPrompts
from r1.types import Rollout
from tools.bench_parts_measure import Bench
from tools.bench_profile import profile_table
from tools.bench_work import Work, response_lengths


def made_rollouts(work: Work, config: Config, prompts: BatchPrompts, vocab_size: int) -> list[Rollout]:
    """The step's rollouts, of lengths as sampled, with random tokens and rewards."""
    lengths = iter(response_lengths(work, len(prompts) * config.rollout.n))
    draw = torch.Generator().manual_seed(0)
    rollouts = []
    for group in range(len(prompts)):
        prompt_ids = prompts[group].prompt_ids
        for sample in range(config.rollout.n):
            ids = torch.randint(vocab_size, (next(lengths),), generator=draw).tolist()
            reward = float(torch.rand((), generator=draw))
            rollouts.append(Rollout(
                group=group, sample=sample, prompt_ids=prompt_ids, response_ids=ids, truncated=False,
                rollout_logprobs=[-11.9] * len(ids), reward=reward, rewards={"overall": reward},
            ))  # fmt: skip
    return rollouts


def forget_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *_: Any) -> tuple[float, bool]:
    """In the place of the optimizer step, so that the update is forward and backward alone."""
    optimizer.zero_grad(set_to_none=True)
    return 0.0, False


def trainer_parts(
    config: Config, bench: Bench, policy: Policy, rollouts: list[Rollout], rows: list[int], profile: Path | None
) -> None:
    """Log-probabilities, the optimizer, forward and backward, and the optimizer states' way to host memory."""
    tp, ranks = config.rollout.tensor_parallel_size, bench.ranks
    groups = len(rows)
    homes = [min(r.group * ranks.num_engines // groups, ranks.num_engines - 1) * tp for r in rollouts]
    minibatches = policy.pack(rollouts, homes, BatchPrompts(bench.loader, rows))
    microbatches = [m for minibatch in minibatches for m in minibatch]
    counted = sum(len(r.prompt_ids) + len(r.response_ids) for r in rollouts)
    flops, epochs = update_flops(policy.model, microbatches), config.update.ppo_epochs
    packed = sum_packed(microbatches)
    # What set_logprobs leaves to the first update.
    deferred = minibatches[0] if config.defers_old_logprobs else []
    passes = int(config.algorithm.old_logprobs == "recompute")
    passes += int(policy.reference is not None and config.algorithm.kl_penalty != "full")
    found = bench.measure(lambda: policy.set_logprobs(minibatches))
    share = bench.mfu_of((passes * flops - update_flops(policy.model, deferred)) / 3, found["seconds"])
    computed = passes * packed - sum_packed(deferred)
    bench.write("logprobs", **found, counted_tokens=counted, computed_tokens=computed, mfu=share,
                passes=computed / packed)  # fmt: skip

    set_advantages(rollouts, function_of(config.algorithm.advantage, ADVANTAGES, option="algorithm.advantage"), config)
    valid = valid_tokens(rollouts, config)
    fetch_states(policy)
    found = bench.measure(
        lambda: optimizer_step(policy.model, policy.optimizer, config.update.max_grad_norm),
        lambda: set_gradients(policy),
    )
    bench.write("optimizer", **found, times=len(minibatches) * epochs)
    # The states stay on the GPU meanwhile: the way to host memory is a part of its own.
    with (
        mock.patch.object(r1.policy.policy, "optimizer_step", forget_gradients),
        mock.patch.object(policy.offload, "store_optimizer", lambda: None),
    ):
        found = bench.measure(lambda: policy.update(minibatches, valid))
        share = bench.mfu_of(epochs * flops, found["seconds"])
        bench.write("update", **found, counted_tokens=counted, computed_tokens=epochs * packed, mfu=share,
                    passes=epochs, microbatches=len(microbatches))  # fmt: skip
        if profile is not None:
            text = profile_table(lambda: policy.update([[minibatches[0][0]]], valid[:1]), describe(minibatches[0][0]))
            if ranks.rank == 0:
                profile.write_text(text)
    bench.write("optimizer_offload", **bench.measure(policy.offload.store_optimizer, lambda: fetch_states(policy)))


def sum_packed(microbatches: Sequence[Microbatch]) -> int:
    """Packed tokens, over all ranks."""
    return sum(gather_objects(sum(m.input_ids.numel() for m in microbatches)))


def fetch_states(policy: Policy) -> None:
    policy.offload.fetch_optimizer()
    policy.offload.await_optimizer()


def set_gradients(policy: Policy) -> None:
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def describe(microbatch: Microbatch) -> str:
    return f"{microbatch.input_ids.numel()} packed tokens, {microbatch.labels.numel()} of responses"
