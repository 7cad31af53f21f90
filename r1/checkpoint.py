"""Save and resume a run. A checkpoint is a folder that counts once its marker file exists: weights and optimizer
states in shards that load on any number of ranks, the small state, every rank's RNG, and all that merging needs.
"""

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from r1.checkpoint_files import (
    SHARDS,
    complete_checkpoints,
    damaged_files,
    find_checkpoint,
    read_marker,
    torn_checkpoints,
)
from r1.checkpoint_resume import checkpoint_to_resume
from r1.checkpoint_save import Snapshot, Writer, first_cause, hf_files, make_marker, read_generation_config
from r1.checkpoint_state import (
    Learner,
    model_values,
    of,
    optimizer_values,
    rng_state,
    room_for,
    set_optimizer_values,
    set_rng_state,
    set_small_state,
    small_state,
    staged,
    under,
)
from r1.config import Config
from r1.parallel import gather_objects
from r1.policy.offload import HostMemory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where a run stands, beside its weights."""

    step: int  # steps that are done
    policy_version: int  # optimizer steps that are done
    draws: int = 0  # batches of prompts that were sampled; more than steps where groups are filtered
    kl_coef: float | None = None  # where it moves during the run


class DamagedCheckpoint(ValueError):
    """The bytes on disk are not those that were saved."""


class Checkpoints:
    """The checkpoints of one run, in RUN/checkpoints/step_000050/ and so on.

    Args:
        config: its checkpoint section, run folder and model path are used.
        tokenizer, processor: copied into every checkpoint; the processor is None for text models.

    Raises:
        ValueError: by load, resume and to_resume, where a checkpoint is missing, damaged or of another model.
    """

    def __init__(
        self, config: Config, *, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None = None
    ) -> None:
        self.config = config
        self.folder = Path(config.run_dir) / "checkpoints"
        self._writer = Writer(config)
        self.rank, self.world_size = self._writer.rank, self._writer.world_size
        self._tokenizer, self._processor = tokenizer, processor
        # Read at the start: by the first save the hub may be out of reach.
        self._generation_config = read_generation_config(config) if self.rank == 0 else None
        self._hf: Mapping[str, bytes] | OSError = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._copy = HostMemory()  # of the state being written
        self._failure: OSError | None = None
        self.write_s = 0.0  # seconds from the last save's begin until it was written
        self._waited: dict[str, float] = {}

    def latest(self) -> Path | None:
        """The newest complete checkpoint of the run, if it has one."""
        found = complete_checkpoints(self.folder)
        return found[-1] if found else None

    def save(
        self,
        state: TrainerState,
        policy: Learner,
        *,
        critic: Learner | None = None,
        reference: PreTrainedModel | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Save step state.step; every rank takes part. Returns when the state is copied, and may change again.

        The copy is written in a thread (checkpoint.asynchronous). Where that fails an error is logged and training may
        go on: earlier checkpoints are intact, and `finish` raises if it was the last save.

        Args:
            reference: only one that moves during the run; the others come from model.path.
            metrics: of this step, as logged; checkpoint.best_metric is one of them.
        """
        began = time.monotonic()
        self._wait()
        if self.rank == 0 and (not self._hf or isinstance(self._hf, OSError)):
            # In this thread and once: tokenizers cannot be used by two threads.
            self._hf = hf_files(self.config, policy.model, self._tokenizer, self._processor, self._generation_config)
        values, trainer = model_values(policy.model), {"state": asdict(state), "policy": small_state(policy)}
        if not self.config.checkpoint.save_model_only:
            values |= optimizer_values(policy.model, policy.optimizer)
            if critic is not None:
                values |= under("critic", model_values(critic.model) | optimizer_values(critic.model, critic.optimizer))
                trainer |= {"critic": small_state(critic)}
            if reference is not None:
                values |= under("reference", model_values(reference))
        snapshot = Snapshot(
            folder=self.folder / f"step_{state.step:06d}",
            values=staged(values, self._copy) if self.config.checkpoint.asynchronous else values,
            rng=rng_state(),
            trainer=copy.deepcopy(trainer),
            hf=self._hf,
            marker=make_marker(self.config, asdict(state), metrics or {}, self.world_size),
        )
        if self.config.checkpoint.asynchronous:
            self._writing = self._thread.submit(self._write, snapshot)
        else:
            self._write(snapshot)
        self._waited = {"time/save_s": time.monotonic() - began}
        return snapshot.folder

    def take_metrics(self) -> dict[str, float]:
        """time/save_s, the seconds that training waited for a save, if there was one since the last call."""
        waited, self._waited = self._waited, {}
        return waited

    def _write(self, snapshot: Snapshot) -> None:
        self._failure, began = None, time.monotonic()
        try:
            self._writer.write(snapshot)
        except OSError as error:
            self._failure = error
            if self.rank == 0:
                _log.error("NOT SAVED: %s; training goes on", error)
        self.write_s = time.monotonic() - began

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def finish(self) -> Path | None:
        """Wait until the last save is written, and return the newest checkpoint.

        Raises:
            OSError: the last save could not be written; on every rank alike.
        """
        self._wait()
        if self._failure is not None:
            raise self._failure
        return self.latest()

    def to_resume(self) -> Path | None:
        """The checkpoint that the config says to go on from; None: start anew. Looks at files only."""
        return checkpoint_to_resume(self.config)

    def resume(
        self, policy: Learner, *, critic: Learner | None = None, reference: PreTrainedModel | None = None
    ) -> TrainerState | None:
        """Load what the config says to go on from; None: there is nothing. Every rank takes part.

        Where it is the run's newest and that is damaged on disk, the one before it is taken, with an error logged.
        """
        path = self.to_resume()
        if path is None:
            return None
        complete = complete_checkpoints(self.folder)
        for torn in torn_checkpoints(self.folder) if self.rank == 0 else ():
            _log.error("%s is damaged: a file of it is missing or cut short; it is passed over", torn)
        # A path that was asked for is not replaced by another.
        asked = Path(self.config.checkpoint.load_path or ".").absolute() == path.absolute()
        choices = complete if path in complete[-1:] and not asked else [path]
        for choice in reversed(choices):
            try:
                return self.load(choice, policy, critic=critic, reference=reference)
            except DamagedCheckpoint as error:
                if choice == choices[0]:
                    raise
                if self.rank == 0:
                    _log.error("%s; resuming from the checkpoint before it", error)
        return None

    def load(
        self, path: Path, policy: Learner, *, critic: Learner | None = None, reference: PreTrainedModel | None = None
    ) -> TrainerState:
        """Put weights, optimizer states, schedule and RNG back, in place; every rank takes part.

        On as many ranks as saved it is exact, bit for bit; on another number the RNG stays freshly seeded.
        Parameters without states in the checkpoint (they never had a gradient) get theirs at their first step.
        """
        marker = self._check(path)
        trainer = torch.load(path / "trainer.pt", weights_only=True)
        learners = {"policy": policy} | ({"critic": critic} if critic is not None and "critic" in trainer else {})
        try:
            # Not set_state_dict: on a fresh optimizer that takes a step, and it wants states of every parameter.
            there = FileSystemReader(path / SHARDS).read_metadata().state_dict_metadata
            values = {}
            for name, learner in learners.items():
                values |= under(name, room_for(path, learner.model, learner.optimizer, of(name, there)))
            moved = reference is not None and bool(of("reference", there))
            if reference is not None and moved:
                values |= under("reference", room_for(path, reference, None, of("reference", there)))
            load_shards(values, checkpoint_id=path / SHARDS, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {first_cause(error)}; use an earlier one") from error
        for name, learner in learners.items():
            set_optimizer_values(learner.model, learner.optimizer, of(name, values))
            set_small_state(learner, trainer[name])
        if marker["world_size"] == self.world_size:
            set_rng_state(torch.load(path / f"rank_{self.rank:04d}.pt", weights_only=True)["rng"])
        if self.rank == 0:
            missing = [name for name, part in (("critic", critic), ("reference", reference)) if part is not None]
            missing = [name for name in missing if not of(name, there)]
            for line in fresh_parts(marker, self.world_size, missing):
                _log.warning("%s %s", path, line)
        return TrainerState(**trainer["state"])

    def _check(self, path: Path) -> dict[str, Any]:
        """The marker, once every rank sees the same and every file is as it was saved."""
        marker = read_marker(path)
        if marker is None:
            find_checkpoint(path)  # says what is wrong and what is there
            raise ValueError(f"{path} is not one checkpoint; give one of its step_ folders")
        seen = self._gather((marker["step"], marker["sequence"]))
        if len(set(seen)) > 1:
            raise ValueError(f"the ranks see different checkpoints at {path}: steps {seen}; use one shared folder")
        share = slice(self.rank, None, self.world_size)
        damaged = sorted(name for names in self._gather(damaged_files(path, marker, share=share)) for name in names)
        if damaged:
            raise DamagedCheckpoint(
                f"{path} is damaged: the bytes of {', '.join(damaged[:3])} are not those that were saved; "
                f"check the disk and use an earlier checkpoint"
            )
        return marker

    def _gather(self, value: Any) -> list[Any]:
        return gather_objects(value) if dist.is_initialized() else [value]


def fresh_parts(marker: Mapping[str, Any], world_size: int, missing: list[str]) -> Iterator[str]:
    """What a run that loads the checkpoint does not get from it, one line each."""
    if marker["world_size"] != world_size:
        yield (
            f"was saved on {marker['world_size']} ranks and is loaded on {world_size}: random number generators start "
            "fresh from the seed"
        )
    if marker["model_only"]:
        yield (
            "has weights and no optimizer states (checkpoint.save_model_only): the optimizer starts fresh, so the run "
            "goes on, but not as it would have"
        )
    for name in missing:
        yield f"has no {name}: it starts from model.path"
