"""Read a run folder, and make long curves short enough to draw."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_POINTS = 400
"""Points of a drawn curve: more than a chart has pixels to tell apart on most screens."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder says of itself, samples aside."""

    name: str
    folder: Path
    metrics: list[dict[str, float | None]]  # one a step, "step" among them, in order
    config: dict[str, Any]  # settings by dotted path; {} where config.json is missing
    starts: list[dict[str, Any]]  # what it ran on, one entry a start; [] where environment.json is missing

    @property
    def step(self) -> int:
        return int(self.metrics[-1]["step"] or 0) if self.metrics else 0

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run, where it is known."""
        return self.starts[-1].get("num_steps") if self.starts else self.config.get("trainer.max_steps")

    @property
    def keys(self) -> list[str]:
        """Names of all metrics, in the order in which they appear."""
        return list(dict.fromkeys(key for line in self.metrics for key in line if key != "step"))

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Steps that have a finite value, and the values."""
        pairs = [(float(line["step"] or 0), value) for line in self.metrics if (value := line.get(key)) is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def hours(self) -> list[float]:
        """Hours of training after each line of metrics: steps and saving, without validation and start-up."""
        total, passed = 0.0, []
        for line in self.metrics:
            total += ((line.get("time/step_s") or 0.0) + (line.get("time/save_s") or 0.0)) / 3600
            passed.append(total)
        return passed


def read_run(folder: Path) -> Run:
    """Read a run folder, also one whose run is still writing.

    Raises:
        ValueError: it holds no metrics.jsonl.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise ValueError(
            f"{folder} holds no metrics.jsonl; give a run folder, runs/<experiment_name>, of a run whose "
            "trainer.loggers has 'file'"
        )
    metrics = [line for _, line in json_lines(path) if isinstance(line.get("step"), int)]
    config, starts = _json(folder / "config.json"), _json(folder / "environment.json")
    return Run(
        name=folder.resolve().name,
        folder=folder,
        metrics=metrics,
        config=flatten(config) if isinstance(config, dict) else {},
        starts=starts if isinstance(starts, list) else [],
    )


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte offset, object) of each line that is a whole JSON object; the last one may still be being written."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield offset, value
            offset += len(line)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted path: {"optim": {"lr": 1}} becomes {"optim.lr": 1}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return flat


def shorten(x: Sequence[float], y: Sequence[float], points: int = MAX_POINTS) -> dict[str, list[float]]:
    """A curve of at most so many points; a longer one becomes means of equal spans, with least and greatest.

    Returns:
        "x" and "y", and for a curve that was shortened "low" and "high".
    """
    if len(x) <= points:
        return {"x": [brief(v) for v in x], "y": [brief(v) for v in y]}
    edges = [len(x) * i // points for i in range(points + 1)]
    spans = [slice(a, b) for a, b in itertools.pairwise(edges)]
    return {
        "x": [brief(math.fsum(x[s]) / len(x[s])) for s in spans],
        "y": [brief(math.fsum(y[s]) / len(y[s])) for s in spans],
        "low": [brief(min(y[s])) for s in spans],
        "high": [brief(max(y[s])) for s in spans],
    }


def brief(value: float) -> float:
    """Five significant digits, and no fraction where there is none: what a page needs."""
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
