"""Where rows come from: a hub id, a JSON, JSONL, parquet or arrow file, a folder or glob of them, a saved data set.

Rows are read-only dicts by position.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import datasets
import pyarrow.parquet
from datasets.exceptions import DatasetGenerationError

from r1.data.json_rows import JsonRows, read_json
from r1.data.sources import JSON_KINDS, TABLE_KINDS, data_dir, glob_root, parse_source, set_name, split_words

__all__ = ["Part", "Rows", "data_dir", "load_parts", "load_rows", "parse_source", "set_name"]


class Rows(Protocol):
    """What the rest of r1 uses of a data set; `datasets.Dataset` has it too."""

    @property
    def column_names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows that come from one file, folder or hub id, as messages name them and as their image paths start."""

    name: str
    rows: Rows
    folder: Path | None  # relative image paths start here; None for a hub id


def load_rows(source: str, *, default_split: str = "train") -> Rows:
    """Read a data source that is not a glob.

    Images of `datasets`' Image feature stay encoded, as {"bytes", "path"}: r1 decodes them itself.

    Args:
        source: [name=]location[@split]; hub ids, owner/name or owner/name:subset, go through `datasets.load_dataset`,
            which respects HF_ENDPOINT, or with USE_MODELSCOPE_HUB=1 through `modelscope`.
        default_split: the split where the source names none.

    Raises:
        ValueError: nothing there, no rows, or no line that can be read.
    """
    parsed = parse_source(source)
    split = parsed.split or default_split
    rows = _load(parsed.location, parsed.path, parsed.split, default_split)
    if len(rows) == 0:
        raise ValueError(f"{source} has no rows; check the file, or the split {split!r}")
    return rows


def load_parts(source: str) -> list[Part]:
    """Read a data source; a glob gives one part for each file or folder that it matches.

    Raises:
        ValueError: as load_rows, or the glob matches nothing.
    """
    parsed = parse_source(source)
    if not parsed.is_glob:
        return [Part(name=parsed.name, rows=load_rows(source), folder=data_dir(source))]
    split = parsed.split or "train"
    name = split.partition("[")[0]
    paths = [p for p in parsed.paths if p.is_dir() or p.suffix in JSON_KINDS + TABLE_KINDS]
    if parsed.split is not None and any(split_words(Path(p.name)) for p in paths):
        paths = [p for p in paths if p.is_dir() or name in split_words(Path(p.name))]
    root = glob_root(parsed.location)
    if not paths:
        raise ValueError(f"{source} matches no {', '.join(JSON_KINDS + TABLE_KINDS)} file (looked from {Path.cwd()})")
    parts = [
        Part(
            name=str(p.relative_to(root).with_suffix("")),
            rows=_load("", p, name, "train"),
            folder=p if p.is_dir() else p.parent,
        )
        for p in paths
    ]
    return _slice_parts(parts, split)


def _slice_parts(parts: Sequence[Part], split: str) -> list[Part]:
    """The parts that hold the rows of 'train[10:20]' of all parts together."""
    chosen = _chosen(split, sum(len(p.rows) for p in parts))
    kept, start = [], 0
    for part in parts:
        size = len(part.rows)
        inside = range(max(chosen.start - start, 0), min(chosen.stop - start, size))
        if len(inside) == size > 0:
            kept.append(part)
        elif inside:
            selectable: Any = part.rows
            kept.append(replace(part, rows=selectable.select(inside)))
        start += size
    return kept


def _load(location: str, path: Path | None, split: str | None, default_split: str) -> Rows:
    if path is None:
        return _load_hub(location, split or default_split)
    return _load_folder(path, split or default_split) if path.is_dir() else _load_file(path, split)


def _load_hub(location: str, split: str) -> Rows:
    if Path(location).suffix in JSON_KINDS + TABLE_KINDS or location.startswith((".", "/", "~")):
        raise ValueError(
            f"no file or folder {location} (looked from {Path.cwd()}); check data.train_files and val_files"
        )
    if os.environ.get("USE_MODELSCOPE_HUB", "0").lower() in ("1", "true", "yes"):
        return _keep_encoded(_load_modelscope(location, split))
    try:
        name, _, subset = location.partition(":")
        rows = datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError) as error:  # not found, not reachable, no such split or configuration
        raise ValueError(
            f"{location}@{split} is no local path and could not be loaded from the hub: {error}; "
            "check the name and the split, and the network (HF_ENDPOINT sets a mirror)"
        ) from error
    return _keep_encoded(rows)


def _load_modelscope(location: str, split: str) -> Any:
    """Rows from the ModelScope hub, as a `datasets.Dataset`; seen with a stand-in of its client only."""
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise ValueError(
            f"USE_MODELSCOPE_HUB=1 asks for {location} from ModelScope, but its client is not installed ({error}); "
            "pip install modelscope, or unset USE_MODELSCOPE_HUB"
        ) from error
    name, _, subset = location.partition(":")
    try:
        rows = MsDataset.load(name, split=split.partition("[")[0], **({"subset_name": subset} if subset else {}))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{location}@{split} could not be loaded from ModelScope: {error}; check the name, the split, the network"
        ) from error
    return _slice(rows.to_hf_dataset() if isinstance(rows, MsDataset) else rows, split)


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
    splits = {path: split_words(path.relative_to(folder)) for path in files}
    if any(splits.values()):
        files = [path for path in files if name in splits[path]]
    elif name != "train":  # files that name no split are all training rows, as in `datasets`
        files = []
    if not files:
        found = sorted({word for words in splits.values() for word in words}) or ["train"]
        raise ValueError(f"{folder} has no file of split {name!r}; its file names say {', '.join(found)}")
    return _slice(_read_files(files), split)


def _load_file(path: Path, split: str | None) -> Rows:
    name = (split or "train").partition("[")[0]
    if name != "train" and name not in split_words(Path(path.name)):
        raise ValueError(f"{path} is one file, which is one split; drop @{name}, or give the file that holds {name}")
    if path.suffix not in JSON_KINDS + TABLE_KINDS:
        raise ValueError(f"{path} is not a {', '.join(JSON_KINDS + TABLE_KINDS)} file; convert it to one of these")
    return _slice(_read_files([path]), split or "train")


def _read_files(files: Sequence[Path]) -> Rows:
    kinds = sorted({path.suffix for path in files})
    if all(kind in JSON_KINDS for kind in kinds):
        return JsonRows([row for path in files for row in read_json(path)])
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


def _slice(rows: Any, split: str) -> Rows:
    """The rows of 'train[10:20]' or 'train[:50%]', as `datasets` slices a hub set's split."""
    return rows.select(_chosen(split, len(rows))) if "[" in split else rows


def _chosen(split: str, num_rows: int) -> range:
    name, bracket, _ = split.partition("[")
    if not bracket:
        return range(num_rows)
    match = re.fullmatch(r"\[(-?\d+%?)?:(-?\d+%?)?\]", split[len(name) :])
    if match is None:
        raise ValueError(f"split {split!r} is not understood; write train, train[:100], train[100:] or train[:50%]")
    bounds = [None if b is None else _position(b, num_rows) for b in match.groups()]
    return range(num_rows)[slice(*bounds)]


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
