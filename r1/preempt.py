"""Stop a run in time: a signal or a deadline makes all ranks agree, after a step, to save and to end with code 75."""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from r1.config import CheckpointConfig
from r1.faults import leave
from r1.parallel import gather_objects
from r1.sections_training import time_of_deadline

STOPPED = 75
"""Exit code of a run that saved before its end: EX_TEMPFAIL of sysexits.h, start the same command again."""
STOP_FILE = "R1_STOP_FILE"
"""Where launch/torchrun.py says which file to make instead, as torchrun turns every exit code into 1."""
STARTED_AT = "R1_STARTED_AT"
"""Seconds since the epoch when the launcher started: ranks that torchrun starts anew keep the deadline."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopper:
    """Watches for SIGTERM, SIGUSR1 and the deadline. Create it early and in the main thread; `join` after init_ranks.

    Signals are read in a thread, as Python's own handlers wait for the main thread, which may sit in a collective.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        started = float(os.environ.get(STARTED_AT, time.time()))
        self.deadline = None if config.deadline is None else time_of_deadline(config.deadline, since=started)
        self.reason = ""  # of this rank to stop
        self._siblings: list[int] | None = None  # not known before `join`
        self._ended = False
        self._last_asked = time.time()
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, daemon=True, name="signals").start()

    def join(self) -> None:
        """Learn the process ids of the other ranks on this host; collective."""
        # Containers of several hosts may all have one name; torchrun numbers its hosts.
        host = (socket.gethostname(), os.environ.get("GROUP_RANK", "0"))
        ranks = gather_objects((host, os.getpid()))
        self._siblings = [pid for where, pid in ranks if where == host and pid != os.getpid()]

    def requested(self, save_s: float = 0.0) -> str | None:
        """Why to stop now, the same on every rank; None: go on. Collective, once a step.

        Args:
            save_s: what a save takes until it is written.
        """
        now = time.time()
        step_s, self._last_asked = now - self._last_asked, now
        if self.deadline is not None and now + step_s + save_s > self.deadline:
            self.reason = self.reason or "checkpoint.deadline"
        wishes = [reason for reason in gather_objects(self.reason) if reason] if self._any() else []
        self._ended = self._ended or bool(wishes)
        return wishes[0] if wishes else None

    def _any(self) -> bool:
        wish = torch.tensor([bool(self.reason)], dtype=torch.int32)
        dist.all_reduce(wish, op=dist.ReduceOp.MAX)
        return bool(wish.item())

    def end(self) -> None:
        """The loop is over: ranks may end one after the other from here on."""
        self._ended = True

    def _watch(self) -> None:
        while True:
            number = os.read(self._read, 1)[0]
            if number not in _SIGNALS or self._ended:
                continue
            if self._siblings is None and number == signal.SIGTERM:
                os._exit(128 + signal.SIGTERM)  # nothing to save yet, and another rank may be gone already
            name = signal.Signals(number).name
            if not self.reason:
                self.reason = name
                sys.stderr.write(f"{name}: the run saves and stops after this step\n")
            if number == signal.SIGTERM:
                threading.Thread(target=self._end_with_siblings, daemon=True, name="siblings").start()

    def _end_with_siblings(self) -> None:
        """End at once when a rank of this host is gone: torchrun sends SIGTERM for that, too, and no step will end."""
        while not self._ended:
            if any(not _alive(pid) for pid in self._siblings or ()):
                rank = os.environ.get("RANK", "0")
                sys.stderr.write(
                    f"SIGTERM: another rank of this host has ended, so rank {rank} does; it was at {whereabouts()}\n"
                )
                sys.stderr.flush()
                os._exit(128 + signal.SIGTERM)
            time.sleep(0.2)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # a zombie has ended, and its parent has not asked yet


def whereabouts(depth: int = 6) -> str:
    """Where this process's main thread is: its innermost calls, the outermost of them first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.extract_stack(frame)[-depth:]
    return " > ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls)


def exit_stopped() -> NoReturn:
    """End this process at once after a stop, the run being saved."""
    code = STOPPED
    if path := os.environ.get(STOP_FILE):
        Path(path).touch()
        code = 0
    elif int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        code = 0  # bare torchrun would start the ranks again at once
    leave(code)
