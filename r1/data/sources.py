"""A source string taken apart: [name=]location[@split][*weight], where a location may be a glob."""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

JSON_KINDS = (".json", ".jsonl")
TABLE_KINDS = (".parquet", ".arrow")
SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source string in its parts; a split may be sliced as in train[:100]."""

    name: str
    location: str
    split: str | None
    weight: float | None = None  # the share of rows drawn from here is weight / sum of weights

    @property
    def path(self) -> Path | None:
        """The local file or folder; None for a hub id or a glob."""
        path = Path(self.location).expanduser()
        return path if path.exists() else None

    @property
    def paths(self) -> list[Path]:
        """The local file or folder, or the files that a glob matches, by name; [] for a hub id."""
        if self.path is not None:
            return [self.path]
        matches = glob.glob(str(Path(self.location).expanduser()), recursive=True)
        return sorted(Path(match) for match in matches)

    @property
    def is_glob(self) -> bool:
        return self.path is None and glob.has_magic(self.location)


def parse_source(source: str) -> Source:
    """Take a source string apart. A path that exists is taken whole, also where it holds '@', '=' or '*'."""
    name, location, split, weight = "", source.strip(), None, None
    if not location:
        raise ValueError("a data source is empty; give a hub id, a file or a folder, as in data/train.jsonl")
    if not exists(location) and (match := re.fullmatch(r"(.+)\*(\d+\.?\d*|\.\d+)", location)):
        location, weight = match[1], float(match[2])
        if weight == 0:
            raise ValueError(f"data source {source!r} has the weight 0; leave it out, or give it a share")
    if not exists(location) and (match := re.fullmatch(r"([\w.-]+)=(.+)", location)):
        name, location = match[1], match[2]
    if not exists(location) and "@" in location:
        location, _, split = location.rpartition("@")
    return Source(name=name or _name_of(location), location=location, split=split or None, weight=weight)


def set_name(source: str) -> str:
    """The name of a set in metrics: what stands before '=', else the file's or data set's own."""
    return parse_source(source).name


def data_dir(source: str) -> Path | None:
    """The folder that a local source lies in, which relative image paths start from; None for a hub id."""
    path = parse_source(source).path
    return path.parent if path is not None and path.is_file() else path


def as_sources(value: str | Sequence[str]) -> list[str]:
    """One source or several, as a list."""
    return [value] if isinstance(value, str) else list(value)


def exists(location: str) -> bool:
    try:
        return Path(location).expanduser().exists()
    except (OSError, RuntimeError):  # a name too long for a path, a ~user who does not exist
        return False


def split_words(path: Path) -> set[str]:
    """The names of splits that are written in a path, as in data/train-00000-of-00002.parquet."""
    words = set(re.split(r"[^a-z]+", str(path).lower()))
    return {word for word in SPLIT_WORDS if word in words}


def glob_root(location: str) -> Path:
    """The part of a path before its first component with a wildcard; a path that exists is taken whole."""
    path = Path(location).expanduser()
    while not exists(str(path)) and glob.has_magic(str(path)) and path.parent != path:
        path = path.parent
    return path


def _name_of(location: str) -> str:
    path = glob_root(location)  # data/*.jsonl is named after data
    if not exists(location):
        path = path.with_name(path.name.partition(":")[0]) if path.name else path
    return (path.stem if path.suffix in JSON_KINDS + TABLE_KINDS else path.name) or "data"
