"""JSON and JSON Lines files as rows.

JSON is read here rather than by `datasets`, whose columns must have one type: answers 5, "5" and [1, 2] in one column
are then an error, or all become strings.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from r1.data.faults import RowError

BOM = b"\xef\xbb\xbf"
NOT_AN_OBJECT = "row is not an object"


class JsonRows:
    """Rows read from JSON; a key that a row lacks is None, as it would be in a table."""

    def __init__(self, rows: Sequence[dict[str, Any] | RowError]) -> None:
        """A RowError stands for a line that could not be read, and is raised when that row is asked for."""
        self.rows = rows
        self.column_names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if isinstance(row, RowError):
            raise RowError(row.kind, row.problem, row.fix)
        return {name: row.get(name) for name in self.column_names}

    def select(self, indices: Iterable[int]) -> "JsonRows":
        return JsonRows([self.rows[i] for i in indices])


def read_json(path: Path) -> list[dict[str, Any] | RowError]:
    """Rows of a JSON file: a list of objects, one object that holds such a list, or an object a line.

    Raises:
        ValueError: no row in it can be read.
    """
    data = path.read_bytes().removeprefix(BOM)
    if not data.strip():
        raise ValueError(f"{path} is empty; it should hold one JSON object a row")
    rows = _read_lines(data) if path.suffix == ".jsonl" else _read_document(path, data)
    if rows and not any(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} has no row that can be read; its first {rows[0]}")
    return rows


def _read_document(path: Path, data: bytes) -> list[dict[str, Any] | RowError]:
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it to UTF-8") from error
    except json.JSONDecodeError as error:
        if data.lstrip().startswith(b"{") and b"\n" in data.strip():  # JSON lines under the name .json
            return _read_lines(data)
        raise ValueError(f"{path} line {error.lineno} is not JSON ({error.msg}); mend it there") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read; expected a list of objects, one a row") from error
    if isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)]
        value = lists[0] if len(value) == len(lists) == 1 else [value]
    if not isinstance(value, list):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a list of objects, one a row")
    return [_as_row(row, "is") for row in value]


def _read_lines(data: bytes) -> list[dict[str, Any] | RowError]:
    # Split at \n alone: JSON strings may hold U+2028, at which splitlines would cut.
    # Files joined end to end have a byte-order mark before each one's first line.
    cut = (line.removeprefix(BOM) for line in data.split(b"\n"))
    lines = ((i, line) for i, line in enumerate(cut, start=1) if line.strip())
    return [_read_line(number, line) for number, line in lines]


def _read_line(number: int, line: bytes) -> dict[str, Any] | RowError:
    where = f"(line {number} of its file)"
    try:
        return _as_row(json.loads(line.decode()), f"{where} is")
    except UnicodeDecodeError as error:
        problem = f"{where} is not UTF-8 at byte {error.start} of the line"
        return RowError("line is not UTF-8", problem, "convert the file to UTF-8")
    except json.JSONDecodeError as error:
        return RowError("line is not JSON", f"{where} is not JSON ({error})", "mend or delete the line")
    except (RecursionError, ValueError) as error:  # thousands of brackets; an integer of thousands of digits
        return RowError("line is not JSON", f"{where} cannot be read ({error})", "mend or delete the line")


def _as_row(value: Any, verb: str) -> dict[str, Any] | RowError:
    if isinstance(value, dict):
        return value
    problem = f"{verb} a {type(value).__name__}"
    return RowError(NOT_AN_OBJECT, problem, "write an object that maps columns to values")
