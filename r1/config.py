"""The config of a run: sections, rules across them, and how a config file and the command line become one.

A config file is Python: `config = Config(...)`. Rules of one section are checked in r1/sections.py, rules across
sections in `Config`, rules that need the number of ranks in `Config.check_world_size`; all before a model loads.
"""

import dataclasses
import difflib
import json
import math
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from r1.sections import DataConfig, RewardConfig, RolloutConfig, ValSamplingConfig, require
from r1.sections_model import LoraConfig, ModelConfig, OptimConfig, ParallelConfig, UpdateConfig
from r1.sections_training import AlgorithmConfig, CheckpointConfig, TrainerConfig
from r1.sections_types import check_types

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainerConfig",
    "UpdateConfig",
    "ValSamplingConfig",
    "config_to_json",
    "load_config",
    "override_config",
]


def _multiples_near(total: int, size: int) -> str:
    """The multiples of `size` on both sides of `total`, for a message: '126 or 132'."""
    below, above = total // size * size, (total // size + 1) * size
    return f"{below} or {above}" if below else str(above)


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        check_types(self, "")
        prompts, minibatch = self.data.rollout_batch_size, self.update.global_batch_size
        require(
            minibatch <= prompts and prompts % minibatch == 0,
            f"data.rollout_batch_size={prompts} prompts do not divide into optimizer steps of "
            f"update.global_batch_size={minibatch}; set it to {math.gcd(prompts, minibatch)} or {prompts}, "
            f"or rollout_batch_size to {_multiples_near(prompts, minibatch)}",
        )
        require(
            not self.trainer.val_only or bool(self.data.val_files),
            "trainer.val_only=True validates and ends, and data.val_files names no set; name one",
        )
        best = self.checkpoint.best_metric
        require(
            best is None or not best.startswith("val/") or bool(self.data.val_files),
            f"checkpoint.best_metric={best!r} is measured in validation, and data.val_files names no set; name one",
        )
        need = self.data.max_prompt_length + self.data.max_response_length
        require(
            self.rollout.max_model_len is None or self.rollout.max_model_len >= need,
            f"rollout.max_model_len={self.rollout.max_model_len} is below data.max_prompt_length + "
            f"data.max_response_length = {need}; raise it to {need} or leave it None",
        )
        sharing = self.parallel.sequence_parallel_size
        least = -(-need // sharing)
        require(
            self.update.max_tokens_per_microbatch >= least,
            f"update.max_tokens_per_microbatch={self.update.max_tokens_per_microbatch} cannot hold one prompt and "
            f"response of data.max_prompt_length + data.max_response_length = {need} tokens; raise it to {least}, or "
            f"share them among more ranks than parallel.sequence_parallel_size={sharing}",
        )
        self._check_algorithm()

    def _check_algorithm(self) -> None:
        require(
            self.rollout.n >= 2
            or self.algorithm.advantage in ("remax", "reinforce_plus_plus", "gae")
            or ".py:" in self.algorithm.advantage,
            f"rollout.n={self.rollout.n} gives every response an advantage of 0 under "
            f"algorithm.advantage={self.algorithm.advantage!r}, which compares a prompt's responses; use at least 2",
        )
        require(
            self.model.lora.rank == 0 or self.algorithm.reference_update_steps is None,
            "algorithm.reference_update_steps moves the reference, which with model.lora.rank is the frozen model "
            "without its adapters; leave it None",
        )
        step = self.algorithm.reference_polyak
        require(
            step >= 0.5 or self.algorithm.reference_update_steps is None or self.model.precision == "float32",
            f"algorithm.reference_polyak={step} moves the reference by less than its bfloat16 weights can tell; use "
            "0.5 to 1 with a larger algorithm.reference_update_steps, or model.precision='float32'",
        )
        require(
            (self.rollout.top_p == 1 and self.rollout.top_k == -1)
            or (self.algorithm.old_logprobs == "recompute" and self.algorithm.correction == "off"),
            f"rollout.top_p={self.rollout.top_p}, rollout.top_k={self.rollout.top_k} cut the sampler's distribution: "
            "its logprobs and the trainer's are of two, and their ratio is not 1 for equal weights; use top_p=1 and "
            "top_k=-1, or algorithm.old_logprobs='recompute' with algorithm.correction='off'",
        )
        bf16 = self.model.precision == "bf16"  # of adapters as well
        require(
            self.optim.strategy != "adamw_stochastic" or bf16,
            f"optim.strategy='adamw_stochastic' rounds bfloat16 weights, and model.precision={self.model.precision!r} "
            "keeps float32 ones; use 'adamw', or model.precision='bf16'",
        )
        require(
            self.optim.strategy != "muon" or not bf16,
            "optim.strategy='muon' trains float32 weights, bfloat16 ones would lose its updates; "
            "set model.precision='amp'",
        )

    @property
    def run_dir(self) -> str:
        return f"{self.trainer.output_dir}/{self.trainer.experiment_name}"

    @property
    def engine_dtype(self) -> str:
        if self.rollout.dtype != "auto":
            return self.rollout.dtype
        return "float32" if self.model.precision == "float32" else "bfloat16"

    @property
    def max_model_len(self) -> int:
        return self.rollout.max_model_len or self.data.max_prompt_length + self.data.max_response_length

    @property
    def defers_old_logprobs(self) -> bool:
        """Whether a step's first update makes its own old logprobs, in a forward pass that it runs anyway."""
        algorithm = self.algorithm
        return (
            algorithm.old_logprobs == "recompute"
            and algorithm.kl_in == "loss"  # else the rewards need them before
            and algorithm.critic_warmup_steps == 0  # else there are steps without an update
            and self.model.lora.dropout == 0  # else an update's logprobs are not the policy's
        )

    def steps_per_epoch(self, num_rows: int) -> int:
        """Whole batches in num_rows rows; ValueError when there is not even one."""
        batch = self.data.rollout_batch_size
        require(
            num_rows >= batch,
            f"the training set has {num_rows} rows after filtering, fewer than data.rollout_batch_size={batch}; "
            f"lower it to {num_rows} or less",
        )
        return num_rows // batch

    def num_steps(self, num_rows: int) -> int:
        return self.trainer.max_steps or self.steps_per_epoch(num_rows) * self.trainer.total_epochs

    def check_world_size(self, world_size: int, local_world_size: int) -> None:
        """Raise ValueError unless the batches and engines divide over the ranks; the message names sizes that do."""
        tp, engines = self.rollout.tensor_parallel_size, world_size // self.rollout.tensor_parallel_size
        fits = [d for d in range(1, local_world_size + 1) if world_size % d == 0 and local_world_size % d == 0]
        require(
            tp in fits,
            f"rollout.tensor_parallel_size={tp} does not divide {local_world_size} ranks a node "
            f"({world_size} in all); use one of {fits}",
        )
        sharing = self.parallel.sequence_parallel_size
        parts = [d for d in range(1, world_size + 1) if world_size % d == 0]
        fits = [d for d in parts if local_world_size % d == 0 or d % local_world_size == 0]
        require(
            sharing in fits,
            f"parallel.sequence_parallel_size={sharing} does not divide {local_world_size} ranks a node "
            f"({world_size} in all), nor is it whole nodes; use one of {fits}",
        )
        learners = world_size // sharing
        for name, size in (
            ("data.rollout_batch_size", self.data.rollout_batch_size),
            ("update.global_batch_size", self.update.global_batch_size),
        ):
            unit = engines if name.startswith("data") else 1
            require(
                size % unit == 0,
                f"{name}={size} prompts do not divide over {engines} engines ({world_size} ranks, "
                f"tensor_parallel_size={tp}); use {_multiples_near(size, unit)}",
            )
            responses = size * self.rollout.n
            require(
                responses >= learners,
                f"{name}={size} x rollout.n={self.rollout.n} = {responses} responses are fewer than {learners} "
                f"{'ranks' if sharing == 1 else f'groups of {sharing} ranks'}; "
                f"use at least {math.ceil(learners / self.rollout.n)}",
            )
        fsdp = self.parallel.fsdp_size
        require(
            fsdp == -1 or (fsdp >= 1 and world_size % fsdp == 0),
            f"parallel.fsdp_size={fsdp} does not divide {world_size} ranks; use -1 or one of {parts}",
        )


def load_config(path: str, overrides: Sequence[str] = (), *, quiet: bool = False) -> Config:
    """Run a config file and apply command-line overrides by dotted path (`--rollout.n 8`).

    Args:
        path: a Python file that defines `config = Config(...)`.
        overrides: command-line words; an unknown option ends the program and names the nearest.
        quiet: print nothing when ending; for ranks other than 0.

    Raises:
        ValueError: the file is missing, defines no config, sets an unknown field, or breaks a rule.
    """
    if not Path(path).is_file():
        raise ValueError(f"--config {path}: no such file; see configs/ for examples")
    if Path(path).suffix in (".yaml", ".yml", ".json", ".toml"):
        raise ValueError(
            f"--config {path}: a config is a Python file with `config = Config(...)`; see configs/ for examples"
        )
    sys.path.insert(0, str(Path(path).resolve().parent))  # a config file may import its neighbour
    try:
        config = runpy.run_path(path).get("config")
    except TypeError as error:
        raise ValueError(f"{path}: {_explain_keyword(error)}") from error
    except dataclasses.FrozenInstanceError as error:
        raise ValueError(f"{path}: {error}: give it to its section, as in RolloutConfig(n=8)") from error
    finally:
        sys.path.pop(0)
    if not isinstance(config, Config):
        raise ValueError(f"{path} must define `config = Config(...)`, found {type(config).__name__}")
    # A shell completes the words behind a command of one word.
    completes = any(word.startswith("--tyro-") for word in overrides)
    prog = "single_node.sh" if completes else f"python -m r1.train --config {path}"
    return override_config(config, overrides, prog=prog, quiet=quiet)


def override_config(config: Config, overrides: Sequence[str], *, prog: str, quiet: bool = False) -> Config:
    """config with the fields replaced that the command line names by their dotted path (`--rollout.n 8`).

    Args:
        overrides: command-line words; an unknown option ends the program and names the nearest.
        prog: how the command line began, for messages.
        quiet: print nothing when ending; for ranks other than 0.
    """
    if not overrides:
        return config
    if not overrides[0].startswith("-"):
        name, _, value = overrides[0].partition("=")
        raise ValueError(f"{overrides[0]!r} is no option; write --{name} {value or 'VALUE'}, as in --rollout.n 8")
    return tyro.cli(
        Config,
        args=list(overrides),
        default=config,
        prog=prog,
        description="Settings of the run; each may be overridden by its dotted path.",
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        console_outputs=not quiet,
    )


def _explain_keyword(error: TypeError) -> str:
    """Name the nearest field when a dataclass got an unknown keyword; other errors as they are."""
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    section = globals().get(found[1]) if found else None
    if found is None or section is None or not dataclasses.is_dataclass(section):
        return str(error)
    known = [f.name for f in dataclasses.fields(section)]
    near = difflib.get_close_matches(found[2], known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"its fields are {', '.join(known)}"
    return f"{found[1]} has no field {found[2]!r}; {hint}"


def config_to_json(config: Config) -> str:
    """The resolved config, for config.json in the run folder."""
    return json.dumps(dataclasses.asdict(config), indent=2)
