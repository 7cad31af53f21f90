"""torchrun for a run that may stop early: exits with 75 (EX_TEMPFAIL: start the same command again) where the ranks
have saved and stopped for a signal or a deadline, and lets them save when it is told to end itself.

python launch/torchrun.py --standalone --nproc_per_node 8 -m r1.train --config configs/geo3k.py
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import main

STOPPED = 75


def launch(words: list[str]) -> int:
    """Run torchrun in this process and return the exit code."""
    os.environ.setdefault("R1_STARTED_AT", str(time.time()))
    # Else ranks that are started again meet the addresses of the dead ones in the store (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    signal.signal(signal.SIGUSR1, pass_on)
    if "signals_to_handle" in LaunchConfig.__dataclass_fields__:
        # torchrun kills the ranks a while after its own SIGTERM; this way they get the time that they need to save.
        signal.signal(signal.SIGTERM, pass_on)
        words = ["--signals_to_handle", "SIGINT,SIGHUP,SIGQUIT", *words]
    with tempfile.TemporaryDirectory() as folder:
        # slurm.sbatch names one that all hosts see.
        stop_file = Path(os.environ.setdefault("R1_STOP_FILE", f"{folder}/stopped"))
        terminated = False
        try:
            main(words)
        except SignalException:  # it has passed the signal on and waited for the ranks
            terminated = True
        except ChildFailedError as error:
            if not stop_file.exists():  # else all ranks had saved before one failed to end well
                sys.stderr.write(hint(error))
                raise
        # srun ends the other hosts when the first exits with a code other than 0: the last words must be said by then.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if stop_file.exists():
            return STOPPED
    return 128 + signal.SIGTERM if terminated else 0


def pass_on(number: int, _: object) -> None:
    """Send a signal to the ranks. Slurm signals the processes it started, not their children (proctrack/cgroup)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(int(stat.parent.name), number)


def hint(error: ChildFailedError) -> str:
    """What to look at where NCCL's watchdog aborted ranks: no line of theirs runs any more that could say it."""
    aborted = sorted(rank for rank, failure in error.failures.items() if failure.exitcode == -signal.SIGABRT)
    if not aborted:
        return ""
    files = os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/tmp/r1_nccl_rank_")
    return (
        f"hint: ranks {aborted} were aborted. Where NCCL's watchdog says above that a collective timed out, they "
        "waited parallel.timeout_s for the other ranks, which are stuck or slower than that: they say above what they "
        f"did when they were ended, and the flight recorder has every rank's last collectives in {files}<rank>\n"
    )


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
