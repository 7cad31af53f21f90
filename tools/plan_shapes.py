"""Models that the planner knows by name: published shapes as transformers' configs, for where no hub is reached."""

from dataclasses import replace
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tools.bench_model import SHAPES, SPECIAL_TOKENS, Shape, make_config

_32B = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False}  # fmt: skip
_72B = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False}  # fmt: skip
_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "num_heads": 16, "window_size": 112,
           "fullatt_block_indexes": [7, 15, 23, 31]}  # fmt: skip
QWEN2_5: dict[str, Shape] = {
    **{name: shape for name, shape in SHAPES.items() if not name.startswith("tiny")},
    "qwen2.5-14b": Shape(**(_32B | {"intermediate_size": 13824, "num_hidden_layers": 48})),
    "qwen2.5-32b": Shape(**_32B),
    "qwen2.5-72b": Shape(**_72B),
    "qwen2.5-vl-32b": Shape(**_32B, vision=_VISION),
    "qwen2.5-vl-72b": Shape(**_72B, vision=_VISION),
}


def _text(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, tied: bool) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "tie_word_embeddings": tied}  # fmt: skip


LLAMA = {
    "llama-1b": _text(2048, 8192, 16, 32, 8, 64, True),
    "llama-3b": _text(3072, 8192, 28, 24, 8, 128, True),
    "llama-8b": _text(4096, 14336, 32, 32, 8, 128, False),
    "llama-70b": _text(8192, 28672, 80, 64, 8, 128, False),
}
QWEN3 = {
    "qwen3-0.6b": _text(1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": _text(2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": _text(2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": _text(4096, 12288, 36, 32, 8, 128, False),
    "qwen3-14b": _text(5120, 17408, 40, 40, 8, 128, False),
    "qwen3-32b": _text(5120, 25600, 64, 64, 8, 128, False),
}
_A3B = {**_text(2048, 6144, 48, 32, 4, 128, False), "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8}  # fmt: skip
_VISION3 = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}  # fmt: skip
NAMES = (*QWEN2_5, *LLAMA, *QWEN3, "qwen3-30b-a3b", "qwen3-vl-4b", "qwen3-vl-8b", "qwen3-vl-30b-a3b")


def known_config(name: str) -> PreTrainedConfig:
    """The config of a model by its short name, e.g. qwen2.5-7b.

    Raises:
        ValueError: no such name; lists those there are.
    """
    if name in QWEN2_5:
        shape = QWEN2_5[name]
        padded = replace(shape, vocab_size=max(shape.vocab_size, 1000))
        return make_config(padded, {token: 900 + i for i, token in enumerate(SPECIAL_TOKENS)})
    if name in LLAMA:
        return transformers.LlamaConfig(**LLAMA[name], vocab_size=128256, max_position_embeddings=131072)
    if name in QWEN3:
        return transformers.Qwen3Config(**QWEN3[name], vocab_size=151936, max_position_embeddings=40960)
    if name == "qwen3-30b-a3b":
        return transformers.Qwen3MoeConfig(**_A3B, vocab_size=151936, max_position_embeddings=40960)
    if name.startswith("qwen3-vl-") and name in NAMES:
        return _qwen3_vl(name.removeprefix("qwen3-vl-"))
    raise ValueError(f"no known model {name!r}; give a folder, or one of {', '.join(NAMES)}")


def _qwen3_vl(size: str) -> PreTrainedConfig:
    text = _A3B if size == "30b-a3b" else QWEN3[f"qwen3-{size}"]
    vision = {**_VISION3, "out_hidden_size": text["hidden_size"]}
    if size == "4b":
        vision |= {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
    kind = transformers.Qwen3VLMoeConfig if size == "30b-a3b" else transformers.Qwen3VLConfig
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return kind(text_config={**text, "vocab_size": 151936}, vision_config=vision, **tied)
