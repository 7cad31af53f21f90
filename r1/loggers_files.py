"""The run folder's own log: metrics.jsonl, samples.jsonl, and small copies of the samples' pictures."""

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

MAX_PICTURES = 1000
"""Pictures that a run folder keeps, the latest: about 10 MB."""
MAX_PICTURES_PER_SAMPLE = 8
PICTURE_SIDE = 320
"""Pixels of a kept picture's longer side: enough to read a figure."""
_DATA_URL = re.compile(r"data:([\w/+.-]+)(?:;[\w.=-]+)*;base64,([\w+/=-]{64,})")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{512,}={0,2}")


def plain(value: Any) -> Any:
    """value as JSON takes it: pictures and their base64 shortened to a stub, what is not finite None."""
    if isinstance(value, str):
        value = _DATA_URL.sub(lambda m: f"<{m[1]}, {len(m[2]):,} characters of base64>", value)
        return _BASE64.sub(lambda m: f"<{m[0][:16]}... {len(m[0]):,} characters>", value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Image):
        return f"<image {value.width}x{value.height}>"
    return plain(value.item()) if hasattr(value, "item") and getattr(value, "size", 0) == 1 else plain(str(value))


class Files:
    """metrics.jsonl and samples.jsonl, whose steps only rise; a record's pictures go to images/, by their content."""

    def __init__(self, run_dir: Path, resumed_step: int | None) -> None:
        self.metrics, self.responses = run_dir / "metrics.jsonl", run_dir / "samples.jsonl"
        self.pictures = Pictures(run_dir)
        for path in (self.metrics, self.responses):
            if path.exists():
                _set_aside(path, resumed_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        _append(self.metrics, [{"step": step} | {name: plain(float(value)) for name, value in metrics.items()}])

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        """Each with its own keys; "images", a list of PIL images, becomes the paths of small copies."""
        _append(self.responses, [{"step": step, "kind": kind} | self.pictures.keep(record) for record in records])

    def close(self) -> None:
        """Each write opens and closes its file."""


class Pictures:
    """Small copies of pictures in run_dir/images, equal ones once; the oldest go when there are too many."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.folder = run_dir, run_dir / "images"
        kept = sorted(self.folder.glob("*.jpg"), key=lambda path: path.stat().st_mtime)
        self.names = dict.fromkeys(path.name for path in kept)  # least recently used first

    def keep(self, record: dict[str, Any]) -> dict[str, Any]:
        """A sample's record as JSON takes it, its pictures kept."""
        return plain(record | {"images": self.save(record["images"])} if record.get("images") else record)

    def save(self, images: Sequence[Image]) -> list[str]:
        """Returns their paths in the run folder; of what exceeds MAX_PICTURES_PER_SAMPLE, stubs."""
        return [self._save(image) for image in images[:MAX_PICTURES_PER_SAMPLE]] + [
            plain(image) for image in images[MAX_PICTURES_PER_SAMPLE:]
        ]

    def _save(self, image: Image) -> str:
        content = io.BytesIO()
        thumbnail(image).save(content, "JPEG", quality=85)
        name = hashlib.sha256(content.getvalue()).hexdigest()[:16] + ".jpg"
        if name in self.names and (self.folder / name).exists():
            self.names.pop(name)
            os.utime(self.folder / name)
        else:
            self.folder.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content.getvalue())
        self.names[name] = None
        while len(self.names) > MAX_PICTURES:
            oldest = next(iter(self.names))
            self.names.pop(oldest)
            (self.folder / oldest).unlink(missing_ok=True)
        return f"{self.folder.name}/{name}"


def thumbnail(image: Image) -> Image:
    """A small copy in RGB."""
    small = image.convert("RGB")
    small.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    return small


def _append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    # Half a surrogate pair, which UTF-8 cannot write, becomes JSON's escape for it.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(lines)


def _set_aside(path: Path, resumed_step: int | None) -> None:
    """Move the lines of later steps, and one that a kill cut short, to <name>.superseded.jsonl."""
    keep, aside = [], []
    # Not splitlines(): a response may hold characters that end a line for Unicode, and JSON leaves them as they are.
    for line in path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"):
        try:
            superseded = resumed_step is not None and json.loads(line)["step"] > resumed_step - (resumed_step == 0)
        except (json.JSONDecodeError, KeyError, TypeError):
            superseded = True
        (aside if superseded else keep).append(line + "\n")
    if aside:
        with path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(aside)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(keep), encoding="utf-8")
        os.replace(temporary, path)
