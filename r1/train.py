"""Train: the whole loop, one program under torchrun.

torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k.py [--rollout.n 8 …]
python -m r1.train --config configs/geo3k.py --dry-run --world-size 8
"""

import argparse
import logging
import os
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record
from transformers import PreTrainedModel

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.groups import set_advantages, valid_tokens
from r1.algorithms.named import function_of
from r1.checkpoint import Checkpoints, TrainerState
from r1.checkpoint_resume import check_resume
from r1.config import Config, config_to_json, load_config
from r1.config_help import help_text, topic_of
from r1.data.loader import Loader
from r1.data.setup import load_data
from r1.dry_run import check_files, dry_run
from r1.evaluate import evaluate
from r1.faults import run_rank
from r1.loggers import Logger, check_installed
from r1.loggers_environment import write_environment
from r1.metrics import Timer, step_metrics
from r1.parallel import Ranks, init_ranks, is_first_rank, seed_everything, world_from_env
from r1.policy.critic import Critic
from r1.policy.policy import Policy
from r1.preempt import Stopper, exit_stopped
from r1.profile import profiled
from r1.rewards.runner import RewardRunner
from r1.rollout.sampler import BatchPrompts, Sampler

_log = logging.getLogger(__name__)


def train(config: Config, ranks: Ranks, rewards: RewardRunner, stopper: Stopper) -> bool:
    """The loop: sample, score, update; now and then validate and save. Every rank runs it in step; False: stopped."""
    advantage_fn = function_of(config.algorithm.advantage, ADVANTAGES, option="algorithm.advantage")
    loader, val_sets, policy, critic, sampler, checkpoints = load_parts(config, ranks, rewards)
    num_steps = config.num_steps(loader.num_rows)
    start, reason = resume(checkpoints, policy, sampler, critic), None
    log = RankZeroLog(config, ranks, num_steps, start)

    def validate(step: int) -> dict[str, float]:
        with sampler.awake() as engine:
            metrics, samples = evaluate(config, ranks, engine, val_sets, rewards, sampler.tokenizer)
        log.samples(step, "val", samples)
        return metrics

    if val_sets and validates_first(config, checkpoints, start):
        log.metrics(start, validate(start))
    for step in profiled(range(start + 1, 1 if config.trainer.val_only else num_steps + 1), config, ranks):
        timer = Timer()
        with timer("weight_sync"):
            sampler.sync()
        with timer("rollout"):
            batch = sampler.sample(loader)
            rollouts, prompts = batch.rollouts, BatchPrompts(loader, batch.rows)
        with timer("logprobs"):
            minibatches = policy.pack(rollouts, batch.homes, prompts)
            policy.set_logprobs(minibatches)
            if critic is not None:
                critic.set_values(rollouts, minibatches)
        with timer("reward"):  # grading went on during the logprobs; this is what was left of it
            sampler.set_rewards(batch)
        metrics = policy.set_kl_penalties(rollouts, minibatches)
        set_advantages(rollouts, advantage_fn, config)
        global_valid_tokens = valid_tokens(rollouts, config)
        with timer("update"):
            if critic is not None:
                metrics |= critic.update(rollouts, minibatches, global_valid_tokens)
            if step > config.algorithm.critic_warmup_steps:
                metrics |= policy.update(minibatches, global_valid_tokens)
        metrics |= step_metrics(rollouts, minibatches, timer, policy.model, config, ranks) | sampler.take_metrics(batch)
        policy.end_step(step, metrics, len(rollouts))
        if val_sets and is_due(step, config.trainer.val_freq, num_steps):
            metrics |= validate(step)
        # Before the save: a kill between them leaves a line too many, which resuming sets aside, and not one too few.
        log.metrics(step, metrics | checkpoints.take_metrics())
        log.samples(step, "train", sampler.samples(batch, prompts))
        log.failures(step, batch.failures)
        reason = stopper.requested(checkpoints.write_s) if step < num_steps else None
        if reason or is_due(step, config.checkpoint.save_freq, num_steps):
            save(checkpoints, policy, sampler, critic, step, metrics)
        if reason:
            break
    log.end(checkpoints.finish(), reason)
    sampler.close()
    return reason is None


def load_parts(
    config: Config, ranks: Ranks, rewards: RewardRunner
) -> tuple[Loader, list[Loader], Policy, Critic | None, Sampler, Checkpoints]:
    """Data, models and engine, and how long each took."""
    timer = Timer()
    with timer("data"):
        tokenizer, processor, loader, val_sets = load_data(config)
    num_steps = config.num_steps(loader.num_rows)
    with timer("policy"):
        policy = Policy(config, ranks, num_steps)
        critic = Critic(config, ranks, policy.backend, num_steps) if config.algorithm.advantage == "gae" else None
    with timer("engine"):
        sampler = Sampler(config, ranks, policy, tokenizer, rewards, loader.renderer.mm_processor_kwargs)
    say("loaded: " + ", ".join(f"{part} {seconds:.0f} s" for part, seconds in timer.seconds.items()))
    checkpoints = Checkpoints(config, tokenizer=tokenizer, processor=processor)
    return loader, val_sets, policy, critic, sampler, checkpoints


def validates_first(config: Config, checkpoints: Checkpoints, start: int) -> bool:
    """Whether to validate before any step: a run that goes on from a checkpoint of its own has done that."""
    return config.trainer.val_only or (config.trainer.val_before_train and not (start and checkpoints.latest()))


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Every so many steps, -1: never; and after the last step."""
    return step == num_steps or (every > 0 and step % every == 0)


def resume(checkpoints: Checkpoints, policy: Policy, sampler: Sampler, critic: Critic | None) -> int:
    """Load the checkpoint that the config asks for, if there is one; returns the step that is done."""
    state = checkpoints.resume(policy, critic=critic, reference=moving_reference(policy))
    if state is None:
        return 0
    policy.offload.after_load()
    if critic is not None:
        critic.sleep(updated=True)  # loaded into the model, while its copies in host memory are older
    policy.version, sampler.draws = state.policy_version, state.draws
    if policy.config.algorithm.kl_target is not None and state.kl_coef is not None:  # else the config's stands
        policy.kl_coef = state.kl_coef
    return state.step


def moving_reference(policy: Policy) -> PreTrainedModel | None:
    """The reference, if it is not model.path's all along."""
    return policy.reference if policy.config.algorithm.reference_update_steps is not None else None


def save(
    checkpoints: Checkpoints,
    policy: Policy,
    sampler: Sampler,
    critic: Critic | None,
    step: int,
    metrics: dict[str, float],
) -> None:
    """Save what the run needs to go on after this step."""
    state = TrainerState(step=step, policy_version=policy.version, draws=sampler.draws, kl_coef=policy.kl_coef)
    checkpoints.save(state, policy, critic=critic, reference=moving_reference(policy), metrics=metrics)


def say(text: str) -> None:
    """A line on the console, from one rank."""
    if is_first_rank():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class RankZeroLog:
    """The loggers, on rank 0; nothing on the others. Remembers validation for the last lines."""

    def __init__(self, config: Config, ranks: Ranks, num_steps: int, start: int) -> None:
        self.config, self.began, self.first, self.last = config, time.monotonic(), {}, {}
        self.logger: Logger | None = None
        if ranks.rank == 0:
            folder = Path(config.run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(config_to_json(config))
            write_environment(folder / "environment.json", ranks, num_steps=num_steps, start=start)
            self.logger = Logger(config, folder, num_steps=num_steps, resumed_step=start)
            if start:
                say(f"resumed after step {start} of {num_steps}")
            if start >= num_steps and not config.trainer.val_only:
                say("nothing is left to train; raise trainer.max_steps or trainer.total_epochs to go on")

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        validation = {name: value for name, value in metrics.items() if name.startswith("val/")}
        self.first, self.last = self.first or validation, validation or self.last
        if self.logger is not None:
            self.logger.log(step, metrics)

    def samples(self, step: int, kind: str, records: list[dict]) -> None:
        if self.logger is not None:
            self.logger.samples(step, kind, records)

    def failures(self, step: int, lines: list[str]) -> None:
        if self.logger is not None and lines:
            _log.warning(
                "step %d: %d responses left out, their reward failed: %s", step, len(lines), "; ".join(lines[:3])
            )

    def end(self, checkpoint: Path | None, stopped: str | None) -> None:
        """The last lines: validation before and after, where things lie, and what to type next."""
        for name in sorted(self.last):
            if name in self.first and name.endswith(("/accuracy", "/reward")):
                say(f"{name}: {self.first[name]:.3f} before, {self.last[name]:.3f} after")
        say(f"run folder: {self.config.run_dir} (report.html, metrics.jsonl, samples.jsonl, tensorboard/)")
        if checkpoint is not None:
            say(f"to use the model: python tools/merge.py {self.config.run_dir} --output {self.config.run_dir}/merged")
        if stopped and checkpoint is not None:
            say(f"stopped by {stopped}, saved as {checkpoint.name}; the same command goes on from there")
        say(f"done in {time.monotonic() - self.began:.0f} s")
        if self.logger is not None:
            self.logger.close()


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the rest, which override the config."""
    parser = argparse.ArgumentParser(prog="python -m r1.train", description=__doc__, add_help=False, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--config", help="Python file that defines `config = Config(...)`; see configs/")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the run, start nothing")
    parser.add_argument("--world-size", type=int, help="ranks to assume in --dry-run (default: the launcher's, or 1)")
    parser.add_argument("--ranks-per-node", type=int, help="ranks of one node in --dry-run (default: at most 8)")
    if not words or (("-h" in words or "--help" in words) and "--config" not in words):
        parser.print_help()
        sys.stdout.write(
            "\nWith --config FILE --help [SECTION]: the settings of that run, with their values and meaning.\n"
        )
        sys.exit(0)
    options, overrides = parser.parse_known_args(words)
    if options.config is None:
        parser.error("--config is missing; give one of configs/*.py")
    return options, overrides


def prepare(words: list[str]) -> Config | None:
    """Everything that can fail before a process group or a model exists; None when that was all that was asked for."""
    options, overrides = parse_arguments(words)
    asked, topic = topic_of(overrides)
    if asked:
        sys.stdout.write(help_text(load_config(options.config), topic) + "\n")
        return None
    config = load_config(options.config, ["--help"] if topic == "all" else overrides, quiet=not is_first_rank())
    world_size, local_world_size = world_from_env()
    if options.dry_run:
        world_size = options.world_size or world_size
        local = options.ranks_per_node or min(world_size, 8)
        sys.stdout.write(dry_run(config, world_size, local) + "\n")
        return None
    config.check_world_size(world_size, local_world_size)
    check_files(config)
    check_installed(config.trainer.loggers)
    for line in check_resume(config):
        if is_first_rank():
            _log.warning("%s", line)
    return config


@record  # torchrun then reports the rank that failed first, with its traceback
def main() -> None:
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    try:
        config = prepare(sys.argv[1:])
    except ValueError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(3)  # as a rule all ranks meet it: rank 0 says it, and torchrun ends the others meanwhile
        sys.stderr.write(f"error: {error}\n" if rank == "0" else f"error: rank {rank}: {error}\n")
        sys.exit(2)
    if config is None:
        return
    seed_everything(config.trainer.seed, deterministic=config.trainer.deterministic)
    stopper = Stopper(config.checkpoint)
    with RewardRunner(config.reward) as rewards:  # before the GPU is touched: its workers are other processes
        ranks = init_ranks(config.parallel, config.rollout.tensor_parallel_size)
        stopper.join()
        finished = train(config, ranks, rewards, stopper)
        stopper.end()
    if not finished:
        exit_stopped()


if __name__ == "__main__":
    run_rank(main)
