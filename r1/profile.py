"""Profiles of chosen steps: a PyTorch trace, and on a GPU a history of its memory, written into the run folder."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from r1.config import Config
from r1.parallel import Ranks

MEMORY_EVENTS = 100_000  # allocations kept with their stacks, about 100 MB: the last of a step


def profiled(steps: Iterable[int], config: Config, ranks: Ranks) -> Iterator[int]:
    """The steps, for a loop to run; those that the config asks for are recorded, on the ranks that it names."""
    for step in steps:
        if step in config.trainer.profile_steps and ranks.rank in config.trainer.profile_ranks:
            with _recorded(Path(config.run_dir) / "profile", f"step_{step:06d}_rank{ranks.rank}", ranks.device):
                yield step
        else:
            yield step


@contextlib.contextmanager
def _recorded(folder: Path, name: str, device: torch.device) -> Iterator[None]:
    """Write <name>.json.gz, for ui.perfetto.dev; on CUDA also <name>_memory.pickle, for pytorch.org/memory_viz."""
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    trace = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
    trace.start()
    try:
        yield
    finally:  # a loop that breaks ends here, too
        trace.stop()
        trace.export_chrome_trace(str(folder / f"{name}.json.gz"))
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}_memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
