"""`bench.py trl`: the same work in TRL's GRPOTrainer, beside a step of r1."""

import argparse
import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from r1.config import Config, load_config
from tools.bench_launch import end, start, tail
from tools.bench_options import add_work_options, models_folder, output_folder, work_of
from tools.bench_report import hardware, header, read_lines, read_step, spread, versions
from tools.bench_step import measure
from tools.bench_work import Work, model_of, write_config

PROGRAM = Path(__file__).resolve().parent / "bench_trl_rank.py"
INSTALL = "pip install trl==1.16.0 accelerate==1.15.0 liger-kernel==0.8.5"
ROWS = ("time/weight_sync_s", "time/rollout_s", "time/logprobs_s", "time/reward_s", "time/update_s", "time/other_s",
        "time/step_s", "mem/peak_gib", "perf/tokens_per_s_per_gpu")  # fmt: skip
OTHER_TITLES = {"other_s": "between phases, s", "peak_gib": "peak memory, GiB",
                "tokens_per_s_per_gpu": "counted tokens/s/GPU"}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add_work_options(parser)
    parser.add_argument("--steps", type=int, default=4, help="cycles; the first is warm-up, not counted (default 4)")
    setting = "a field of TRL's GRPOConfig, as in per_device_train_batch_size=8; may be given several times"
    parser.add_argument("--trl", action="append", default=[], metavar="KEY=VALUE", help=setting)


def run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """The same work in TRL's GRPOTrainer (colocated vLLM, sleep mode, liger), beside a step of r1."""
    if importlib.util.find_spec("trl") is None:
        raise ValueError(f"TRL is not installed; for this benchmark: {INSTALL}")
    work, folder = work_of(options, steps=options.steps), output_folder(options)
    settings = dict(parse_setting(text) for text in options.trl)
    results = folder / "trl.jsonl"
    with models_folder(options) as models:
        model = model_of(work, models)
        ours = read_step(folder, work)
        if ours is None:
            ours = measure(work, model, folder, overrides)
        else:
            print(f"r1's step is that of {folder / 'bench.json'}", flush=True)
        config = write_config(work, model, folder)
        settings = trl_batch(work) | settings
        settings = accumulation(work, settings["per_device_train_batch_size"]) | settings
        request = {"config": str(config), "overrides": list(overrides), "work": asdict(work), "settings": settings,
                   "results": str(results)}  # fmt: skip
        (folder / "trl.request.json").write_text(json.dumps(request, indent=2))
        steps = run_ranks(folder / "trl.request.json", results, work)
    summary = summarize(steps, work)
    used = trl_settings(work, load_config(str(config), overrides), on_gpu="CPU" not in hardware()) | settings
    report: dict[str, Any] = {
        "benchmark": "trl", "hardware": hardware(), "versions": versions("trl", "accelerate", "liger-kernel"),
        "work": asdict(work), "overrides": list(overrides), "settings": used, "summary": summary, "steps": steps,
        "step": ours["summary"],
    }  # fmt: skip
    (folder / "trl.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\n" + header(work, overrides, report["versions"], report["hardware"]))
    print("TRL: " + ", ".join(f"{k}={v}" for k, v in used.items()))
    print(f"\n{table(summary, ours['summary'])}\n\n{folder / 'trl.json'}")


def parse_setting(text: str) -> tuple[str, Any]:
    """("beta", 0.02) of "beta=0.02"; values are JSON, or else text.

    Raises:
        ValueError: it has no value.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--trl {text}: expected KEY=VALUE with a field of GRPOConfig, as in --trl beta=0.02")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, {"True": True, "False": False, "None": None}.get(value, value)


def trl_batch(work: Work) -> dict[str, int]:
    """Rows of TRL's microbatch: 16, or the most below that which divides an optimizer step's responses on a rank."""
    rows = work.prompts * work.n // work.minibatches // work.nproc
    return {"per_device_train_batch_size": max(b for b in range(1, 17) if rows % b == 0)}


def trl_settings(work: Work, config: Config, *, on_gpu: bool) -> dict[str, Any]:
    """GRPOConfig's fields for the work of one r1 step, at the best that was found for them.

    One generation of all prompts' responses, then `minibatches` optimizer steps on it: TRL counts its steps by the
    latter. Without a GPU TRL samples with transformers, since its way to sync weights needs one.
    """
    settings: dict[str, Any] = {
        "num_generations": work.n,
        "max_completion_length": work.max_response_tokens,
        "max_steps": work.minibatches * work.steps,
        "num_iterations": config.update.ppo_epochs,
        "beta": config.algorithm.kl_coef,
        "epsilon": config.algorithm.clip_low,
        "epsilon_high": config.algorithm.clip_high,
        "learning_rate": config.optim.lr,
        "max_grad_norm": config.update.max_grad_norm,
        "temperature": config.rollout.temperature,
        "lr_scheduler_type": "constant",
        "loss_type": "dapo",  # a mean over all tokens of the optimizer step, as r1's token_mean
        "bf16": work.precision != "float32",
        "model_init_kwargs": {"dtype": "bfloat16" if work.precision == "bf16" else "float32"},
        "gradient_checkpointing": config.model.gradient_checkpointing is not False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": work.minibatches,
        "disable_tqdm": True,
        "use_cpu": not on_gpu,
    }
    if on_gpu:
        settings |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": True,
            "vllm_gpu_memory_utilization": config.rollout.gpu_memory_utilization,
            "vllm_max_model_length": config.max_model_len,
            "use_liger_kernel": importlib.util.find_spec("liger_kernel") is not None,
            # Decoding each token to text while sampling, vLLM's default, would halve its speed.
            "generation_kwargs": {"ignore_eos": config.rollout.ignore_eos, "detokenize": False},
        }
    return settings


def accumulation(work: Work, rows: int) -> dict[str, int]:
    """How many microbatches of `rows` responses make an optimizer step, and a generation.

    Raises:
        ValueError: they do not divide.
    """
    responses = work.prompts * work.n // work.nproc
    if responses % (work.minibatches * rows):
        raise ValueError(f"per_device_train_batch_size={rows} does not divide the {responses // work.minibatches} "
                         "responses of an optimizer step on a GPU")  # fmt: skip
    return {
        "gradient_accumulation_steps": responses // (work.minibatches * rows),
        "steps_per_generation": responses // rows,
    }


def run_ranks(request: Path, results: Path, work: Work) -> list[dict[str, float]]:
    """Run bench_trl_rank.py to its end; a line of results for each cycle.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    results.unlink(missing_ok=True)
    log = request.parent / "trl.log"
    print(f"starting TRL on {work.nproc} rank(s), its output is in {log}", flush=True)
    shown: list[dict[str, float]] = []
    # Alone it needs no torchrun, under which it would keep its gradients twice, the second time in DDP's buckets.
    ranks = start([str(PROGRAM), str(request)], work.nproc, log, torchrun=work.nproc > 1)
    try:
        ended = False
        while not ended and len(shown) < work.steps:
            ended = ranks.poll() is not None
            for line in read_lines(results)[len(shown) :]:
                print(f"cycle {line['step']}/{work.steps}  {line['time/step_s']:.1f} s", flush=True)
                shown.append(line)
            time.sleep(0.2)
    finally:
        end(ranks)
    if len(shown) < work.steps:
        raise RuntimeError(f"{tail(log)}\nTRL ended after {len(shown)} of {work.steps} cycles, all it said is in {log}")
    return shown


def summarize(steps: Sequence[dict[str, float]], work: Work) -> dict[str, dict[str, float]]:
    """Median, least and most of each number over the cycles but the first."""
    counted = [
        step | {"perf/tokens_per_s_per_gpu": step["counted_tokens"] / step["time/step_s"] / work.nproc}
        for step in steps[1:]
    ]
    return {name: spread([step[name] for step in counted]) for name in counted[0] if name != "step"}


def table(trl: dict[str, dict[str, float]], ours: dict[str, dict[str, float]]) -> str:
    """Medians side by side, and how many times as fast r1 is."""
    lines = [f"{'':34}{'TRL':>12}{'r1':>12}{'TRL / r1':>12}"]
    for name in ROWS:
        if name not in trl and name not in ours:
            continue
        kind, _, rest = name.partition("/")
        title = OTHER_TITLES.get(rest, rest[:-2].replace("_", " ") + ", s")
        cells = [format(side[name]["median"], ",.2f" if kind == "time" else ",.1f") if name in side else ""
                 for side in (trl, ours)]  # fmt: skip
        both = name in trl and name in ours and ours[name]["median"] > 0
        cells.append(f"{trl[name]['median'] / ours[name]['median']:.2f}" if both else "")
        lines.append(f"{title:34}" + "".join(f"{cell:>12}" for cell in cells))
    speeds = [side["perf/tokens_per_s_per_gpu"]["median"] for side in (ours, trl)]
    return "\n".join([*lines, "", f"r1 does {speeds[0] / speeds[1]:.2f} x TRL's counted tokens/s"])
