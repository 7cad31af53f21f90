"""Write one checkpoint from a copy of a step's state, on all ranks together; it counts only once it is whole."""

import contextlib
import datetime
import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.hub import cached_file

from r1.checkpoint_files import (
    BEST,
    CONFIG,
    HF,
    MARKER,
    POINTER,
    SHARDS,
    STEP_FOLDER,
    best_checkpoints,
    checksum,
    complete_checkpoints,
    metric_of,
    read_marker,
    remove,
    superfluous,
    sync_folder,
    write_synced,
    write_text_atomically,
)
from r1.config import Config, config_to_json

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All of one checkpoint on one rank, out of reach of the training that goes on."""

    folder: Path
    values: dict[str, Any]  # the shards
    rng: dict[str, Any]  # this rank's
    trainer: dict[str, Any]  # the small state, the same on every rank
    hf: Mapping[str, bytes] | OSError  # files of the model folder, on rank 0; or why there are none
    marker: dict[str, Any]  # what the marker says beside sequence and files


class Writer:
    """Writes snapshots; creating one and every write is collective, and may happen in a thread beside training."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.run_dir) / "checkpoints"
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            # Of its own: collectives of two threads on one group get each other's messages.
            timeout = datetime.timedelta(seconds=config.parallel.timeout_s)
            group = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup), "new_group of all ranks has every rank in it"
            self.group = group

    def write(self, snapshot: Snapshot) -> None:
        """A kill at any moment leaves the earlier checkpoints valid. Raises OSError on every rank alike."""
        try:
            self._write(snapshot)
        except OSError:
            # Every rank has stopped writing; a full disk wants the room back.
            if self.rank == 0 and read_marker(snapshot.folder) is None:
                shutil.rmtree(snapshot.folder, ignore_errors=True)
            raise

    def _write(self, snapshot: Snapshot) -> None:
        folder = snapshot.folder
        with self._all_or_none(folder):
            if self.rank == 0:
                self._clean(folder)
                (folder / HF).mkdir(parents=True)
        with self._all_or_none(folder):
            shards, alone = folder / SHARDS, self.group is None
            save_shards(snapshot.values, checkpoint_id=shards, process_group=self.group, no_dist=alone)
            write_synced(folder / f"rank_{self.rank:04d}.pt", {"rng": snapshot.rng})
            if self.rank == 0:
                self._write_small(snapshot)
        files: dict[str, list[int]] = {}
        with self._all_or_none(folder):
            files = {str(path.relative_to(folder)): checksum(path, sync=True) for path in self._own_files(folder)}
        every = {name: entry for part in self._gather(files) for name, entry in part.items()}
        with self._all_or_none(folder):
            if self.rank == 0:
                self._commit(folder, snapshot.marker | {"files": dict(sorted(every.items()))})

    def _gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.group)
        return out

    @contextlib.contextmanager
    def _all_or_none(self, folder: Path) -> Iterator[None]:
        """A barrier at the end of the block that raises on every rank when the block failed on one of them."""
        cause = None
        try:
            yield
        except CheckpointException as error:
            cause = first_cause(error)
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            cause = f"rank {self.rank}: {type(error).__name__}: {error}"
        for found in self._gather(cause):
            if found is not None:
                raise OSError(
                    f"{folder} could not be saved ({found}); free disk space or make it writable. "
                    f"Earlier checkpoints are intact"
                )

    def _clean(self, folder: Path) -> None:
        """Remove what earlier saves left half-written, and the folder that is about to be written."""
        complete = set(complete_checkpoints(self.folder))
        for path in self.folder.glob("step_*"):
            if STEP_FOLDER.fullmatch(path.name) and (path == folder or path not in complete):
                remove(path)

    def _write_small(self, snapshot: Snapshot) -> None:
        write_synced(snapshot.folder / "trainer.pt", snapshot.trainer)
        (snapshot.folder / CONFIG).write_text(config_to_json(self.config))
        if isinstance(snapshot.hf, OSError):
            raise snapshot.hf
        for name, content in snapshot.hf.items():
            (snapshot.folder / HF / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot.folder / HF / name).write_bytes(content)

    def _own_files(self, folder: Path) -> list[Path]:
        """What this rank wrote: its checksums are its own work."""
        files = [folder / f"rank_{self.rank:04d}.pt", *folder.glob(f"{SHARDS}/__{self.rank}_*")]
        if self.rank == 0:
            files += [folder / SHARDS / ".metadata", folder / "trainer.pt", folder / CONFIG]
            files += [path for path in (folder / HF).rglob("*") if path.is_file()]
        return files

    def _commit(self, folder: Path, marker: dict[str, Any]) -> None:
        """Make the checkpoint count; then move the pointers and delete what is neither new nor good."""
        missing = [name for name in marker["files"] if not (folder / name).exists()]
        if missing:
            raise OSError(f"rank 0 does not see {missing[:3]}; trainer.output_dir must be on a disk all hosts share")
        for path in (folder / SHARDS, folder / HF, folder, self.folder):
            sync_folder(path)
        older = complete_checkpoints(self.folder)
        sequence = 1 + max((m["sequence"] for m in map(read_marker, older) if m is not None), default=0)
        write_text_atomically(folder / MARKER, json.dumps(marker | {"sequence": sequence}, indent=1))
        try:
            self._tidy(folder, marker, older)
        except OSError as error:  # as with folders that a network disk does not let go; the next save tries again
            _log.warning("%s is saved, but what it replaces could not be cleared away: %s", folder, error)

    def _tidy(self, folder: Path, marker: dict[str, Any], older: list[Path]) -> None:
        self._point(POINTER, folder, marker)
        for best in best_checkpoints([*older, folder], self.config.checkpoint)[:1]:
            best_marker = read_marker(best) or {}
            value = {
                "metric": self.config.checkpoint.best_metric,
                "value": metric_of(best_marker, self.config.checkpoint),
            }
            self._point(BEST, best, best_marker, **value)
        for path in superfluous([*older, folder], self.config.checkpoint):
            remove(path)

    def _point(self, name: str, folder: Path, marker: dict[str, Any], **more: Any) -> None:
        write_text_atomically(self.folder / name, json.dumps({"step": marker["step"], "path": folder.name} | more))


def make_marker(
    config: Config, state: Mapping[str, Any], metrics: Mapping[str, float], world_size: int
) -> dict[str, Any]:
    """The marker's text except for sequence and files; metrics that are not finite are left out."""
    return {
        "step": state["step"],
        "policy_version": state["policy_version"],
        "world_size": world_size,
        "model_only": config.checkpoint.save_model_only,
        "load_path": config.checkpoint.load_path,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "metrics": {name: float(value) for name, value in metrics.items() if math.isfinite(value)},
    }


def hf_files(
    config: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
    generation_config: str | None,
) -> dict[str, bytes] | OSError:
    """{name: content} of a model folder's files without the weights, or the error that making them met."""
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if not model.config.architectures:  # FSDP2 puts its name before the class's
                model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
            model.config.save_pretrained(folder)
            # Verbatim: saving the parsed one may drop fields, refuse old ones, or lose all but one end token.
            if generation_config is not None:
                (folder / "generation_config.json").write_text(generation_config)
            (processor or tokenizer).save_pretrained(folder)
            if processor is not None:
                tokenizer.save_pretrained(folder)
            if config.data.override_chat_template is not None:
                shutil.copyfile(config.data.override_chat_template, folder / "chat_template.jinja")
            return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    except OSError as error:
        return error


def read_generation_config(config: Config) -> str | None:
    """The text of the model's generation_config.json, if it has one."""
    try:
        path = cached_file(config.model.path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    except OSError:  # no such model folder and no hub
        return None
    return Path(path).read_text() if path is not None else None


def first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"
