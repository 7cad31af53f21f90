"""`bench.py parts`: each part of a step alone, at the same sizes: what a step may cost at best."""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from r1.config import load_config
from tools.bench_launch import end, start, tail
from tools.bench_options import add_work_options, models_folder, output_folder, work_of
from tools.bench_report import hardware, header, read_lines, read_step, spread, versions
from tools.bench_work import Work, model_of, write_config

PROGRAM = Path(__file__).resolve().parent / "bench_parts_rank.py"
TITLES = {
    "rollout": "vLLM alone",
    "logprobs": "log-probabilities",
    "update": "forward + backward",
    "optimizer": "optimizer",
    "optimizer_offload": "optimizer states to host memory",
    "weight_sync": "weight sync",
    "sleep_wake": "sleep + wake",
}
PART_KEYS = tuple(TITLES)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_work_options(parser)
    parser.add_argument(
        "--repeats", type=int, default=3, help="times to measure each part, after a warm-up (default 3)"
    )
    vary = "settings of r1 to run the trainer's parts under, as in model.gradient_checkpointing=true,false; given " \
           "several times, under every combination"  # fmt: skip
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=VALUE,…", help=vary)
    skip = "rollout: no engine, so no sampling, sync or sleep; trainer: the engine alone"
    parser.add_argument("--skip", action="append", default=[], choices=("rollout", "trainer"), help=skip)
    profile = "write the 40 longest kernels of one microbatch, forward and backward, to profile-N.txt for each variant"
    parser.add_argument("--profile", action="store_true", help=profile)


def run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Each part of a step alone: sampling, log-probabilities, update, optimizer, weight sync, sleep and wake."""
    work, folder = work_of(options, steps=options.repeats + 1), output_folder(options)
    variants = {name: [*overrides, *words] for name, words in variants_of(options.vary).items()}
    profiles = {name: str(folder / f"profile-{i}.txt") for i, name in enumerate(variants)} if options.profile else {}
    results = folder / "parts.jsonl"
    results.unlink(missing_ok=True)
    with models_folder(options) as models:
        config = write_config(work, model_of(work, models), folder)
        for words in variants.values():
            load_config(str(config), words).check_world_size(work.nproc, work.nproc)
        request = {"config": str(config), "variants": variants, "work": asdict(work), "repeats": options.repeats,
                   "skip": options.skip, "profile": profiles, "results": str(results)}  # fmt: skip
        (folder / "parts.request.json").write_text(json.dumps(request, indent=2))
        rows = run_ranks(folder / "parts.request.json", results, work.nproc)
    report: dict[str, Any] = {"benchmark": "parts", "hardware": hardware(), "versions": versions(),
                              "work": asdict(work), "overrides": list(overrides), "parts": rows}  # fmt: skip
    report["sums"] = {name: sum_of_parts(rows, name, work) for name in variants}
    (folder / "parts.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\n" + header(work, overrides, report["versions"], report["hardware"]))
    for name in variants:
        print("\n" + table(rows, name, work, read_step(folder, work)))
    if len(variants) > 1:
        print("\n" + comparison(rows, list(variants), work))
    for name, path in profiles.items():
        print(f"\nkernels of {name or 'these settings'}: {path}")
    print(f"\n{folder / 'parts.json'}")


def variants_of(vary: Sequence[str]) -> dict[str, list[str]]:
    """Every combination of the settings, each under its name, with the words that set it; {"": []} for none.

    Raises:
        ValueError: one is not of the form key=value,value.
    """
    axes = []
    for text in vary:
        key, _, values = text.partition("=")
        if "." not in key or not values:
            raise ValueError(f"--vary {text}: expected key=value,value with a setting of r1, as in "
                             "--vary update.max_tokens_per_microbatch=16384,32768")  # fmt: skip
        # The command line of r1 knows True and False.
        axes.append([(key, v.capitalize() if v in ("true", "false") else v) for v in values.split(",")])
    return {
        " ".join(f"{k}={v}" for k, v in chosen): [word for k, v in chosen for word in (f"--{k}", v)]
        for chosen in itertools.product(*axes)
    }


def run_ranks(request: Path, results: Path, nproc: int) -> list[dict[str, Any]]:
    """Run bench_parts_rank.py to its end, saying what it has measured; the lines of its results.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    log = request.parent / "parts.log"
    print(f"measuring on {nproc} rank(s), the output is in {log}", flush=True)
    shown: list[dict[str, Any]] = []
    ranks = start([str(PROGRAM), str(request)], nproc, log)
    try:
        ended = False
        while not ended:
            ended = ranks.poll() is not None
            for line in read_lines(results)[len(shown) :]:
                what = f"{min(line['seconds']):.2f} s" if "seconds" in line else line["error"]
                print(f"{line['variant']}  {line['part']}: {what}".strip(), flush=True)
                shown.append(line)
            time.sleep(0.2)
    finally:
        end(ranks)
    if ranks.returncode != 0:
        raise RuntimeError(f"{tail(log)}\nmeasuring failed, all that it said is in {log}")
    return shown


def parts_of(rows: Sequence[dict[str, Any]], variant: str) -> dict[str, dict[str, Any]]:
    """The parts measured under a variant; the engine's, which are measured once, under the first."""
    first = rows[0]["variant"] if rows else ""
    engine = [r for r in rows if r["variant"] == first and r["part"] in ("rollout", "weight_sync", "sleep_wake")]
    own = [r for r in rows if r["variant"] == variant and r["part"] in PART_KEYS]
    found = {r["part"]: r for r in [*engine, *own]}
    return {key: found[key] for key in PART_KEYS if key in found}


def sum_of_parts(rows: Sequence[dict[str, Any]], variant: str, work: Work) -> dict[str, float]:
    """Median seconds of all parts of a step together, and counted tokens/s/GPU at that speed.

    Sampled responses are a little longer or shorter than those of the trainer's parts, so sampling is taken at its
    speed, for as many tokens as the trainer's parts have.
    """
    parts = parts_of(rows, variant)
    tokens = next((p["counted_tokens"] for k, p in parts.items() if k in ("update", "rollout")), 0)
    if "update" in parts:
        tokens = parts["update"]["counted_tokens"]
    seconds = 0.0
    for part in parts.values():
        scale = tokens / part["counted_tokens"] if "counted_tokens" in part else 1.0
        seconds += spread(part["seconds"])["median"] * part.get("times", 1) * scale
    return {"seconds": seconds, "counted_tokens": tokens, "parts": len(parts),
            "tokens_per_s_per_gpu": tokens / seconds / work.nproc if seconds else 0.0}  # fmt: skip


def table(rows: Sequence[dict[str, Any]], variant: str, work: Work, step: dict[str, Any] | None) -> str:
    """A variant's parts, their sum, and how a whole step compares to it where one was measured."""
    lines = [variant] if variant else []
    lines += [r["error"] for r in rows if r["variant"] == variant and "error" in r]
    columns = ("seconds", "min", "max", "counted/s", "computed/s", "MFU %", "peak GiB")
    lines.append(f"{'':34}" + "".join(f"{name:>12}" for name in columns))
    parts = parts_of(rows, variant)
    for key, part in parts.items():
        lines.append(_row(key, part, work))
    if response := parts.get("rollout", {}).get("response_tokens"):
        speed = response / spread(parts["rollout"]["seconds"])["median"] / work.nproc
        lines.append(f"vLLM alone: {speed:,.0f} response tokens/s/GPU")
    total = sum_of_parts(rows, variant, work)
    names = "" if {"rollout", "update"} <= set(parts) else f" ({', '.join(TITLES[key] for key in parts)} alone)"
    lines.append(
        f"sum of parts{names}: {total['seconds']:.2f} s for {total['counted_tokens']:,.0f} counted tokens, "
        f"{total['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
    )
    if step is not None and {"rollout", "update"} <= set(parts):
        speed = step["summary"]["perf/tokens_per_s_per_gpu"]["median"]
        lines.append(
            f"whole step ({' '.join(step['overrides']) or 'default settings'}): {speed:,.0f} tokens/s/GPU, "
            f"{total['tokens_per_s_per_gpu'] / speed:.3f} x its parts"
        )
        sampling = step["summary"]["bench/response_tokens_per_s"]["median"]
        lines.append(f"vLLM in it: {sampling:,.0f} response tokens/s/GPU")
    return "\n".join(lines)


def comparison(rows: Sequence[dict[str, Any]], variants: Sequence[str], work: Work) -> str:
    """One line a variant: seconds and MFU of its passes, the peak of the update, the speed of all parts together."""
    columns = ("logprobs, s", "MFU %", "update, s", "MFU %", "peak GiB", "tokens/s/GPU")
    lines = ["".join(f"{name:>14}" for name in columns) + "  settings"]
    for name in variants:
        parts, cells = parts_of(rows, name), []
        for key in ("logprobs", "update"):
            part = parts.get(key, {})
            cells.append(f"{spread(part['seconds'])['median']:.3f}" if part else "")
            cells.append(f"{100 * spread(part['mfu'])['median']:.1f}" if part.get("mfu") else "")
        cells.append(f"{parts['update']['peak_gib']:.1f}" if "update" in parts else "failed")
        cells.append(f"{sum_of_parts(rows, name, work)['tokens_per_s_per_gpu']:,.0f}" if "update" in parts else "")
        lines.append("".join(f"{cell:>14}" for cell in cells) + f"  {name}")
    return "\n".join(lines)


def _row(key: str, part: dict[str, Any], work: Work) -> str:
    seconds, times, passes = spread(part["seconds"]), part.get("times", 1), part.get("passes", 1)
    title = TITLES[key] + (f", {times} x" if times > 1 else "") + (f", {passes:.3g} passes" if passes != 1 else "")
    cells = [f"{seconds[name]:.3f}" for name in ("median", "min", "max")]
    for name in ("counted_tokens", "computed_tokens"):
        speed = part[name] / seconds["median"] / work.nproc if name in part else None
        cells.append("" if speed is None else f"{speed:,.0f}")
    cells.append(f"{100 * spread(part['mfu'])['median']:.1f}" if part.get("mfu") else "")
    cells.append(f"{part['peak_gib']:.1f}" if "peak_gib" in part else "")
    return f"{title:34}" + "".join(f"{cell:>12}" for cell in cells)
