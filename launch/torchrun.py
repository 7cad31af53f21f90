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
from torch.distributed.run import main

STOPPED = 75


def launch(words: list[str]) -> int:
    """Run torchrun in this process and return the exit code."""
    # Slurm signals every process of a step. The ranks set their own handler; torchrun would die of this one.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ.setdefault("R1_STARTED_AT", str(time.time()))
    # Else ranks that are started again meet the addresses of the dead ones in the store (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with tempfile.TemporaryDirectory() as folder:
        stop_file = Path(folder) / "stopped"
        os.environ["R1_STOP_FILE"] = str(stop_file)
        terminated = False
        try:
            main(words)
        except SignalException:  # it has passed SIGTERM on and waited for the ranks
            terminated = True
        # srun ends the other hosts when the first exits with a code other than 0: the last words must be said by then.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if stop_file.exists():
            return STOPPED
    return 128 + signal.SIGTERM if terminated else 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
