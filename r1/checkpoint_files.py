"""Which folders count as checkpoints: the marker file, their order, what a path means, and kill-proof writing."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

MARKER, POINTER, SHARDS, HF = "complete.json", "latest.json", "shards", "hf"
STEP_FOLDER = re.compile(r"step_(\d+)")


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a complete checkpoint; None when it is missing, or a file it lists is gone or cut short.

    The files under hf/ only have to be there: people edit them.
    """
    try:
        marker = json.loads((folder / MARKER).read_text())
        for name, size in marker["files"].items():
            if (folder / name).stat().st_size != size and not name.startswith(f"{HF}/"):
                return None
    except (OSError, json.JSONDecodeError, KeyError):
        return None
    return marker


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
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
