"""What a forward pass and an update hold for a while: activations, logits, gathered weights and their gradients.

Estimated at the token budget, with every layer recomputed unless model.gradient_checkpointing is False.
"""

from typing import Any

from transformers import PreTrainedConfig

from r1.config import Config
from tools.plan_held import Held

FULL_KL_BYTES = 44  # a logit of two models in the full KL: in bfloat16, and float32 copies (r1/policy/logprobs.py)
LAYER_PEAK = 1.5  # backward of a recomputed layer over what the layer keeps: gradients of its widest tensors
IMAGE_SHARE = 0.3  # of packed tokens that are a picture's, for models that see; a token is four patches


def compute_bytes(config: Config) -> int:
    return 4 if config.model.precision == "float32" else 2


def mlp_width(text: Any) -> float:
    """Of all experts that a token is sent to, with the token's copy and each expert's output."""
    experts = getattr(text, "num_experts_per_tok", 0) or 0
    return experts * (text.moe_intermediate_size + text.hidden_size / 2) if experts else text.intermediate_size


def layer_bytes(text: Any, compute: int, *, liger: bool) -> float:
    """Bytes a token that one decoder layer keeps for its backward pass.

    With liger-kernel: two norms (input and output), queries, keys and values as the kernel takes them (of prompts once
    for each response, about twice in all), the kernel's output, and gate, up and product of the MLP.

    Without: the norms' inputs in float32 too, queries, keys and values before and after rotary, and the activated gate.
    Within 4% of what autograd saves of a layer of Qwen2.5-3B and 7B, Qwen3-4B and Llama-8B (counted without a GPU).
    """
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    q, kv = text.num_attention_heads * head_dim, text.num_key_value_heads * head_dim
    head_norms = (q + kv) * (compute if liger else 4 + compute) if "qwen3" in text.model_type else 0
    if liger:
        experts = getattr(text, "num_experts_per_tok", 0) or 0  # run as transformers has them
        mlp = (4 if experts else 3) * mlp_width(text)
        return compute * (4 * text.hidden_size + 2 * q + 4 * kv + mlp) + head_norms
    norms = 2 * text.hidden_size * (4 + 2 * compute)
    return norms + compute * (5 * q + 6 * kv + 4 * mlp_width(text)) + head_norms


def activations(hf_config: PreTrainedConfig, config: Config, *, training: bool) -> float:
    """Bytes: inputs of all layers and one recomputed, or all of them whole; without training the widest moment of one.

    That is the MLP's gate, up and product, beside the layer's input and what it adds up to.
    """
    text, tokens = hf_config.get_text_config(), config.update.max_tokens_per_microbatch
    compute = compute_bytes(config)
    stream = tokens * text.hidden_size * compute
    vision: Any = getattr(hf_config, "vision_config", None)
    patches = 4 * IMAGE_SHARE * tokens if vision is not None else 0.0
    width = (getattr(vision, "embed_dim", None) or vision.hidden_size) if vision is not None else 0
    tower = patches * width * compute * (vision.depth if training else 8) if vision is not None else 0.0
    if not training:
        return 3 * tokens * mlp_width(text) * compute + 4 * stream + tower
    layer = tokens * layer_bytes(text, compute, liger=config.model.liger_kernel is not False)
    if config.model.gradient_checkpointing is False:
        whole = patches * width * compute * 16 * vision.depth if vision is not None else 0.0
        return text.num_hidden_layers * layer + 4 * stream + whole
    return text.num_hidden_layers * stream + LAYER_PEAK * layer + 4 * stream + tower


def logits(hf_config: PreTrainedConfig, held: Held, config: Config, *, training: bool) -> float:
    """Bytes of the LM head's chunks, of which the next is made before the last is freed, and of its gradient."""
    text, compute = hf_config.get_text_config(), compute_bytes(config)
    numbers = min(config.update.logprob_chunk_tokens, config.update.max_tokens_per_microbatch) * text.vocab_size
    if training and config.algorithm.kl_penalty == "full" and config.algorithm.kl_coef > 0:
        return numbers * FULL_KL_BYTES
    # The gradient itself is in `gathered`; its sum over chunks is float32, and tied embeddings have one of their own.
    extra = 4 + (compute if text.tie_word_embeddings else 0)
    return 2 * numbers * compute + (held.head.trained * extra if training else 0)


def gathered(held: Held, config: Config, *, training: bool) -> float:
    """Bytes of whole weights that a pass holds beside its shards, and in training of their gradients while they are
    reduced: in the dtype of the pass, the float32 buffer that is reduced, and a rank's rows of the sum."""
    compute = compute_bytes(config)
    layers = 2 if held.shard == 1 else 3  # the one that computes, the next, and the buffer that it arrives in
    total = (held.root.all + layers * held.layer.all) * compute
    if training:
        total += (held.root.trained + held.layer.trained) * (compute + 4 + 4 / held.shard)
    return total
