"""Where a run's metrics and sampled responses go, by name: console, files, TensorBoard, W&B, SwanLab, MLflow."""

import importlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from PIL.Image import Image

from r1.config import Config
from r1.loggers_services import MLflow, SwanLab, TensorBoard, Wandb

_log = logging.getLogger(__name__)

CONSOLE = (
    ("reward", "reward/mean", ".3f"),
    ("accuracy", "reward/accuracy", ".3f"),
    ("length", "response/length_mean", ".0f"),
    ("kl", "loss/kl", ".2e"),
    ("entropy", "policy/entropy", ".3f"),
    ("grad_norm", "policy/grad_norm", ".3f"),
    ("mismatch", "mismatch/abs_mean", ".1e"),
    ("seconds", "time/step_s", ".1f"),
)
"""(word, metric, format) of the console's line, in order; what a step has not is left out."""
_PACKAGES = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "swanlab": ("swanlab", "swanlab"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
"""The module that is imported for a logger, and what to install when that fails."""
_DATA_URL = re.compile(r"data:([\w/+.-]+)(?:;[\w.=-]+)*;base64,([\w+/=-]{64,})")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{512,}={0,2}")


def plain(value: Any) -> Any:
    """value as JSON takes it: pictures and their base64 shortened to a stub, what is not finite None."""
    if isinstance(value, str):
        value = _DATA_URL.sub(lambda m: f"<{m[1]}, {len(m[2]):,} characters of base64>", value)
        return _BASE64.sub(lambda m: f"<{m[0][:16]}... {len(m[0]):,} characters>", value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Image):
        return f"<image {value.width}x{value.height}>"
    return plain(value.item()) if hasattr(value, "item") and getattr(value, "size", 0) == 1 else plain(str(value))


def check_installed(names: Iterable[str]) -> None:
    """Raise ValueError, with the package to install, for a logger that cannot be imported."""
    for name in names:
        if name in _PACKAGES:
            module, package = _PACKAGES[name]
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ValueError(
                    f"trainer.loggers names {name!r}, which cannot be imported ({error}); "
                    f"pip install {package}, or leave it out"
                ) from error


class Backend(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


class Logger:
    """Hands metrics and samples to every backend in config.trainer.loggers; for rank 0 only.

    A backend that fails is named in one warning and left out from then on (the files are tried again each time).

    Args:
        config: its trainer section is used; all of it is shown by the backends that have a page for settings.
        run_dir: the run folder.
        num_steps: of the whole run, for the console's `step 3/100` and time left.
        resumed_step: the run goes on after this step (0: from the start). What an earlier process logged about later
            steps is moved to metrics.superseded.jsonl, so that steps in metrics.jsonl only rise. None: only append.

    Raises:
        ValueError: a backend's package is not installed.
    """

    def __init__(
        self, config: Config, run_dir: Path, *, num_steps: int | None = None, resumed_step: int | None = None
    ) -> None:
        check_installed(config.trainer.loggers)
        settings = plain(asdict(config))
        run_dir.mkdir(parents=True, exist_ok=True)
        self._backends: dict[str, Backend] = {}
        self._warned: set[str] = set()
        makers: dict[str, Callable[[], Backend]] = {
            "console": lambda: _Console(num_steps or config.trainer.max_steps),
            "file": lambda: _Files(run_dir, resumed_step),
            "tensorboard": lambda: TensorBoard(run_dir, resumed_step),
            "wandb": lambda: Wandb(config.trainer, settings, run_dir, resumed_step),
            "swanlab": lambda: SwanLab(config.trainer, settings, run_dir),
            "mlflow": lambda: MLflow(config.trainer, settings, run_dir),
        }
        for name in config.trainer.loggers:
            backend = self._safely(name, makers[name])
            if backend is not None:
                self._backends[name] = backend

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of one step; step never falls within a run. A value that is not finite becomes null."""
        self._each(lambda backend: backend.log(step, metrics))

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        """Record sampled responses with what belongs to them; kind says where they are from: train, val/geo3k."""
        stubs = [plain(record) for record in records]
        self._each(lambda backend: backend.samples(step, kind, stubs))

    def close(self) -> None:
        self._each(lambda backend: backend.close())
        self._backends = {}

    def _each(self, action: Callable[[Backend], None]) -> None:
        for name, backend in list(self._backends.items()):
            self._safely(name, lambda backend=backend: action(backend))

    def _safely(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        # Whatever a tracking service raises (network, quota, its own bugs), a day of training must not end with it.
        except Exception as error:  # noqa: BLE001
            if name not in self._warned:
                self._warned.add(name)
                retried = name == "file" and name in self._backends
                fate = "tried again at each step" if retried else "off for the rest of this run"
                _log.warning("logger %s failed (%s: %s); it is %s", name, type(error).__name__, error, fate)
            if name != "file":
                self._backends.pop(name, None)
            return None


class _Console:
    def __init__(self, num_steps: int | None) -> None:
        self.num_steps, self.seconds, self.timed = num_steps, 0.0, 0

    def log(self, step: int, metrics: dict[str, float]) -> None:
        parts = [f"step {step}" + (f"/{self.num_steps}" if self.num_steps else "")]
        parts += [f"{word} {metrics[key]:{form}}" for word, key, form in CONSOLE if key in metrics]
        parts += [f"{key} {value:.4g}" for key, value in metrics.items() if key.startswith("val/")]
        if "time/step_s" in metrics:
            self.seconds, self.timed = self.seconds + metrics["time/step_s"], self.timed + 1
            if self.num_steps and step < self.num_steps:
                parts.append("left " + _duration((self.num_steps - step) * self.seconds / self.timed))
        sys.stdout.write("  ".join(parts) + "\n")
        sys.stdout.flush()

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        """A screen is too narrow for them; samples.jsonl has them."""

    def close(self) -> None:
        """Nothing is held."""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class _Files:
    def __init__(self, run_dir: Path, resumed_step: int | None) -> None:
        self.metrics, self.responses = run_dir / "metrics.jsonl", run_dir / "samples.jsonl"
        for path in (self.metrics, self.responses):
            if path.exists():
                _set_aside(path, resumed_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        _append(self.metrics, [{"step": step} | {name: plain(float(value)) for name, value in metrics.items()}])

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        _append(self.responses, ({"step": step, "kind": kind} | record for record in records))

    def close(self) -> None:
        """Each write opens and closes its file."""


def _append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)


def _set_aside(path: Path, resumed_step: int | None) -> None:
    """Move the lines of later steps, and one that a kill cut short, to <name>.superseded.jsonl."""
    keep, aside = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            superseded = resumed_step is not None and json.loads(line)["step"] > resumed_step - (resumed_step == 0)
        except (json.JSONDecodeError, KeyError, TypeError):
            superseded = True
        (aside if superseded else keep).append(line + "\n")
    if aside:
        with path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(aside)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(keep), encoding="utf-8")
        os.replace(temporary, path)
