"""Where rows come from: a hub id, a JSON, JSONL, parquet or arrow file, or a folder of them.

Rows are read-only dicts by position. JSON is read here rather than by `datasets`, whose columns must have one type:
answers 5, "5" and [1, 2] in one column are then an error, or all become strings.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets
import pyarrow.parquet
from datasets.exceptions import DatasetGenerationError

JSON_KINDS = (".json", ".jsonl")
TABLE_KINDS = (".parquet", ".arrow")
SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")


class Rows(Protocol):
    """What the rest of r1 uses of a data set; `datasets.Dataset` has it too."""

    @property
    def column_names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class JsonRows:
    """Rows read from JSON; a key that a row lacks is None, as it would be in a table."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.column_names = list(dict.fromkeys(name for row in rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: self.rows[index].get(name) for name in self.column_names}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source string in its parts: [name=]location[@split], where a split may be sliced as in train[:100]."""

    name: str
    location: str
    split: str | None

    @property
    def path(self) -> Path | None:
        """The local file or folder; None for a hub id."""
        path = Path(self.location).expanduser()
        return path if path.exists() else None


def parse_source(source: str) -> Source:
    """Take a source string apart. A path that exists is taken whole, also where it holds '@' or '='."""
    name, location, split = "", source.strip(), None
    if not location:
        raise ValueError("a data source is empty; give a hub id, a file or a folder, as in data/train.jsonl")
    if not _exists(location) and (match := re.fullmatch(r"([\w.-]+)=(.+)", location)):
        name, location = match[1], match[2]
    if not _exists(location) and "@" in location:
        location, _, split = location.rpartition("@")
    last = Path(location).name
    is_file = Path(location).suffix in JSON_KINDS + TABLE_KINDS
    return Source(name=name or (Path(last).stem if is_file else last), location=location, split=split or None)


def set_name(source: str) -> str:
    """The name of a set in metrics: what stands before '=', else the file's or data set's own."""
    return parse_source(source).name


def data_dir(source: str) -> Path | None:
    """The folder that a local source lies in, which relative image paths start from; None for a hub id."""
    path = parse_source(source).path
    return path.parent if path is not None and path.is_file() else path


def load_rows(source: str, *, default_split: str = "train") -> Rows:
    """Read a data source.

    Images of `datasets`' Image feature stay encoded, as {"bytes", "path"}: r1 decodes them itself.

    Args:
        source: [name=]location[@split]; hub ids go through `datasets.load_dataset`, which respects HF_ENDPOINT.
        default_split: the split where the source names none.

    Raises:
        ValueError: nothing there, no rows, or a line that is not a JSON object; names the file and the line.
    """
    parsed = parse_source(source)
    split = parsed.split or default_split
    if parsed.path is None:
        rows = _load_hub(parsed.location, split)
    elif parsed.path.is_dir():
        rows = _load_folder(parsed.path, split)
    else:
        rows = _load_file(parsed.path, parsed.split)
    if len(rows) == 0:
        raise ValueError(f"{source} has no rows; check the file, or the split {split!r}")
    return rows


def _exists(location: str) -> bool:
    return Path(location).expanduser().exists()


def _load_hub(location: str, split: str) -> Rows:
    if Path(location).suffix in JSON_KINDS + TABLE_KINDS or location.startswith((".", "/", "~")):
        raise ValueError(
            f"no file or folder {location} (looked from {Path.cwd()}); check data.train_files and val_files"
        )
    try:
        rows = datasets.load_dataset(location, split=split)
    except (OSError, ValueError) as error:  # not found, not reachable, no such split or configuration
        raise ValueError(
            f"{location}@{split} is no local path and could not be loaded from the hub: {error}; "
            "check the name and the split, and the network (HF_ENDPOINT sets a mirror)"
        ) from error
    return _keep_encoded(rows)


def _load_folder(folder: Path, split: str) -> Rows:
    """A folder that `save_to_disk` wrote, or one of data files: those whose path has the split's name in it."""
    name, _, _ = split.partition("[")
    if (folder / "dataset_dict.json").exists():
        saved: Any = datasets.load_from_disk(str(folder))
        if name not in saved:
            raise ValueError(
                f"{folder} has no split {name!r}; it has {', '.join(saved)}: write {folder}@{next(iter(saved))}"
            )
        return _keep_encoded(_slice(saved[name], split))
    if (folder / "state.json").exists():
        return _keep_encoded(_slice(datasets.load_from_disk(str(folder)), split))
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in JSON_KINDS + TABLE_KINDS
        and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    ]
    if not files:
        raise ValueError(f"{folder} holds no {', '.join(JSON_KINDS + TABLE_KINDS)} file, nor a saved data set")
    splits = {path: _split_words(path.relative_to(folder)) for path in files}
    if any(splits.values()):
        files = [path for path in files if name in splits[path]]
    elif name != "train":  # files that name no split are all training rows, as in `datasets`
        files = []
    if not files:
        found = sorted({word for words in splits.values() for word in words}) or ["train"]
        raise ValueError(f"{folder} has no file of split {name!r}; its file names say {', '.join(found)}")
    return _slice(_read_files(files), split)


def _split_words(path: Path) -> set[str]:
    words = set(re.split(r"[^a-z]+", str(path).lower()))
    return {word for word in SPLIT_WORDS if word in words}


def _load_file(path: Path, split: str | None) -> Rows:
    name = (split or "train").partition("[")[0]
    if name != "train" and name not in _split_words(Path(path.name)):
        raise ValueError(f"{path} is one file, which is one split; drop @{name}, or give the file that holds {name}")
    if path.suffix not in JSON_KINDS + TABLE_KINDS:
        raise ValueError(f"{path} is not a {', '.join(JSON_KINDS + TABLE_KINDS)} file; convert it to one of these")
    return _slice(_read_files([path]), split or "train")


def _read_files(files: Sequence[Path]) -> Rows:
    kinds = sorted({path.suffix for path in files})
    if all(kind in JSON_KINDS for kind in kinds):
        return JsonRows([row for path in files for row in _read_json(path)])
    if len(kinds) > 1:
        raise ValueError(f"{files[0].parent} mixes {', '.join(kinds)} files; keep one kind, or name one file")
    kind = kinds[0]
    for path in files:
        try:
            if kind == ".parquet" and pyarrow.parquet.ParquetFile(path).metadata.num_rows == 0:
                raise ValueError(f"{path} has no rows; remove it")
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path} is not a readable parquet file ({error}); write it anew") from error
    try:
        rows = datasets.load_dataset(kind[1:], data_files=[str(path) for path in files], split="train")
    except (DatasetGenerationError, ValueError, OSError) as error:
        cause = error.__cause__ or error
        raise ValueError(f"cannot read {', '.join(map(str, files))}: {cause}; write it anew") from error
    return _keep_encoded(rows)


def _read_json(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON file: a list of objects, one object that holds such a list, or an object a line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it to UTF-8") from error
    if not text.strip():
        raise ValueError(f"{path} is empty; it should hold one JSON object a row")
    if path.suffix == ".jsonl":
        return _read_lines(path, text)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and "\n" in text.strip():  # JSON lines under the name .json
            return _read_lines(path, text)
        raise ValueError(f"{path} line {error.lineno} is not JSON ({error.msg}); mend it there") from error
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)]
        value = lists[0] if len(value) == len(lists) == 1 else [value]
    if not isinstance(value, list):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a list of objects, one a row")
    for i, row in enumerate(value):
        if not isinstance(row, dict):
            raise ValueError(
                f"{path} row {i} is a {type(row).__name__}; expected an object that maps columns to values"
            )
    return value


def _read_lines(path: Path, text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON strings may hold U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}); mend or delete the line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number} is a {type(row).__name__}; expected an object of columns")
        rows.append(row)
    return rows


def _slice(rows: Any, split: str) -> Rows:
    """The rows of 'train[10:20]' or 'train[:50%]', as `datasets` slices a hub set's split."""
    name, bracket, _ = split.partition("[")
    if not bracket:
        return rows
    match = re.fullmatch(r"\[(-?\d+%?)?:(-?\d+%?)?\]", split[len(name) :])
    if match is None:
        raise ValueError(f"split {split!r} is not understood; write train, train[:100], train[100:] or train[:50%]")
    bounds = [None if b is None else _position(b, len(rows)) for b in match.groups()]
    chosen: Iterable[int] = range(len(rows))[slice(*bounds)]
    return JsonRows([rows.rows[i] for i in chosen]) if isinstance(rows, JsonRows) else rows.select(chosen)


def _position(bound: str, num_rows: int) -> int:
    return round(int(bound[:-1]) * num_rows / 100) if bound.endswith("%") else int(bound)


def _keep_encoded(rows: Any) -> Rows:
    """Have Image columns give {"bytes", "path"}: decoding every picture to learn its size would take hours."""
    for name, feature in rows.features.items():
        encoded = _encoded(feature)
        if encoded != feature:
            rows = rows.cast_column(name, encoded)
    return rows


def _encoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return type(feature)(_encoded(feature.feature))
    if isinstance(feature, dict):
        return {name: _encoded(inner) for name, inner in feature.items()}
    return feature
