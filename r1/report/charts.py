"""Which curves a page draws, under which title, in which order; a metric that has none gets a chart of its own."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from r1.report.read import Run, brief, shorten


class Chart(NamedTuple):
    """Curves that belong into one picture."""

    section: str
    title: str
    keys: str  # regular expression of the metrics' names
    unit: str = ""
    scale: str = "linear"  # or "log", where every value is positive


CHARTS = (
    Chart("Rewards and responses", "Reward", r"reward/mean|reward/accuracy"),
    Chart("Rewards and responses", "Parts of the reward", r"reward/(?!mean$|accuracy$|std|zero_std|failed|gold|kl$).+"),
    Chart("Rewards and responses", "Spread of rewards", r"reward/std(_in_group)?"),
    Chart(
        "Rewards and responses", "Shares of groups and responses", r"reward/(zero_std_frac|failed_frac|gold_unparsable)"
    ),
    Chart("Rewards and responses", "Response length", r"response/length_.*", "tokens"),
    Chart("Rewards and responses", "Responses cut", r"response/clip_frac", "share"),
    Chart("Policy", "KL", r"loss/kl|reward/kl|policy/kl_to_old", "nats"),
    Chart("Policy", "Entropy", r"policy/entropy", "nats a token"),
    Chart("Policy", "Clip fractions", r"policy/clip_frac.*", "share of tokens"),
    Chart("Policy", "Gradient norm", r".*/grad_norm"),
    Chart("Policy", "Learning rate", r".*/lr(_.*)?"),
    Chart("Policy", "Loss", r"loss/(?!kl$).*|critic/loss"),
    Chart("Policy", "Skipped updates", r"policy/skipped_steps"),
    Chart("Policy", "KL coefficient", r"policy/kl_coef"),
    Chart("Sampler and trainer", "Mismatch", r"mismatch/abs_(mean|max)", "nats a token", "log"),
    Chart("Sampler and trainer", "KL to the trainer, k3", r"mismatch/kl_k3", "nats", "log"),
    Chart("Sampler and trainer", "KL to the trainer, k1", r"mismatch/kl_k1", "nats"),
    Chart("Sampler and trainer", "Perplexity ratio", r"mismatch/perplexity_ratio"),
    Chart("Sampler and trainer", "Effective sample share", r"mismatch/(ess|weight_mean)"),
    Chart("Time and memory", "Step", r"time/step_s", "s"),
    Chart("Time and memory", "Saving", r"time/save_s", "s"),
    Chart("Time and memory", "Throughput", r"perf/.*tokens_per_s_per_gpu", "tokens/s per GPU"),
    Chart("Time and memory", "MFU", r"perf/mfu.*", "share"),
    Chart("Time and memory", "Peak memory", r"mem/.*", "GiB of the fullest rank"),
    Chart("Time and memory", "Prompt length", r"prompt/length_.*", "tokens"),
)
PHASES = ("weight_sync", "rollout", "logprobs", "reward", "update")
"""Phases of a step that come first in the stack; others follow in the order of the log."""


def sections(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The page's sections with their charts, each with the curves of all runs; what no run has is left out."""
    keys = list(dict.fromkeys(key for run in runs for key in run.keys))
    found: dict[str, list[dict[str, Any]]] = {"Validation": _validation(runs, keys)}
    left = [key for key in keys if not key.startswith("val/")]
    for chart in CHARTS:
        chosen = [key for key in left if re.fullmatch(chart.keys, key)]
        left = [key for key in left if key not in chosen]
        found.setdefault(chart.section, [])
        if chosen:
            found[chart.section].append(_chart(runs, chosen, chart.title, chart.unit, chart.scale))
    phases = [key for key in left if re.fullmatch(r"time/.+_s", key)]
    found["Time and memory"][:0] = _stacks(runs, phases)
    others: dict[str, list[str]] = {}
    for key in left:
        if key not in phases:  # figures of each layer are one picture
            others.setdefault(re.sub(r"\d+", "#", key), []).append(key)
    found["Other"] = [
        _chart(runs, keys, keys[0] if len(keys) == 1 else name, "", "linear") for name, keys in others.items()
    ]
    return [
        {"title": title, "charts": [c for c in charts if not is_flat(c)], "flat": [c for c in charts if is_flat(c)]}
        for title, charts in found.items()
        if charts
    ]


def is_flat(chart: dict[str, Any]) -> bool:
    """Whether nothing in it ever changes, over more than one step: its values in words say as much."""
    return all(len(curve["y"]) > 1 and len(set(curve["y"])) == 1 for curve in chart["curves"])


def _chart(runs: Sequence[Run], keys: Sequence[str], title: str, unit: str, scale: str) -> dict[str, Any]:
    curves = []
    for key in keys:
        for number, run in enumerate(runs):
            steps, values = run.curve(key)
            if steps:
                curves.append({"run": number, "name": key} | shorten(steps, values))
    return {"title": title, "unit": unit, "kind": "line", "scale": scale, "curves": curves}


def _validation(runs: Sequence[Run], keys: Sequence[str]) -> list[dict[str, Any]]:
    """One chart for each figure of validation, with a curve for each set: accuracy and reward first."""
    names: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith("val/") and key.count("/") >= 2:
            name = re.sub(r"@\d+$", "@k", key.rsplit("/", 1)[1])  # pass@1, pass@2 … are one picture
            names.setdefault(name, []).append(key)
    order = sorted(names, key=lambda name: (name not in ("accuracy", "reward"), name.endswith("_frac"), name))
    return [_chart(runs, names[name], name, "", "linear") | {"kind": "points"} for name in order]


def _stacks(runs: Sequence[Run], keys: Sequence[str]) -> list[dict[str, Any]]:
    """For each run the seconds of its phases on top of each other; "other" is what no phase accounts for."""
    charts = []
    order = sorted(keys, key=lambda key: (_rank(key), keys.index(key)))
    for number, run in enumerate(runs):
        lines = [line for line in run.metrics if line.get("time/step_s")]
        if not lines:
            continue
        steps = [float(line["step"] or 0) for line in lines]
        values = {key: [line.get(key) or 0.0 for line in lines] for key in order if any(key in line for line in lines)}
        known = [sum(series[i] for series in values.values()) for i in range(len(lines))]
        values["other"] = [max(0.0, (line["time/step_s"] or 0.0) - k) for line, k in zip(lines, known, strict=True)]
        curves = [{"run": number, "name": key} | shorten(steps, series) for key, series in values.items()]
        title = "Time of a step by phase" + (f": {run.name}" if len(runs) > 1 else "")
        charts.append({"title": title, "unit": "s", "kind": "stack", "scale": "linear", "curves": curves})
    return charts


def _rank(key: str) -> int:
    phase = key.removeprefix("time/").removesuffix("_s")
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def clock(run: Run) -> dict[str, list[float]]:
    """Hours of training at each step, for an axis of time."""
    return shorten([float(line["step"] or 0) for line in run.metrics], run.hours())


def tiles(run: Run) -> list[list[str]]:
    """The run in a few figures: [label, value, note] each."""
    rows = []

    def latest(key: str, count: int = 10) -> float | None:
        values = run.curve(key)[1][-count:]
        return sum(values) / len(values) if values else None

    if (reward := latest("reward/mean")) is not None:
        rows.append(["reward", f"{reward:.3f}", "mean of the last 10 steps"])
    for key in run.keys:
        if re.fullmatch(r"val/.+/(accuracy|reward)", key):
            values = run.curve(key)[1]
            if values:
                rows.append([key, f"{values[-1]:.3f}", f"{values[0]:.3f} at first, {max(values):.3f} at best"])
    if (seconds := latest("time/step_s")) is not None:
        rows.append(["a step takes", f"{brief(seconds):.4g} s", f"{run.hours()[-1]:.2f} h of training"])
    if (speed := latest("perf/tokens_per_s_per_gpu")) is not None:
        rows.append(["tokens/s per GPU", f"{speed:,.0f}", "prompts and responses"])
    if (memory := latest("mem/peak_gib")) is not None:
        rows.append(["peak memory", f"{memory:.1f} GiB", "of the fullest rank"])
    return rows
