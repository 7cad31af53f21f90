"""Measure r1 on models of true shape with random weights: no network, no downloads.

python tools/bench.py step                                        # what this machine can: a small model
python tools/bench.py step --model qwen2.5-3b --lengths mixed     # 64 prompts of 343 tokens, 5 responses of 361 each
python tools/bench.py step --model qwen2.5-vl-3b --lengths mixed  # a 504 x 504 picture in each prompt
python tools/bench.py step --model qwen2.5-7b --precision bf16 --update.max_tokens_per_microbatch 32768
python tools/bench.py step --preset geo3k                         # prompts, pictures and responses vary
python tools/bench.py parts --model qwen2.5-3b --lengths mixed    # each part of a step alone: what a step may cost
python tools/bench.py trl --model qwen2.5-3b --lengths mixed      # the same work in TRL, beside a step of r1
python tools/bench.py scale --budget-s 560                        # the same work for each GPU on 1, 2, 4 … GPUs
python tools/bench.py learn --parallel 2                          # accuracy of every algorithm on the demo's pictures

`step` starts the real trainer, waits for --steps steps and ends it before it saves; `parts` and `trl` compare with it
where bench.json in --output is of the same work. Any setting of r1 may follow by its
dotted path; `python -m r1.train --config configs/geo3k.py --help` lists them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs where r1 is not installed

from tools import bench_learn, bench_parts, bench_scale, bench_step, bench_trl

AddOptions = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace, Sequence[str]], None]
BENCHMARKS: dict[str, tuple[AddOptions, Run]] = {
    "step": (bench_step.add_options, bench_step.run),
    "parts": (bench_parts.add_options, bench_parts.run),
    "trl": (bench_trl.add_options, bench_trl.run),
    "scale": (bench_scale.add_options, bench_scale.run),
    "learn": (bench_learn.add_options, bench_learn.run),
}
"""Each gives its options, and a function of those and of the settings of r1 that followed them."""


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the settings of r1 that follow them."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tools/bench.py", description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, (add_options, run) in BENCHMARKS.items():
        add_options(commands.add_parser(name, help=run.__doc__, description=__doc__, formatter_class=plain,
                                        allow_abbrev=False))  # fmt: skip
    options, overrides = parser.parse_known_args(words)
    unknown = next((w for w in overrides if w.startswith("--") and "." not in w), None)
    if unknown:
        parser.error(f"unknown option {unknown}; settings of r1 are given by their dotted path, as in --rollout.n")
    return options, overrides


def main(words: Sequence[str]) -> None:
    try:
        options, overrides = parse(words)
        BENCHMARKS[options.benchmark][1](options, overrides)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
