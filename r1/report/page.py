"""Put runs into one HTML page that needs nothing else: data, pictures, styles and scripts are inside it."""

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

from r1.config import Config
from r1.health import health
from r1.report.charts import clock, sections, tiles
from r1.report.read import Run, flatten, read_run
from r1.report.samples import samples

ASSETS = Path(__file__).parent
SCRIPTS = ("page.js", "charts.js", "samples.js")


def write_report(folders: Sequence[Path], output: Path, *, refresh_s: int | None = None) -> list[Run]:
    """Write the page of one run, or of several side by side, whole or not at all.

    Args:
        folders: run folders.
        output: the HTML file.
        refresh_s: the page loads itself again after so many seconds; None: never.

    Returns:
        The runs as they were read.

    Raises:
        ValueError: a folder is not that of a run.
    """
    runs = [read_run(folder) for folder in folders]
    temporary = output.with_suffix(".tmp")
    # A response may hold half a surrogate pair, which UTF-8 cannot write.
    temporary.write_text(page(runs, refresh_s=refresh_s), encoding="utf-8", errors="replace")
    os.replace(temporary, output)
    return runs


def page(runs: Sequence[Run], *, refresh_s: int | None = None) -> str:
    """The page as HTML.

    Nothing that a model wrote is HTML in it: texts are data, which the scripts show as text. A policy in the page
    allows its own scripts by their hash and no other, and no address outside of it.
    """
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = " and ".join(run.name for run in runs)
    return Template((ASSETS / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        script=script,
        data=as_script_data(page_data(runs) | {"refresh_s": refresh_s}),
    )


def as_script_data(value: Any) -> str:
    """JSON for the inside of a script element: no character in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the scripts show."""
    return {
        "runs": [
            {
                "name": run.name,
                "step": run.step,
                "num_steps": run.num_steps,
                "started": run.starts[0].get("started") if run.starts else None,
                "tiles": tiles(run),
                "troubles": [list(trouble) for trouble in health(run.metrics)],
                "clock": clock(run),
            }
            for run in runs
        ],
        "sections": sections(runs),
        "samples": samples(runs),
        "settings": settings(runs),
        "environment": _table([flatten(run.starts[-1]) if run.starts else {} for run in runs]),
    }


def settings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every setting: its value in each run, and whether one is not the default."""
    defaults = flatten(json.loads(json.dumps(asdict(Config()))))
    rows = _table([run.config for run in runs])
    missing = object()
    for row in rows:
        default = _shown(defaults.get(row["name"], missing))
        row["changed"] = any(value not in (default, "") for value in row["values"])
    return rows


def _table(columns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [_shown(column[name]) if name in column else "" for column in columns]
        rows.append({"name": name, "values": values, "differs": len(set(values)) > 1})
    return rows


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
