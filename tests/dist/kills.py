"""Run tests/dist/life.py on two ranks and kill -9 one or both at random moments; prints what happened as JSON.

The ranks are forked from this process, which has imported everything already: a life takes a second and not ten.
"""

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

from tests.dist import life
from r1.faults import leave

PATIENCE_S = 30  # in which a rank must notice that the other is gone
TERMINATE_S = 10  # after which it is told, as torchrun tells it at once: one that waits to meet the other cannot notice


def start(options: dict) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in where.items()}, MASTER_ADDR="127.0.0.1")
            os.dup2(os.open(f"{options['folder']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            life.main(options)
            os._exit(0)
        pids.append(pid)
    return pids


def wait(pids: list[int], timeout_s: float) -> list[int]:
    """Exit statuses, negative for a signal; who is not gone in time is killed, and TimeoutError raised."""
    began, told, left, statuses = time.monotonic(), False, dict.fromkeys(pids), {}
    while left and time.monotonic() < began + timeout_s:
        if statuses and not told and time.monotonic() > began + TERMINATE_S:
            told = True
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del left[pid]
                statuses[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if left:
        raise TimeoutError(f"ranks {[pids.index(pid) for pid in left]} were still there after {timeout_s} s")
    return [statuses[pid] for pid in pids]


def kill_once(options: dict, rng: random.Random) -> float:
    """One life and its end; returns the seconds the last rank outlived the first."""
    journal = Path(options["folder"]).with_suffix(".txt")
    before = journal.stat().st_size if journal.exists() else 0
    pids = start(options)
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, 2))  # in the middle of starting, or of loading
    else:
        deadline = time.monotonic() + 60
        while (journal.stat().st_size if journal.exists() else 0) == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.5))
    for pid in rng.choice([pids, pids[:1], pids[1:]]):
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    wait(pids, PATIENCE_S)
    return time.monotonic() - began


def main() -> None:
    options, kills, seed = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng, half_written, slowest = random.Random(seed), 0, 0.0
    for _ in range(kills):
        slowest = max(slowest, kill_once(options, rng))
        folders = Path(options["folder"]).glob("checkpoints/step_*")
        half_written += any(not (folder / "complete.json").exists() for folder in folders)
    statuses = wait(start(options), 300)
    print(json.dumps({"statuses": statuses, "half_written": half_written, "slowest_s": round(slowest, 1)}))


if __name__ == "__main__":
    main()
    leave()
