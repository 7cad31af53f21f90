"""What the README says is so: its map, its migration table, and the configs and commands it names."""

import importlib.util
import json
import re
import sys
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from r1.config import Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
# What the top level may hold beside dot files; build outputs are ignored by git.
TOP_LEVEL = "r1 launch configs tests tools pyproject.toml Dockerfile Makefile README.md LICENSE".split()
IGNORED = ("runs", "build", "dist", "__pycache__")


def section(title: str) -> str:
    """Text of a second-level section of the README."""
    match = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    assert match, f"the README has no section {title!r}"
    return match[1]


def migration_rows() -> list[tuple[str, str, str]]:
    rows = [
        [c.strip() for c in line.strip().strip("|").split("|")] for line in section("Coming from EasyR1").split("\n")
    ]
    return [(r[0], r[1], r[2]) for r in rows if len(r) == 3 and r[0].startswith("`")]


def has_field(path: str) -> bool:
    """Whether Config, or a section of it, has the field at a dotted path."""
    value: Any = Config()
    for name in path.split("."):
        if not is_dataclass(value) or name not in [f.name for f in fields(value)]:
            return False
        value = getattr(value, name)
    return True


def example(name: str) -> str:
    """The indented block of the README that gives a file's contents."""
    match = re.search(rf"`{re.escape(name)}`[^\n]*:\n\n((?:    [^\n]*\n|\n)+)", README)
    assert match, f"the README shows no {name}"
    return textwrap.dedent(match[1])


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as load_config: a config file may import its neighbour
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_map_names_every_top_level_entry() -> None:
    named = set(re.findall(r"^ {4}(\S+?)/? {2,}", section("Map"), re.MULTILINE))
    here = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and p.name not in IGNORED}
    here = {name for name in here if not name.endswith(".egg-info")}
    assert here <= set(TOP_LEVEL), f"{here - set(TOP_LEVEL)} do not belong at the top level"
    assert set(TOP_LEVEL) <= named, f"the README's map lacks {set(TOP_LEVEL) - named}"
    assert all((ROOT / name).exists() for name in named), f"the map names what is not there: {named}"


def test_every_migrated_key_exists() -> None:
    rows = migration_rows()
    assert len(rows) > 90, f"only {len(rows)} rows parsed: has the table's form changed?"
    for theirs, ours, note in rows:
        keys = re.findall(r"`([^`]+)`", ours)
        assert keys or ours in ("not yet", "—"), f"{theirs}: say which key, 'not yet' or '—', not {ours!r}"
        assert ours != "—" or note, f"{theirs} has no counterpart: the note must say why"
        for key in keys:
            assert has_field(key), f"{theirs} -> {key}: Config has no such field"


def test_no_key_is_migrated_twice() -> None:
    keys = [key for theirs, _, _ in migration_rows() for key in re.findall(r"`([^`]+)`", theirs)]
    assert len(keys) == len(set(keys)), sorted(k for k in keys if keys.count(k) > 1)


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(
        re.findall(r"\bmake ([a-z][a-z0-9-]*)", "\n".join(re.findall(r"`[^`]+`|^ {4}.*$", README, re.MULTILINE)))
    )
    assert {"demo", "test"} <= named
    assert named <= targets, f"the README names targets that are not there: {named - targets}"


def test_named_files_exist() -> None:
    for name in set(re.findall(r"\b(?:configs|launch|tools|tests|r1)/[\w./-]+\.(?:py|sh|sbatch|jinja)\b", README)):
        assert (ROOT / name).exists(), f"the README names {name}, which is not there"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_config_files_fit_eight_gpus(path: Path) -> None:
    module = load(path)
    assert isinstance(module.config, Config)
    module.config.check_world_size(8, 8)
    assert f"configs/{path.name}" in module.__doc__, "its docstring gives its command"
    prompt = module.config.data.format_prompt
    assert prompt is None or (ROOT / prompt).exists(), f"{path.name} names {prompt}, which is not there"


def test_experiments_do_not_share_a_run_folder() -> None:
    folders = [load(path).config.run_dir for path in CONFIGS]
    assert len(folders) == len(set(folders)), sorted(folders)


def test_example_data_has_the_columns_that_a_config_expects_by_default() -> None:
    data = Config().data
    for line in example("shapes.jsonl").strip().split("\n"):
        row = json.loads(line)
        assert set(row) == {data.prompt_key, data.answer_key, data.image_key}
        assert row[data.prompt_key].count("<image>") == len(row[data.image_key])


def test_example_reward_scores_a_right_and_a_wrong_response() -> None:
    names: dict[str, Any] = {}
    exec(example("my_reward.py"), names)
    scores = names["compute_score"]([{"response": r, "ground_truth": "2"} for r in (" 2\n", "3")])
    assert [s["overall"] for s in scores] == [1.0, 0.0]


def test_example_config_is_one(tmp_path: Path) -> None:
    path = tmp_path / "my_run.py"
    path.write_text(example("my_run.py"))
    load(path).config.check_world_size(8, 8)
