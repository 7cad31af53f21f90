"""The console's log: a line a step and warnings of health.py; on a terminal also a panel below them."""

import sys
from collections.abc import Mapping
from typing import Any

from r1.health import Trouble, health
from r1.loggers_panel import COLUMNS, Panel, Screen, duration

REPEAT = 20
"""Steps after which a warning that still holds is said again."""
KEEP = 60
"""Steps remembered: the first 10, which health compares with, and the latest."""


class Console:
    """Lines on standard output: where that is a terminal, above a panel with trends, times and time left."""

    def __init__(self, name: str, num_steps: int | None) -> None:
        self.name, self.num_steps = name, num_steps
        self.seconds, self.timed = 0.0, 0
        self.history: list[Mapping[str, float]] = []
        self.validation: dict[str, tuple[float, float]] = {}  # first and latest of each val/ metric
        self.said: dict[str, int] = {}  # step at which a trouble was last named
        self.screen = Screen() if Screen.is_possible() else None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._remember(metrics)
        left = self._left_s(step)
        troubles = health(self.history)
        lines = [step_line(step, self.num_steps, metrics, left)]
        lines += [f"  warning: {trouble}" for trouble in self._news(step, troubles)]
        if self.screen is None:
            sys.stdout.write("".join(line + "\n" for line in lines))
            sys.stdout.flush()
        else:
            panel = Panel(self.name, step, self.num_steps, left, self.history, self.validation, troubles)
            self.screen.show(lines, panel)

    def _remember(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith("val/"):
                self.validation[name] = (self.validation.get(name, (value, value))[0], value)
        if "time/step_s" in metrics:
            self.seconds, self.timed = self.seconds + metrics["time/step_s"], self.timed + 1
        self.history.append(metrics)
        if len(self.history) > KEEP:
            del self.history[10]

    def _left_s(self, step: int) -> float | None:
        """Seconds to the last step; None where that is not known, or reached."""
        if not self.num_steps or step >= self.num_steps or not self.timed:
            return None
        return (self.num_steps - step) * self.seconds / self.timed

    def _news(self, step: int, troubles: list[Trouble]) -> list[Trouble]:
        """Those not named for a while."""
        news = [t for t in troubles if step - self.said.get(t.name, step - REPEAT) >= REPEAT]
        self.said |= {trouble.name: step for trouble in news}
        return news

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        """A screen is too narrow for them; samples.jsonl has them."""

    def close(self) -> None:
        """Give the terminal back."""
        if self.screen is not None:
            self.screen.close()


def step_line(step: int, num_steps: int | None, metrics: Mapping[str, float], left_s: float | None) -> str:
    """A step as one line of words and numbers."""
    parts = [f"step {step}" + (f"/{num_steps}" if num_steps else "")]
    parts += [f"{word} {metrics[key]:{form}}" for word, key, form in COLUMNS if key in metrics]
    parts += [
        f"{key} {value:.4g}" for key, value in metrics.items() if key.startswith("val/") and not _is_dull(key, value)
    ]
    if left_s is not None and "time/step_s" in metrics:
        parts.append("left " + duration(left_s))
    return "  ".join(parts)


def _is_dull(key: str, value: float) -> bool:
    """Shares of failures are told when there are some."""
    return value == 0 and key.endswith(("_frac", "_unparsable"))
