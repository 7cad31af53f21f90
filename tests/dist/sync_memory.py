"""Run under torchrun by test_gpu_multi: what a weight sync holds beyond what lies there before and after, as JSON.

torchrun --nproc_per_node 2 -m tests.dist.sync_memory MODEL TENSOR_PARALLEL_SIZE
"""

import json
import sys
import time
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from r1.config import AlgorithmConfig, Config, DataConfig, ModelConfig, RolloutConfig
from r1.parallel import Ranks, gather_objects, init_ranks
from r1.policy.policy import Policy
from r1.rollout.vllm_engine import VllmEngine
from r1.rollout.weight_sync import stream_weights
from r1.faults import leave


class InFlight:
    """Bytes that a stream of tensors keeps allocated at once: on CUDA all that is, on a CPU its own tensors."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.total, self.largest, self.peak, self._alive = device.type == "cuda", 0, 0, 0, 0

    def _free(self, size: int) -> None:
        self._alive -= size

    def watch(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        before = 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for name, tensor in weights:
            size = tensor.nbytes
            self.total, self.largest, self._alive = self.total + size, max(self.largest, size), self._alive + size
            self.peak = max(self.peak, self._alive)
            weakref.finalize(tensor, self._free, size)
            yield name, tensor
            del tensor
        if self.on_gpu:
            self.peak = torch.cuda.max_memory_allocated() - before


def measure(model: str, ranks: Ranks) -> dict[str, float]:
    """The second of two syncs, on this rank."""
    config = Config(
        model=ModelConfig(path=model, precision="amp"),
        data=DataConfig(max_prompt_length=64, max_response_length=64),
        rollout=RolloutConfig(
            tensor_parallel_size=ranks.tensor_parallel_size,
            gpu_memory_utilization=0.1,
            kv_cache_gib=0.25,
            enforce_eager=True,
        ),
        algorithm=AlgorithmConfig(kl_coef=0.0),
    )
    policy = Policy(config, ranks, 1)
    engine = VllmEngine(model, config, mm_processor_kwargs=None, device=ranks.device)
    seconds, in_flight = 0.0, InFlight(ranks.device)
    for _ in range(2):
        engine.sleep()
        engine.wake()
        in_flight, began = InFlight(ranks.device), time.perf_counter()
        engine.load_weights(in_flight.watch(stream_weights(policy.model, dtype=torch.bfloat16)))
        seconds = time.perf_counter() - began
    found = {"peak": in_flight.peak, "largest": in_flight.largest, "total": in_flight.total, "seconds": seconds}
    found_by_rank = gather_objects(found)
    engine.close()
    return {name: max(each[name] for each in found_by_rank) for name in found}


def main() -> None:
    ranks = init_ranks(Config().parallel, int(sys.argv[2]))
    found = measure(sys.argv[1], ranks)
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
    leave()
