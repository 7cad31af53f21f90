"""r1.train with a thread beside it that notes the process's memory: -m tests.dist.watched FILE and r1.train's words.

A line of FILE: bytes resident in this process, bytes resident in its children (reward processes), bytes of tensors on
the GPU; four times a second, once the run has logged its first line.
"""

import os
import runpy
import sys
import threading
import time
from pathlib import Path

import torch

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int | str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except OSError:  # it has just ended
        return 0


def children() -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(stat.parent.name)
        except OSError:
            continue
    return found


def watch(path: str) -> None:
    while not (Path(path).parent / "runs/demo/metrics.jsonl").exists():  # starting still
        time.sleep(0.25)
    while True:
        on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        with open(path, "a") as file:
            file.write(f"{resident('self')} {sum(map(resident, children()))} {on_gpu}\n")
        time.sleep(0.25)


if __name__ == "__main__":
    threading.Thread(target=watch, args=(sys.argv.pop(1),), daemon=True).start()
    runpy.run_module("r1.train", run_name="__main__", alter_sys=True)
