"""Advantages and losses by name, or from a user's file."""

import difflib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def function_of(spec: str, table: Mapping[str, Callable[..., Any]], *, option: str) -> Callable[..., Any]:
    """The function that a config names: one of table, or `path/to/file.py:function`.

    Args:
        option: the config field, for messages.

    Raises:
        ValueError: no such name, file or function; names the nearest.
    """
    if spec in table:
        return table[spec]
    path, _, name = spec.partition(":")
    if not path.endswith(".py"):
        near = difflib.get_close_matches(spec.lower(), table, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(table)}, or path.py:function"
        raise ValueError(f"{option}={spec!r} is not known; {hint}")
    path = str(Path(path).expanduser())
    if not Path(path).is_file():
        raise ValueError(f"{option}={spec!r}: no file {path!r} (relative paths start at {Path.cwd()})")
    module_spec = importlib.util.spec_from_file_location(f"r1_user_{Path(path).stem}", path)
    assert module_spec is not None and module_spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    found = getattr(module, name or "main", None)
    if not callable(found):
        raise ValueError(f"{option}={spec!r}: {path} has no function {name or 'main'!r}")
    return found
