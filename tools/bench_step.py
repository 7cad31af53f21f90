"""`bench.py step`: whole steps of the real trainer, phase by phase."""

import argparse
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from r1.config import load_config
from tools.bench_launch import end, start, tail
from tools.bench_options import add_work_options, models_folder, output_folder, work_of
from tools.bench_report import describe, hardware, header, read_lines, spread, versions
from tools.bench_timeline import phases_of, timeline_svg
from tools.bench_work import Work, model_of, write_config

ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("engine/wake_s", "waking (in weight sync), s", 1, ".2f"),
    ("engine/generate_s", "vLLM (in rollout), s", 1, ".2f"),
    ("engine/sleep_s", "going to sleep (in rollout), s", 1, ".2f"),
    ("perf/tokens_per_s_per_gpu", "counted tokens/s/GPU", 1, ",.0f"),
    ("perf/computed_tokens_per_s_per_gpu", "computed tokens/s/GPU", 1, ",.0f"),
    ("bench/response_tokens_per_s", "response tokens/s/GPU of vLLM", 1, ",.0f"),
    ("perf/mfu", "update MFU, %", 100, ".1f"),
    ("perf/mfu_logprobs", "logprobs MFU, %", 100, ".1f"),
    ("mismatch/abs_mean", "mismatch, mean, nats", 1, ".1e"),
    ("mismatch/abs_max", "mismatch, max, nats", 1, ".1e"),
    ("response/length_mean", "response tokens, mean", 1, ",.0f"),
    ("response/length_max", "response tokens, longest", 1, ",.0f"),
    ("mem/rollout_peak_gib", "peak memory, rollout, GiB", 1, ".1f"),
    ("mem/logprobs_peak_gib", "peak memory, logprobs, GiB", 1, ".1f"),
    ("mem/update_peak_gib", "peak memory, update, GiB", 1, ".1f"),
    ("mem/peak_gib", "peak memory, GiB", 1, ".1f"),
)
"""(metric, name in the table, factor, format), below the phases' seconds."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_work_options(parser)
    parser.add_argument("--steps", type=int, default=4, help="steps; the first is warm-up, not counted (default 4)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of the trainer, one after another (default 1)")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Whole steps of the real trainer, phase by phase."""
    work, folder = work_of(options, steps=options.steps), output_folder(options)
    with models_folder(options) as models:
        report = measure(work, model_of(work, models), folder, overrides, repeat=options.repeat)
    summary = report["summary"]
    print("\n" + header(work, overrides, report["versions"], report["hardware"]))
    print(f"\n{table(summary)}\n")
    mfu = f", update MFU {100 * summary['perf/mfu']['median']:.1f}%" if "perf/mfu" in summary else ""
    of = f"{work.steps - 1} steps" if options.repeat == 1 else f"{options.repeat} runs"
    print(
        f"{work.model} {work.precision}: {summary['perf/tokens_per_s_per_gpu']['median']:,.0f} counted tokens/s/GPU, "
        f"{summary['time/step_s']['median']:.2f} s a step (median of {of}){mfu}; {folder / 'bench.json'}"
    )


def measure(work: Work, model: Path, folder: Path, overrides: Sequence[str], *, repeat: int = 1) -> dict[str, Any]:
    """Run the trainer, write bench.json and timeline.svg into the folder; what bench.json holds."""
    print(describe(work), flush=True)
    print(f"making {work.prompts * (work.steps + 1)} prompts", flush=True)
    config = write_config(work, model, folder)
    load_config(str(config), overrides).check_world_size(work.nproc, work.nproc)
    runs = [run_trainer(config, work, overrides) for _ in range(repeat)]
    report: dict[str, Any] = {
        "benchmark": "step", "hardware": hardware(), "versions": versions(), "work": asdict(work),
        "overrides": list(overrides), "summary": summarize_runs(runs, work), "runs": runs,
    }  # fmt: skip
    (folder / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    shown = sorted(runs[-1][1:], key=lambda step: step["time/step_s"])[(len(runs[-1]) - 1) // 2]
    title = f"One step of {work.model}, {work.precision}: {shown['time/step_s']:.2f} s"
    below = f"{work.prompts} prompts x {work.n}, {shown['perf/tokens_per_s_per_gpu']:,.0f} counted tokens/s/GPU"
    (folder / "timeline.svg").write_text(timeline_svg(phases_of(shown), title, f"{below}; {report['hardware']}"))
    return report


def run_trainer(
    config: Path, work: Work, overrides: Sequence[str], *, gpus: str | None = None, until: float = math.inf
) -> list[dict[str, float]]:
    """Start r1.train on config, end it after work.steps steps; the metrics of those steps.

    Args:
        gpus: those that it sees, as in CUDA_VISIBLE_DEVICES; None: all.
        until: on time.monotonic's clock; then two steps or more are enough.

    Raises:
        RuntimeError: it ended before, or had not come to a second step by then; the message has the end of its output.
    """
    folder = config.parent
    log, metrics = folder / "train.log", folder / "run" / "metrics.jsonl"
    shutil.rmtree(folder / "run", ignore_errors=True)
    print(f"starting the trainer on {work.nproc} rank(s), its output is in {log}", flush=True)
    shown: list[dict[str, float]] = []
    trainer = start(["-m", "r1.train", "--config", str(config), *overrides], work.nproc, log, gpus=gpus)
    try:
        while len(shown) < work.steps and time.monotonic() < until:
            ended = trainer.poll() is not None  # asked first: what it wrote before is then read below
            for row in read_lines(metrics)[len(shown) :]:
                print(f"step {row['step']:.0f}/{work.steps}  {row['time/step_s']:.1f} s", flush=True)
                shown.append(row)
            if ended:
                break
            time.sleep(0.2)
    finally:
        end(trainer)
    late = time.monotonic() >= until
    if len(shown) < (2 if late else work.steps):
        why = "was out of time" if late else "ended"
        raise RuntimeError(
            f"{tail(log)}\nthe trainer {why} after {len(shown)} of {work.steps} steps, all it said is in {log}"
        )
    return shown[: work.steps]


def summarize_runs(runs: Sequence[Sequence[dict[str, float]]], work: Work) -> dict[str, dict[str, float]]:
    """Of one run over its steps; of several over the medians of each."""
    summaries = [summarize(steps, work) for steps in runs]
    if len(summaries) == 1:
        return summaries[0]
    return {name: spread([s[name]["median"] for s in summaries if name in s]) for name in summaries[0]}


def summarize(steps: Sequence[dict[str, float]], work: Work) -> dict[str, dict[str, float]]:
    """Median, least and most of each metric over the steps but the first, which compiles and captures graphs.

    Adds time/other_s, what no phase accounts for, and bench/response_tokens_per_s, per GPU while vLLM samples.
    """
    counted = []
    for step in steps[1:]:
        phases = [v for k, v in step.items() if k.startswith("time/") and k != "time/step_s"]
        tokens = step["response/length_mean"] * work.prompts * work.n
        counted.append(step | {
            "time/other_s": step["time/step_s"] - sum(phases),
            "bench/response_tokens_per_s": tokens / step["engine/generate_s"] / work.nproc,
        })  # fmt: skip
    summary = {}
    for name in counted[0]:
        values = [step[name] for step in counted if step.get(name) is not None]
        if name != "step" and values:
            summary[name] = spread(values)
    return summary


def table(summary: dict[str, dict[str, float]]) -> str:
    """Phases in the order of the step, then the whole step, then rates, quality and memory."""
    phases = [name for name in summary if name.startswith("time/") and name not in ("time/other_s", "time/step_s")]
    rows = [(name, f"{name[5:-2].replace('_', ' ')}, s", 1, ".2f") for name in phases]
    rows += [("time/other_s", "between phases, s", 1, ".2f"), ("time/step_s", "step, s", 1, ".2f")]
    lines = [f"{'':34}{'median':>12}{'min':>12}{'max':>12}"]
    for name, title, factor, form in (*rows, *ROWS):
        if name in summary:
            cells = (format(summary[name][key] * factor, form) for key in ("median", "min", "max"))
            lines.append(f"{title:34}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)
