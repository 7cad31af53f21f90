"""The child process that holds the reward functions: load them, answer calls, stay within a memory limit.

`r1.rewards.runner` starts it as a plain program, not through multiprocessing, whose children import the parent's main
module again: here that is training, with torch and vLLM.
"""

import ctypes
import os
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from r1.rewards.functions import Caller, Source, load_all

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MIB = 1 << 20


class Target(NamedTuple):
    """What a child is to load and the limits it works under."""

    sources: tuple[Source, ...]
    limit_s: float
    memory_mb: int


def limit_memory(memory_mb: int) -> None:
    """Let this process, and any that it starts, hold memory_mb more private memory than it holds now; 0: no limit."""
    status = Path("/proc/self/status")
    if not memory_mb or not status.exists():
        return
    held = re.search(r"VmData:\s*(\d+) kB", status.read_text())
    assert held is not None
    limit = (int(held[1]) << 10) + memory_mb * MIB
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def serve(connection: Connection) -> None:
    """Answer requests until the other end closes: first what to load, then probes and calls."""
    target: Target = connection.recv()
    try:
        functions = load_all(target.sources)
    except ValueError as error:
        connection.send(("fault", str(error)))
        return
    caller = Caller(functions, target.limit_s)
    limit_memory(target.memory_mb)
    # Where every function takes many responses at once, a call may hold many.
    whole = all(one.reward_type == "batch" or one.is_async for one in functions)
    connection.send(("ready", "batch" if whole else "sequential", any(one.is_async for one in functions)))
    while True:
        try:
            request, inputs = connection.recv()
        except EOFError:
            return
        connection.send(caller.probe() if request == "probe" else caller.call(inputs))


def main(descriptor: int, parent_pid: int) -> None:
    if sys.platform == "linux":
        # The end of the pipe does not reach a function that hangs in C code; the kernel's signal does.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Slurm sends these to every process of a job; the ranks decide when to stop, and need their rewards until then.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() == parent_pid:  # else it died before the line above
        serve(Connection(descriptor))
