"""Run under torchrun by test_dist_sequence: one update on one long response, which all ranks share; their memory.

torchrun --nproc_per_node N -m tests.dist.sequence_memory OUT.json MODEL_FOLDER RESPONSE_TOKENS
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from r1.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
)
from r1.metrics import peak_memory_gib
from r1.parallel import gather_objects, init_ranks
from r1.policy.policy import Policy
from r1.types import Prompt, Rollout
from r1.faults import leave


def resident_gib() -> float:
    """Host memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def main() -> None:
    out, model, tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    world_size = int(os.environ["WORLD_SIZE"])
    config = Config(
        model=ModelConfig(path=model, precision="float32"),
        data=DataConfig(max_prompt_length=100, max_response_length=tokens, rollout_batch_size=1),
        rollout=RolloutConfig(n=2),
        algorithm=AlgorithmConfig(kl_coef=0.0, old_logprobs="rollout"),
        update=UpdateConfig(
            global_batch_size=1,
            max_tokens_per_microbatch=-(-(tokens + 120) // world_size),
            logprob_chunk_tokens=1024,
        ),
        parallel=ParallelConfig(sequence_parallel_size=world_size),
        trainer=TrainerConfig(progress=False),
    )
    ranks = init_ranks(config.parallel, 1)
    policy = Policy(config, ranks, 1)
    draw = torch.Generator().manual_seed(0)
    prompt_ids, *responses = (torch.randint(0, 256, (n,), generator=draw).tolist() for n in (100, tokens, 10))
    prompts = {0: Prompt(row=0, text="", prompt_ids=prompt_ids, sampler_ids=prompt_ids)}
    rollouts = [
        Rollout(group=0, sample=i, prompt_ids=prompt_ids, response_ids=ids, rollout_logprobs=[-5.0] * len(ids),
                truncated=False, advantages=torch.full((len(ids),), 1.0 - 2 * i), weight=1 / (tokens + 10))
        for i, ids in enumerate(responses)
    ]  # fmt: skip
    minibatches = policy.pack(rollouts, [0, 0], prompts)
    policy.set_logprobs(minibatches)
    before = resident_gib()
    metrics = policy.update(minibatches, [tokens + 10])
    results = gather_objects({"extra_gib": peak_memory_gib() - before})
    if ranks.rank == 0:
        out.write_text(json.dumps({"ranks": results, "metrics": metrics}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
