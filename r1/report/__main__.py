"""Show a run, or several side by side, as one HTML page.

python tools/report.py RUN [RUN ...] [--output FILE] [--watch [SECONDS]]
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from r1.report.page import write_report


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="report.py", description="Show runs as one HTML page that needs no network.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, runs/<experiment_name>")
    parser.add_argument(
        "--output", type=Path, help="the file (default: report.html in the run folder; of several runs, beside them)"
    )
    parser.add_argument(
        "--watch", type=int, nargs="?", const=30, metavar="SECONDS",
        help="write it again whenever the runs have gone on, at most every so many seconds (30), until they are done; "
        "the open page follows",
    )  # fmt: skip
    return parser.parse_args(words)


def output_of(folders: Sequence[Path]) -> Path:
    """Where the page goes by default."""
    if len(folders) == 1:
        return folders[0] / "report.html"
    return Path(os.path.commonpath([folder.resolve().parent for folder in folders])) / "report.html"


def watch(folders: Sequence[Path], output: Path, seconds: int) -> None:
    """Keep the page up to date until every run has done its steps, or the user stops it."""
    seen: list[tuple[float, int]] = []
    try:
        while True:
            now = [(s.st_mtime, s.st_size) for f in folders if (s := (f / "metrics.jsonl").stat())]
            if now != seen:
                runs = write_report(folders, output, refresh_s=seconds)
                sys.stdout.write(f"{time.strftime('%H:%M:%S')}  " + _steps(runs) + f"  -> {output}\n")
                sys.stdout.flush()
                seen = now
                if all(run.num_steps is not None and run.step >= run.num_steps for run in runs):
                    break
            time.sleep(seconds)
    except KeyboardInterrupt:
        pass
    write_report(folders, output)  # the last one stays as it is in the browser


def _steps(runs: Sequence) -> str:
    return ", ".join(f"{run.name}: step {run.step}" + (f" of {run.num_steps}" if run.num_steps else "") for run in runs)


def main(words: Sequence[str]) -> int:
    """The command; returns its exit status."""
    options = parse_arguments(words)
    output = options.output or output_of(options.runs)
    try:
        if options.watch is not None:
            if options.watch < 1:
                raise ValueError(f"--watch takes whole seconds, at least 1, got {options.watch}")
            watch(options.runs, output, options.watch)
        else:
            runs = write_report(options.runs, output)
            sys.stdout.write(f"{output}: {_steps(runs)}\n")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
