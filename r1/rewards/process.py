"""The child process that holds one reward function: load it, call it, say what it returned.

`r1.rewards.runner` starts it as a plain program, not through multiprocessing, whose children import the parent's main
module again: here that is training, with torch and vLLM.
"""

import ctypes
import hashlib
import importlib.util
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

Outcome = dict[str, float] | str
"""One response's rewards, or one line saying why there are none."""

REWARD_TYPES = ("batch", "sequential")
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Captured:
    """Keeps what a user's code raises, of whatever type: it is to become one line, not the end of this process."""

    error: BaseException | None = None

    def __enter__(self) -> "Captured":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


def describe(error: BaseException) -> str:
    """An exception as one line: type, message, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return " ".join(traceback.format_exception_only(error)[-1].split()) + where


def load_module(path: str) -> ModuleType:
    """Import a file under a name of its own, so that two files called math.py meet neither each other nor Python's.

    The file may import its neighbours and what lies in the current folder; both come last in the search order.
    """
    name = f"reward_{Path(path).stem}_{hashlib.sha1(path.encode()).hexdigest()[:8]}"
    sys.path.extend(folder for folder in (str(Path(path).parent), os.getcwd()) if folder not in sys.path)
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, path))
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load(path: str, function: str, kwargs: dict[str, Any]) -> tuple[Callable[..., Any], str]:
    """The reward function with its keyword arguments bound, and its type, batch or sequential.

    Raises:
        ValueError: one line on what the file lacks.
    """
    with Captured() as captured:
        module = load_module(path)
    if captured.error is not None:
        raise ValueError(f"reward.function: {path} cannot be imported: {describe(captured.error)}")
    reward_type = getattr(module, "REWARD_TYPE", "batch")
    if reward_type not in REWARD_TYPES:
        raise ValueError(f"reward.function: {path} sets REWARD_TYPE = {reward_type!r}; use one of {REWARD_TYPES}")
    reward_fn = getattr(module, function, None)
    if not callable(reward_fn):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ValueError(
            f"reward.function: {path} has {'no' if reward_fn is None else 'a non-callable'} {function!r}; "
            f"its functions are {', '.join(own) or '(none)'}; write {path}:{own[0] if own else 'function'}"
        )
    try:
        signature = inspect.signature(reward_fn)
    except ValueError:  # a builtin or C function does not tell
        return partial(reward_fn, **kwargs), reward_type
    try:
        signature.bind(None, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"reward.kwargs {kwargs} do not fit {Path(path).name}:{function}{signature}: {error}"
        ) from error
    return partial(reward_fn, **kwargs), reward_type


def shape_fault(rewards: object) -> str | None:
    """What is wrong with one returned value as a dict of rewards; None if nothing is."""
    if not isinstance(rewards, dict):
        return f"TypeError: expected a dict with 'overall' for a response, got {type(rewards).__name__} {rewards!r:.80}"
    if "overall" not in rewards:
        return f"KeyError: the reward function returned no 'overall', only {sorted(map(str, rewards))}"
    return None


def to_outcome(rewards: object) -> Outcome:
    """A returned dict as plain finite floats, or the fault that excludes it."""
    fault = shape_fault(rewards)
    if fault is not None:
        return fault
    assert isinstance(rewards, dict)
    values: dict[str, float] = {}
    for key, value in rewards.items():
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            return f"ValueError: reward {key!r} is {value!r:.80}, not a finite number"
        values[str(key)] = number
    return values


def call(reward_fn: Callable[..., Any], reward_type: str, inputs: list[dict[str, Any]]) -> list[Any] | str:
    """What the function returns for these responses, one value each; a line if it raised or returned something else."""
    with Captured() as captured:
        returned = reward_fn(inputs) if reward_type == "batch" else [reward_fn(one) for one in inputs]
    if captured.error is not None:
        return describe(captured.error)
    if not isinstance(returned, (list, tuple)):
        return f"TypeError: a batch reward function returns a list of dicts, got {type(returned).__name__}"
    if len(returned) != len(inputs):
        return f"ValueError: the reward function returned {len(returned)} rewards for {len(inputs)} responses"
    return list(returned)


def probe(reward_fn: Callable[..., Any], reward_type: str) -> str | None:
    """Call once with an empty response and return what is wrong with the shape of the answer.

    An exception is no fault here: the function may rightly ask for columns or an answer that this response lacks.
    """
    blank = {"response": "", "response_length": 0, "ground_truth": "0", "prompt": ""}
    with Captured() as captured:
        returned = reward_fn([blank]) if reward_type == "batch" else [reward_fn(blank)]
    if captured.error is not None:
        return None
    if not isinstance(returned, (list, tuple)) or len(returned) != 1:
        return f"TypeError: a batch reward function returns one dict per response in a list, got {returned!r:.80}"
    return shape_fault(returned[0])


def serve(connection: Connection) -> None:
    """Answer requests until the other end closes: first what to load, then probes and calls."""
    try:
        reward_fn, reward_type = load(*connection.recv())
    except ValueError as error:
        connection.send(("fault", str(error)))
        return
    connection.send(("ready", reward_type))
    while True:
        try:
            request, inputs = connection.recv()
        except EOFError:
            return
        if request == "probe":
            connection.send(probe(reward_fn, reward_type))
        else:
            returned = call(reward_fn, reward_type, inputs)
            connection.send(returned if isinstance(returned, str) else [to_outcome(one) for one in returned])


def main(descriptor: int, parent_pid: int) -> None:
    if sys.platform == "linux":
        # The end of the pipe does not reach a function that hangs in C code; the kernel's signal does.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent_pid:  # else it died before the line above
        serve(Connection(descriptor))
