"""Time a part of a step on all ranks at once, and write it down."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from r1.data.loader import Loader
from r1.metrics import GpuMemory, peak_memory_gib
from r1.metrics_flops import mfu
from r1.parallel import Ranks, gather_objects


@dataclass
class Bench:
    """What all parts need: where this rank stands, the data, and how often to repeat."""

    ranks: Ranks
    loader: Loader
    repeats: int
    results: Path
    variant: str = ""

    def measure(self, action: Callable[[], Any], before: Callable[[], Any] | None = None) -> dict[str, Any]:
        """Seconds of action on the slowest rank, each time, after a warm-up; the peak of memory over all of them."""
        seconds, peak = [], 0.0
        on_gpu = self.ranks.device.type == "cuda"
        for i in range(1 + self.repeats):
            if before is not None:
                before()
            if on_gpu:
                torch.cuda.synchronize()
                memory = GpuMemory()
            dist.barrier()
            began = time.perf_counter()
            action()
            if on_gpu:
                torch.cuda.synchronize()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
            peak = max(peak, memory.peak_gib() if on_gpu else peak_memory_gib())
            if i == 0 and self.repeats:
                seconds.clear()
        return {"seconds": seconds, "peak_gib": max(gather_objects(peak))}

    def write(self, part: str, **values: Any) -> None:
        """Append a part's line to the results."""
        if self.ranks.rank == 0:
            with self.results.open("a") as file:
                file.write(json.dumps({"variant": self.variant, "part": part, **values}) + "\n")

    def mfu_of(self, flops: float, seconds: Sequence[float]) -> list[float] | None:
        """flops: of this rank."""
        device = self.ranks.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        total = sum(gather_objects(flops))
        shares = [mfu(total, s, self.ranks.world_size, name) for s in seconds]
        return None if None in shares else [s for s in shares if s is not None]
