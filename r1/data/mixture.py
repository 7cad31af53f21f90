"""Several data sources as one set of rows, and the order in which an epoch draws from them by their weights."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from r1.config import DataConfig
from r1.data.faults import RowError
from r1.data.rows import Part, Rows, load_parts
from r1.data.sources import parse_source


class Mixture:
    """The rows of all sources, one source after the other; a column that a row's file lacks is None."""

    def __init__(self, sources: Sequence[str], config: DataConfig) -> None:
        """Read the sources.

        Raises:
            ValueError: a source that cannot be read or lacks a column; weights on some sources only.
        """
        if not sources:
            raise ValueError("no data source is named; give data.train_files a hub id, a file or a folder")
        self.parts: list[Part] = []
        self.source_of: list[int] = []  # for each part, the position of the source that it came from
        for i, source in enumerate(sources):
            parts = load_parts(source)
            for part in parts:
                check_columns(part.rows, config, source=source if len(parts) == 1 else part.name)
            self.parts += parts
            self.source_of += [i] * len(parts)
        self.sources = [parse_source(source) for source in sources]
        self.name = "+".join(dict.fromkeys(s.name for s in self.sources))
        self.weights = _weights(sources)
        self._ends = list(accumulate(len(part.rows) for part in self.parts))
        self.column_names = list(dict.fromkeys(name for part in self.parts for name in part.rows.column_names))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, position = self._place(index)
        row = part.rows[position]
        return dict(row) if len(self.parts) == 1 else {name: row.get(name) for name in self.column_names}

    def read(self, index: int) -> dict[str, Any] | RowError:
        """A row, or why its line could not be read."""
        try:
            return self[index]
        except RowError as error:
            return error

    def label(self, index: int) -> str:
        """'train row 17': how messages name a row, by its position in its own file."""
        part, position = self._place(index)
        return f"{part.name} row {position}"

    def folder(self, index: int) -> Path | None:
        """Where the row's relative image paths start."""
        return self._place(index)[0].folder

    def source(self, index: int) -> int:
        """The position of the row's source among the sources."""
        return self.source_of[bisect_right(self._ends, index)]

    def _place(self, index: int) -> tuple[Part, int]:
        i = bisect_right(self._ends, index)
        return self.parts[i], index - (self._ends[i - 1] if i else 0)


def check_columns(rows: Rows, config: DataConfig, *, source: str = "the data") -> None:
    """Raise ValueError unless the prompt and answer columns are there; images may be absent."""
    for option, name in (("data.prompt_key", config.prompt_key), ("data.answer_key", config.answer_key)):
        if name not in rows.column_names:
            raise ValueError(
                f"{source} has no column {name!r}; its columns are {', '.join(rows.column_names)}: set {option} to one"
            )


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """One order of num_rows rows, the same on every rank and machine."""
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def weighted_order(
    groups: Sequence[Sequence[int]], weights: Sequence[float], *, draws: int, seed: int, epoch: int, shuffle: bool
) -> list[int]:
    """The rows that an epoch draws when each source has a share of them.

    Source i gives draws * weights[i] / sum(weights) of them, rounded so that they add up. It goes through its own rows
    from epoch to epoch, each once before any comes again; a small source with a large share comes round several times.

    Args:
        groups: the rows of each source.
        shuffle: False keeps each source's order and takes from the sources in turn.
    """
    chosen: list[tuple[float, int]] = []
    for i, (rows, count) in enumerate(zip(groups, _shares(weights, draws), strict=True)):
        for k in range(count):
            cycle, position = divmod(epoch * count + k, len(rows))
            if shuffle:
                position = int(_cycle_order(seed, i, cycle, len(rows))[position])
            chosen.append(((k + 0.5) / count, rows[position]))
    if shuffle:
        return [chosen[i][1] for i in permutation(seed, epoch, len(chosen))]
    return [row for _, row in sorted(chosen, key=lambda pair: pair[0])]


@lru_cache(maxsize=64)
def _cycle_order(seed: int, source: int, cycle: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng((seed, source, cycle)).permutation(num_rows)


def _shares(weights: Sequence[float], draws: int) -> list[int]:
    """draws divided in proportion to weights, by largest remainders."""
    exact = [draws * w / sum(weights) for w in weights]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: draws - sum(counts)]:
        counts[i] += 1
    return counts


def _weights(sources: Sequence[str]) -> list[float] | None:
    """The weights where all sources have one, None where none has."""
    weights = [parse_source(source).weight for source in sources]
    given = [w for w in weights if w is not None]
    if given and len(given) < len(weights):
        without = sources[weights.index(None)]
        raise ValueError(f"{without!r} has no weight but another source has; end each with one, as in {without}*0.5")
    return given or None
