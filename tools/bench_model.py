"""Models of true shapes with random weights, made on disk without a network: the speed of the published ones, no skill.

They write a uniformly random token at a time, and end a response with a probability that is chosen here, so that real
engines sample responses of mixed lengths from them.
"""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast, ProcessorMixin

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
# ChatML with Qwen's picture marks.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
SHARD_BYTES = 2 << 30
MATRIX_STD, EMBED_STD = 0.02, 0.002
CONSTANT = 4.0
"""Channel 0 of the residual stream carries this times the norm of all others together, the same for every token."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen2.5 or Qwen2.5-VL model, from its published config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 151936
    tie_word_embeddings: bool = True
    mrope_section: tuple[int, int, int] = (16, 24, 24)
    vision: dict[str, Any] | None = None


_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "window_size": 112,
           "fullatt_block_indexes": [7, 15, 23, 31]}  # fmt: skip
_TINY_VISION = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "window_size": 112,
                "fullatt_block_indexes": [1]}  # fmt: skip
_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 512}  # fmt: skip
_3B = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
       "num_key_value_heads": 2}  # fmt: skip
_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
       "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}  # fmt: skip
SHAPES = {
    "tiny": Shape(**_TINY),
    "tiny-vl": Shape(**_TINY, mrope_section=(8, 12, 12), vision=_TINY_VISION),
    "qwen2.5-0.5b": Shape(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    ),
    "qwen2.5-1.5b": Shape(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
    ),
    "qwen2.5-3b": Shape(**_3B),
    "qwen2.5-7b": Shape(**_7B),
    "qwen2.5-vl-3b": Shape(**_3B, vision=_VISION),
    "qwen2.5-vl-7b": Shape(**_7B, vision=_VISION),
}


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Each byte of a text is one token, and each id below vocab_size decodes to text, as a real vocabulary's does."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = map("".join, itertools.product(letters, repeat=4))
    tokens = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), words)
    vocab = {token: i for i, token in enumerate(itertools.islice(tokens, vocab_size - len(SPECIAL_TOKENS)))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    size = {"shortest_edge": 56 * 56, "longest_edge": 12845056}
    return transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(size=size),
        chat_template=CHAT_TEMPLATE,
    )


def make_config(shape: Shape, ids: dict[str, int]) -> PreTrainedConfig:
    """The family's own config class; ids: of SPECIAL_TOKENS."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000000.0}
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "tie_word_embeddings")  # fmt: skip
    text = {name: getattr(shape, name) for name in names} | {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
    if shape.vision is None:
        config = transformers.Qwen2Config(**text, rope_parameters=rope, **ends)
        config.architectures = ["Qwen2ForCausalLM"]
    else:
        rope["mrope_section"] = list(shape.mrope_section)
        vision = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope, **ends},
            vision_config={**vision, **shape.vision, "out_hidden_size": shape.hidden_size},
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=shape.tie_word_embeddings,
            **ends,
        )
        config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.dtype = torch.bfloat16
    return config


class Noise:
    """Normal numbers at the speed of a copy: slices of one block, whose prime length keeps rows from lining up."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._block = torch.randn(4_194_301, generator=self._generator)

    def draw(self, shape: torch.Size, std: float) -> Tensor:
        """bfloat16 of the given shape."""
        block = (self._block * std).bfloat16()
        start = int(torch.randint(len(block), (), generator=self._generator))
        flat, at = torch.empty(shape.numel(), dtype=torch.bfloat16), 0
        while at < len(flat):
            piece = block[start : start + len(flat) - at]
            flat[at : at + len(piece)] = piece
            at, start = at + len(piece), 0
        return flat.view(shape)


def end_weight(shape: Shape, mean_length: float) -> float:
    """How far channel 0 of the end token's LM head row must stand out for it to be drawn once in mean_length tokens.

        p(end) = exp(x) / (exp(x) + vocab_size - 1) = 1 / mean_length, and x = end_weight * channel 0 after the norm,

    where the other logits are 0 to a few hundredths.
    """
    x = math.log((shape.vocab_size - 1) / (mean_length - 1))
    hidden = shape.hidden_size
    mean_square = EMBED_STD**2 * (CONSTANT**2 + 1)  # of the residual stream: layers add next to nothing
    return x * math.sqrt(mean_square + 1e-6) / (CONSTANT * EMBED_STD * math.sqrt(hidden))


def make_tensors(shape: Shape, config: PreTrainedConfig, mean_length: float, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, bfloat16 tensor) of every parameter, one at a time; tied weights once."""
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    noise = Noise(seed)
    end, weight = config.get_text_config().eos_token_id, end_weight(shape, mean_length)
    constant = CONSTANT * EMBED_STD * math.sqrt(shape.hidden_size)
    # Small enough that all layers together leave the residual stream, and so the lengths, as the embedding made it.
    write_std = EMBED_STD / (4 * math.sqrt(2 * shape.num_hidden_layers * shape.intermediate_size))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            tensor = torch.full(parameter.shape, float(name.endswith("weight")), dtype=torch.bfloat16)
        elif "embed_tokens" in name:
            tensor = noise.draw(parameter.shape, EMBED_STD)
            tensor[:, 0] = constant
            if shape.tie_word_embeddings:
                tensor[end, 0] = constant + weight
        elif "lm_head" in name:
            tensor = noise.draw(parameter.shape, EMBED_STD)
            tensor[:, 0] = 0.0
            tensor[end, 0] = weight
        elif "visual" not in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor = noise.draw(parameter.shape, write_std)
            tensor[0] = 0.0
        else:
            tensor = noise.draw(parameter.shape, MATRIX_STD)
        yield name, tensor


def make_model(name: str, folder: Path, *, mean_length: float, seed: int = 0) -> None:
    """Write a model folder that transformers and vLLM load, in shards of 2 GiB, one shard in memory at a time.

    Args:
        name: one of SHAPES.
        mean_length: tokens of its responses, the end token included, where nothing else ends them; at least 2.
    """
    if name not in SHAPES:
        raise ValueError(f"no model named {name!r}; there are {', '.join(SHAPES)}")
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(shape.vocab_size)
    config = make_config(shape, {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS})
    config.save_pretrained(folder)
    text = config.get_text_config()
    GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if shape.vision is not None:
        make_processor(tokenizer).save_pretrained(folder)
    shard, size, weight_map = {}, 0, {}

    def write() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))

    for tensor_name, tensor in make_tensors(shape, config, mean_length, seed):
        if shard and size + tensor.nbytes > SHARD_BYTES:
            write()
            shard, size = {}, 0
        shard[tensor_name], size = tensor, size + tensor.nbytes
    write()
    total = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
