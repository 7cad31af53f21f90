"""What a save and a resume cost, per GiB: torchrun --nproc_per_node 1 -m tests.dist.save_speed '{"layers": 28}'.

The weights are where training has them (GPU or CPU), the optimizer's states in host memory, as between updates.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, Qwen2Config

from r1.checkpoint import Checkpoints, TrainerState
from r1.config import CheckpointConfig, Config, ModelConfig, TrainerConfig
from r1.parallel import Ranks, init_ranks
from tests.tiny import make_tokenizer
from r1.faults import leave


class Learner:
    """A random Qwen2 of 1.5B's width, sharded, with AdamW's states of a first step."""

    def __init__(self, ranks: Ranks, layers: int) -> None:
        config = Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=layers, num_attention_heads=12,
                             num_key_value_heads=2, vocab_size=8192, tie_word_embeddings=True)  # fmt: skip
        with ranks.device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=ranks.mesh)
        fully_shard(self.model, mesh=ranks.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1.0)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            state |= {name: value.to("cpu") for name, value in state.items() if value.ndim > 0}

    def gib(self) -> float:
        """Of this rank: weights and states."""
        tensors: list[Any] = [*self.model.parameters()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
        return sum(t.nbytes for t in local) / 2**30


def seconds(ranks: Ranks, since: float) -> float:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.monotonic() - since


def measure(ranks: Ranks, layers: int, folder: Path) -> dict[str, float]:
    learner, result = Learner(ranks, layers), {}
    gib = learner.gib()
    for name, asynchronous in (("asynchronous", True), ("waiting", False)):
        config = Config(
            model=ModelConfig(path=str(folder)),
            checkpoint=CheckpointConfig(asynchronous=asynchronous, save_limit=1),
            trainer=TrainerConfig(output_dir=str(folder), experiment_name=name),
        )
        checkpoints = Checkpoints(config, tokenizer=make_tokenizer())
        for step in (1, 2):  # the first also makes the tokenizer's files, and warms up
            began = time.monotonic()
            checkpoints.save(TrainerState(step=step, policy_version=step), learner)
            result[f"{name}_stall_s_per_gib"] = seconds(ranks, began) / gib
            checkpoints.finish()
            result[f"{name}_written_s_per_gib"] = seconds(ranks, began) / gib
    began = time.monotonic()
    checkpoints.resume(learner)
    return {"gib": gib} | result | {"resume_s_per_gib": seconds(ranks, began) / gib}


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    ranks = init_ranks(Config().parallel, 1)
    shared: list[str] = [tempfile.mkdtemp(dir=options.get("folder"))]
    dist.broadcast_object_list(shared)
    result = measure(ranks, options.get("layers", 28), Path(shared[0]))
    if ranks.rank == 0:
        rounded = {name: round(value, 4) for name, value in result.items()}
        sys.stdout.write(json.dumps(rounded | {"torch": torch.__version__, "device": ranks.device.type}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
