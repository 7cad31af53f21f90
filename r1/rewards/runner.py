"""Runs reward functions, ours or a user's, in child processes with limits of time and memory.

A response that raises, hangs or gets no finite reward costs itself only: it comes back as None, with one line on why.
"""

import difflib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PicklingError
from queue import SimpleQueue
from typing import Any

import r1
from r1.config import RewardConfig
from r1.rewards.functions import Outcome, Source
from r1.rewards.process import Target

NAMES = ("math", "r1v", "dapo", "choice", "iou", "format", "overlong", "repetition", "cosine")
BUILT_IN = {name: Path(__file__).with_name(f"{name}.py") for name in NAMES}

START_LIMIT_S = 120.0  # to import a reward file, on a busy machine
ASYNC_GRACE_S = 1.0  # an async function's limits are kept inside the process; past this it is killed
MAX_HANGS = 32  # of one submission: the responses after them are given up
HOPELESS = 16  # failures without any success that end the run
PATH_OF_R1 = str(Path(r1.__file__).resolve().parent.parent)


class Tally:
    """How grading goes: of a runner, whether anything was ever graded; of a submission, how many responses hung."""

    def __init__(self) -> None:
        self.succeeded = False
        self.failed = 0
        self.hung = 0


Task = tuple[list[dict[str, Any]], Future[list[Outcome]], Tally]


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


class _Process:
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
        reply = self._ask(self._target, START_LIMIT_S)
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


class PendingRewards:
    """Rewards on their way: `RewardRunner.submit` returned while the processes grade."""

    def __init__(
        self, inputs: Sequence[dict[str, Any]], parts: list[Future[list[Outcome]]], on_error: str, tally: Tally
    ) -> None:
        self._names = [
            f"row {one['row']}, response {index}" if "row" in one else f"response {index}"
            for index, one in enumerate(inputs)
        ]
        self._parts = parts
        self._on_error = on_error
        self._tally = tally

    def _outcomes(self) -> list[Outcome]:
        return [outcome for part in self._parts for outcome in part.result()]

    @property
    def failures(self) -> list[str]:
        """One line for each response without a reward, naming it; waits for all of them."""
        named = zip(self._names, self._outcomes(), strict=True)
        return [f"{name}: {outcome}" for name, outcome in named if isinstance(outcome, str)]

    def result(self) -> list[dict[str, float] | None]:
        """Wait for all rewards: a dict per response, in the order submitted, None where there is none.

        Raises:
            ValueError: the reward file no longer loads; a response has no reward and reward.on_error is "raise"; or
                nothing was ever graded, neither these responses nor any before.
        """
        failures = self.failures
        if not self._tally.succeeded and self._tally.failed >= HOPELESS:
            raise ValueError(
                f"the reward function has graded none of {self._tally.failed} responses; the first: {failures[0]}; "
                "mend it, or raise reward.timeout_s if it is slow"
            )
        if failures and self._on_error == "raise":
            raise ValueError(
                f"{len(failures)} of {len(self._names)} responses have no reward; the first: {failures[0]}; "
                "mend the reward function, or set reward.on_error='exclude' to leave such responses out"
            )
        return [None if isinstance(outcome, str) else outcome for outcome in self._outcomes()]


class RewardRunner:
    """Child processes that grade responses with one reward function.

    A batch function gets at most reward.batch_size responses a call. When a call raises, hangs past its limit or kills
    its process, its responses are graded again one by one, so that only those at fault are lost. After MAX_HANGS
    responses of one submission have hung, the rest of it is given up, which bounds the time it can take.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._closed = threading.Event()
        self._tally = Tally()
        self._processes = [_Process(config, self._closed) for _ in range(config.num_workers)]
        self._threads = [threading.Thread(target=self._work, args=(p,), daemon=True) for p in self._processes]
        for thread in self._threads:
            thread.start()

    def submit(self, inputs: Sequence[dict[str, Any]]) -> PendingRewards:
        """Start grading and return at once.

        Args:
            inputs: per response its response, response_length (tokens), ground_truth, prompt and every other column
                of its row; `row`, if there, names it in messages.
        """
        if self._closed.is_set():
            raise ValueError("this RewardRunner is closed; make a new one")
        size = max(1, min(self._config.batch_size, -(-len(inputs) // self._config.num_workers)))
        tally = Tally()
        parts: list[Future[list[Outcome]]] = []
        for start in range(0, len(inputs), size):
            parts.append(Future())
            self._tasks.put((list(inputs[start : start + size]), parts[-1], tally))
        return PendingRewards(inputs, parts, self._config.on_error, self._tally)

    def close(self) -> None:
        """End the processes; rewards still on their way fail."""
        self._closed.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, process: _Process) -> None:
        try:
            process.start()
        except (ValueError, OSError):
            pass  # the first task tries again and reports it
        for inputs, part, tally in iter(self._tasks.get, None):
            try:
                outcomes = self._grade(process, inputs, tally)
                self._count(outcomes)
                part.set_result(outcomes)
            except (ValueError, OSError) as error:
                part.set_exception(error)
            finally:
                if not part.done():  # whatever happens here, nobody is left waiting
                    part.set_exception(RuntimeError("the thread that grades ended"))
        process.kill()

    def _count(self, outcomes: list[Outcome]) -> None:
        failed = sum(isinstance(outcome, str) for outcome in outcomes)
        self._tally.failed += failed
        self._tally.succeeded = self._tally.succeeded or failed < len(outcomes)

    def _grade(self, process: _Process, inputs: list[dict[str, Any]], tally: Tally) -> list[Outcome]:
        process.start()
        if process.reward_type == "batch" and len(inputs) > 1 and tally.hung < MAX_HANGS:
            outcomes = process.call(inputs, self._config.limit_s)
            if not isinstance(outcomes, str):
                return outcomes
            if outcomes.startswith("MemoryError"):
                process.kill()
        return [self._grade_one(process, one, tally) for one in inputs]

    def _grade_one(self, process: _Process, one: dict[str, Any], tally: Tally) -> Outcome:
        if tally.hung >= MAX_HANGS:
            return f"TimeoutError: not tried, {MAX_HANGS} other responses had hung"
        was_fresh = process.is_fresh
        outcome = process.call([one], self._config.limit_s)
        if isinstance(outcome, str) and "MemoryError" in outcome:
            process.kill()  # what it holds is not given back; in a new process the response may well fit
            if not was_fresh:
                outcome = process.call([one], self._config.limit_s)
        tally.hung += isinstance(outcome, str) and outcome.startswith("TimeoutError")
        return outcome if isinstance(outcome, str) else outcome[0]


def check_reward_function(config: RewardConfig) -> None:
    """Load the functions in a process of their own and call each once, with an empty response, before any model loads.

    Raises:
        ValueError: one line: no such file, built-in or function, an import that fails, keyword arguments that do not
            fit, or a return value without "overall".
    """
    process = _Process(config, threading.Event())
    try:
        process.start()
        fault = process.probe(config.limit_s)
    finally:
        process.kill()
    if fault is not None and not fault.startswith("TimeoutError"):
        raise ValueError(f"reward.function={config.function!r}: {fault}")
