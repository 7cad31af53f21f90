"""The parent's end of one child process: start it, ask it, kill it when it does not answer."""

import difflib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PicklingError
from typing import Any

import r1
from r1.config import RewardConfig
from r1.rewards.functions import Outcome, Source
from r1.rewards.process import Target

NAMES = ("math", "r1v", "dapo", "choice", "iou", "format", "overlong", "repetition", "cosine")
BUILT_IN = {name: Path(__file__).with_name(f"{name}.py") for name in NAMES}

START_LIMIT_S = 120.0  # to import a reward file, on a busy machine
ASYNC_GRACE_S = 1.0  # an async function's limits are kept inside the process; past this it is killed
PATH_OF_R1 = str(Path(r1.__file__).resolve().parent.parent)


def resolve(function: str) -> tuple[str, str]:
    """(file, function name) of a reward.function setting; ValueError if there is no such file or built-in."""
    target, _, name = function.partition(":")
    if "/" not in target and not target.endswith(".py"):
        if target not in BUILT_IN:
            near = difflib.get_close_matches(target, BUILT_IN, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"reward.function={function!r} is no built-in; did you mean {near!r}? built in are "
                f"{', '.join(BUILT_IN)}; a file of yours is path/to/file.py:function"
            )
        return str(BUILT_IN[target]), name or "compute_score"
    path = Path(target).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"reward.function={function!r}: there is no file {path}")
    return str(path), name or "main"


class Child:
    """One child process with the reward function loaded; started again after it hung or died."""

    def __init__(self, config: RewardConfig, closed: threading.Event) -> None:
        self._closed = closed  # gives up waiting once set
        self._target = Target(
            tuple(
                Source(*resolve(name), dict(config.kwargs_of(name)), weight)
                for name, weight in config.functions.items()
            ),
            config.limit_s,
            config.memory_mb,
        )
        self.reward_type = ""
        self._grace_s = 0.0
        self.is_fresh = True  # nothing was graded in it yet
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child if none is alive, and load the function in it; ValueError if that fails.

        The kernel kills the child when the thread that started it ends: start it where it is used.
        """
        if self._child is not None and self._child.poll() is None:
            return
        self.kill()
        ours, theirs = socket.socketpair()
        # The first entry is the current folder, whose files may be named like Python's own modules.
        code = f"import sys; sys.path[0] = {PATH_OF_R1!r}; from r1.rewards.process import main; "
        self._child = subprocess.Popen(
            [sys.executable, "-c", code + f"main({theirs.fileno()}, {os.getpid()})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that what the function started can be killed with it
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        reply: Any = self._ask(self._target, START_LIMIT_S)
        if isinstance(reply, str):
            files = ", ".join(source.path for source in self._target.sources)
            reply = ("fault", f"reward.function: loading {files} failed: {reply}")
        if reply[0] == "fault":
            self.kill()
            raise ValueError(reply[1])
        self.reward_type, self._grace_s = reply[1], ASYNC_GRACE_S if reply[2] else 0.0
        self.is_fresh = True

    def call(self, inputs: list[dict[str, Any]], limit_s: float) -> list[Outcome] | str:
        """One outcome per response, or one line if the call as a whole failed."""
        self.start()
        outcomes = self._ask(("call", inputs), limit_s + self._grace_s)
        self.is_fresh = False
        return outcomes

    def probe(self, limit_s: float) -> str | None:
        self.start()
        return self._ask(("probe", None), limit_s)

    def _ask(self, request: Any, limit_s: float) -> Any:
        """The child's reply, or one line on why there is none; the child does not outlive a limit or a broken pipe."""
        deadline = time.monotonic() + limit_s
        try:
            self._connection.send(request)
            while (left_s := deadline - time.monotonic()) > 0:
                if self._closed.is_set():
                    raise ValueError("the RewardRunner was closed before these responses were graded")
                if self._connection.poll(min(left_s, 0.2)):
                    return self._connection.recv()
        except (PicklingError, TypeError, AttributeError) as error:  # pickle raises all three
            return f"{type(error).__name__}: the inputs do not fit through the pipe to the reward process: {error}"
        except (EOFError, ConnectionError):
            return f"ChildProcessError: the reward process died (exit status {self.kill(grace_s=1.0)})"
        self.kill()
        return f"TimeoutError: no answer within {limit_s:g} s"

    def kill(self, grace_s: float = 0.0) -> int | None:
        """End the child and all that it started; its exit status. In grace_s a dying child ends with its own."""
        child, self._child = self._child, None
        if child is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=grace_s)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        self._connection.close()
        return child.wait()
