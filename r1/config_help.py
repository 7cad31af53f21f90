"""`--help` for a config of many settings: its sections, one section on a screen, or one setting in full."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

from r1.config import Config

WIDTH = 120


def help_text(config: Config, topic: str | None) -> str:
    """What `--help` prints: the sections, `--help SECTION` its settings, a line each, `--help SECTION.NAME` one whole.

    Raises:
        ValueError: no section or setting has that name; lists those there are.
    """
    settings = list(_settings(config))
    sections = list(dict.fromkeys(name.split(".")[0] for name, _, _ in settings))
    if topic is None:
        lines = [f"  {name:12}{_names(settings, name)}" for name in sections]
        return "\n".join([
            "Settings, by section; each is given as --section.name value:\n", *lines, "",
            "--help SECTION        its settings with their values and meaning, as in --help rollout",
            "--help SECTION.NAME   all about one of them, as in --help rollout.n",
            "--help all            everything",
        ])  # fmt: skip
    exact = [one for one in settings if one[0] == topic]
    if exact:
        name, value, meaning = exact[0]
        return f"--{name} {value!r}\n\n{textwrap.fill(meaning or 'No more to say.', WIDTH)}"
    chosen = [one for one in settings if one[0].startswith(f"{topic}.")]
    if not chosen:
        raise ValueError(f"--help {topic}: there is no such setting; the sections are {', '.join(sections)}")
    column = min(48, max(len(f"--{name} {value!r}") for name, value, _ in chosen) + 2)
    return "\n".join(_line(name, value, meaning, column) for name, value, meaning in chosen)


def _names(settings: list[tuple[str, Any, str]], section: str) -> str:
    names = [name.removeprefix(f"{section}.") for name, _, _ in settings if name.startswith(f"{section}.")]
    return textwrap.shorten(", ".join(names), WIDTH - 14, placeholder=" …")


def _line(name: str, value: Any, meaning: str, column: int) -> str:
    """One setting with the beginning of its meaning, cut at the screen's edge."""
    head = f"--{name} {value!r}"
    head = f"{head[: column - 4]} …" if len(head) > column - 2 else head
    return f"{head:{column}}{textwrap.shorten(meaning, WIDTH - column, placeholder=' …')}".rstrip()


def _settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted name, value, meaning) of every setting, in the order of their sections."""
    meanings = _meanings(type(section))
    for field in dataclasses.fields(section):
        value, name = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{name}.")
        else:
            yield name, value, meanings.get(field.name, "")


def _meanings(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass, on one line."""
    [body] = [node.body for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body
              if isinstance(node, ast.ClassDef)]  # fmt: skip
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


def topic_of(words: list[str]) -> tuple[bool, str | None]:
    """Whether the words ask for help, and on what; `--help all` asks for none of ours."""
    asked = [i for i, word in enumerate(words) if word in ("-h", "--help")]
    if not asked:
        return False, None
    after = words[asked[0] + 1 : asked[0] + 2]
    topic = after[0] if after and not after[0].startswith("-") else None
    return topic != "all", topic
