"""Run our programs as a user would, from tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(**extra: str) -> dict[str, str]:
    """This process's, with r1 importable from any folder and one thread a process."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **extra}


def torchrun(module: str, *words: str, ranks: int) -> list[str]:
    """The command line that starts a module on so many ranks of this machine."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launch, "-m", module, *words]


def run(command: list[str], cwd: Path, *, timeout_s: float = 280, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with extra environment variables."""
    env = environment(**extra)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
