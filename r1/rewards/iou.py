"""Reward for a box around something in a picture: its overlap with the gold box, intersection over union."""

import re
from collections.abc import Sequence
from typing import Any

from r1.rewards.grader import extract_answer

REWARD_NAME = "iou"
REWARD_TYPE = "batch"
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

SIGNED = r"\s*(-?\d+(?:\.\d+)?)\s*"
BOX = re.compile(r"[\[(]" + ",".join([SIGNED] * 4) + r"[\])]")
SCALES = {"thousand": (1000.0, 1000.0), "unit": (1.0, 1.0)}
SIZES = {"model": "model_image_sizes", "original": "image_sizes"}


def find_box(text: str) -> Box | None:
    """The last [left, top, right, bottom] of a response's answer, or of all of it where it marks no answer."""
    if re.search(r"\\boxed(?![a-zA-Z])|<answer>", text):
        text = extract_answer(text, ("tag", "boxed")) or ""
    found = BOX.findall(text)
    return to_box(found[-1]) if found else None


def to_box(values: Sequence[Any]) -> Box:
    left, top, right, bottom = (float(value) for value in values)
    return left, top, right, bottom


def iou(a: Box, b: Box) -> float:
    """Intersection over union, in [0, 1]; 0 for a box without area or with its corners swapped."""
    area_a, area_b = ((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    if min(a[2] - a[0], a[3] - a[1], b[2] - b[0], b[3] - b[1]) <= 0:
        return 0.0
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (area_a + area_b - shared)


def gold_box(gold: Any) -> Box:
    """The box of a ground_truth: four numbers in a list, or a text that holds them."""
    if isinstance(gold, (list, tuple)) and len(gold) == 4:
        return to_box(gold)
    found = find_box(gold) if isinstance(gold, str) else None
    if found is None:
        raise ValueError(f"ground_truth must be a box [left, top, right, bottom], got {gold!r:.80}")
    return found


def scale(coordinates: str, one: dict[str, Any]) -> tuple[float, float]:
    """Width and height of the picture in these coordinates."""
    if coordinates in SCALES:
        return SCALES[coordinates]
    if coordinates not in SIZES:
        raise ValueError(f"coordinates must be one of {[*SIZES, *SCALES]}, got {coordinates!r}")
    sizes = one.get(SIZES[coordinates])
    if not sizes:
        raise ValueError(f"the iou reward needs {SIZES[coordinates]}, the pictures' sizes, and the row has none")
    width, height = sizes[0]
    return float(width), float(height)


def compute_score(
    reward_inputs: list[dict[str, Any]],
    threshold: float | None = None,
    coordinates: str = "model",
    gold_coordinates: str = "original",
) -> list[dict[str, float]]:
    """overall = iou, or with a threshold 1 where iou reaches it, else 0.

    Args:
        coordinates: what the model answers in: "model" (pixels of the picture as resized for it: Qwen2.5-VL),
            "original" (pixels of the file), "thousand" (0 to 1000: Qwen2-VL, Qwen3-VL) or "unit" (0 to 1).
        gold_coordinates: what the ground truth is in. The first picture's size converts one into the other.
    """
    rewards = []
    for one in reward_inputs:
        gold, found = gold_box(one["ground_truth"]), find_box(one["response"])
        if found is not None and coordinates != gold_coordinates:
            (width, height), (gold_width, gold_height) = scale(coordinates, one), scale(gold_coordinates, one)
            x, y = width / gold_width, height / gold_height
            gold = (gold[0] * x, gold[1] * y, gold[2] * x, gold[3] * y)
        overlap = iou(found, gold) if found is not None else 0.0
        overall = overlap if threshold is None else float(overlap >= threshold)
        rewards.append({"overall": overall, "iou": overlap, "format": float(found is not None)})
    return rewards
