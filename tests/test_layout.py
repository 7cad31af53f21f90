"""Rules held by a test, not by memory: imports point down, files and functions stay small, rooms keep their names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(p for p in (ROOT / "r1").rglob("*.py") if p.name != "__init__.py")
TOOLS = sorted((ROOT / "tools").glob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60

# Lowest first; a module imports from lower layers, and from its own folder.
LAYERS = [
    "sections types health",
    "config",
    "parallel report",
    "faults",
    "data rewards algorithms metrics loggers preempt profile",
    "policy",
    "rollout",
    "checkpoint dry_run",
    "evaluate",
    "train",
]
LEVEL = {name: i for i, layer in enumerate(LAYERS) for name in layer.split()}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(module: str) -> str:
    """checkpoint_files and checkpoint_state belong to checkpoint: a file split by responsibility stays one room."""
    room = module if module in LEVEL else module.split("_")[0]
    assert room in LEVEL, f"r1/{module} is in no room of LAYERS; put it into one, or add it with its level"
    return room


def imported_rooms(tree: ast.AST) -> Iterator[str]:
    """Rooms of r1 that a module imports from, at its top, in functions or for type checking alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert node.level == 0, "imports inside r1 are absolute: from r1.room import name"
            names = [f"r1.{a.name}" for a in node.names] if module == "r1" else [module]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        yield from (room_of(n.split(".")[1]) for n in names if n.startswith("r1."))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    room = room_of(path.relative_to(ROOT / "r1").parts[0].removesuffix(".py"))
    for other in imported_rooms(ast.parse(path.read_text())):
        assert other == room or LEVEL[other] < LEVEL[room], (
            f"{name_of(path)} imports from {other}, which is not below {room}"
        )


@pytest.mark.parametrize("path", MODULES + TOOLS, ids=name_of)
def test_code_stays_small(path: Path) -> None:
    source = path.read_text()
    lines = source.count("\n")
    assert lines <= MAX_FILE_LINES, f"{name_of(path)} has {lines} lines: split it by responsibility"
    tree = ast.parse(source)
    assert ast.get_docstring(tree), f"{name_of(path)} starts without a docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno
            assert size < MAX_FUNCTION_LINES, (
                f"{name_of(path)}:{node.lineno} {node.name} has {size + 1} lines: split it"
            )


def test_r1_never_imports_its_tools_or_tests() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert (module or "").split(".")[0] not in ("tools", "tests"), f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("name", ["utils", "base", "helpers", "common", "misc"])
def test_no_file_is_named_after_nothing(name: str) -> None:
    assert not [p for p in MODULES if p.stem == name], f"name {name}.py after what is in it"
