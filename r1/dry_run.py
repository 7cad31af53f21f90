"""`--dry-run`: resolve and check everything that needs no GPU and no network, and print the run that would follow."""

from collections.abc import Iterator
from pathlib import Path

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.loss import LOSSES
from r1.algorithms.named import function_of
from r1.config import Config
from r1.data.loader import Loader
from r1.data.mixture import Mixture
from r1.data.setup import load_data
from r1.data.sources import as_sources, parse_source
from r1.policy.lora import check_adapter
from r1.policy.model import load_model_config
from r1.rewards.runner import check_reward_function

RANKS_SHOWN = 16
"""Ranks whose place is printed."""


def dry_run(config: Config, world_size: int, local_world_size: int) -> str:
    """What the run would be, as text.

    A model or data set on a hub is not fetched: the text then says that it was not checked.

    Raises:
        ValueError: anything that would stop the run before its first step, in one line with what to do.
    """
    config.check_world_size(world_size, local_world_size)
    check_files(config)
    lines = [
        f"run        {config.run_dir}",
        *_layout(config, world_size, local_world_size),
        *_batches(config, world_size),
    ]
    lines += [f"reward     {config.reward.function}: found, loads, takes its arguments"]
    lines += _model(config)
    lines += _data(config)
    lines += [f"loggers    {', '.join(config.trainer.loggers)}", "dry run: all checks passed, nothing was started"]
    return "\n".join(lines)


def check_files(config: Config) -> None:
    """Raise ValueError for a template, folder, data file, model or function that is named but not there."""
    check_reward_function(config.reward)
    function_of(config.algorithm.advantage, ADVANTAGES, option="algorithm.advantage")
    function_of(config.algorithm.loss, LOSSES, option="algorithm.loss")
    for name in ("format_prompt", "override_chat_template", "image_dir"):
        path = getattr(config.data, name)
        if path is not None and not Path(path).exists():
            raise ValueError(f"data.{name}={path!r} does not exist (relative paths start at {Path.cwd()})")
    for option, source in (
        *(("data.train_files", t) for t in as_sources(config.data.train_files)),
        *(("data.val_files", v) for v in config.data.val_files),
    ):
        parsed = parse_source(source)
        if not parsed.paths and (parsed.is_glob or not _on_hub(parsed.location)):
            raise ValueError(f"{option}={source!r}: no such file or folder, and not a hub id like owner/name")
    if _looks_local(config.model.path) and not Path(config.model.path).is_dir():
        raise ValueError(f"model.path={config.model.path!r}: no such folder, and not a hub id like owner/name")
    adapter = config.model.lora.adapter_path
    if adapter is not None and Path(adapter).is_dir():
        check_adapter(config.model.lora)
    elif adapter is not None and _looks_local(adapter):
        raise ValueError(f"model.lora.adapter_path={adapter!r}: no such folder, and not a hub id like owner/name")


def _on_hub(location: str) -> bool:
    return (
        location.count("/") <= 1
        and not location.startswith((".", "/", "~"))
        and not Path(location).suffix.startswith(".json")
    )


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def _layout(config: Config, world_size: int, local_world_size: int) -> Iterator[str]:
    nodes = -(-world_size // local_world_size)
    tp = config.rollout.tensor_parallel_size
    shard = world_size if config.parallel.fsdp_size == -1 else config.parallel.fsdp_size
    yield f"ranks      {world_size} on {nodes} node{'s' if nodes > 1 else ''}, {local_world_size} a node"
    lora = config.model.lora
    trains = f", {'DoRA' if lora.use_dora else 'LoRA'} of rank {lora.rank}" if lora.rank else ""
    yield f"policy     FSDP2 over {shard} ranks x {world_size // shard} replicas, {config.model.precision}{trains}"
    yield (
        f"engines    {world_size // tp} x {config.rollout.engine}, tensor parallel {tp}, {config.engine_dtype}, "
        f"context {config.max_model_len}"
    )
    yield from _ranks(config, world_size, local_world_size)
    reference = "none (kl_coef 0)" if config.algorithm.kl_coef == 0 else f"yes, kl_coef {config.algorithm.kl_coef}"
    yield f"reference  {reference}"


def _ranks(config: Config, world_size: int, local_world_size: int) -> Iterator[str]:
    """What each rank holds and works on; of many ranks, the first ones and the last."""
    tp, sharing = config.rollout.tensor_parallel_size, config.parallel.sequence_parallel_size
    shard = world_size if config.parallel.fsdp_size == -1 else config.parallel.fsdp_size
    shown = range(world_size) if world_size <= RANKS_SHOWN else [*range(RANKS_SHOWN - 1), world_size - 1]
    for rank in shown:
        if rank > shown[0] and rank - 1 not in shown:
            yield "           …"
        words = [f"node {rank // local_world_size}", f"weights {rank % shard + 1}/{shard} of replica {rank // shard}"]
        words += [f"engine {rank // tp}" + (f", its part {rank % tp + 1}/{tp}" if tp > 1 else "")]
        tokens = f", their tokens' part {rank % sharing + 1}/{sharing}" if sharing > 1 else ""
        words += [f"microbatches {rank // sharing}{tokens}"]
        yield f"rank {rank:<5} {', '.join(words)}"


def _batches(config: Config, world_size: int) -> Iterator[str]:
    prompts, minibatch, n = config.data.rollout_batch_size, config.update.global_batch_size, config.rollout.n
    engines = world_size // config.rollout.tensor_parallel_size
    yield f"step       {prompts} prompts ({prompts // engines} an engine) x {n} responses = {prompts * n} rollouts"
    steps = prompts // minibatch * config.update.ppo_epochs
    yield f"updates    {steps} optimizer steps a step, of {minibatch} prompts = {minibatch * n} rollouts each"
    yield (
        f"tokens     prompts <= {config.data.max_prompt_length}, responses <= {config.data.max_response_length}, "
        f"microbatches <= {config.update.max_tokens_per_microbatch} packed tokens a rank"
    )


def _model(config: Config) -> Iterator[str]:
    if not Path(config.model.path).is_dir():
        yield f"model      {config.model.path}: on the hub, fetched at start, not checked"
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    hf_config = load_model_config(config.model)
    auto = AutoModelForImageTextToText if hasattr(hf_config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        count = sum(p.numel() for p in auto.from_config(hf_config).parameters())
    context = hf_config.get_text_config().max_position_embeddings
    if context < config.max_model_len:
        raise ValueError(
            f"data.max_prompt_length + data.max_response_length = {config.max_model_len} tokens are more than the "
            f"model's context of {context}; lower them to {context} together"
        )
    yield f"model      {config.model.path}: {hf_config.model_type}, {count / 1e6:,.1f}M parameters, context {context}"


def _data(config: Config) -> Iterator[str]:
    train_sources = as_sources(config.data.train_files)
    sources = [*train_sources, *config.data.val_files]
    local_data = [s for s in sources if parse_source(s).paths]
    for source in sources:
        if source not in local_data:
            yield f"data       {source}: on the hub, fetched at start, not checked"
    if Path(config.model.tokenizer_path or config.model.path).is_dir() and len(local_data) == len(sources):
        _, _, train, val_sets = load_data(config)
        steps = config.steps_per_epoch(train.num_rows)
        yield f"data       {', '.join(train_sources)}: {_rows(train)}"
        for val in val_sets:
            yield f"validation {val.name}: {_rows(val)}"
        yield f"steps      {steps} an epoch, {config.num_steps(train.num_rows)} in all"
        return
    for source in local_data:
        rows = Mixture([source], config.data)
        columns = ", ".join(rows.column_names)
        yield f"data       {source}: {len(rows)} rows, columns {columns} (lengths not checked: no tokenizer here)"


def _rows(loader: Loader) -> str:
    bad = f", {loader.skipped} skipped as unusable" if loader.skipped else ""
    return f"{loader.num_rows} rows, {loader.dropped} dropped as overlong{bad}"
