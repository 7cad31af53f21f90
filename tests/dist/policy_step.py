"""Run under torchrun by test_dist_policy: two updates of tiny policies on fixed rollouts, saved by rank 0."""

import contextlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.groups import set_advantages, valid_tokens
from r1.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
)
from r1.parallel import Ranks, init_ranks, seed_everything
from r1.policy.critic import Critic
from r1.policy.packing import Microbatch
from r1.policy.policy import Policy
from r1.rollout.weight_sync import stream_weights
from r1.types import Prompt, Rollout
from tests.test_policy_packing import make_prompts, make_rollouts
from r1.faults import leave


def make_config(
    model: str,
    max_tokens: int,
    algorithm: dict[str, Any],
    lora: dict[str, Any] | None = None,
    precision: Any = "float32",
    parallel: ParallelConfig | None = None,
) -> Config:
    adapters = LoraConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in (lora or {}).items()})
    return Config(
        model=ModelConfig(path=model, precision=precision, lora=adapters),
        data=DataConfig(max_prompt_length=14, max_response_length=16, rollout_batch_size=4),
        rollout=RolloutConfig(n=3, temperature=0.9),
        algorithm=AlgorithmConfig(**{"kl_coef": 0.05, "critic_lr": 1e-3, **algorithm}),
        # A large eps: else Adam turns the rounding of gradients near 0 into whole steps, and nothing could be compared.
        optim=OptimConfig(lr=1e-3, eps=1e-2),
        update=UpdateConfig(global_batch_size=2, max_tokens_per_microbatch=max_tokens, logprob_chunk_tokens=7),
        parallel=parallel or ParallelConfig(),
        trainer=TrainerConfig(progress=False),
    )


def fixed_step(policy: Policy, scenario: dict[str, Any]) -> tuple[dict[int, Prompt], list[Rollout], list[int]]:
    """Four groups of three, with two minibatches; some responses truncated, some by option without reward."""
    prompts = make_prompts(policy.model.config, policy.vision)
    prompts[3] = prompts[scenario.get("last_prompt", 2)]
    rollouts = make_rollouts(prompts, {0: [7, 1, 3], 1: [2, 11, 5], 2: [4, 4, 9], 3: [6, 2, 1]})
    g = torch.Generator().manual_seed(3)
    rewards, baselines = torch.rand(12, generator=g).tolist(), torch.rand(4, generator=g).tolist()
    for i, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True)):
        rollout.reward = None if i in scenario.get("failed", []) else reward
        rollout.baseline, rollout.truncated = baselines[rollout.group], i % 5 == 0
        rollout.rollout_logprobs = (-3 - torch.rand(len(rollout.response_ids), generator=g)).tolist()
    return prompts, rollouts, [r.group % dist.get_world_size() for r in rollouts]


def cut_pictures(microbatch: Microbatch, policy: Policy) -> int:
    """Cuts between the slices of a sequence group that have a picture on both sides."""
    if policy.vision is None:
        return 0
    slices = microbatch.input_ids[0].chunk(policy.ranks.sequence_parallel_size)
    is_picture = policy.vision.image_token_id
    return sum(int(a[-1] == is_picture and b[0] == is_picture) for a, b in itertools.pairwise(slices))


def whole(policy: Policy, critic: Critic | None) -> dict[str, torch.Tensor]:
    """Every parameter of both, whole and in host memory."""
    named = [*policy.model.named_parameters()]
    if critic is not None:
        critic.wake()
        named += critic.model.named_parameters(prefix="critic")
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().to("cpu", copy=True) for n, p in named}


def run(
    scenario: dict[str, Any], model: str, max_tokens: int, ranks: Ranks, parallel: ParallelConfig
) -> dict[str, Any]:
    algorithm, lora = scenario.get("algorithm", {}), scenario.get("lora")
    precision = scenario.get("precision", "float32")
    config = make_config(model, max_tokens, algorithm, lora, precision, parallel)
    config = replace(config, update=replace(config.update, **scenario.get("update", {})))
    policy, history = Policy(config, ranks, 2), []
    critic = Critic(config, ranks, policy.backend, 2) if config.algorithm.advantage == "gae" else None
    start = whole(policy, critic)
    for step in range(2):
        prompts, rollouts, homes = fixed_step(policy, scenario)
        minibatches = policy.pack(rollouts, homes, prompts)
        policy.set_logprobs(minibatches)
        if critic is not None:
            critic.set_values(rollouts, minibatches)
        policy.set_kl_penalties(rollouts, minibatches)
        set_advantages(rollouts, ADVANTAGES[config.algorithm.advantage], config)
        if scenario.get("nan_rank") == ranks.rank and step == 0:
            for rollout in rollouts[:6]:  # those of the first minibatch
                assert rollout.advantages is not None
                rollout.advantages.fill_(float("nan"))
        valid = valid_tokens(rollouts, config)
        metrics = {} if critic is None else critic.update(rollouts, minibatches, valid)
        metrics |= policy.update(minibatches, valid)
        policy.end_step(step + 1, metrics, len(rollouts))
        metrics["microbatches"] = float(sum(len(m) for m in minibatches))
        metrics["cut_pictures"] = float(sum(cut_pictures(m, policy) for minibatch in minibatches for m in minibatch))
        history.append(metrics)
    merged = {name: tensor.cpu() for name, tensor in stream_weights(policy.model)} if "lora" in scenario else {}
    return {
        "metrics": history,
        "start": start,
        "weights": whole(policy, critic),
        "merged": merged,
        "version": policy.version,
    }


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    seed_everything(1, deterministic=False)  # adapters start from the run's seed
    parallel = ParallelConfig(**plan.get("parallel", {}))
    ranks = init_ranks(parallel, 1)
    results = {}
    for name, scenario in plan["scenarios"].items():
        with contextlib.ExitStack() as patches:
            if scenario.get("scored_before"):  # not left to the first update
                patches.enter_context(mock.patch.object(Config, "defers_old_logprobs", False))
            results[name] = run(scenario, plan["models"][scenario["family"]], plan["max_tokens"], ranks, parallel)
    if ranks.rank == 0:
        torch.save(results, plan["out"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
