"""Run under torchrun by test_dist_optim: every optimizer's states through a checkpoint, on these ranks and on others.

With the word "save" it trains four steps, saving after two, and resumes; with "load" it resumes another world's.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from r1.checkpoint import Checkpoints, TrainerState
from r1.config import Config, OptimConfig, ParallelConfig
from r1.parallel import Ranks, init_ranks
from r1.policy.offload import HostMemory, store_optimizer
from r1.policy.policy import Policy
from tests.dist import life
from r1.faults import leave

AXES = ("replicate", "shard")


def make_config(model: str, folder: Path, scenario: dict[str, Any]) -> Config:
    config = life.make_config({"folder": folder, "model": model})
    # A large eps: else Adam turns the rounding of gradients near 0 into whole steps.
    optim = OptimConfig(**{"lr": 1e-3, "eps": 1e-3, "schedule": "cosine", **scenario["optim"]})
    parallel = ParallelConfig(
        fsdp_size=scenario.get("fsdp_size", -1), timeout_s=60.0, offload_optimizer=scenario.get("offload")
    )
    return replace(config, model=replace(config.model, precision=scenario["precision"]), optim=optim, parallel=parallel)


def learn(policy: Policy, config: Config, step: int) -> None:
    torch.manual_seed(step)  # of the rewards, on any number of ranks
    life.learn(policy, config, step)


def whole(policy: Policy) -> dict[str, torch.Tensor]:
    named = policy.model.named_parameters()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


def resumed(config: Config, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The weights after two more steps from the checkpoint."""
    policy = Policy(config, ranks, 4)
    learn(policy, config, 9)  # states that must go
    assert Checkpoints(config, tokenizer=AutoTokenizer.from_pretrained(config.model.path)).resume(policy) is not None
    for step in (3, 4):
        learn(policy, config, step)
    return whole(policy)


def straight(config: Config, ranks: Ranks) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights after four steps, and what the states are made of; saves after two."""
    policy = Policy(config, ranks, 4)
    checkpoints, host = Checkpoints(config, tokenizer=AutoTokenizer.from_pretrained(config.model.path)), HostMemory()
    for step in range(1, 5):
        learn(policy, config, step)
        store_optimizer(policy.optimizer, host)
        if step == 2:
            checkpoints.save(TrainerState(step=step, policy_version=policy.version), policy, metrics={})
    checkpoints.finish()
    local = [p.to_local() for p in policy.model.parameters() if isinstance(p, DTensor)]
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, [p.detach() for p in local])
    pairs = zip(*every, strict=True)
    kinds = {type(getattr(v, "_local_tensor", v)).__name__ for s in policy.optimizer.state.values() for v in s.values()}
    return whole(policy), {"equal_shards": all(torch.equal(p[0], p[-1]) for p in pairs), "kinds": sorted(kinds)}


def main() -> None:
    what, plan = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    ranks = init_ranks(ParallelConfig(), 1)
    results = {}
    for name, scenario in plan["scenarios"].items():
        here = ranks
        if scenario.get("fsdp_size") == 1:
            here = replace(ranks, mesh=init_device_mesh("cpu", (ranks.world_size, 1), mesh_dim_names=AXES))
        config = make_config(plan["model"], Path(plan["folder"]) / name, scenario)
        result = {}
        if what == "save":
            result["straight"], facts = straight(config, here)
            result |= facts
        result["resumed"] = resumed(config, here)
        results[name] = result
    if ranks.rank == 0:
        torch.save(results, Path(plan["folder"]) / f"{what}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
