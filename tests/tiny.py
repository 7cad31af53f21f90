"""Tiny random models of every family r1 trains, with tokenizer, chat template and processor, made in a second.

They have the real architectures, so that tests prove the real code paths; 320 tokens, 2 layers, head size 64.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast

TEXT_FAMILIES = ("llama3", "qwen2", "qwen2_5", "qwen3", "qwen3_moe")
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
FAMILIES = TEXT_FAMILIES + VISION_FAMILIES

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ADDED_WORDS = ("<think>", "</think>")  # added, but not special: decoding keeps them
VOCAB_SIZE = 320  # 256 bytes + 55 merges + the nine above
HIDDEN_SIZE, HEAD_DIM = 128, 64
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' or 'image' in part %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' or 'video' in part %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part['text'] }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens: any text round-trips, common pairs are one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    digraphs = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de"
    merges = [("Ġ", letter) for letter in "abcdefghilmnoprstw"]
    merges += [(pair[0], pair[1]) for pair in (digraphs + " hi ri ro").split()]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED_WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    assert len(tokenizer) == VOCAB_SIZE, len(tokenizer)
    return tokenizer


def _text_fields(rope_parameters: dict[str, Any], *, tie: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": HIDDEN_SIZE // HEAD_DIM,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "rope_parameters": rope_parameters,
        "tie_word_embeddings": tie,
    }


def _text_config(family: str, *, tie: bool) -> transformers.PreTrainedConfig:
    if family == "llama3":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        return transformers.LlamaConfig(**_text_fields(rope, tie=tie), head_dim=HEAD_DIM)
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    if family == "qwen3":
        return transformers.Qwen3Config(**_text_fields(rope, tie=tie), head_dim=HEAD_DIM)
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**_text_fields(rope, tie=tie), **EXPERTS, head_dim=HEAD_DIM)
    return transformers.Qwen2Config(**_text_fields(rope, tie=tie))


def _vision_config(family: str, ids: dict[str, int], *, tie: bool) -> transformers.PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": HIDDEN_SIZE, "num_heads": 2, "spatial_merge_size": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": HIDDEN_SIZE, "mlp_ratio": 2, "patch_size": 14}
        config_class = transformers.Qwen2VLConfig
    elif family == "qwen2_5_vl":
        vision |= {"intermediate_size": 192, "out_hidden_size": HIDDEN_SIZE, "patch_size": 14, "window_size": 112}
        vision |= {"fullatt_block_indexes": [1]}
        config_class = transformers.Qwen2_5_VLConfig
    else:
        vision |= {"intermediate_size": 192, "out_hidden_size": HIDDEN_SIZE, "patch_size": 16}
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        # transformers always interleaves, vLLM only where the flag says so.
        rope |= {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
        config_class = transformers.Qwen3VLMoeConfig if family == "qwen3_vl_moe" else transformers.Qwen3VLConfig
    text = _text_fields(rope, tie=tie) | {"pad_token_id": ids["<|endoftext|>"]}
    text |= {"eos_token_id": ids["<|im_end|>"], "bos_token_id": None}
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        text |= {"head_dim": HEAD_DIM}
    if family == "qwen3_vl_moe":
        text |= EXPERTS
    return config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tie,
    )


def make_config(family: str, *, tie: bool = False) -> transformers.PreTrainedConfig:
    """The family's real config class with tiny sizes."""
    if family not in FAMILIES:
        raise ValueError(f"no tiny model of family {family!r}; there are {FAMILIES}")
    tokenizer = make_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = _text_config(family, tie=tie) if family in TEXT_FAMILIES else _vision_config(family, ids, tie=tie)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, ids["<|im_end|>"], ids["<|endoftext|>"]
    config.dtype = torch.float32
    return config


def make_processor(family: str) -> transformers.ProcessorMixin:
    """The family's processor around the tiny tokenizer; it keeps pictures between 64 x 64 and 448 x 448."""
    size = {"shortest_edge": 56 * 56, "longest_edge": 448 * 448}
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        sizes = {
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {**size, "shortest_edge": 64 * 64},
        }
        half = [0.5, 0.5, 0.5]
        image = transformers.Qwen2VLImageProcessor(**sizes, image_mean=half, image_std=half)
        video = transformers.Qwen3VLVideoProcessor(**sizes)
        processor_class = transformers.Qwen3VLProcessor
    else:
        sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": size}
        image, video = transformers.Qwen2VLImageProcessor(**sizes), transformers.Qwen2VLVideoProcessor(**sizes)
        processor_class = transformers.Qwen2VLProcessor if family == "qwen2_vl" else transformers.Qwen2_5_VLProcessor
    return processor_class(
        image_processor=image, tokenizer=make_tokenizer(), video_processor=video, chat_template=CHAT_TEMPLATE
    )


@torch.no_grad()
def randomize(model: nn.Module, *, seed: int) -> None:
    """Draw every parameter anew, norms around 1, matrices wide enough that greedy text is not one token repeated."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_((0.06 if "embed_tokens" in name else 0.12) * noise)
        else:
            parameter.copy_((1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.1 * noise)


def publish_experts(file: Path) -> None:
    """Give the experts in a file of Qwen3-VL-MoE the layout of the published ones, which save_pretrained does not."""
    tensors = load_file(file)
    turned = {n: t.transpose(1, 2).contiguous() for n, t in tensors.items() if ".experts." in n}
    save_file({**tensors, **turned}, file, metadata={"format": "pt"})


def make_tiny(family: str, folder: Path, *, seed: int = 0, tie: bool = False) -> Path:
    """Save a random model of the family into folder, with all that transformers and vLLM load from one.

    Args:
        family: one of FAMILIES; qwen2_5 is qwen2's class.
        seed: of the weights; the same seed gives the same weights, whatever the global random state.
        tie: the LM head shares the embedding's weights.

    Returns:
        folder.
    """
    config = make_config(family, tie=tie)
    auto = transformers.AutoModelForImageTextToText if family in VISION_FAMILIES else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        model = auto.from_config(config, dtype=torch.float32)
    randomize(model, seed=seed)
    ends = [config.eos_token_id, config.pad_token_id]
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=config.pad_token_id, do_sample=True, temperature=0.7, top_p=0.8, top_k=20
    )
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        publish_experts(folder / "model.safetensors")
    saver = make_processor(family) if family in VISION_FAMILIES else make_tokenizer()
    saver.save_pretrained(folder)
    if family in VISION_FAMILIES:  # vLLM of some versions reads the file itself
        saver.image_processor.save_pretrained(folder)
        saver.video_processor.save_pretrained(folder)
    return Path(folder)
