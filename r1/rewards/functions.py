"""Load reward functions and call them: batch or sequential, plain or async, one or several with weights.

What a function raises or returns wrongly becomes one line of text here, never an exception of ours.
"""

import asyncio
import hashlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

Outcome = dict[str, float] | str
"""One response's rewards, or one line saying why there are none."""

LARGEST = 3.4e38  # what float32, the advantages' type, holds
REWARD_TYPES = ("batch", "sequential")


class Fault(str):
    """One line on why a response has no reward, where a returned value would stand."""


class Source(NamedTuple):
    """Where a reward function lies, how it is called and what it counts."""

    path: str
    function: str
    kwargs: dict[str, Any]
    weight: float


class RewardFunction(NamedTuple):
    """A loaded reward function with its keyword arguments bound."""

    name: str
    fn: Callable[..., Any]
    reward_type: str  # batch or sequential
    is_async: bool
    weight: float


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
    if isinstance(error, MemoryError):
        return "MemoryError: grading took more memory than reward.memory_mb allows"
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


def load(source: Source) -> RewardFunction:
    """Import the file and find the function in it.

    Raises:
        ValueError: one line on what the file lacks.
    """
    path, function, kwargs, weight = source
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
        signature.bind(None, **kwargs)
    except ValueError:
        pass  # a function in C does not tell its arguments
    except TypeError as error:
        raise ValueError(
            f"reward.kwargs {kwargs} do not fit {Path(path).name}:{function}{signature}: {error}"
        ) from error
    is_async = inspect.iscoroutinefunction(reward_fn)
    return RewardFunction(Path(path).stem, partial(reward_fn, **kwargs), reward_type, is_async, weight)


def load_all(sources: Sequence[Source]) -> list[RewardFunction]:
    """Load them; two of one file are told apart by their function's name."""
    loaded = [load(source) for source in sources]
    stems = [one.name for one in loaded]
    return [
        one._replace(name=f"{one.name}.{source.function}") if stems.count(one.name) > 1 else one
        for one, source in zip(loaded, sources, strict=True)
    ]


def shape_fault(rewards: object) -> str | None:
    """What is wrong with one returned value as a dict of rewards; None if nothing is."""
    if not isinstance(rewards, dict):
        return f"TypeError: expected a dict with 'overall' for a response, got {type(rewards).__name__} {rewards!r:.80}"
    if "overall" not in rewards:
        return f"KeyError: the reward function returned no 'overall', only {sorted(map(str, rewards))}"
    return None


def to_outcome(rewards: object) -> Outcome:
    """A returned dict as plain finite floats, or the fault that excludes it."""
    if isinstance(rewards, Fault):
        return str(rewards)
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
        if not abs(number) <= LARGEST:
            return f"ValueError: reward {key!r} is {value!r:.80}, not a finite number in float32"
        values[str(key)] = number
    return values


def combine(parts: Sequence[Outcome], functions: Sequence[RewardFunction]) -> Outcome:
    """A response's rewards from all functions: their own where there is one, else

        overall = sum of weight * overall,  and each function's keys as <name>/<key>.

    Where one function has no reward for it, the response has none.
    """
    if len(parts) == 1:
        return parts[0]
    combined = {"overall": 0.0}
    for part, function in zip(parts, functions, strict=True):
        if isinstance(part, str):
            return f"{function.name}: {part}"
        combined["overall"] += function.weight * part["overall"]
        combined |= {f"{function.name}/{key}": value for key, value in part.items()}
    return combined


class Caller:
    """Calls loaded functions; its event loop lives as long, so that what an async function keeps open stays usable."""

    def __init__(self, functions: Sequence[RewardFunction], limit_s: float) -> None:
        self.functions = functions
        self.limit_s = limit_s
        self.loop = asyncio.new_event_loop()

    def call(self, inputs: list[dict[str, Any]]) -> list[Outcome] | str:
        """One outcome per response; a line if a call failed for all of them."""
        columns: list[list[Outcome]] = []
        for function in self.functions:
            returned = self._call(function, inputs)
            if isinstance(returned, str):
                return returned if len(self.functions) == 1 else f"{function.name}: {returned}"
            columns.append([to_outcome(one) for one in returned])
        return [combine(parts, self.functions) for parts in zip(*columns, strict=True)]

    def _call(self, function: RewardFunction, inputs: list[dict[str, Any]]) -> list[Any] | str:
        """What one function returns for these responses, one value each; a line if it raised or returned no list."""
        with Captured() as captured:
            if function.reward_type == "batch":
                returned = function.fn(inputs)
                returned = self.loop.run_until_complete(returned) if inspect.isawaitable(returned) else returned
            elif function.is_async:
                returned = self.loop.run_until_complete(self._concurrently(function, inputs))
            else:
                returned = [function.fn(one) for one in inputs]
        if captured.error is not None:
            return describe(captured.error)
        if not isinstance(returned, (list, tuple)):
            return f"TypeError: a batch reward function returns a list of dicts, got {type(returned).__name__}"
        if len(returned) != len(inputs):
            return f"ValueError: the reward function returned {len(returned)} rewards for {len(inputs)} responses"
        return list(returned)

    async def _concurrently(self, function: RewardFunction, inputs: list[dict[str, Any]]) -> list[Any]:
        """All responses at once, each with the time limit; what one raises costs its own only."""

        async def one(awaitable: Awaitable[Any]) -> Any:
            with Captured() as captured:
                return await asyncio.wait_for(awaitable, self.limit_s)
            error = captured.error
            assert error is not None
            if isinstance(error, asyncio.TimeoutError):
                return Fault(f"TimeoutError: no answer within {self.limit_s:g} s")
            return Fault(describe(error))

        return list(await asyncio.gather(*(one(function.fn(item)) for item in inputs)))

    def probe(self) -> str | None:
        """Call each function once with an empty response and return what is wrong with the shape of an answer.

        An exception is no fault here: the function may rightly ask for columns or an answer that this response lacks.
        """
        for function in self.functions:
            blank = {"response": "", "response_length": 0, "ground_truth": "0", "prompt": "", "truncated": False}
            with Captured() as captured:
                returned = function.fn([blank] if function.reward_type == "batch" else blank)
                returned = self.loop.run_until_complete(returned) if inspect.isawaitable(returned) else returned
            if captured.error is not None:
                continue
            returned = [returned] if function.reward_type == "sequential" else returned
            if not isinstance(returned, (list, tuple)) or len(returned) != 1:
                return (
                    f"TypeError: a batch reward function returns one dict per response in a list, got {returned!r:.80}"
                )
            if fault := shape_fault(returned[0]):
                return fault
        return None
