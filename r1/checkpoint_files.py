"""Which folders count as checkpoints: the marker file, their order, what a path means, and kill-proof writing."""

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from r1.config import CheckpointConfig

MARKER, POINTER, BEST, CONFIG = "complete.json", "latest.json", "best.json", "config.json"
SHARDS, HF = "shards", "hf"
STEP_FOLDER = re.compile(r"step_(\d+)")
_PART = 16 * 2**20  # bytes read at a time for a checksum


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a complete checkpoint; None when it is missing, or a file it lists is gone or cut short.

    The files under hf/ only have to be there: people edit them.
    """
    try:
        marker = json.loads((folder / MARKER).read_text())
        for name, (size, _) in marker["files"].items():
            if (folder / name).stat().st_size != size and not name.startswith(f"{HF}/"):
                return None
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return None
    return marker


def checksum(path: Path, *, sync: bool = False) -> list[int]:
    """[size in bytes, CRC-32] of a file; sync: push it to the disk, too."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while part := file.read(_PART):
            size, crc = size + len(part), zlib.crc32(part, crc)
        if sync:
            os.fsync(file.fileno())
    return [size, crc]


def damaged_files(folder: Path, marker: dict[str, Any], *, share: slice = slice(None)) -> list[str]:
    """Names of files whose bytes are not those that were saved (people may edit hf/); share: of the sorted names."""
    names = sorted(name for name in marker["files"] if not name.startswith(f"{HF}/"))
    return [name for name in names[share] if checksum(folder / name) != marker["files"][name]]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a checkpoints/ folder in the order they were saved, the newest last.

    The order of saving is a counter in the marker, so that in a folder that is used again step 10 of the new run is
    newer than step 1000 of the old one; within a run it is the order of the step numbers.
    """
    order = {}
    for path in folder.glob("step_*"):
        if STEP_FOLDER.fullmatch(path.name) and (marker := read_marker(path)) is not None:
            order[path] = (marker["sequence"], marker["step"])
    return sorted(order, key=lambda path: order[path])


def torn_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a checkpoints/ folder that were whole once and are not any more."""
    return sorted(p.parent for p in folder.glob(f"step_*/{MARKER}") if read_marker(p.parent) is None)


def metric_of(marker: dict[str, Any], config: CheckpointConfig) -> float | None:
    """The checkpoint's value of checkpoint.best_metric; None where it was not measured at that step."""
    value = marker["metrics"].get(config.best_metric) if config.best_metric is not None else None
    return value if value is not None and math.isfinite(value) else None


def best_checkpoints(paths: Iterable[Path], config: CheckpointConfig) -> list[Path]:
    """Those of paths that have the metric, the best first; of equals the one later in paths."""
    sign = 1 if config.best_mode == "max" else -1
    values = [(marker, path) for path in paths if (marker := read_marker(path)) is not None]
    ranked = [
        (sign * value, i, path) for i, (m, path) in enumerate(values) if (value := metric_of(m, config)) is not None
    ]
    return [path for _, _, path in sorted(ranked, reverse=True)]


def superfluous(complete: list[Path], config: CheckpointConfig) -> list[Path]:
    """What to delete of complete, the newest last: neither of the save_limit newest nor of the best_limit best."""
    if config.save_limit == -1:
        return []
    kept = set(complete[-config.save_limit :]) | set(best_checkpoints(complete, config)[: config.best_limit])
    return [path for path in complete if path not in kept]


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that path means: itself, or the newest complete one of a run folder or checkpoints/ folder.

    Raises:
        ValueError: there is none; the message lists what is there instead.
    """
    path = Path(path)
    if read_marker(path) is not None:
        return path
    for folder in (path / "checkpoints", path):
        if found := complete_checkpoints(folder):
            return found[-1]
    if not path.exists():
        problem = f"{path} does not exist"
    elif (path / MARKER).exists():
        problem = f"{path} is damaged: a file that its {MARKER} lists is missing or has another size"
    elif STEP_FOLDER.fullmatch(path.name):
        problem = f"{path} is half written: it has no {MARKER}"
    else:
        problem = f"{path} holds no checkpoint"
    parent = path.parent if STEP_FOLDER.fullmatch(path.name) else path
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    complete = [p.name for p in complete_checkpoints(parent)]
    there = f"complete checkpoints: {', '.join(complete)}" if complete else f"{_names_in(parent)} and no checkpoint"
    raise ValueError(f"{problem}. {parent} has {there}; give a folder like runs/<name>/checkpoints/step_000050")


def _names_in(folder: Path, most: int = 8) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "no files"


def remove(folder: Path) -> None:
    # The marker first: a kill in the middle leaves a folder that does not count.
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def write_synced(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def write_text_atomically(path: Path, text: str) -> None:
    """Whoever reads path sees the old text or the new one, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Push the folder's list of names to the disk; fsync of a file does not."""
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
