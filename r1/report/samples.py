"""The samples that a page shows: the best and worst of each step of too many, with their pictures inside."""

import base64
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from r1.report.read import Run, json_lines

MAX_SAMPLES = 1200
MAX_CHARACTERS = 5_000_000
"""Of all texts together."""
MAX_CHARACTERS_EACH = 12_000
MAX_PICTURE_BYTES = 6_000_000
PICTURE = re.compile(r"images/[0-9a-f]{16}\.jpg")


class Place(NamedTuple):
    """Where a sample is in samples.jsonl, and what decides whether it is shown."""

    offset: int  # in bytes
    kind: str  # "train", or "val/" and the set
    step: int
    reward: float | None
    rank: str  # "best" or "worst" of its kind and step, or ""


def samples(runs: Sequence[Run]) -> dict[str, Any]:
    """Rows for the page's table; texts and pictures are in lists of their own, each once.

    Returns:
        rows: objects with run, kind, step, row, sample, prompt, response, answer (numbers of texts), reward, rewards,
        length, cut, rank, images (names of pictures, or stubs); texts; pictures: name to data URL; total: samples that
        the runs hold.
    """
    rows, total, pictures = [], 0, {}
    for number, run in enumerate(runs):
        path = run.folder / "samples.jsonl"
        if not path.exists():
            continue
        places = ranked(_places(path))
        total += len(places)
        chosen = list(_records(path, thin(places, MAX_SAMPLES // len(runs))))
        names = [name for _, record in chosen for name in record.get("images") or ()]
        found = _pictures(run.folder, names, MAX_PICTURE_BYTES // len(runs))
        # Names are hashes of the content: equal pictures of several runs are one.
        pictures |= found
        rows += [{"run": number} | _row(place, record) for place, record in chosen]
    texts = _share_texts(rows)
    return {"rows": rows, "texts": texts, "pictures": pictures, "total": total}


def _places(path: Path) -> Iterator[Place]:
    for offset, record in json_lines(path):
        kind = record.get("kind", "train")
        kind = f"{kind}/{record['set']}" if record.get("set") else kind
        reward = (record.get("rewards") or {}).get("overall")
        yield Place(offset, str(kind), int(record.get("step", 0)), reward, "")


def ranked(places: Iterator[Place]) -> list[Place]:
    """Mark the best and the worst of each kind and step, where their rewards differ."""
    groups: dict[tuple[str, int], list[Place]] = {}
    for place in places:
        groups.setdefault((place.kind, place.step), []).append(place)
    marked = []
    for group in groups.values():
        rewards = [p.reward for p in group if p.reward is not None]
        marks = {}
        if rewards and min(rewards) < max(rewards):
            marks[next(i for i, p in enumerate(group) if p.reward == min(rewards))] = "worst"
            marks[next(i for i, p in enumerate(group) if p.reward == max(rewards))] = "best"
        marked += [p._replace(rank=marks.get(i, "")) for i, p in enumerate(group)]
    return marked


def thin(places: Sequence[Place], limit: int) -> list[Place]:
    """At most limit of them: all; else the best and worst of each step (of tied ones the first); else of fewer steps.

    Every kind keeps its first and last step, and steps between at equal distances.
    """
    if len(places) <= limit:
        return list(places)
    groups: dict[tuple[str, int], list[Place]] = {}
    for place in places:
        groups.setdefault((place.kind, place.step), []).append(place)
    kept = {key: [p for p in group if p.rank] or group[:1] for key, group in groups.items()}
    kinds = sorted({kind for kind, _ in kept})
    chosen: list[Place] = []
    for kind in kinds:
        steps = sorted(step for k, step in kept if k == kind)
        room = max(2, limit // (2 * len(kinds)))
        if len(steps) > room:
            steps = [steps[round(i * (len(steps) - 1) / (room - 1))] for i in range(room)]
        chosen += [place for step in steps for place in kept[kind, step]]
    return chosen


def _records(path: Path, places: Sequence[Place]) -> Iterator[tuple[Place, dict[str, Any]]]:
    with path.open("rb") as file:
        for place in places:
            file.seek(place.offset)
            yield place, json.loads(file.readline())


def _row(place: Place, record: dict[str, Any]) -> dict[str, Any]:
    known = {"step", "kind", "set", "row", "sample", "prompt", "response", "ground_truth", "rewards", "images"}
    known |= {"response_length", "truncated"}
    answer = record.get("ground_truth", "")
    rest = {key: value for key, value in record.items() if key not in known}
    return {
        "kind": place.kind, "step": place.step, "row": record.get("row"), "sample": record.get("sample"),
        "prompt": str(record.get("prompt", "")), "response": str(record.get("response", "")),
        "answer": answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False),
        "reward": place.reward, "rewards": record.get("rewards"), "rank": place.rank,
        "length": record.get("response_length"), "cut": bool(record.get("truncated")),
        "images": [PICTURE.sub(lambda m: m[0][7:-4], str(name)) for name in record.get("images") or ()], "rest": rest,
    }  # fmt: skip


def _pictures(folder: Path, names: Sequence[str], budget: int) -> dict[str, str]:
    """Data URLs of pictures that are still there, evenly thinned to the budget in bytes."""
    paths = {name: folder / name for name in names if PICTURE.fullmatch(str(name))}
    sizes = {name: path.stat().st_size for name, path in paths.items() if path.is_file()}
    every = max(1, -(-sum(sizes.values()) // budget))
    return {
        name[7:-4]: "data:image/jpeg;base64," + base64.b64encode(paths[name].read_bytes()).decode()
        for name in list(sizes)[::every]
    }


def _share_texts(rows: list[dict[str, Any]]) -> list[str]:
    """Replace the rows' texts by numbers into the list that is returned; long ones lose their middle."""
    fields = ("prompt", "response", "answer")
    numbers = {text: i for i, text in enumerate(dict.fromkeys(row[field] for row in rows for field in fields))}
    each = MAX_CHARACTERS_EACH
    while each > 500 and sum(min(len(text), each) for text in numbers) > MAX_CHARACTERS:
        each //= 2
    for row in rows:
        for field in fields:
            row[field] = numbers[row[field]]
    return [cut(text, each) for text in numbers]


def cut(text: str, limit: int) -> str:
    """The beginning and the end of a text that is longer than limit, and how much is missing between them."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 2], text[-(limit // 2) :]
    return f"{head}\n[… {len(text) - len(head) - len(tail):,} characters left out; samples.jsonl has them …]\n{tail}"
