"""What check_data found, as text: faults by kind, lengths and image sizes, what is filtered, prompts as rendered."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from r1.config import DataConfig
from r1.data.faults import RowError
from r1.data.mixture import Mixture
from r1.data.scan import by_kind

if TYPE_CHECKING:
    from tools.check_data import Checked

BARS = 12
SHOWN = 160  # characters of row numbers


def text_report(checked: "Checked", data: DataConfig) -> str:
    """The whole report of one set."""
    head = f"== {checked.title} "
    if checked.rows is None:
        return f"{head}\nnot readable: {checked.error}\n"
    rows, total = checked.rows, len(checked.rows)
    used = total - len(checked.faults) - len([1 for _, f in checked.overlong if f.kind.startswith("prompt too")])
    lines = [f"{head}({total} rows: {used} used, {len(checked.faults)} bad, {len(checked.overlong)} too long)"]
    if checked.faults:
        lines += ["", "Bad rows, by what is wrong:", *fault_table(rows, checked.faults)]
    if checked.overlong:
        what = "cut on the left" if data.overlong_prompts == "truncate_left" else "filtered"
        limit = f"data.max_prompt_length={data.max_prompt_length}"
        lines += ["", f"Would be {what} ({limit}):", *fault_table(rows, checked.overlong)]
    if checked.notes:
        lines += ["", "Used as they are, but worth a look:", *fault_table(rows, checked.notes)]
    lines += ["", *statistics(checked)]
    for label, text, _ in checked.examples:
        lines += ["", f"-- {label}, as the model sees it --", shorten(text)]
    return "\n".join(lines) + "\n"


def fault_table(rows: Mixture, faults: Sequence[tuple[int, RowError]]) -> list[str]:
    """A block for each kind: count and row numbers, the first row's problem, the fix."""
    width = max(60, min(shutil.get_terminal_size((120, 40)).columns, 160))
    lines = []
    for kind, some in by_kind(faults).items():
        numbers = row_numbers(rows, [i for i, _ in some])
        numbers = numbers if len(numbers) <= SHOWN else numbers[:SHOWN].rsplit(",", 1)[0] + ", …"
        lines.append(f"  {len(some):>6}  {kind}: {numbers}")
        first = some[0][1]
        for name, text in (("", f"the first {printable(first.problem)}"), ("fix: ", printable(first.fix))):
            if text:
                lines += textwrap.wrap(
                    name + text, width, initial_indent=" " * 10, subsequent_indent=" " * 12, break_on_hyphens=False
                )
    return lines


def row_numbers(rows: Mixture, indices: Iterable[int]) -> str:
    """'row 3, 7-9', by file where there are several: 'a row 3; b row 0-2'."""
    by_part: dict[str, list[int]] = {}
    for i in indices:
        part, _, number = rows.label(i).rpartition(" row ")
        by_part.setdefault(part, []).append(int(number))
    many = len(rows.parts) > 1
    return "; ".join((f"{part} " if many else "") + f"row {_ranges(numbers)}" for part, numbers in by_part.items())


def _ranges(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for n in sorted(numbers):
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def statistics(checked: "Checked") -> list[str]:
    """Quantiles and histograms of prompt lengths and image sizes."""
    lines: list[str] = []
    if checked.lengths:
        lines += [f"Prompt length in {checked.unit}: {quantiles(checked.lengths)}", *histogram(checked.lengths)]
    if checked.sizes:
        counts = np.array(checked.images)
        lines += [
            "",
            f"Images: {len(checked.sizes)} in {int((counts > 0).sum())} rows, at most {counts.max()} in one; "
            f"{int((counts == 0).sum())} rows have none",
            f"  width   {quantiles([w for w, _ in checked.sizes])}",
            f"  height  {quantiles([h for _, h in checked.sizes])}",
            f"  tokens  {quantiles(checked.image_tokens)}",
            *histogram([w * h / 1e6 for w, h in checked.sizes], unit="Mpixel"),
        ]
    if checked.frames:
        lines += [
            "",
            f"Videos: {len(checked.frames)}",
            f"  frames  {quantiles(checked.frames)}",
            f"  tokens  {quantiles(checked.video_tokens)}",
        ]
    return lines


def quantiles(values: Sequence[float]) -> str:
    low, mid, p90, p99, high = np.quantile(np.array(values, dtype=float), [0, 0.5, 0.9, 0.99, 1])
    return f"min {low:.0f}, median {mid:.0f}, 90% {p90:.0f}, 99% {p99:.0f}, max {high:.0f}"


def bins(values: Sequence[float]) -> list[tuple[float, float, int]]:
    """(from, to, count) of up to BARS equal bins."""
    array = np.array(values, dtype=float)
    spread = array.max() - array.min()
    counts, edges = np.histogram(array, bins=BARS if spread > 0 else 1)
    return [(float(a), float(b), int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]


def histogram(values: Sequence[float], *, unit: str = "", width: int = 50) -> list[str]:
    rows = bins(values)
    most = max(n for _, _, n in rows)
    digits = 0 if max(values) >= 20 else 2
    lines = []
    for a, b, n in rows:
        bar = "#" * round(width * n / most) or ("." if n else "")
        lines.append(f"  {a:>9.{digits}f} - {b:>9.{digits}f} {unit} |{bar} {n}")
    return lines


def printable(text: str) -> str:
    """Text that a terminal takes: half surrogates and control characters written out."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", lambda m: f"\\x{ord(m[0]):02x}", text)


def shorten(text: str, limit: int = 2000) -> str:
    text = printable(text)
    return (
        text
        if len(text) <= limit
        else f"{text[: limit // 2]}\n[… {len(text) - limit} characters …]\n{text[-limit // 2 :]}"
    )
