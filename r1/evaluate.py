"""Validation: sample every validation set with the current weights and average what the reward function says.

    python -m r1.evaluate --model MODEL --data geo3k=hiyouga/geometry3k@test math.jsonl --rollout.val.n 8
    torchrun --nproc_per_node 8 -m r1.evaluate --config configs/geo3k.py --model runs/geo3k_7b/merged

The first needs no config file: prompts are rendered and responses graded by r1's defaults, which any setting by its
dotted path replaces; the second takes them, and the sets, from a training run's config.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record
from transformers import PreTrainedTokenizerBase

from r1.config import (
    Config,
    ParallelConfig,
    RolloutConfig,
    UpdateConfig,
    config_to_json,
    load_config,
    override_config,
)
from r1.data.loader import Loader
from r1.data.setup import load_val_sets, make_renderer
from r1.data.tokenizer import load_tokenizer
from r1.dry_run import check_files
from r1.evaluate_scores import Scored, answer_finder, score_prompt, summarize
from r1.faults import run_rank
from r1.loggers_files import Pictures
from r1.parallel import Ranks, gather_objects, init_ranks, is_first_rank, seed_everything, world_from_env
from r1.rewards.runner import RewardRunner
from r1.rollout.engines import ENGINES, Engine
from r1.rollout.responses import decode_responses, reward_inputs, sample_record
from r1.types import SamplingParams

SAMPLES_WITH_PICTURES = 32
"""Of a validation set on each rank: of thousands, pictures would fill the host's memory."""


def evaluate(
    config: Config,
    ranks: Ranks,
    engine: Engine,
    val_sets: Sequence[Loader],
    rewards: RewardRunner,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Means over each validation set, with an engine that is awake and holds the weights; collective.

    Returns:
        Metrics `val/<set>/reward` (the mean of "overall"), `val/<set>/<key>` for the reward function's other keys,
        `val/<set>/response_length` in tokens and `val/<set>/failed_frac`, the share of responses without a reward,
        which count as 0. With n = rollout.val.n responses a prompt also, of those that rollout.val.correct_key calls
        right, `mean@n`, their share; `maj@n`, the share of prompts whose most frequent answer is right; and `pass@k`
        for k = 1, 2, 4 … n, the chance that one of k is right (arXiv 2107.03374).
        And some of this rank's samples for the log.
    """
    val, find = config.rollout.val, answer_finder(config.reward)
    sampling = SamplingParams(
        n=val.n,
        temperature=val.temperature,
        top_p=val.top_p,
        top_k=val.top_k,
        max_tokens=config.data.max_response_length,
        seed=config.rollout.seed,
    )
    metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    for loader in val_sets:
        size = loader.num_rows if config.data.val_batch_size == -1 else config.data.val_batch_size
        scored: list[Scored] = []
        shown = 0
        for start in range(0, loader.num_rows, size):
            rows = list(range(start, min(start + size, loader.num_rows)))
            share = ranks.engine_share(len(rows))
            prompts = loader.prepare(rows[share])
            rollouts = engine.generate(prompts, rows[share], sampling)
            if not ranks.speaks_for_engine:
                continue
            decode_responses(rollouts, tokenizer, skip_special_tokens=config.reward.skip_special_tokens)
            graded = rewards.submit(reward_inputs(rollouts, prompts, start + share.start)).result()
            for rollout, rewards_of in zip(rollouts, graded, strict=True):
                rollout.rewards = rewards_of
            for at in range(0, len(rollouts), val.n):
                group = rollouts[at : at + val.n]
                given, lengths = [r.rewards for r in group], [len(r.response_ids) for r in group]
                scored.append(score_prompt(given, lengths, [r.response for r in group], find, val.correct_key))
            some = rollouts[: config.trainer.samples_to_log - shown]
            for rollout in some:
                prompt = prompts[rollout.group - start - share.start]
                record_of = sample_record(rollout, prompt, pictures=shown < SAMPLES_WITH_PICTURES)
                samples.append({"set": loader.name} | record_of)
                shown += 1
        gathered = [x for part in gather_objects(scored) for x in part]
        metrics |= summarize(loader.name, gathered, val.correct_key)
    return metrics, samples


def prepare(words: list[str]) -> tuple[Config, Path]:
    """The config of an evaluation, checked, and the folder for its files.

    Raises:
        ValueError: a setting, file or column that cannot be used; before a process group or an engine exists.
    """
    parser = argparse.ArgumentParser(prog="python -m r1.evaluate", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--config", help="Python file that defines `config = Config(...)`; see configs/")
    parser.add_argument("--model", help="folder or hub id of the model (default: the config's model.path)")
    parser.add_argument("--data", nargs="+", help="sets, as data.val_files (default: the config's)")
    parser.add_argument("--output", help="folder for scores.json and samples.jsonl (default: runs/eval-<model>)")
    options, overrides = parser.parse_known_args(words)
    quiet = not is_first_rank()
    if options.config is None:
        if not (options.model and options.data):
            parser.error("give --config FILE, or --model MODEL and --data SET …")
        # No trainer shares the GPU, and nothing is packed into microbatches.
        plain = Config(
            rollout=RolloutConfig(gpu_memory_utilization=0.9), update=UpdateConfig(max_tokens_per_microbatch=1 << 30)
        )
        config = override_config(plain, overrides, prog="python -m r1.evaluate", quiet=quiet)
    else:
        config = load_config(options.config, overrides, quiet=quiet)
    sets = tuple(options.data or config.data.val_files)
    if not sets:
        raise ValueError("there is nothing to evaluate on: give --data, or data.val_files in the config")
    config = replace(
        config,
        model=replace(config.model, path=options.model or config.model.path),
        data=replace(config.data, val_files=sets, train_files=sets),  # so that no file is checked that is not read
        trainer=replace(config.trainer, samples_to_log=sys.maxsize),
        # How a trainer is sharded and packs its microbatches is nothing to it.
        parallel=ParallelConfig(timeout_s=config.parallel.timeout_s),
        update=replace(config.update, max_tokens_per_microbatch=1 << 30),
    )
    _, local_world_size = world_from_env()
    tp = config.rollout.tensor_parallel_size
    if local_world_size % tp:
        raise ValueError(f"rollout.tensor_parallel_size={tp} does not divide {local_world_size} ranks a node")
    check_files(config)
    name = Path(config.model.path).resolve().name if Path(config.model.path).is_dir() else config.model.path
    return config, Path(options.output or f"runs/eval-{name.replace('/', '--')}")


def run(config: Config, folder: Path) -> None:
    """Evaluate, print the table and write scores.json, samples.jsonl and config.json; on every rank."""
    with RewardRunner(config.reward) as rewards:  # before the GPU is touched: its workers are other processes
        ranks = init_ranks(config.parallel, config.rollout.tensor_parallel_size)
        tokenizer, processor = load_tokenizer(config.model)
        renderer = make_renderer(config, tokenizer, processor)
        val_sets = load_val_sets(config, renderer)
        engine = ENGINES[config.rollout.engine](
            config.model.path, config, mm_processor_kwargs=renderer.mm_processor_kwargs, device=ranks.device
        )
        metrics, samples = evaluate(config, ranks, engine, val_sets, rewards, tokenizer)
        everyones = [sample for part in gather_objects(samples) for sample in part]
        if ranks.rank == 0:
            write(folder, config, metrics, everyones)
        engine.close()


def write(folder: Path, config: Config, metrics: dict[str, float], samples: Sequence[dict[str, Any]]) -> None:
    """Print the table; write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = list(dict.fromkeys(name.split("/")[1] for name in metrics))
    scores = {s: {k.split("/", 2)[2]: v for k, v in metrics.items() if k.split("/")[1] == s} for s in sets}
    (folder / "scores.json").write_text(json.dumps({"model": config.model.path, "sets": scores}, indent=2) + "\n")
    (folder / "config.json").write_text(config_to_json(config))
    order = {name: i for i, name in enumerate(sets)}
    ordered = sorted(samples, key=lambda s: (order[s["set"]], s["row"], s["sample"]))
    pictures = Pictures(folder)
    lines = (json.dumps(pictures.keep(s), ensure_ascii=False) + "\n" for s in ordered)
    (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"{table(scores)}\n\n{folder}/scores.json, samples.jsonl ({len(ordered)} responses)\n")


def table(scores: dict[str, dict[str, float]]) -> str:
    """One row a score, one column a set."""
    rows = list(dict.fromkeys(key for values in scores.values() for key in values))
    width = max(len(row) for row in rows)
    columns = {name: max(len(name), 8) for name in scores}
    lines = [f"{'':{width}}  " + "  ".join(f"{name:>{size}}" for name, size in columns.items())]
    for row in rows:
        cells = [
            f"{scores[name][row]:>{size}.4g}" if row in scores[name] else f"{'':{size}}"
            for name, size in columns.items()
        ]
        lines.append(f"{row:{width}}  " + "  ".join(cells))
    return "\n".join(lines)


@record
def main() -> None:
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    try:
        config, folder = prepare(sys.argv[1:])
    except ValueError as error:  # the same on every rank; one of them says it
        if is_first_rank():
            sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    seed_everything(config.trainer.seed, deterministic=config.trainer.deterministic)
    run(config, folder)


if __name__ == "__main__":
    run_rank(main)
