"""Which algorithms learn: each trains on the demo's pictures, with several seeds, by real runs of r1.train.

    python tools/bench.py learn                                         # all of them, three seeds, 30 steps
    python tools/bench.py learn --algorithms grpo gspo --seeds 0 --steps 10
    nice -n 19 python tools/bench.py learn --parallel 2                 # two runs at a time, on two cores

A run that is finished is kept and not run again, so the same command goes on where it was ended. Writes learn.md,
learn.json and learn.png (needs matplotlib) into --output, beside a folder for each run.
"""

import argparse
import json
import os
import pprint
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tools.bench_launch import ROOT, start, tail
from tools.bench_report import hardware, versions

METRICS = ("val/held_out/accuracy", "val/held_out/math/accuracy")  # the second where there are several rewards

GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean_token_mean"}
ALGORITHMS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "grpo": ("GRPO", {}),
    "grpo_kl": ("GRPO, KL in the loss", {"algorithm": {"kl_coef": 0.01, "kl_penalty": "k3"}}),
    "grpo_bypass": ("GRPO, sampler's logprobs", {"algorithm": {"old_logprobs": "rollout"}}),
    "dr_grpo": (
        "Dr. GRPO",
        {"algorithm": {"advantage_std": "none", "aggregation": "sequence_mean_token_sum"}},
    ),
    "dapo": (
        "DAPO",
        {
            "algorithm": {"filter_by": "mean", "filter_key": "math/accuracy", "clip_high": 0.28},
            "reward": {
                "function": {"math": 1.0, "overlong": 1.0},
                "kwargs": {
                    "math": {"format_weight": 0.0},
                    "overlong": {"max_response_length": 12, "overlong_buffer_length": 4},
                },
            },
        },
    ),
    "rloo": ("RLOO", {"algorithm": {"advantage": "rloo"}}),
    "reinforce_plus_plus": (
        "REINFORCE++",
        {"algorithm": {"advantage": "reinforce_plus_plus", "kl_coef": 0.001, "kl_penalty": "k1", "kl_in": "reward"}},
    ),
    "reinforce_plus_plus_baseline": (
        "REINFORCE++ baseline",
        {"algorithm": {"advantage": "reinforce_plus_plus_baseline"}},
    ),
    "remax": ("ReMax", {"algorithm": {"advantage": "remax"}}),
    # The best of a group is credited by its lead, so a group teaches only while one response of it is right: pairs.
    "passk": (
        "pass@2",
        {
            "algorithm": {"advantage": "passk"},
            "rollout": {"n": 2},
            "data": {"rollout_batch_size": 128},
            "update": {"global_batch_size": 64},
        },
    ),
    "ppo": (
        "PPO with a critic",
        {"algorithm": {"advantage": "gae", "lam": 0.95, "critic_lr": 1e-3, "critic_warmup_steps": 2}},
    ),
    "gspo": ("GSPO", {"algorithm": {"loss": "gspo", **GSPO}}),
    "gspo_token": ("GSPO-token", {"algorithm": {"loss": "gspo_token", **GSPO}}),
    "cispo": ("CISPO", {"algorithm": {"loss": "cispo", "clip_low": 0.99, "clip_high": 5.0}}),
    "sapo": ("SAPO", {"algorithm": {"loss": "sapo"}}),
}
"""Name, title, and what of configs/demo.py it changes. 256 responses a step for all, as the demo has."""

CONFIG = '''"""{title} on the demo's pictures, seed {seed}; written by tools/bench_learn.py{further}."""

from dataclasses import replace

from r1.config import load_config

CHANGES = {changes}
config = load_config({demo!r})
config = replace(config, **{{section: replace(getattr(config, section), **c) for section, c in CHANGES.items()}})
'''


def changes_of(name: str, seed: int, steps: int, folder: Path, data: Path) -> dict[str, dict[str, Any]]:
    """Fields of configs/demo.py that a run replaces, by section."""
    own: dict[str, dict[str, Any]] = {
        "model": {"path": f"{data}/model"},
        "data": {"train_files": f"{data}/train.jsonl", "val_files": (f"held_out={data}/val.jsonl",), "seed": seed},
        "rollout": {"seed": seed},
        "checkpoint": {"resume": False, "save_model_only": True},
        "trainer": {
            "seed": seed, "max_steps": steps, "val_freq": max(steps // 6, 1), "output_dir": str(folder.parent),
            "experiment_name": folder.name, "loggers": ("console", "file"), "progress": False,
        },
    }  # fmt: skip
    changes = ALGORITHMS[name][1]
    return {section: own.get(section, {}) | changes.get(section, {}) for section in {**own, **changes}}


def read_curve(metrics: Path) -> dict[int, float]:
    """Held-out accuracy by step, as far as the run came."""
    if not metrics.exists():
        return {}
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return {int(row["step"]): row[name] for row in rows for name in METRICS if name in row}


def train(name: str, seed: int, options: argparse.Namespace, overrides: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """One run, or the result of an earlier one with the same settings.

    Returns:
        Its record, and whether it was run just now.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    folder = options.output / f"{name}-{seed}"
    changes = changes_of(name, seed, options.steps, folder, options.data)
    further = f" and {' '.join(overrides)} on its command line" if overrides else ""
    text = CONFIG.format(title=ALGORITHMS[name][0], seed=seed, changes=pprint.pformat(changes, width=110),
                         demo=str(ROOT / "configs" / "demo.py"), further=further)  # fmt: skip
    done = folder / "done.json"
    if done.exists() and (folder / "config.py").read_text() == text:
        return json.loads(done.read_text()), False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.py").write_text(text)
    began = time.monotonic()
    log = folder / "train.log"
    status = start(["-m", "r1.train", "--config", str(folder / "config.py"), *overrides], options.nproc, log).wait()
    curve = read_curve(folder / "metrics.jsonl")
    if status != 0 or options.steps not in curve:
        raise RuntimeError(f"{tail(log)}\n{name}, seed {seed}, ended with status {status}; all it said is in {log}")
    record = {"algorithm": name, "seed": seed, "seconds": time.monotonic() - began, "accuracy": curve}
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    done.write_text(json.dumps(record) + "\n")
    return json.loads(done.read_text()), True


def summarize(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each algorithm, in the order of ALGORITHMS: mean and range over its seeds."""

    def spread(values: Sequence[float]) -> dict[str, float]:
        return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}

    lines = []
    for name, (title, _) in ALGORITHMS.items():
        runs = [r for r in records if r["algorithm"] == name]
        if not runs:
            continue
        steps, curves = list(map(int, runs[0]["accuracy"])), [list(r["accuracy"].values()) for r in runs]
        lines.append({
            "algorithm": name,
            "title": title,
            "seeds": [r["seed"] for r in runs],
            "steps": steps,
            "curves": curves,
            "start": spread([c[0] for c in curves]),
            "third": spread([c[len(steps) // 3] for c in curves]),
            "end": spread([c[-1] for c in curves]),
            "gain": spread([c[-1] - c[0] for c in curves]),
            "seconds": spread([r["seconds"] for r in runs]),
        })  # fmt: skip
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The lines as a Markdown table: accuracy before, a third of the way and after, its gain, and a run's seconds."""

    def shown(values: dict[str, float], form: str) -> str:
        low, high = (f"{values[key]:{form}}" for key in ("min", "max"))
        return low if low == high else f"{values['mean']:{form}} ({low} to {high})"

    steps = lines[0]["steps"] if lines else [0]
    head = ["algorithm", "seeds", "before", f"step {steps[len(steps) // 3]}", f"step {steps[-1]}", "gain", "s a run"]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        accuracies = [shown(line[key], ".3f") for key in ("start", "third", "end")]
        cells = [line["title"], str(len(line["seeds"])), *accuracies, shown(line["gain"], "+.3f")]
        rows.append([*cells, f"{line['seconds']['mean']:.0f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME",
                        help=f"of {', '.join(ALGORITHMS)} (default all)")  # fmt: skip
    seeds = "of the order of the data, of sampling and of the trainer (default 0 1 2)"
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help=seeds)
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (default 30)")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of each run (default 1)")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time (default 1)")
    output = "folder for the results and a folder each run (default runs/learn)"
    parser.add_argument("--output", type=Path, default=Path("runs/learn"), help=output)
    data = "what tools/make_demo.py wrote, or where it shall write (default runs/demo-data)"
    parser.add_argument("--data", type=Path, default=Path("runs/demo-data"), help=data)


def run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Held-out accuracy of every algorithm on the demo's pictures."""
    options.output, options.data = options.output.resolve(), options.data.resolve()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it for several ranks only; runs share the cores
    if not (options.data / "model").exists():
        subprocess.run(
            [sys.executable, str(ROOT / "tools" / "make_demo.py"), "--output", str(options.data)], check=True
        )
    wanted = [(name, seed) for seed in options.seeds for name in options.algorithms]
    records, failures = [], []
    pool = ThreadPoolExecutor(options.parallel)
    jobs = {pool.submit(train, name, seed, options, overrides): (name, seed) for name, seed in wanted}
    try:
        for count, job in enumerate(as_completed(jobs), start=1):
            name, seed = jobs[job]
            if error := job.exception():
                failures.append(str(error))
                print(f"[{count}/{len(wanted)}] {name}, seed {seed}: failed", flush=True)
                continue
            record, fresh = job.result()
            records.append(record)
            curve = list(record["accuracy"].values())
            how = f"in {record['seconds']:.0f} s" if fresh else "kept from before"
            print(f"[{count}/{len(wanted)}] {name}, seed {seed}: {curve[0]:.3f} -> {curve[-1]:.3f} {how}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C ends the runs, and no further one is begun
    records.sort(key=lambda r: wanted.index((r["algorithm"], r["seed"])))
    write(options, overrides, summarize(records))
    if failures:
        raise RuntimeError("\n\n".join(failures))


def write(options: argparse.Namespace, overrides: Sequence[str], lines: Sequence[dict[str, Any]]) -> None:
    """learn.json, learn.md and learn.png."""
    report = {"benchmark": "learn", "hardware": hardware(), "versions": versions(), "steps": options.steps,
              "nproc": options.nproc, "overrides": list(overrides), "algorithms": lines}  # fmt: skip
    (options.output / "learn.json").write_text(json.dumps(report, indent=2) + "\n")
    (options.output / "learn.md").write_text(table(lines) + "\n")
    print(f"\n{table(lines)}\n")
    try:
        from tools.bench_learn_plot import plot
    except ImportError as error:
        print(f"no plot: {error}; pip install matplotlib, and run the same command again")
        return
    plot(lines, options.output / "learn.png")
    print(f"written to {options.output}: learn.md, learn.json, learn.png")
