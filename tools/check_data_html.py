"""What check_data found, as one HTML page without outside files: tables, histograms, prompts, thumbnails."""

import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r1.config import DataConfig
from r1.data.faults import RowError
from r1.data.images import load_image
from r1.data.scan import by_kind
from tools.check_data_report import bins, printable, quantiles, row_numbers, shorten

if TYPE_CHECKING:
    from tools.check_data import Checked

THUMBNAILS = 24
SIDE = 180  # pixels of a thumbnail's longer side
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;width:100%;margin:.5em 0 1.5em}
td,th{border:1px solid #ccc;padding:.3em .6em;text-align:left;
vertical-align:top}pre{background:#f4f4f4;padding:1em;overflow-x:auto;white-space:pre-wrap}
.bar{background:#4a7ab5;height:1em;display:inline-block}.good{color:#17722f}.bad{color:#a4161a}
figure{display:inline-block;margin:.4em;text-align:center;vertical-align:top;font-size:12px}
.rows{max-height:8em;overflow-y:auto;font-family:monospace;font-size:12px}
"""


def write_html(path: Path, results: Sequence["Checked"], data: DataConfig) -> None:
    """Write the page; pictures are inside it, so it can be sent around."""
    body = "\n".join(part for checked in results for part in _section(checked, data))
    page = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>data check</title><style>{STYLE}</style>"
    path.write_text(f"{page}<body><h1>Data check</h1>\n{body}\n</body></html>\n", encoding="utf-8")


def _section(checked: "Checked", data: DataConfig) -> Iterator[str]:
    yield f"<h2>{_text(checked.title)}</h2>"
    if checked.rows is None:
        yield f"<p class='bad'>not readable: {_text(checked.error)}</p>"
        return
    verdict = "good" if checked.is_good else "bad"
    yield (
        f"<p class='{verdict}'>{len(checked.rows)} rows, {len(checked.faults)} bad, {len(checked.overlong)} too long "
        f"for data.max_prompt_length={data.max_prompt_length} (data.overlong_prompts={data.overlong_prompts})</p>"
    )
    for title, faults in (
        ("Bad rows", checked.faults),
        ("Too long", checked.overlong),
        ("Used as they are, but worth a look", checked.notes),
    ):
        if faults:
            yield f"<h3>{title}</h3>{_table(checked, faults)}"
    if checked.lengths:
        yield f"<h3>Prompt length in {_text(checked.unit)}</h3><p>{quantiles(checked.lengths)}</p>"
        yield _bars(checked.lengths)
    if checked.sizes:
        yield f"<h3>Images</h3><p>{len(checked.sizes)} in all; pixels: {quantiles([w * h for w, h in checked.sizes])}; "
        yield f"tokens: {quantiles(checked.image_tokens)}</p>{_bars([w * h / 1e6 for w, h in checked.sizes])}"
    for label, text, _ in checked.examples:
        yield f"<h3>{_text(label)}, as the model sees it</h3><pre>{_text(shorten(text, 6000))}</pre>"
    thumbnails = list(_thumbnails(checked))
    if thumbnails:
        yield "<h3>Pictures</h3>" + "".join(thumbnails)


def _table(checked: "Checked", faults: Sequence[tuple[int, RowError]]) -> str:
    assert checked.rows is not None
    lines = ["<table><tr><th>kind<th>rows<th>which<th>the first<th>fix</tr>"]
    for kind, some in by_kind(faults).items():
        numbers = row_numbers(checked.rows, [i for i, _ in some])
        lines.append(
            f"<tr><td>{_text(kind)}<td>{len(some)}<td><div class='rows'>{_text(numbers)}</div>"
            f"<td>{_text(some[0][1].problem)}<td>{_text(some[0][1].fix)}</tr>"
        )
    return "".join(lines) + "</table>"


def _bars(values: Sequence[float]) -> str:
    rows = bins(values)
    most = max(n for _, _, n in rows)
    cells = (
        f"<tr><td>{a:.4g} - {b:.4g}<td>{n}<td style='width:70%'><span class='bar' style='width:{100 * n / most:.1f}%'>"
        "</span></tr>"
        for a, b, n in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _thumbnails(checked: "Checked") -> Iterator[str]:
    """Pictures of rows all through the set."""
    rows, bad = checked.rows, {i for i, _ in checked.faults}
    assert rows is not None
    good = [i for i in range(len(rows)) if i not in bad]
    count = 0
    for i in good[:: max(1, len(good) // (4 * THUMBNAILS))]:
        renderer = checked.renderers[rows.folder(i)]
        row: dict[str, Any] = rows[i]
        for value in renderer.media(row)[0]:
            image = load_image(value, renderer.image_dir)
            size = f"{image.width} x {image.height}"
            image.thumbnail((SIDE, SIDE))
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=80)
            data = base64.b64encode(buffer.getvalue()).decode()
            label = _text(f"{rows.label(i)}, {size}")
            yield f"<figure><img src='data:image/jpeg;base64,{data}' alt=''><br>{label}</figure>"
            count += 1
        if count >= THUMBNAILS:
            return


def _text(text: str) -> str:
    return html.escape(printable(text))
