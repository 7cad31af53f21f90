"""A run without an engine, for tests of what ends one: the policy learns from fixed rollouts and is saved every step.

Under torchrun, or in processes that tests/dist/kills.py forks. Each step appends "step digest bytes" to a file: of
the weights, and of the process's resident memory; and a line to the run's own metrics.jsonl.
"""

import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.groups import set_advantages, valid_tokens
from r1.checkpoint import Checkpoints, TrainerState
from r1.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
)
from r1.faults import run_rank
from r1.loggers import Logger
from r1.parallel import init_ranks, seed_everything
from r1.policy.policy import Policy
from r1.preempt import Stopper, exit_stopped
from tests.test_policy_packing import make_prompts, make_rollouts


def make_config(options: dict) -> Config:
    folder = Path(options["folder"])
    return Config(
        model=ModelConfig(path=options["model"], precision="float32", gradient_checkpointing=False),
        data=DataConfig(max_prompt_length=14, max_response_length=16, rollout_batch_size=2),
        rollout=RolloutConfig(n=3),
        algorithm=AlgorithmConfig(kl_coef=0.0),
        optim=OptimConfig(lr=1e-3, schedule="cosine"),
        update=UpdateConfig(global_batch_size=2, max_tokens_per_microbatch=200),
        parallel=ParallelConfig(timeout_s=options.get("timeout_s", 60.0)),
        checkpoint=CheckpointConfig(**options.get("checkpoint", {})),
        trainer=TrainerConfig(
            output_dir=str(folder.parent), experiment_name=folder.name, progress=False, loggers=("file",)
        ),
    )


def learn(policy: Policy, config: Config, step: int) -> None:
    """One step on rollouts made from its number, with rewards from the global generator, which must resume, too."""
    prompts = make_prompts(policy.model.config, policy.vision, seed=step)
    rollouts = make_rollouts(prompts, {0: [7, 1, 3], 1: [2, 11, 5]}, seed=step)
    for rollout, reward in zip(rollouts, torch.rand(6).tolist(), strict=True):
        rollout.reward = reward
    minibatches = policy.pack(rollouts, [r.group % policy.ranks.world_size for r in rollouts], prompts)
    policy.set_logprobs(minibatches)
    set_advantages(rollouts, ADVANTAGES[config.algorithm.advantage], config)
    policy.update(minibatches, valid_tokens(rollouts, config))


def digest(policy: Policy) -> str:
    total = hashlib.sha1()
    for _, p in sorted(policy.model.named_parameters()):
        total.update((p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy().tobytes())
    return total.hexdigest()


def run_out(*_: object) -> NoReturn:
    """Stand in for a microbatch that the GPU's memory cannot hold."""
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def limit_files(full: bool) -> None:
    """Stand in for a full disk: this process can write no file beyond 64 KiB, until it may again."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16 if full else most, most))


def live(options: dict) -> bool:
    """From the latest checkpoint to the last step; False: stopped on the way."""
    config = make_config(options)
    seed_everything(1, deterministic=False)
    stopper = Stopper(config.checkpoint)
    ranks = init_ranks(config.parallel, 1)
    stopper.join()
    policy = Policy(config, ranks, options["steps"])
    checkpoints = Checkpoints(config, tokenizer=AutoTokenizer.from_pretrained(config.model.path))
    state = checkpoints.resume(policy)
    done = state.step if state else 0
    logger = Logger(config, Path(config.run_dir), resumed_step=done) if ranks.rank == 0 else None
    journal, reason = Path(options["folder"]).with_suffix(".txt"), None
    memory = Path(f"/proc/{os.getpid()}/statm")
    for step in range(done + 1, options["steps"] + 1):
        if step in (full := options.get("full", [])):
            limit_files(step == full[0])
        if options.get("hang") == [step, ranks.rank]:
            time.sleep(1000)
        if options.get("oom") == [step, ranks.rank]:
            policy._backward = run_out
        learn(policy, config, step)
        line = f"{step} {digest(policy)} {int(memory.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')}\n"
        if ranks.rank == 0:
            with journal.open("a") as file:
                file.write(line)
        if logger is not None:
            logger.log(step, {"version": policy.version})
        time.sleep(options.get("step_s", 0))
        reason = stopper.requested() if step < options["steps"] else None
        checkpoints.save(TrainerState(step=step, policy_version=policy.version), policy, metrics={"step": float(step)})
        if reason:
            break
    stopper.end()
    checkpoints.finish()
    return reason is None


def main(options: dict) -> None:
    """live, ending as r1.train does."""
    if not live(options):
        exit_stopped()


if __name__ == "__main__":
    run_rank(lambda: main(json.loads(sys.argv[1])))
