"""Start programs under torchrun for a benchmark, quote them when they fail, and end them."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GONE_S = 30.0
"""Longest wait for killed processes to give their GPUs' memory back."""


def start(
    program: Sequence[str], nproc: int, log: Path, *, torchrun: bool = True, gpus: str | None = None
) -> subprocess.Popen:
    """Start `-m module …` or `file.py …` on nproc ranks, in the log's folder, with all that it says in the log.

    gpus: those that it sees, as in CUDA_VISIBLE_DEVICES; None: all that this process does.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"] if torchrun else []
    command = [sys.executable, *launcher, *program]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    with log.open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)


def tail(log: Path) -> str:
    """The last lines that the program itself said; torchrun's own summary of a failure comes after them."""
    lines = log.read_text(errors="replace").splitlines()
    own = [*itertools.takewhile(lambda line: "elastic/multiprocessing/api.py" not in line, lines)]
    return "\n".join(own[-40:])


def end(run: subprocess.Popen) -> None:
    """End torchrun and its ranks at once: asked politely, the trainer would save a checkpoint first."""
    children = _children(run.pid)
    for pid in [run.pid, *children]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.wait()
    gone_by = time.monotonic() + GONE_S
    while any(map(_holds_memory, children)) and time.monotonic() < gone_by:
        time.sleep(0.1)


def _holds_memory(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    """Process ids of pid's children and theirs."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    children = [int(word) for word in found.stdout.split()]
    return children + [deeper for child in children for deeper in _children(child)]
