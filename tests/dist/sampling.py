"""Run under torchrun by test_dist_train: what each rank samples for given seeds, gathered and printed by rank 0."""

import json
import sys
from typing import Any

import torch.distributed as dist

from r1.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
)
from r1.data.setup import load_data
from r1.parallel import Ranks, init_ranks
from r1.policy.policy import Policy
from r1.rewards.runner import RewardRunner
from r1.rollout.sampler import Sampler
from r1.faults import leave


def make_config(plan: dict[str, Any], rollout_seed: int, data_seed: int) -> Config:
    return Config(
        model=ModelConfig(path=plan["model"], precision="float32"),
        data=DataConfig(train_files=plan["rows"], val_files=(), max_prompt_length=64, max_response_length=12,
                        rollout_batch_size=2, seed=data_seed),
        rollout=RolloutConfig(engine="hf", n=4, seed=rollout_seed),
        reward=RewardConfig(function=plan["reward"], num_workers=1),
        algorithm=AlgorithmConfig(kl_coef=0.0),
        update=UpdateConfig(global_batch_size=2, max_tokens_per_microbatch=256),
        trainer=TrainerConfig(progress=False, max_steps=2),
    )  # fmt: skip


def draw(config: Config, ranks: Ranks, rewards: RewardRunner) -> list[dict[str, Any]]:
    """Two steps' rows, and their rollouts in order: group, sample, home rank and tokens."""
    tokenizer, _, loader, _ = load_data(config)
    sampler = Sampler(config, ranks, Policy(config, ranks, 2), tokenizer, rewards, None)
    steps = []
    for _ in range(2):
        sampler.sync()
        batch = sampler.sample(loader)
        sampler.set_rewards(batch)
        rollouts = zip(batch.rollouts, batch.homes, strict=True)
        steps.append(
            {"rows": batch.rows, "rollouts": [(r.group, r.sample, home, r.response_ids) for r, home in rollouts]}
        )
    return steps


def main() -> None:
    plan = json.loads(sys.argv[1])
    configs = {name: make_config(plan, *seeds) for name, seeds in plan["runs"].items()}
    with RewardRunner(next(iter(configs.values())).reward) as rewards:
        ranks = init_ranks(Config().parallel, 1)
        results = {name: draw(config, ranks, rewards) for name, config in configs.items()}
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(results) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
