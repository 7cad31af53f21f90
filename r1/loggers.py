"""Where a run's metrics and sampled responses go, by name: console, files, TensorBoard, W&B, SwanLab, MLflow."""

import importlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from r1.config import Config
from r1.loggers_console import Console
from r1.loggers_files import Files, plain
from r1.loggers_services import MLflow, SwanLab, TensorBoard, Wandb
from r1.report.page import write_report

_log = logging.getLogger(__name__)

_PACKAGES = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "swanlab": ("swanlab", "swanlab"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
"""The module that is imported for a logger, and what to install when that fails."""


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
        self.run_dir = run_dir
        self._backends: dict[str, Backend] = {}
        self._warned: set[str] = set()
        makers: dict[str, Callable[[], Backend]] = {
            "console": lambda: Console(config.trainer.experiment_name, num_steps or config.trainer.max_steps),
            "file": lambda: Files(run_dir, resumed_step),
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
        """Record sampled responses with what belongs to them; kind says where they are from: train, val/geo3k.

        Pictures under "images" are kept small, as files beside samples.jsonl; every other log has stubs of them.
        """
        stubs = [plain(record) for record in records]
        self._each(lambda backend: backend.samples(step, kind, records if isinstance(backend, Files) else stubs))

    def close(self) -> None:
        """Close every backend, and show the run as a page: report.html, made from the files."""
        if "file" in self._backends and (self.run_dir / "metrics.jsonl").is_file():
            self._safely("report", lambda: write_report([self.run_dir], self.run_dir / "report.html"))
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
