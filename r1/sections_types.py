"""Whether the fields of a config's section hold what their annotations say: a config file is Python, which asks no one.

Without it `shuffle="False"` is true, `overlong_prompts="trim"` is no error, and `lr="1e-6"` fails in a comparison.
"""

import dataclasses
import difflib
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", type(None): "None"}


def check_types(section: Any, name: str) -> None:
    """Raise ValueError unless every field of a section fits its annotation; a list becomes its tuple, a path its text.

    Args:
        name: the section's dotted name, for messages; "" for the whole config.
    """
    for field_name, annotation in get_type_hints(type(section)).items():
        if field_name not in {field.name for field in dataclasses.fields(section)}:
            continue
        value = given = getattr(section, field_name)
        if isinstance(value, list) and "tuple" in str(annotation):
            value = tuple(value)
        value = tuple(map(_as_text, value)) if isinstance(value, tuple) else _as_text(value)
        if value is not given:
            object.__setattr__(section, field_name, value)  # sections are frozen, but this one is being made
        if not fits(value, annotation) or value != value:  # NaN
            dotted = f"{name}.{field_name}".lstrip(".")
            raise ValueError(f"{dotted} must be {describe(annotation)}, got {value!r:.80}{_hint(value, annotation)}")


def _as_text(value: Any) -> Any:
    """A path as text, as fields hold it; anything else as it is."""
    return str(value) if isinstance(value, Path) else value


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of an annotated type; whole numbers are numbers, True and False are none."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return len(value) == len(kinds) and all(fits(v, kind) for v, kind in zip(value, kinds, strict=True))
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(k, arguments[0]) and fits(v, arguments[1]) for k, v in value.items()
        )
    if annotation in (int, float):
        return isinstance(value, int if annotation is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, annotation)


def describe(annotation: Any) -> str:
    """An annotation in words: 'one of 'a', 'b'', 'a whole number or None'."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(one) for one in arguments)
    if origin is tuple:
        if arguments[-1] is ...:
            return f"a tuple, as in (…,), whose parts are each {describe(arguments[0])}"
        return f"a tuple of {' and '.join(describe(one) for one in arguments)}"
    if origin is dict:
        return f"a dict from {describe(arguments[0])} to {describe(arguments[1])}"
    if dataclasses.is_dataclass(annotation):
        return f"a {getattr(annotation, '__name__', annotation)}(…)"
    return WORDS.get(annotation, "anything")


def _hint(value: Any, annotation: Any) -> str:
    """The choice that is nearest to what was written, where there are choices."""
    if not isinstance(value, str) or get_origin(annotation) is not Literal:
        return ""
    near = difflib.get_close_matches(value, get_args(annotation), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
