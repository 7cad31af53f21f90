"""Plan a run's memory before there is a GPU: does it fit, where does it go, what is the cheapest change that helps.

python tools/plan.py --config configs/geo3k.py --gpus 8xH100-80GB [--optim.strategy adamw_8bit …]
python tools/plan.py --model qwen2.5-vl-32b --gpus 8x80GB --model.precision bf16
python tools/plan.py --table                     # the README's table of hardware, 1.5B to 72B

A model is a folder with a config.json, a hub id, or a known name; nothing of its weights is read.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that `python tools/plan.py` runs where r1 is not installed

from r1.config import Config, LoraConfig, ModelConfig, load_config, override_config  # noqa: E402
from r1.policy.recompute import SPARE  # noqa: E402
from tools.plan_held import Machines  # noqa: E402
from tools.plan_memory import GIB, USABLE, Plan, plan, saved_by_rank  # noqa: E402
from tools.plan_shapes import NAMES, known_config  # noqa: E402

ROWS = (("1.5B", "qwen2.5-1.5b"), ("3B", "qwen2.5-3b"), ("7B", "qwen2.5-7b"), ("14B", "qwen2.5-14b"),
        ("32B", "qwen2.5-32b"), ("72B", "qwen2.5-72b"))  # fmt: skip
COLUMNS: dict[str, dict[str, Any]] = {
    "AMP": {"precision": "amp"}, "BF16": {"precision": "bf16"},
    "LoRA": {"precision": "bf16", "lora": LoraConfig(rank=64)},
}  # fmt: skip
SIZES = tuple(Machines(num_gpus=n, per_node=8, gpu_gib=gb * USABLE, name=f"{n} x {gb} GB")
              for n in (1, 2, 4, 8, 16, 32, 64) for gb in (24, 40, 80))  # fmt: skip
Step = tuple[str, Callable[[Config], Config]]


def parse_gpus(text: str, per_node: int | None) -> Machines:
    """`8xH100-80GB`, `32x80GB`: how many GPUs, and the memory of one as its name has it.

    Raises:
        ValueError: it has another form.
    """
    match = re.fullmatch(r"(\d+)x(?:[\w.+]+-)*(\d+)GB?", text, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"--gpus {text!r}: give a number and a size, as in 8xH100-80GB or 4x24GB")
    num = int(match[1])
    return Machines(num_gpus=num, per_node=per_node or min(num, 8), gpu_gib=int(match[2]) * USABLE, name=text)


def find_model(path: str) -> PreTrainedConfig:
    """The config of a folder, a known name, or a hub id.

    Raises:
        ValueError: it is none of them, or the hub cannot be reached.
    """
    if not Path(path).is_dir():
        short = re.sub(r"-(instruct|base|it|chat|hf|\d{4})(?=-|$)", "", path.rpartition("/")[2].lower())
        short = re.sub(r"^(meta-)?llama-3(\.\d)?-", "llama-", short)
        if short in NAMES:
            return known_config(short)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path!r} is no folder with a config.json, no reachable hub id ({reason}), and not one of "
            f"{', '.join(NAMES)}"
        ) from None


def changes(config: Config, machines: Machines) -> Iterator[Step]:
    """What could be changed, the cheapest first: what costs no quality and little time, then time, then quality."""
    update, rollout, parallel = config.update, config.rollout, config.parallel
    longest = config.data.max_prompt_length + config.data.max_response_length
    least = -(-longest // parallel.sequence_parallel_size)  # tokens of a rank: a prompt and response must fit
    if config.model.gradient_checkpointing is False:
        yield "--model.gradient_checkpointing None", lambda c: replace(
            c, model=replace(c.model, gradient_checkpointing=None))  # fmt: skip
    for name in ("optimizer", "reference", "params"):
        if getattr(parallel, f"offload_{name}") is not True:
            yield f"--parallel.offload_{name} True", lambda c, n=name: replace(
                c, parallel=replace(c.parallel, **{f"offload_{n}": True}))  # fmt: skip
    for chunk in (2048, 1024, 512):
        if chunk < update.logprob_chunk_tokens:
            yield f"--update.logprob_chunk_tokens {chunk}", lambda c, x=chunk: replace(
                c, update=replace(c.update, logprob_chunk_tokens=x))  # fmt: skip
    tp = rollout.tensor_parallel_size * 2
    while tp <= machines.per_node and machines.num_gpus % tp == 0:
        yield f"--rollout.tensor_parallel_size {tp}", lambda c, x=tp: replace(
            c, rollout=replace(c.rollout, tensor_parallel_size=x))  # fmt: skip
        tp *= 2
    for share in (0.7, 0.5, 0.4, 0.3):
        yield f"--rollout.gpu_memory_utilization {share}", lambda c, x=share: replace(
            c, rollout=replace(c.rollout, gpu_memory_utilization=x))  # fmt: skip
    tokens = update.max_tokens_per_microbatch // 2
    while tokens >= least:
        yield f"--update.max_tokens_per_microbatch {tokens}", lambda c, x=tokens: replace(
            c, update=replace(c.update, max_tokens_per_microbatch=x))  # fmt: skip
        tokens //= 2
    if least < update.max_tokens_per_microbatch:
        yield f"--update.max_tokens_per_microbatch {least}", lambda c: replace(
            c, update=replace(c.update, max_tokens_per_microbatch=least))  # fmt: skip
    yield from shared_sequences(config, machines)


def shared_sequences(config: Config, machines: Machines) -> Iterator[Step]:
    """Sequence parallelism over ever more ranks, wherever r1 allows it, each rank with its part of one response."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    size = config.parallel.sequence_parallel_size * 2
    while size <= machines.num_gpus:
        tokens = min(-(-longest // size), config.update.max_tokens_per_microbatch)

        def change(c: Config, size: int = size, tokens: int = tokens) -> Config:
            return replace(
                c,
                parallel=replace(c.parallel, sequence_parallel_size=size),
                update=replace(c.update, max_tokens_per_microbatch=tokens),
            )

        if divides(change(config), machines):
            yield f"--parallel.sequence_parallel_size {size} --update.max_tokens_per_microbatch {tokens}", change
        size *= 2


def divides(config: Config, machines: Machines) -> bool:
    """Whether the run's batches, engines and groups of ranks divide over the machines."""
    try:
        config.check_world_size(machines.num_gpus, machines.per_node)
    except ValueError:
        return False
    return True


def dear_changes(config: Config) -> Iterator[Step]:
    """What also changes what is learned: precision, then adapters."""
    if config.model.precision == "amp" and config.model.lora.rank == 0:
        yield "--model.precision bf16", lambda c: replace(c, model=replace(c.model, precision="bf16"))
    if config.model.lora.rank == 0:
        yield "--model.lora.rank 64 --model.precision bf16", lambda c: replace(
            c, model=replace(c.model, precision="bf16", lora=LoraConfig(rank=64)))  # fmt: skip


def mend(
    hf_config: PreTrainedConfig, config: Config, machines: Machines, *, dear: bool
) -> tuple[list[str], Config, Plan] | None:
    """The cheapest changes that make it fit, with what they give; None if none of ours do. [] where it fits already."""
    need, chosen = config.max_model_len, {}

    def apply(some: dict[str, Step]) -> tuple[Config, Plan]:
        changed = config
        for _, change in some.values():
            changed = change(changed)
        return changed, plan(hf_config, changed, machines)

    best = apply(chosen)
    for step in [*changes(config, machines), *(dear_changes(config) if dear else ())]:
        if best[1].shortage(need) == 0:
            break
        trial = {**chosen, step[0].split()[0]: step}  # a setting's later step replaces its earlier one
        result = apply(trial)
        if result[1].shortage(need) < best[1].shortage(need):
            chosen, best = trial, result
    if best[1].shortage(need) > 0:
        return None
    for name in reversed(list(chosen)):  # the dearest may do without the others, and they without it
        fewer = {n: s for n, s in chosen.items() if n != name}
        result = apply(fewer)
        if result[1].shortage(need) == 0:
            chosen, best = fewer, result
    return [text for text, _ in chosen.values()], *best


def show(result: Plan, config: Config, machines: Machines) -> str:
    """Two tables: a rank's GPU by phase, and a node's host memory; then the KV cache."""
    held, phases = result.held, result.phases
    parts = list(dict.fromkeys(part for values in phases.values() for part in values))
    width = max(len(part) for part in parts)
    lines = [f"{'GiB of one GPU':{width}}" + "".join(f"{name:>10}" for name in phases)]
    for part in parts:
        cells = "".join(f"{v[part] / GIB:>10.1f}" if v.get(part) else f"{'':>10}" for v in phases.values())
        lines.append(f"{part:{width}}{cells}")
    totals = "".join(f"{sum(values.values()) / GIB:>10.1f}" for values in phases.values())
    lines += [
        f"{'sum':{width}}{totals}",
        f"{'of':{width}}{result.limit / GIB:>10.1f}",
        "",
        "GiB of one node's host memory",
    ]
    lines += [f"{name:{width}}{size / GIB:>10.1f}" for name, size in result.host.items()]
    lines += [f"{'sum':{width}}{sum(result.host.values()) / GIB:>10.1f}", ""]
    away = [name for name, leaves in result.leaves.items() if leaves]
    lines.append(
        f"{held.parameters / 1e9:.2f}B parameters, {held.trained / 1e9:.2f}B trained, {config.model.precision}; in "
        f"host memory while the engine samples: {', '.join(away) or 'nothing'}"
    )
    lines.append(
        f"{machines.num_gpus // config.rollout.tensor_parallel_size} engines of "
        f"{config.rollout.tensor_parallel_size} GPUs, each with a KV cache of {max(0, result.kv_tokens):,} tokens: "
        f"{max(0, result.kv_tokens) / config.max_model_len:.1f} responses of full length at once"
    )
    size, limit = held.shard * saved_by_rank(held, config) / GIB, config.checkpoint.save_limit
    kept = limit + 1 + (config.checkpoint.best_metric is not None)  # one is being written
    room = "; all are kept (checkpoint.save_limit=-1)" if limit == -1 else f", {kept * size:.0f} GiB with those kept"
    lines.append(f"{size:.1f} GiB of disk for a checkpoint{room}")
    return "\n".join(lines)


def verdict(result: Plan, config: Config) -> str:
    """Whether it fits, and what becomes of memory that is left."""
    fits, adapts = result.shortage(config.max_model_len) == 0, config.model.gradient_checkpointing is None
    text = f"{'fits' if fits else 'does not fit'}: {result.peak / GIB:.1f} of {result.limit / GIB:.1f} GiB at its peak"
    text += ", with every layer recomputed" if adapts else ""
    filled = (1 - SPARE) * result.limit
    if fits and adapts and sum(result.phases["update"].values()) < filled:
        text += (
            f"\nwhat an update leaves of {filled / GIB:.1f} GiB, {1 - SPARE:.0%} of the GPU, it fills on purpose: with "
            "activations that then need not be\nrecomputed; --model.gradient_checkpointing True leaves it free"
        )
    return text


def hardware_table() -> str:
    """Markdown: the least memory in all that each model and precision fits, after changes that cost no quality."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    by_size = sorted(SIZES, key=lambda m: (m.num_gpus * m.gpu_gib, m.num_gpus))
    for title, name in ROWS:
        hf_config, cells = known_config(name), []
        for model in COLUMNS.values():
            config = Config(model=ModelConfig(**model))
            fitting = (m.name for m in by_size if mend(hf_config, config, m, dear=False) is not None)
            cells.append(next(fitting, "more"))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="tools/plan.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--config", help="a run's config file (default: r1's defaults)")
    parser.add_argument("--model", help=f"folder, hub id, or one of {', '.join(NAMES)} (default: the config's)")
    parser.add_argument("--gpus", help="as in 8xH100-80GB; 32xH100-80GB is four nodes of eight")
    parser.add_argument("--per-node", type=int, help="GPUs of one node (default: 8, or all where there are fewer)")
    parser.add_argument("--table", action="store_true", help="print the hardware table of the README")
    options, overrides = parser.parse_known_args(words)
    if not options.table and not options.gpus:
        parser.error("give --gpus, as in --gpus 8xH100-80GB, or --table")
    return options, overrides


def main(words: Sequence[str]) -> None:
    options, overrides = parse(words)
    if options.table:
        print(hardware_table())
        return
    try:
        machines = parse_gpus(options.gpus, options.per_node)
        plain = Config() if options.config is None else load_config(options.config)
        if options.model is None and options.config is None:
            raise ValueError("say what to plan: --config FILE or --model NAME")
        config = override_config(plain, overrides, prog="python tools/plan.py")
        hf_config = find_model(options.model or config.model.path)
        config.check_world_size(machines.num_gpus, machines.per_node)
        result = plan(hf_config, config, machines)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{options.model or config.model.path} on {machines.name}\n\n{show(result, config, machines)}\n")
    print(verdict(result, config))
    if result.shortage(config.max_model_len) == 0:
        return
    mended = mend(hf_config, config, machines, dear=True)
    if mended is None:
        more = next((n for n in (2, 4, 8, 16) if mend(hf_config, config, replace(
            machines, num_gpus=machines.num_gpus * n, per_node=8), dear=False)), None)  # fmt: skip
        print("no setting makes it fit" + (f"; {machines.num_gpus * more} such GPUs would" if more else ""))
        sys.exit(1)
    print(f"the cheapest change that makes it fit: {' '.join(mended[0])}\n")
    print(show(mended[2], mended[1], machines))
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
