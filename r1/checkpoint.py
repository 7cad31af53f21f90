"""Save and resume a run. A checkpoint is a folder that counts once its marker file exists: weights and optimizer
states in shards that load on any number of ranks, the small state, every rank's RNG, and all that merging needs.
"""

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.hub import cached_file

from r1.checkpoint_files import (
    HF,
    MARKER,
    POINTER,
    SHARDS,
    STEP_FOLDER,
    complete_checkpoints,
    find_checkpoint,
    read_marker,
    remove,
    write_synced,
    write_text_atomically,
)
from r1.checkpoint_state import (
    check_names,
    empty_optimizer_values,
    group_state,
    load_schedule,
    model_values,
    optimizer_values,
    rng_state,
    set_group_state,
    set_optimizer_values,
    set_rng_state,
)
from r1.config import Config
from r1.parallel import gather_objects

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where a run stands, beside its weights."""

    step: int  # steps that are done
    policy_version: int  # optimizer steps that are done
    best_metric: float | None = None  # best value so far of the metric that picks a checkpoint


class Checkpoints:
    """The checkpoints of one run, in RUN/checkpoints/step_000050/ and so on.

    Args:
        config: its checkpoint section, run folder and model path are used.
        tokenizer, processor: copied into every checkpoint; the processor is None for text models.

    Raises:
        ValueError: by load and to_resume, where a checkpoint is missing, damaged or of another model.
        OSError: by save, on every rank alike, where one of them could not write; earlier checkpoints stay as they were.
    """

    def __init__(
        self, config: Config, *, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None = None
    ) -> None:
        self.config = config
        self.folder = Path(config.run_dir) / "checkpoints"
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._tokenizer, self._processor = tokenizer, processor
        # Read at the start: by the first save the hub may be out of reach.
        self._generation_config = _generation_config(config) if self.rank == 0 else None

    def latest(self) -> Path | None:
        """The newest complete checkpoint of the run, if it has one."""
        found = complete_checkpoints(self.folder)
        return found[-1] if found else None

    def to_resume(self) -> Path | None:
        """The checkpoint that the config says to go on from; None: start anew. Looks at files only."""
        if self.config.checkpoint.load_path is not None:
            return find_checkpoint(self.config.checkpoint.load_path)
        return self.latest() if self.config.checkpoint.resume else None

    def save(
        self, state: TrainerState, *, model: PreTrainedModel, optimizer: Optimizer, scheduler: LRScheduler
    ) -> Path:
        """Write step state.step; every rank takes part. A kill at any moment leaves the earlier checkpoints valid."""
        folder = self.folder / f"step_{state.step:06d}"
        rng = rng_state()
        trainer = {"state": asdict(state), "scheduler": scheduler.state_dict(), "groups": group_state(optimizer)}
        with self._all_or_none(folder):
            if self.rank == 0:
                self._clean(folder)
                (folder / HF).mkdir(parents=True)
        with self._all_or_none(folder):
            save_shards(
                model_values(model) | optimizer_values(model, optimizer),
                checkpoint_id=folder / SHARDS,
                no_dist=not dist.is_initialized(),
            )
            write_synced(folder / f"rank_{self.rank:04d}.pt", {"rng": rng})
            if self.rank == 0:
                write_synced(folder / "trainer.pt", trainer)
                self._write_hf(folder / HF, model)
        with self._all_or_none(folder):
            if self.rank == 0:
                self._commit(folder, state)
        return folder

    def load(self, path: Path, *, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> TrainerState:
        """Put weights, optimizer states, schedule and RNG back, in place; every rank takes part.

        On as many ranks as saved it is exact, bit for bit; on another number the RNG stays freshly seeded.
        Parameters without states in the checkpoint (they never had a gradient) get theirs at their first step.
        """
        marker = read_marker(path)
        if marker is None:
            find_checkpoint(path)  # says what is wrong and what is there
            raise ValueError(f"{path} is not one checkpoint; give one of its step_ folders")
        seen = self._gather((marker["step"], marker["sequence"]))
        if len(set(seen)) > 1:
            raise ValueError(f"the ranks see different checkpoints at {path}: steps {seen}; use one shared folder")
        try:
            # Not set_state_dict: on a fresh optimizer that takes a step, and it wants states of every parameter.
            there = FileSystemReader(path / SHARDS).read_metadata().state_dict_metadata
            values = model_values(model)
            check_names(path, values, there)
            values |= empty_optimizer_values(model, optimizer, there)
            load_shards(values, checkpoint_id=path / SHARDS, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise ValueError(f"{path} cannot be read: {_first_cause(error)}; use an earlier checkpoint") from error
        set_optimizer_values(model, optimizer, values)
        trainer = torch.load(path / "trainer.pt", weights_only=True)
        set_group_state(optimizer, trainer["groups"])
        load_schedule(optimizer, scheduler, trainer["scheduler"])
        if marker["world_size"] == self.world_size:
            set_rng_state(torch.load(path / f"rank_{self.rank:04d}.pt", weights_only=True)["rng"])
        elif self.rank == 0:
            _log.warning(
                "%s was saved on %d ranks and is loaded on %d: random number generators start fresh from the seed",
                path, marker["world_size"], self.world_size,
            )  # fmt: skip
        return TrainerState(**trainer["state"])

    def _gather(self, value: Any) -> list[Any]:
        return gather_objects(value) if dist.is_initialized() else [value]

    @contextlib.contextmanager
    def _all_or_none(self, folder: Path) -> Iterator[None]:
        """A barrier at the end of the block that raises on every rank when the block failed on one of them."""
        cause = None
        try:
            yield
        except CheckpointException as error:
            cause = _first_cause(error)
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            cause = f"{type(error).__name__}: {error}"
        causes = self._gather(cause)
        for rank, cause in enumerate(causes):
            if cause is not None:
                raise OSError(
                    f"{folder} could not be saved (rank {rank}: {cause}); free disk space or make it writable. "
                    f"Earlier checkpoints are intact"
                )

    def _clean(self, folder: Path) -> None:
        """Remove what earlier saves left half-written, and the folder that is about to be written."""
        complete = set(complete_checkpoints(self.folder))
        for path in self.folder.glob("step_*"):
            if STEP_FOLDER.fullmatch(path.name) and (path == folder or path not in complete):
                remove(path)

    def _write_hf(self, folder: Path, model: PreTrainedModel) -> None:
        config = model.config
        if not config.architectures:  # FSDP2 puts its name before the class's
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(folder)
        # Verbatim: saving the parsed one may drop fields, refuse old ones, or lose all but one end token.
        if self._generation_config is not None:
            (folder / "generation_config.json").write_text(self._generation_config)
        (self._processor or self._tokenizer).save_pretrained(folder)
        if self._processor is not None:
            self._tokenizer.save_pretrained(folder)
        if self.config.data.override_chat_template is not None:
            shutil.copyfile(self.config.data.override_chat_template, folder / "chat_template.jinja")

    def _commit(self, folder: Path, state: TrainerState) -> None:
        """Make the checkpoint count, move the pointer, delete the oldest beyond save_limit; in this order."""
        missing = [r for r in range(self.world_size) if not (folder / f"rank_{r:04d}.pt").exists()]
        if missing:
            raise OSError(f"the files of ranks {missing} are not there; trainer.output_dir must be on a shared disk")
        files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
        older = complete_checkpoints(self.folder)
        sequence = 1 + max((m["sequence"] for m in map(read_marker, older) if m is not None), default=0)
        marker = {"step": state.step, "sequence": sequence, "policy_version": state.policy_version}
        marker |= {"world_size": self.world_size, "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        marker |= {"versions": {name: version(name) for name in ("torch", "transformers")}, "files": files}
        write_text_atomically(folder / MARKER, json.dumps(marker, indent=1))
        pointer = {"step": state.step, "path": folder.name}
        write_text_atomically(self.folder / POINTER, json.dumps(pointer))
        if self.config.checkpoint.save_limit != -1:
            for path in [*older, folder][: -self.config.checkpoint.save_limit]:
                remove(path)


def _generation_config(config: Config) -> str | None:
    try:
        path = cached_file(config.model.path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    except OSError:  # no such model folder and no hub
        return None
    return Path(path).read_text() if path is not None else None


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"
