"""Runs reward functions, ours or a user's, in child processes with limits of time and memory.

A response that raises, hangs or gets no finite reward costs itself only: it comes back as None, with one line on why.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from r1.config import RewardConfig
from r1.rewards.child import Child
from r1.rewards.functions import Outcome

MAX_HANGS = 32  # of one submission: the responses after them are given up
HOPELESS = 16  # failures without any success that end the run


class Tally:
    """How grading goes: of a runner, whether anything was ever graded; of a submission, how many responses hung."""

    def __init__(self) -> None:
        self.succeeded = False
        self.failed = 0
        self.hung = 0


Task = tuple[list[dict[str, Any]], Future[list[Outcome]], Tally]


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
        self._processes = [Child(config, self._closed) for _ in range(config.num_workers)]
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

    def _work(self, process: Child) -> None:
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

    def _grade(self, process: Child, inputs: list[dict[str, Any]], tally: Tally) -> list[Outcome]:
        process.start()
        if process.reward_type == "batch" and len(inputs) > 1 and tally.hung < MAX_HANGS:
            outcomes = process.call(inputs, self._config.limit_s)
            if not isinstance(outcomes, str):
                return outcomes
            if outcomes.startswith("MemoryError"):
                process.kill()
        return [self._grade_one(process, one, tally) for one in inputs]

    def _grade_one(self, process: Child, one: dict[str, Any], tally: Tally) -> Outcome:
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
    process = Child(config, threading.Event())
    try:
        process.start()
        fault = process.probe(config.limit_s)
    finally:
        process.kill()
    if fault is not None and not fault.startswith("TimeoutError"):
        raise ValueError(f"reward.function={config.function!r}: {fault}")
