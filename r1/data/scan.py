"""Check every row once before training: which are used, which are too long, which are at fault, and why."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from r1.config import DataConfig
from r1.data.chat import count_of
from r1.data.faults import RowError
from r1.data.mixture import Mixture
from r1.data.prompt import Measured, Renderer
from r1.data.vision import Sizes
from r1.parallel import gather_objects

CHUNK = 1000  # rows per call of the tokenizer
OVERLONG = "prompt too long"
TOO_MANY = {"image": "too many images", "video": "too many videos"}


@dataclass(kw_only=True, slots=True)
class Scan:
    """Positions in the mixture."""

    kept: list[int] = field(default_factory=list)
    overlong: list[int] = field(default_factory=list)  # left out as too long
    faults: list[tuple[int, RowError]] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)  # in any one row, by the kind of fault


def renderers_by_folder(rows: Mixture, renderer: Renderer, config: DataConfig) -> dict[Path | None, Renderer]:
    """A renderer for the folder of each part; one for all where data.image_dir is given or nothing else is known."""
    folders = {part.folder for part in rows.parts}
    fixed = config.image_dir is not None
    return {f: renderer if fixed or f is None else renderer.from_folder(f) for f in folders}


def measure_rows(
    rows: Mixture,
    renderers: dict[Path | None, Renderer],
    indices: Sequence[int],
    pool: Executor | None,
    *,
    decode: bool,
) -> Iterator[tuple[int, Measured | RowError]]:
    """Each row's text, images and length, or what is wrong with it, in order."""
    by_folder = defaultdict(list)
    found: dict[int, Measured | RowError] = {}
    for i in indices:
        row = rows.read(i)
        if isinstance(row, RowError):
            found[i] = row
        else:
            by_folder[rows.folder(i)].append((i, row))
    for folder, some in by_folder.items():
        measured = renderers[folder].measure([row for _, row in some], pool, decode=decode)
        found |= {i: m for (i, _), m in zip(some, measured, strict=True)}
    yield from ((i, found[i]) for i in indices)


def judge(measured: Measured | RowError, config: DataConfig, limit_images: int, limit_videos: int) -> RowError | None:
    """Why a row cannot be used; None: it can. A prompt that is merely too long has the kind OVERLONG."""
    if isinstance(measured, RowError):
        return measured
    counts = {"image": len(measured.sizes.images), "video": len(measured.sizes.videos)}
    for name, limit in (("image", limit_images), ("video", limit_videos)):
        if counts[name] > limit:
            problem = f"has {count_of(counts[name], name)}, above rollout.limit_{name}s={limit}"
            return RowError(TOO_MANY[name], problem, "raise it to the most that a row has")
    if measured.length <= config.max_prompt_length:
        return None
    problem = f"needs {measured.length} prompt tokens, above data.max_prompt_length={config.max_prompt_length}"
    if config.overlong_prompts == "truncate_left":
        if measured.uncut < config.max_prompt_length:
            return None
        fix = "raise it, or lower data.max_pixels"
        return RowError("images do not fit", f"{problem}, {measured.uncut} of them for images, which are not cut", fix)
    return RowError(OVERLONG, problem, "raise it, or set data.overlong_prompts to filter")


def scan_rows(
    rows: Mixture,
    renderers: dict[Path | None, Renderer],
    config: DataConfig,
    pool: Executor | None,
    *,
    limit_images: int,
    limit_videos: int,
    progress: Callable[[int], object],
) -> Scan:
    """Check all rows; collective where there is a process group, whose ranks share the work.

    What one rank finds holds for all, so they agree on the rows even if one machine's disk lacks a file.

    Args:
        pool: reads the images; None: none to read.
        progress: called with the number of rows just checked.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    outcomes: list[tuple[int, tuple[int, int], RowError | None]] = []  # (position, (images, videos), fault)
    chunks = range(0, len(rows), min(CHUNK, -(-len(rows) // world_size)))
    for start in chunks[rank::world_size]:
        indices = range(start, min(start + chunks.step, len(rows)))
        for i, measured in measure_rows(rows, renderers, indices, pool, decode=config.check_images):
            sizes = Sizes() if isinstance(measured, RowError) else measured.sizes
            counts = (len(sizes.images), len(sizes.videos))
            outcomes.append((i, counts, judge(measured, config, limit_images, limit_videos)))
        progress(len(indices) * world_size)
    scan = Scan()
    gathered = gather_objects(outcomes) if dist.is_initialized() else [outcomes]
    for i, counts, fault in sorted((x for part in gathered for x in part), key=lambda x: x[0]):
        for name, count in zip(TOO_MANY, counts, strict=True):
            scan.most[TOO_MANY[name]] = max(scan.most.get(TOO_MANY[name], 0), count)
        if fault is None:
            scan.kept.append(i)
        elif fault.kind == OVERLONG and config.overlong_prompts == "filter":
            scan.overlong.append(i)
        else:
            scan.faults.append((i, fault))
    return scan


def by_kind(faults: Iterable[tuple[int, RowError]]) -> dict[str, list[tuple[int, RowError]]]:
    """Faults by kind, the most frequent first."""
    kinds: dict[str, list[tuple[int, RowError]]] = defaultdict(list)
    for i, fault in faults:
        kinds[fault.kind].append((i, fault))
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def summary(rows: Mixture, faults: Sequence[tuple[int, RowError]], *, shown: int = 5) -> list[str]:
    """A line for each kind of fault: how many rows, the first few's names and what is wrong with the first."""
    lines = []
    for kind, some in by_kind(faults).items():
        names = ", ".join(rows.label(i) for i, _ in some[:shown]) + (", …" if len(some) > shown else "")
        lines.append(f"{len(some)} x {kind} ({names}); the first {some[0][1]}")
    return lines
