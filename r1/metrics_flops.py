"""How much arithmetic an update asks for, and what share of the GPU's peak that is (MFU)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40": 181e12,
    "L40S": 362e12,
    "L20": 119.5e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
"""Dense bfloat16 FLOP/s by NVIDIA's data sheets; a name is matched by whole words, so that an H200 is no H20."""


class Packed(Protocol):
    """The part of a microbatch that sizes are read from."""

    input_ids: Tensor  # [1, T]
    hidden_index: Tensor  # [R]
    image_grid_thw: Tensor | None  # [images, 3]
    packing: Any  # cu_seqlens_q, cu_seqlens_k: [S + 1]


def peak_flops(device_name: str) -> float | None:
    """Of the longest name in PEAK_FLOPS whose words stand in device_name in a row; None for an unknown GPU."""
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    best = None
    for name in PEAK_FLOPS:
        wanted = name.lower().split()
        found = any(words[i : i + len(wanted)] == wanted for i in range(len(words)))
        if found and (best is None or len(name) > len(best)):
            best = name
    return None if best is None else PEAK_FLOPS[best]


def mfu(flops: float, seconds: float, num_gpus: int, device_name: str) -> float | None:
    """Model FLOPs utilisation: flops of all GPUs over what their peak would do in seconds; None if unknown."""
    peak = peak_flops(device_name)
    return None if peak is None or seconds <= 0 else flops / (seconds * num_gpus * peak)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Weights that multiply each token, by what a token is; a trained weight costs 6 FLOPs, a frozen one 4, or 2.

    Each number is FLOPs of forward and backward per token. Recomputed activations are not counted, the embedding's
    look-up costs nothing, and a frozen part below all that trains has no backward pass. Of experts those count that
    a token is sent to.
    """

    text: float = 0.0  # per packed token
    head: float = 0.0  # per response token
    patch: float = 0.0  # vision tower, per patch
    merged: float = 0.0  # projector, per image token

    @staticmethod
    def of(model: PreTrainedModel) -> "ModelSize":
        sums = {"patch": 0.0, "merged": 0.0, "text": 0.0, "head": 0.0}  # from the bottom to the top
        tied = not any("lm_head" in name for name, _ in model.named_parameters())
        parts = [(_part_of(name, tied), p) for name, p in model.named_parameters() if ".original_module." not in name]
        trained = {part for part, parameter in parts if parameter.requires_grad}
        text = model.config.get_text_config()
        below = True
        for part in sums:
            below = below and part not in trained
            for parameter in (p for name, p in parts if name == part):
                # Language models stack nothing but experts.
                used = text.num_experts_per_tok / text.num_experts if part == "text" and parameter.ndim == 3 else 1
                sums[part] += (6 if parameter.requires_grad else 2 if below else 4) * parameter.numel() * used
        return ModelSize(**sums)


def _part_of(name: str, tied: bool) -> str:
    """The number of ModelSize that a parameter counts in; of tied models the head is listed as the embedding."""
    if "embed_tokens" in name:
        return "head" if tied else "look-up"
    if "lm_head" in name:
        return "head"
    if "visual." in name:
        return "merged" if "merger" in name else "patch"
    return "text"


def update_flops(model: PreTrainedModel, microbatches: Iterable[Packed]) -> float:
    """FLOPs of one forward and backward pass over packed microbatches, prompts counted once as they are computed."""
    size, config = ModelSize.of(model), model.config
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # Scores and their sum over values: 2 FLOPs each a pair and channel, three times that with the backward pass.
    per_pair = 12 * text.num_hidden_layers * text.num_attention_heads * head_dim
    total = 0.0
    for batch in microbatches:
        total += size.text * batch.input_ids.numel() + size.head * batch.hidden_index.numel()
        total += per_pair * _causal_pairs(batch.packing.cu_seqlens_q, batch.packing.cu_seqlens_k)
        if vision is not None and batch.image_grid_thw is not None:
            trained = any(p.requires_grad for n, p in model.named_parameters() if "visual." in n and "merger" not in n)
            patches = int(batch.image_grid_thw.prod(dim=1).sum())
            total += (size.patch + size.merged / vision.spatial_merge_size**2) * patches
            total += (12 if trained else 4) * _vision_channels(vision) * _vision_pairs(vision, batch.image_grid_thw)
    return total


def _causal_pairs(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> float:
    """Query-key pairs, causal and aligned at the end: a query sees all keys before it."""
    q, k = cu_seqlens_q.diff().double(), cu_seqlens_k.diff().double()
    return float((q * (k - q) + q * (q + 1) / 2).sum())


def _vision_channels(vision: Any) -> int:
    return getattr(vision, "embed_dim", None) or vision.hidden_size


def _vision_pairs(vision: Any, grid_thw: Tensor) -> float:
    """Pairs over all layers: a frame's patches see each other, in windowed layers only those of their window."""
    grid = grid_thw.double()
    frame = grid[:, 1] * grid[:, 2]
    full = float((grid[:, 0] * frame**2).sum())
    full_layers = getattr(vision, "fullatt_block_indexes", None)
    if full_layers is None:
        return vision.depth * full
    window = (vision.window_size // vision.patch_size) ** 2
    windowed = float((grid[:, 0] * frame * frame.clamp(max=window)).sum())
    return len(full_layers) * full + (vision.depth - len(full_layers)) * windowed
