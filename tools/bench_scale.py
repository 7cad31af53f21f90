"""`bench.py scale`: the same work for each GPU on 1, 2, 4 … GPUs, and weight syncs into engines over two GPUs."""

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from r1.config import load_config
from tools.bench_options import add_work_options, models_folder, output_folder, work_of
from tools.bench_report import describe, hardware, versions
from tools.bench_step import run_trainer, summarize
from tools.bench_work import Work, model_of, write_config

MODELS = {True: "qwen2.5-3b,qwen2.5-vl-3b,qwen2.5-7b:bf16", False: "tiny"}
TARGET = 0.9
"""Of the speed of a GPU alone."""
COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("perf/tokens_per_s_per_gpu", "counted tokens/s/GPU", 1, ",.0f"),
    ("time/step_s", "step, s", 1, ".2f"),
    ("time/rollout_s", "rollout, s", 1, ".2f"),
    ("time/update_s", "update, s", 1, ".2f"),
    ("time/weight_sync_s", "weight sync, s", 1, ".2f"),
    ("mem/weight_sync_peak_gib", "peak in sync, GiB", 1, ".1f"),
    ("mem/peak_gib", "peak, GiB", 1, ".1f"),
)
"""(metric, title, factor, format) of the table, medians over the counted steps."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One start of the trainer."""

    work: Work
    tensor_parallel_size: int

    @property
    def name(self) -> str:
        work = self.work
        return f"{work.model}-{work.precision}-{work.nproc}-tp{self.tensor_parallel_size}"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_work_options(parser, scales=True)
    parser.add_argument("--steps", type=int, default=3, help="steps; the first is warm-up, not counted (default 3)")
    budget = "begin no run that would not end in so many seconds, and end one that takes longer than it should"
    parser.add_argument("--budget-s", type=float, default=math.inf, help=budget)


def run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Whole steps on 1, 2, 4 … GPUs at the same work for each, and with engines over two GPUs."""
    began, folder = time.monotonic(), output_folder(options)
    # On a CPU: ranks, of which two run there at once.
    gpus = torch.cuda.device_count() or 2
    report = Report(folder, overrides)
    batches = [todo for batch in plan(options, gpus) if (todo := [r for r in batch if not report.has(r)])]
    with models_folder(options) as models, ThreadPoolExecutor(gpus) as pool, ThreadPoolExecutor(gpus) as making:
        makers: dict[str, Future[Path]] = {}
        for batch, following in itertools.zip_longest(batches, batches[1:], fillvalue=[]):
            if report.seconds_of(batch) > options.budget_s - (time.monotonic() - began):
                report.left_out += batch
                continue
            for work in (r.work for r in [*batch, *following]):  # the next runs' models are made while these start
                if work.model not in makers:
                    makers[work.model] = making.submit(model_of, work, models)
            until = began + options.budget_s
            jobs = []
            for gpu, planned in enumerate(batch):
                alone = {"gpu": gpu if len(batch) > 1 else None, "until": until}
                jobs.append(pool.submit(measure, planned, makers[planned.work.model], folder, overrides, **alone))
            for planned, job in zip(batch, jobs, strict=True):
                report.add(planned, job)
    report.write()
    print("\n" + report.text())


def plan(options: argparse.Namespace, gpus: int) -> list[list[Run]]:
    """Batches of runs, the most telling first; those of a batch run at once, on a GPU each.

    Of each model one GPU and as many as may be come first, then engines over two GPUs, then what lies between.
    """
    most = options.nproc or gpus
    counts = [n for n in (2**i for i in range(most.bit_length())) if n <= most]
    names = (options.model or MODELS[torch.cuda.is_available()]).split(",")

    def planned(name: str, nproc: int, tensor_parallel_size: int = 1) -> Run:
        model, _, precision = name.partition(":")
        own = {"model": model, "nproc": nproc, "precision": precision or options.precision}
        work = work_of(argparse.Namespace(**vars(options) | own), steps=options.steps)
        whole = argparse.Namespace(**vars(options) | own | {"prompts": work.prompts * nproc})
        return Run(work=work_of(whole, steps=options.steps), tensor_parallel_size=tensor_parallel_size)

    batches = []
    for start in range(0, len(names), gpus):
        some = names[start : start + gpus]
        batches.append([planned(name, 1) for name in some])
        batches += [[planned(name, counts[-1])] for name in some if counts[-1] > 1]
        if start == 0 and most > 1:
            batches.append([planned(names[0], counts[-1], 2)])
    if most > 1:
        batches += [[planned(name, counts[-1], 2)] for name in names[1:]]
    return batches + [[planned(name, n)] for name in names for n in reversed(counts[1:-1])]


def measure(
    run: Run, model: Future[Path], folder: Path, overrides: Sequence[str], *, gpu: int | None, until: float
) -> dict[str, Any]:
    """Run the trainer; its metrics and the seconds that it took from its start.

    Args:
        model: its folder, once it is made.
        gpu: the only one that it sees; None: all.
        until: see run_trainer.
    """
    own = [*overrides, "--rollout.tensor_parallel_size", str(run.tensor_parallel_size)]
    place = folder / run.name
    place.mkdir(exist_ok=True)
    config = write_config(run.work, model.result(), place)
    load_config(str(config), own).check_world_size(run.work.nproc, run.work.nproc)
    print(f"{describe(run.work)}, engines over {run.tensor_parallel_size}", flush=True)
    began = time.monotonic()
    steps = run_trainer(config, run.work, own, gpus=None if gpu is None else nth_gpu(gpu), until=until)
    return {"steps": steps, "summary": summarize(steps, run.work), "seconds": time.monotonic() - began}


def nth_gpu(index: int) -> str:
    """As CUDA_VISIBLE_DEVICES names it, among those that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return seen.split(",")[index] if seen else str(index)


class Report:
    """What has been measured: in scale.json and scale.md of the folder after each run, for a call may be cut.

    Started again with the same output folder, the benchmark goes on with the runs that are not there.
    """

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self._folder, self._overrides = folder, list(overrides)
        self.left_out: list[Run] = []
        self._failed: dict[str, str] = {}
        self._results: list[dict[str, Any]] = []
        if (path := folder / "scale.json").is_file():
            kept = json.loads(path.read_text())
            same = (kept["hardware"], kept["overrides"]) == (hardware(), self._overrides)
            self._results = kept["results"] if same else []

    def has(self, run: Run) -> bool:
        return any((r["work"], r["tensor_parallel_size"]) == _key(run) for r in self._results)

    def seconds_of(self, batch: Sequence[Run]) -> float:
        """What a batch may take: as long as the same model's last run, or else as the longest."""
        longest = max((r["seconds"] for r in self._results), default=0.0)
        taken = {(r["work"]["model"], r["work"]["precision"]): r["seconds"] for r in self._results}
        return max(taken.get((run.work.model, run.work.precision), longest) for run in batch)

    def add(self, run: Run, job: Future[dict[str, Any]]) -> None:
        """Wait for a run, and write what it gave.

        Raises:
            ValueError: options that do not fit each other.
        """
        try:
            work, tensor_parallel_size = _key(run)
            self._results.append({"work": work, "tensor_parallel_size": tensor_parallel_size} | job.result())
        except RuntimeError as error:
            self._failed[run.name] = str(error)
            print(f"failed: {run.name}: {error}", flush=True)
        self.write()

    def write(self) -> None:
        head = {"benchmark": "scale", "hardware": hardware(), "versions": versions(), "overrides": self._overrides}
        saved = head | {"results": self._results, "failed": self._failed}
        (self._folder / "scale.json").write_text(json.dumps(saved, indent=2) + "\n")
        (self._folder / "scale.md").write_text(self.text())

    def text(self) -> str:
        """Markdown: what ran where, the table, and what is missing in it."""
        lines = [hardware() + "; " + ", ".join(f"{k} {v}" for k, v in versions().items()), ""]
        lines += [table(self._results), ""]
        lines += [f"- each GPU: {text}" for text in dict.fromkeys(_share(r["work"]) for r in self._results)]
        lines += [f"- with `{' '.join(self._overrides)}`"] if self._overrides else []
        lines += [f"- failed: {name}: {error.splitlines()[-1]}" for name, error in self._failed.items()]
        if self.left_out:
            lines.append(f"- left out, as --budget-s does not hold them: {', '.join(r.name for r in self.left_out)}")
        return "\n".join([*lines, f"- {self._folder / 'scale.json'} has every step"]) + "\n"


def _key(run: Run) -> tuple[dict[str, Any], int]:
    return asdict(run.work), run.tensor_parallel_size


def _share(work: dict[str, Any]) -> str:
    of_each = Work(**work | {"prompts": work["prompts"] // work["nproc"], "nproc": 1})
    return describe(of_each).rsplit(", ", 1)[0]


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each run; scaling is the speed of a GPU in it over that of the same model's run on one GPU."""
    of_one = {
        (r["work"]["model"], r["work"]["precision"]): r["summary"]["perf/tokens_per_s_per_gpu"]["median"]
        for r in results
        if r["work"]["nproc"] == 1
    }
    titles = ["model", "precision", "GPUs", "engine over", f"scaling (target {TARGET})", *(c[1] for c in COLUMNS)]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    order = sorted(results, key=lambda r: (r["work"]["model"], r["work"]["nproc"], r["tensor_parallel_size"]))
    for result in order:
        work, summary = result["work"], result["summary"]
        alone = of_one.get((work["model"], work["precision"]))
        scaling = "" if alone is None else f"{summary['perf/tokens_per_s_per_gpu']['median'] / alone:.2f}"
        cells = [work["model"], work["precision"], str(work["nproc"]), str(result["tensor_parallel_size"]), scaling]
        for name, _, factor, form in COLUMNS:
            cells.append(format(summary[name]["median"] * factor, form) if name in summary else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
