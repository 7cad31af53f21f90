"""Which checkpoint a run goes on from, and what its config has in common with the one that made it."""

import json
from pathlib import Path
from typing import Any

from r1.checkpoint_files import CONFIG, best_checkpoints, complete_checkpoints, find_checkpoint, read_marker
from r1.config import Config, config_to_json

FIXED = {
    "model.path": "the weights, and the reference beside them, are of that model",
    "model.override_config": "the weights were trained under the old fields",
    "model.precision": "bf16 keeps other weights and optimizer states than amp and float32 do",
    "model.lora.rank": "it holds adapters of that rank, or with rank 0 the whole model",
    **dict.fromkeys(
        ("model.lora.alpha", "model.lora.use_rslora", "model.lora.use_dora"), "it decides what the adapters amount to"
    ),
    **dict.fromkeys(
        (
            "model.lora.parts",
            "model.lora.target_modules",
            "model.lora.exclude_modules",
            "model.lora.modules_to_save",
        ),
        "it decides which layers have adapters",
    ),
    "optim.strategy": "each keeps other optimizer states",
}
"""Settings that a checkpoint fixes, with the reason. What else may change is said, not refused."""

ORDER = (
    "data.train_files",
    "data.seed",
    "data.shuffle",
    "data.rollout_batch_size",
    "data.max_prompt_length",
    "data.overlong_prompts",
)
"""Settings that decide which rows a step gets."""

_SILENT = ("checkpoint", "trainer.project_name", "trainer.experiment_name", "trainer.output_dir", "trainer.loggers",
           "trainer.progress", "trainer.samples_to_log")  # fmt: skip


def checkpoint_to_resume(config: Config) -> Path | None:
    """The checkpoint that the config says to go on from; None: start anew. Looks at files only.

    Raises:
        ValueError: checkpoint.load_path names none.
    """
    settings, folder = config.checkpoint, Path(config.run_dir) / "checkpoints"
    complete = complete_checkpoints(folder)
    latest = complete[-1] if complete and settings.resume else None
    marker = read_marker(latest) if latest is not None else None
    if settings.load_path is None or (marker is not None and marker["load_path"] == settings.load_path):
        return latest  # also of a run that was started from load_path and is started again
    if settings.load_path != "best":
        return find_checkpoint(settings.load_path)
    best = best_checkpoints(complete, settings)
    if not best:
        raise ValueError(
            f'checkpoint.load_path="best": no checkpoint in {folder} has the metric {settings.best_metric!r}; '
            f"give the path of one of {[path.name for path in complete]}"
        )
    return best[0]


def check_resume(config: Config) -> list[str]:
    """Lines on what has changed since the checkpoint to resume was made; none if there is none, or nothing has.

    Raises:
        ValueError: something has that cannot change.
    """
    path = checkpoint_to_resume(config)
    if path is None:
        return []
    changed = changed_settings(json.loads((path / CONFIG).read_text()), json.loads(config_to_json(config)))
    for name, reason in FIXED.items():
        if name in changed and not _is_harmless(name, *changed[name]):
            old, new = changed[name]
            raise ValueError(
                f"{path} was made with {name}={old!r}, now it is {new!r}; that cannot change: {reason}. Set it back, "
                "or start anew: another trainer.experiment_name, or checkpoint.resume=False without load_path"
            )
    lines = [f"changed since {path.name}: {name} {old!r} -> {new!r}" for name, (old, new) in changed.items()]
    if order := [name for name in ORDER if name in changed]:
        lines.append(
            f"with {', '.join(order)} the order of rows changed: some may come twice in this epoch, or not at all"
        )
    return lines


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{section.field: (old, new)} of two config.json whose values differ, without those that say where things go.

    Fields that only one of them has came or went with a version of r1.
    """
    changed = {}
    for section, fields in new.items():
        for field, value in fields.items():
            before = old.get(section, {}).get(field, value)
            name = f"{section}.{field}"
            if name == "model.lora":
                changed |= _changed_adapters(old.get(section, {}).get(field, {"rank": 0}), value)
            elif before != value and name not in _SILENT and section not in _SILENT:
                changed[name] = (before, value)
    return changed


def _changed_adapters(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of model.lora that differ; none where there are no adapters before and after."""
    if old["rank"] == new["rank"] == 0:
        return {}
    pairs = {f"model.lora.{key}": (old.get(key, value), value) for key, value in new.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _is_harmless(name: str, old: Any, new: Any) -> bool:
    if name == "model.path":  # the same model in another folder, or from the hub
        return Path(old).name == Path(new).name
    return name == "model.precision" and "bf16" not in (old, new)  # float32 weights and states, both
