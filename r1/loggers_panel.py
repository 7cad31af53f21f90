"""The panel at the bottom of a terminal: trends of a run, where its time goes, what is left and what is wrong."""

import io
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple, TextIO

from rich.console import Console, Group
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from r1.health import Trouble

COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("accuracy", "reward/accuracy", ".3f"),
    ("length", "response/length_mean", ".0f"),
    ("kl", "loss/kl", ".2e"),
    ("entropy", "policy/entropy", ".3f"),
    ("grad_norm", "policy/grad_norm", ".3f"),
    ("mismatch", "mismatch/abs_mean", ".1e"),
    ("seconds", "time/step_s", ".1f"),
)
"""(word, metric, format) of the line, in order; what a step has not is left out."""
PHASES = (
    ("rollout", "cyan"),
    ("logprobs", "blue"),
    ("reward", "yellow"),
    ("update", "magenta"),
    ("weight_sync", "green"),
)
"""(phase of a step, color) of the time line."""
SPARKS = "▁▂▃▄▅▆▇█"
TREND = 30
"""Steps that a trend shows."""


class Panel(NamedTuple):
    """What a panel is made of."""

    name: str
    step: int
    num_steps: int | None
    left_s: float | None
    history: Sequence[Mapping[str, float]]  # of the latest steps
    validation: Mapping[str, tuple[float, float]]  # first and latest
    troubles: Sequence[Trouble]

    def render(self, width: int, *, color: bool) -> str:
        """The panel as lines of text, width columns wide."""
        console = Console(file=io.StringIO(), width=width, force_terminal=color, legacy_windows=False)
        title = f"{self.name}: step {self.step}" + (f" of {self.num_steps}" if self.num_steps else "")
        body = Group(*self._rows())
        console.print(Frame(body, title=Text(title), title_align="left", border_style="dim", width=min(width, 110)))
        assert isinstance(console.file, io.StringIO), "the console writes into memory"
        return console.file.getvalue()

    def _rows(self) -> Iterator[Table | Text]:
        if self.num_steps:
            row = Table.grid(padding=(0, 2), expand=True)
            row.add_column(ratio=1)
            share = self.step / self.num_steps
            left = "" if self.left_s is None else f"{duration(self.left_s)} left, done at {clock(self.left_s)}"
            row.add_row(ProgressBar(total=1, completed=share), f"{share:.0%}", left)
            yield row
        trends = Table.grid(padding=(0, 2))
        for word, key, form in COLUMNS:
            values = [metrics[key] for metrics in self.history[-TREND:] if key in metrics]
            if values:
                trends.add_row(Text(word, style="bold"), Text(f"{values[-1]:{form}}", justify="right"), sparks(values))
        yield trends
        yield from self._times()
        for name, (first, latest) in self.validation.items():
            if name.endswith(("/accuracy", "/reward")):
                yield Text.assemble((name, "bold"), f"  {first:.3f} at first, {latest:.3f} now")
        for trouble in self.troubles:
            yield Text(f"{trouble}", style="yellow")

    def _times(self) -> Iterator[Table | Text]:
        """A bar whose colored parts are the phases' shares of the latest step."""
        latest = next((m for m in reversed(self.history) if "time/step_s" in m), None)
        if latest is None or not latest["time/step_s"]:
            return
        shares = [(phase, color, latest.get(f"time/{phase}_s", 0.0) / latest["time/step_s"]) for phase, color in PHASES]
        line = Text("time", style="bold")
        for phase, color, share in shares:
            if share >= 0.01:
                line.append("  ").append("█" * max(1, round(20 * share)), style=color)
                line.append(f" {phase} {share:.0%}", style="not bold")
        yield line


def sparks(values: Sequence[float]) -> str:
    """A trend as a line of small bars, from the least value to the greatest: ▁▄█."""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 1:06:45."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def clock(seconds_from_now: float) -> str:
    """The time of day then, with the day if it is another: 14:05, Tue 02:10."""
    then, now = time.localtime(time.time() + seconds_from_now), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%a %H:%M", then)


class Screen:
    """A terminal with a panel below all lines.

    Nothing is redrawn between steps: the first line that anybody else writes takes the panel's place, and the next step
    draws it again. So print, a debugger and a traceback look as they do without it.
    """

    def __init__(self) -> None:
        self.out, self.err, self.height = sys.stdout, sys.stderr, 0
        sys.stdout, sys.stderr = _Above(self.out, self), _Above(self.err, self)
        self.handlers = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is self.err
        ]
        for handler in self.handlers:
            handler.setStream(sys.stderr)

    @staticmethod
    def is_possible() -> bool:
        """Whether standard output and errors are a terminal that can move its cursor (TERM=dumb: lines only)."""
        return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, lines: Sequence[str], panel: Panel) -> None:
        """Write lines, and the panel below them if it fits."""
        columns, rows = os.get_terminal_size(self.out.fileno())
        self.erase()
        text = panel.render(columns, color="NO_COLOR" not in os.environ)
        height = text.count("\n")
        if height > rows - 3:
            text, height = "", 0
        self.out.write("".join(line + "\n" for line in lines) + text)
        self.out.flush()
        self.height = height

    def erase(self) -> None:
        """Remove the panel and what is below it, a progress bar."""
        if self.height:
            self.out.write(f"\r\x1b[{self.height}A\x1b[J")
            self.out.flush()
            self.height = 0

    def close(self) -> None:
        """Leave the streams as they were, and the panel where it is."""
        for handler in self.handlers:
            handler.setStream(self.err)
        sys.stdout, sys.stderr, self.height = self.out, self.err, 0


class _Above(io.TextIOBase):
    """A standard stream that takes the panel away before it writes; a progress bar begins with a return and stays."""

    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self._stream, self._screen = stream, screen

    def write(self, text: str) -> int:
        if text and not text.startswith("\r"):
            self._screen.erase()
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    @property
    def errors(self) -> str | None:
        return self._stream.errors

    @property
    def buffer(self) -> BinaryIO:
        return self._stream.buffer
