"""Run under torchrun by test_rollout_weight_sync: bytes that streaming a sharded model's weights takes, as JSON.

torchrun --nproc_per_node 2 -m tests.dist.stream_memory OUT.json MODEL_FOLDER LORA_RANK
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from r1.config import LoraConfig, ModelConfig, ParallelConfig
from r1.parallel import gather_objects, init_ranks, local_part
from r1.policy.model import load_model
from r1.rollout.weight_sync import stream_weights
from r1.faults import leave


class Allocations(TorchDispatchMode):
    """The most bytes that tensors made inside of it, copies and buffers too, hold at once."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if type(tensor) is torch.Tensor and tensor.untyped_storage().data_ptr() not in self._known:
                storage = tensor.untyped_storage()
                self._alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: pair for key, pair in self._alive.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def main() -> None:
    out, lora = Path(sys.argv[1]), LoraConfig(rank=int(sys.argv[3]))
    ranks = init_ranks(ParallelConfig(), 1)
    config = ModelConfig(path=sys.argv[2], precision="float32", lora=lora)
    model = load_model(config, ranks.mesh, ranks.device, "sdpa", trainable=True)
    total = largest = 0
    with Allocations([local_part(p) for p in model.parameters()]) as allocations:
        for _, tensor in stream_weights(model, dtype=torch.bfloat16):
            total, largest = total + tensor.nbytes, max(largest, tensor.nbytes)
            del tensor
    results = gather_objects({"peak": allocations.peak, "largest": largest, "total": total})
    if ranks.rank == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
