"""The plot of tools/bench_learn.py: held-out accuracy over steps, a small panel for each algorithm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLUMNS = 5
BLUE, GREY, INK = "#2f6fb5", "#c3c7cc", "#333a42"


def plot(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean and range over seeds; the first line's mean is repeated in grey in the other panels, to compare with."""
    columns = min(COLUMNS, len(lines))
    rows = -(-len(lines) // columns)
    lowest = min(value for line in lines for curve in line["curves"] for value in curve)
    floor = max(0.0, lowest - 0.06)
    style: dict[Any, Any] = {"font.size": 8, "font.family": "sans-serif", "axes.edgecolor": GREY, "text.color": INK,
                             "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}  # fmt: skip
    with plt.rc_context(style):
        size = (1.9 * columns + 0.4, 1.55 * rows + 0.4)
        figure, grid = plt.subplots(rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
        for panel, line in zip(grid.flat, lines, strict=False):
            _draw(panel, line, lines[0], floor)
        for panel in grid.flat[len(lines) :]:
            panel.set_visible(False)
        for panel in grid[:, 0]:
            panel.set_ylabel("held-out accuracy")
        for column in range(columns):
            grid[(len(lines) - 1 - column) // columns, column].set_xlabel("step")
            grid[(len(lines) - 1 - column) // columns, column].tick_params(labelbottom=True)
        figure.tight_layout(pad=0.6, w_pad=0.9, h_pad=0.9)
        figure.savefig(path, dpi=120, metadata={"Software": None})
        plt.close(figure)


def _draw(panel: Any, line: dict[str, Any], first: dict[str, Any], floor: float) -> None:
    def mean(of: dict[str, Any]) -> list[float]:
        return [sum(values) / len(values) for values in zip(*of["curves"], strict=True)]

    steps = line["steps"]
    low, high = ([pick(values) for values in zip(*line["curves"], strict=True)] for pick in (min, max))
    if line is not first:
        panel.plot(first["steps"], mean(first), color=GREY, linewidth=1.2, zorder=1)
    panel.fill_between(steps, low, high, color=BLUE, alpha=0.22, linewidth=0, zorder=2)
    panel.plot(steps, mean(line), color=BLUE, linewidth=1.6, zorder=3)
    panel.set_title(line["title"], loc="left", fontsize=8.5, pad=3)
    panel.set_ylim(floor, 1.02)
    panel.set_xlim(0, steps[-1])
    panel.set_yticks([tick / 10 for tick in range(0, 11, 2) if tick / 10 >= floor])
    panel.grid(axis="y", color="#eceef0", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.annotate(f"{mean(line)[-1]:.2f}", (steps[-1], mean(line)[-1]), xytext=(-2, -11), textcoords="offset points",
                   ha="right", color=BLUE, fontsize=8, zorder=4)  # fmt: skip
