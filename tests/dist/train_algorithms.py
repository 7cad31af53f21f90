"""Run under torchrun by test_train_algorithms: r1.train's loop on a tiny model, once for each algorithm of a plan."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.scores import Scores
from r1.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
)
from r1.parallel import init_ranks, seed_everything
from r1.preempt import Stopper
from r1.rewards.runner import RewardRunner
from r1.train import train
from r1.faults import leave


def make_config(name: str, scenario: dict[str, Any], plan: dict[str, Any]) -> Config:
    return Config(
        model=ModelConfig(path=plan["model"], precision="float32", gradient_checkpointing=False),
        data=DataConfig(train_files=plan["rows"], val_files=(), max_prompt_length=64, max_response_length=6,
                        rollout_batch_size=8, num_workers=1),
        rollout=RolloutConfig(engine="hf", n=4, seed=scenario.get("seed", 1)),
        reward=RewardConfig(function=plan["reward"], kwargs=scenario.get("reward", {}), num_workers=1),
        algorithm=AlgorithmConfig(**{"kl_coef": 0.0, **scenario.get("algorithm", {})}),
        optim=OptimConfig(lr=1e-3),
        update=UpdateConfig(global_batch_size=8, max_tokens_per_microbatch=512),
        checkpoint=CheckpointConfig(resume=False),
        trainer=TrainerConfig(experiment_name=name, output_dir=plan["runs"], max_steps=plan["steps"], progress=False,
                              loggers=("file",)),
    )  # fmt: skip


def recorded(
    advantage: Callable[[Scores, AlgorithmConfig], Tensor], into: list[dict[str, Any]]
) -> Callable[[Scores, AlgorithmConfig], Tensor]:
    """The same function, which also writes down what it was given and what it returned."""

    def record(scores: Scores, config: AlgorithmConfig) -> Tensor:
        advantages = advantage(scores, config)
        into.append({"rewards": scores.rewards, "baselines": scores.baselines, "advantages": advantages})
        return advantages

    return record


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    configs = {name: make_config(name, scenario, plan) for name, scenario in plan["scenarios"].items()}
    first = next(iter(configs.values()))
    stopper = Stopper(first.checkpoint)
    ranks = init_ranks(first.parallel, 1)
    stopper.join()
    results: dict[str, Any] = {}
    for name, config in configs.items():
        seed_everything(config.trainer.seed, deterministic=False)
        steps: list[dict[str, Any]] = []
        chosen, error = config.algorithm.advantage, ""
        known = ADVANTAGES.get(chosen)
        if known is not None:
            ADVANTAGES[chosen] = recorded(known, steps)
        with RewardRunner(config.reward) as rewards:
            try:
                train(config, ranks, rewards, stopper)
            except ValueError as raised:
                error = str(raised)
        if known is not None:
            ADVANTAGES[chosen] = known
        results[name] = {"steps": steps, "error": error}
    torch.save(results, f"{plan['runs']}/rank{ranks.rank}.pt")


if __name__ == "__main__":
    main()
    leave()
