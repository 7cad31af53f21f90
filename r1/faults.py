"""How a rank ends, and what to do about errors whose own message does not say: out of memory, stuck collectives."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's own error, and the one that torch's CPU allocator raises."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and re.search(r"out of memory|can't allocate memory", str(error)) is not None
    )


def out_of_memory(error: RuntimeError, sizes: Mapping[str, object]) -> RuntimeError:
    """The error to raise in place of one in a microbatch: its sizes, and what to lower.

    Args:
        sizes: what the microbatch holds, by name, e.g. {"tokens": 16384, "responses": 12, "images": 3}.
    """
    first = str(error).strip().splitlines()[0]
    held = ", ".join(f"{name} {value}" for name, value in sizes.items())
    return RuntimeError(
        f"out of memory in a microbatch of {held}: {first}\n"
        "  lower update.max_tokens_per_microbatch (activations), then update.logprob_chunk_tokens (logits of so many\n"
        "  positions); set model.gradient_checkpointing=True; lower data.max_pixels where images are many; set\n"
        "  parallel.offload_reference=True; lower rollout.gpu_memory_utilization where the engine holds memory asleep"
    )


@contextlib.contextmanager
def memory_explained(sizes: Mapping[str, object]) -> Iterator[None]:
    """Raise out_of_memory with these sizes in place of such an error from the block."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, sizes) from error


def hint(error: BaseException) -> str:
    """A line on what to look at after a collective failed; nothing for other errors."""
    text = str(error)
    if re.search(r"[Tt]imed ?out|timeout", text) and re.search(r"gloo|[Nn]ccl|NCCL|recv|send|Work|barrier|store", text):
        return (
            "hint: this rank waited parallel.timeout_s for the others in a collective. One of them is stuck or slower "
            "than that: the rank without such an error, which says where it was when it is ended now (or look at it "
            "while it hangs, `py-spy dump --pid`). On GPUs the last collectives of every rank are in the flight "
            "recorder's files (TORCH_NCCL_DEBUG_INFO_TEMP_FILE in launch/env.sh). Raise parallel.timeout_s if a step "
            "may take that long\n"
        )
    if re.search(r"Connection closed by peer|Connection reset by peer|NCCL.*(remote|aborted)", text):
        return "hint: another rank ended first; its error is the one to read\n"
    return ""


def leave(code: int = 0) -> NoReturn:
    """End this process at once, all being saved and closed: threads of vLLM or torch that abort at exit must not undo
    that."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_rank(main: Callable[[], None]) -> NoReturn:
    """Run a rank's whole program and end the process: with status 0, or with 1 and the error on stderr."""
    try:
        main()
    except Exception as error:  # noqa: BLE001
        # A rank that fails must be gone at once, or the others wait for it in a collective: no clean-up that may hang.
        traceback.print_exc()
        sys.stderr.write(hint(error))
        leave(1)
    leave()
