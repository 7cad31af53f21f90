"""A picture of one step, as SVG: its phases over seconds, and the most memory that each held."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, LEFT, RIGHT = 920, 64, 24
BAR_TOP, BAR_HEIGHT, MEMORY_HEIGHT, ROW = 78, 58, 120, 22
COLORS = {
    "weight_sync": "#8e63b8",
    "rollout": "#3b7dd8",
    "logprobs": "#2a9d8f",
    "reward": "#d9a521",
    "update": "#e0693e",
    "between phases": "#c9cdd2",
}
SPARE_COLORS = ("#b5567c", "#5f8f3e", "#7a6a58")
INK, PALE, GRID = "#22272e", "#68707a", "#e4e7ea"
FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the step, in the order of time."""

    name: str
    seconds: float
    peak_gib: float | None  # None: not known


def phases_of(step: dict[str, float]) -> list[Phase]:
    """The phases of a step's metrics, in their order, and what none of them accounts for."""
    names = [key[5:-2] for key in step if key.startswith("time/") and key not in ("time/step_s", "time/save_s")]
    phases = [Phase(name=n, seconds=step[f"time/{n}_s"], peak_gib=step.get(f"mem/{n}_peak_gib")) for n in names]
    rest = step["time/step_s"] - sum(p.seconds for p in phases)
    return [*phases, Phase(name="between phases", seconds=max(rest, 0.0), peak_gib=None)]


def timeline_svg(phases: Sequence[Phase], title: str, subtitle: str) -> str:
    """Phases as bars one after another, memory as steps below them, and their numbers as a list."""
    total = sum(p.seconds for p in phases)
    spare = iter(SPARE_COLORS * len(phases))
    colors = [COLORS.get(p.name) or next(spare) for p in phases]
    scale = (WIDTH - LEFT - RIGHT) / total
    memory = any(p.peak_gib is not None for p in phases)
    bottom = BAR_TOP + BAR_HEIGHT + (MEMORY_HEIGHT + 34 if memory else 0)
    parts = [
        _text(LEFT, 30, title, size=17, weight="bold"),
        _text(LEFT, 52, subtitle, color=PALE),
        *_axis(total, scale, bottom),
        *_bars(phases, colors, scale),
        *(_memory(phases, colors, scale) if memory else []),
        *_list(phases, colors, total, bottom + 58, memory),
    ]
    height = bottom + 58 + ROW * (len(phases) + 1) + 12
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'>"
    return "\n".join([head, f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>", *parts, "</svg>\n"])


def _text(x: float, y: float, words: str, *, size: int = 13, color: str = INK, anchor: str = "start",
          weight: str = "normal") -> str:  # fmt: skip
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}' font-weight='{weight}' fill='{color}' "
        f"text-anchor='{anchor}'>{html.escape(words)}</text>"
    )


def tick(total: float, most: int) -> float:
    """A round distance, 1, 2 or 5 times a power of ten, of which at most `most` fit into total."""
    size = 10.0**-6
    while True:
        for factor in (1, 2, 5):
            if total / (size * factor) <= most:
                return size * factor
        size *= 10


def _axis(total: float, scale: float, bottom: float) -> list[str]:
    step, lines, i = tick(total, 10), [], 0
    while i * step <= total * (1 + 1e-9):
        x = LEFT + i * step * scale
        lines.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{BAR_TOP - 6}' y2='{bottom}' stroke='{GRID}'/>")
        lines.append(_text(x, bottom + 18, f"{i * step:g}", color=PALE, anchor="middle", size=12))
        i += 1
    return [*lines, _text(WIDTH - RIGHT, bottom + 36, "seconds", color=PALE, anchor="end", size=12)]


def _starts(phases: Sequence[Phase]) -> list[float]:
    return [sum(p.seconds for p in phases[:i]) for i in range(len(phases))]


def _title(name: str) -> str:
    return name.replace("_", " ")


def _bars(phases: Sequence[Phase], colors: Sequence[str], scale: float) -> list[str]:
    """Blocks with their names in them, where they fit."""
    lines = []
    for phase, color, start in zip(phases, colors, _starts(phases), strict=True):
        x, width = LEFT + start * scale, phase.seconds * scale
        lines.append(
            f"<rect x='{x:.2f}' y='{BAR_TOP}' width='{max(width, 0.6):.2f}' height='{BAR_HEIGHT}' fill='{color}' "
            f"stroke='#ffffff' stroke-width='{1 if width > 3 else 0}'><title>{html.escape(_title(phase.name))} "
            f"{phase.seconds:.2f} s</title></rect>"
        )
        ink = INK if phase.name == "between phases" else "#ffffff"
        if width > 8 * len(_title(phase.name)) + 8:
            middle = BAR_TOP + BAR_HEIGHT / 2
            lines.append(
                _text(x + width / 2, middle - 3, _title(phase.name), color=ink, anchor="middle", weight="bold")
            )
            lines.append(_text(x + width / 2, middle + 14, f"{phase.seconds:.2f} s", color=ink, anchor="middle"))
    return lines


def _memory(phases: Sequence[Phase], colors: Sequence[str], scale: float) -> list[str]:
    """The peak of each phase as a block from 0, with an axis in GiB."""
    top, base = BAR_TOP + BAR_HEIGHT + 34, BAR_TOP + BAR_HEIGHT + 34 + MEMORY_HEIGHT
    most = max(p.peak_gib or 0.0 for p in phases)
    step, lines = tick(most * 1.1, 6), []
    full = step * -(-most * 1.1 // step)
    for i in range(round(full / step) + 1):
        y = base - i * step / full * MEMORY_HEIGHT
        lines.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='{GRID}'/>")
        lines.append(_text(LEFT - 8, y + 4, f"{i * step:g}", color=PALE, anchor="end", size=12))
    lines.append(_text(LEFT, top - 10, "peak memory, GiB", color=PALE, size=12))
    for phase, color, start in zip(phases, colors, _starts(phases), strict=True):
        if phase.peak_gib is None:
            continue
        x, width, height = LEFT + start * scale, phase.seconds * scale, phase.peak_gib / full * MEMORY_HEIGHT
        lines.append(
            f"<rect x='{x:.2f}' y='{base - height:.1f}' width='{max(width, 0.6):.2f}' height='{height:.1f}' "
            f"fill='{color}' fill-opacity='0.28'/>"
        )
        lines.append(
            f"<line x1='{x:.2f}' x2='{x + max(width, 0.6):.2f}' y1='{base - height:.1f}' y2='{base - height:.1f}' "
            f"stroke='{color}' stroke-width='2.5'/>"
        )
        if width > 44:
            lines.append(_text(x + width / 2, base - height + 17, f"{phase.peak_gib:.1f}", anchor="middle", size=12))
    return lines


def _list(phases: Sequence[Phase], colors: Sequence[str], total: float, top: float, memory: bool) -> list[str]:
    """Every phase with its numbers, also those too short for a name in the picture."""
    columns = [LEFT + 230, LEFT + 310, *([LEFT + 420] if memory else [])]
    names = ["seconds", "share", *(["peak GiB"] if memory else [])]
    lines = [_text(x, top, n, color=PALE, anchor="end", size=12) for x, n in zip(columns, names, strict=True)]
    rows = [(p.name, p.seconds, p.peak_gib, c) for p, c in zip(phases, colors, strict=True)]
    for i, (name, seconds, peak, color) in enumerate(rows, start=1):
        y = top + i * ROW
        lines.append(f"<rect x='{LEFT}' y='{y - 11}' width='13' height='13' rx='2' fill='{color}'/>")
        lines.append(_text(LEFT + 22, y, _title(name)))
        cells = [f"{seconds:.2f}", f"{100 * seconds / total:.1f}%", *(["" if peak is None else f"{peak:.1f}"])]
        lines += [_text(x, y, cell, anchor="end") for x, cell in zip(columns, cells, strict=False)]
    return lines
