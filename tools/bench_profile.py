"""Where the GPU's time goes: kernels of one profiled call as a text table."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ROWS, NAME_WIDTH = 40, 110
KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|attention|varlen"),
    ("communication", r"nccl|gloo|all_gather|reduce_scatter"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|xmma|matmul|addmm|mkl|onednn|::mm\b|::bmm\b|::linear\b"),
    ("copies", r"memcpy|memset|copy_|CatArray|::cat\b|::fill_\b|::zero_\b"),
    ("index, gather, sort", r"index|gather|scatter|sort|embedding"),
    ("compiled (triton)", r"triton"),
    ("softmax, reductions", r"softmax|reduce|norm"),
    ("elementwise", r"elementwise|vectorized|foreach|multi_tensor|mul|add|silu|exp"),
)
"""(kind, pattern) of a kernel's name; the first that fits counts."""


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def profile_table(action: Callable[[], Any], what: str) -> str:
    """Run action under torch.profiler; its time by kind and its 40 longest kernels (operators on a CPU).

    Args:
        what: was done, for the first line.
    """
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        began = time.perf_counter()
        action()
        if on_gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - began
    wanted = "CUDA" if on_gpu else "CPU"
    rows = []
    for event in profiler.key_averages():
        # Ranges that record_function marks lie over the kernels in them, which would count twice.
        if event.device_type.name == wanted and not getattr(event, "is_user_annotation", False):
            micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            rows.append((event.key, event.count, micros / 1000))
    return kernel_table(rows, wall * 1000, f"{what}; {'kernels' if on_gpu else 'operators'}")


def kernel_table(rows: Sequence[tuple[str, int, float]], wall_ms: float, title: str) -> str:
    """Args: rows are (kernel, calls, milliseconds); wall_ms is the time of the whole, profiler included."""
    busy = sum(row[2] for row in rows)
    lines = [title, f"{wall_ms:.1f} ms in all, {busy:.1f} ms in kernels", "", f"{'ms':>10}{'%':>7}{'calls':>8}  kind"]
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, calls, millis in rows:
        kinds[kind_of(name)][0] += millis
        kinds[kind_of(name)][1] += calls
    for kind, (millis, calls) in sorted(kinds.items(), key=lambda item: -item[1][0]):
        lines.append(f"{millis:10.2f}{100 * millis / max(busy, 1e-9):7.1f}{calls:8.0f}  {kind}")
    lines += ["", f"{'ms':>10}{'%':>7}{'calls':>8}{'us each':>10}  kernel"]
    for name, calls, millis in sorted(rows, key=lambda row: -row[2])[:ROWS]:
        each = 1000 * millis / max(calls, 1)
        lines.append(f"{millis:10.2f}{100 * millis / max(busy, 1e-9):7.1f}{calls:8}{each:10.1f}  {name[:NAME_WIDTH]}")
    return "\n".join(lines) + "\n"
