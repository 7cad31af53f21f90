"""Attention over packed groups, where responses share their prompt's keys: SDPA with a mask, or varlen kernels.

Registered with transformers under the names below; `packing` reaches it as a keyword argument of the model's forward.
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from r1.parallel import SequenceGroup
from r1.policy.sequence_parallel import over_heads

# "flash" in a vision implementation's name makes transformers pass all of a picture's windows in one call.
PACKED, VISION = "r1_packed", "r1_flash_vision"

MASK_TOKENS = 8192
"""SDPA gets a mask of up to so many packed tokens squared; above, each sequence attends by itself, which holds none."""


@dataclass(slots=True)
class Packing:
    """Which packed token attends to which. Sequences are, group by group, the prompt and then each response.

    Queries are the packed tokens in order. The keys of a sequence are its prompt's followed by its own, gathered by
    kv_index; attention is causal, aligned at the end.
    """

    cu_seqlens_q: Tensor  # [S + 1] int32
    cu_seqlens_k: Tensor  # [S + 1] int32
    max_seqlen_q: int
    max_seqlen_k: int
    kv_index: Tensor  # [K] int64, packed positions
    own_index: Tensor  # [T] int64, where in kv_index a packed token stands as a key of its own sequence
    shared_tokens: Tensor  # [P] int64, packed positions of prompts that responses attend to
    shared_index: Tensor  # [P, n] int64, where in kv_index they stand as keys of responses; -1: of fewer than n
    mask: Tensor | None  # [T, T] bool, for SDPA; None where a varlen kernel runs, or T is above MASK_TOKENS

    @staticmethod
    def from_groups(groups: list[tuple[int, list[int]]], *, with_mask: bool) -> "Packing":
        """From (prompt tokens, tokens of each response) of each group, in packed order."""
        lengths_q, keys, own, shared_tokens, shared = [], [], [], [], []
        start = num_keys = 0
        most = max((len(lengths) for _, lengths in groups), default=0)
        for prompt_length, response_lengths in groups:
            prompt = torch.arange(start, start + prompt_length)
            lengths_q.append(prompt_length)
            keys.append(prompt)
            own.append(torch.arange(num_keys, num_keys + prompt_length))
            start, num_keys = start + prompt_length, num_keys + prompt_length
            uses = torch.full((prompt_length, most), -1)
            for i, length in enumerate(response_lengths):
                lengths_q.append(length)
                keys.append(torch.cat([prompt, torch.arange(start, start + length)]))
                uses[:, i] = torch.arange(num_keys, num_keys + prompt_length)
                num_keys += prompt_length
                own.append(torch.arange(num_keys, num_keys + length))
                start, num_keys = start + length, num_keys + length
            if response_lengths:
                shared_tokens.append(prompt)
                shared.append(uses)
        lengths_k = [len(k) for k in keys]
        mask = None
        if with_mask and start <= MASK_TOKENS:
            mask = torch.zeros(start, start, dtype=torch.bool)
            first = 0
            for length, key in zip(lengths_q, keys, strict=True):
                causal = torch.ones(length, len(key), dtype=torch.bool).tril(len(key) - length)
                mask[first : first + length, key] = causal
                first += length
        return Packing(
            cu_seqlens_q=_cumulative(lengths_q),
            cu_seqlens_k=_cumulative(lengths_k),
            max_seqlen_q=max(lengths_q),
            max_seqlen_k=max(lengths_k),
            kv_index=torch.cat(keys),
            own_index=torch.cat(own),
            shared_tokens=torch.cat(shared_tokens) if shared else torch.zeros(0, dtype=torch.int64),
            shared_index=torch.cat(shared) if shared else torch.zeros(0, most, dtype=torch.int64),
            mask=mask,
        )

    def to(self, device: torch.device) -> "Packing":
        moved = {
            f.name: to_device(value, device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class GatherKeys(torch.autograd.Function):
    """[T, H, D] keys or values of the packed tokens -> [K, H, D], each prompt's repeated for its responses.

    The gradient of a prompt's token is the sum over its uses, taken in float32 and in one order; that of plain
    indexing sorts the whole index, layer by layer.
    """

    @staticmethod
    def forward(ctx: Any, keys: Tensor, packing: Packing) -> Tensor:
        ctx.packing = packing
        return keys[packing.kv_index]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), packing = gradients, ctx.packing
        out = gradient[packing.own_index]
        uses = packing.shared_index
        shared = gradient[uses.clamp(min=0)].float() * (uses >= 0)[..., None, None]  # [P, n, H, D]
        tokens = packing.shared_tokens
        out[tokens] = (out[tokens].float() + shared.sum(1)).to(out.dtype)
        return out, None


def _cumulative(lengths: list[int]) -> Tensor:
    # int32: flash-attn refuses an int64 cu_seqlens
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)


def choose_backend(name: str, device: torch.device, *, float32: bool = False) -> str:
    """Resolve config.model.attention to flash_attn, varlen or sdpa; ValueError if what was asked for cannot run."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    if name == "auto":
        if device.type != "cuda" or float32:  # flash kernels take bfloat16 and float16
            return "sdpa"
        return "flash_attn" if has_flash else "varlen" if has_varlen else "sdpa"
    if name == "flash_attn" and not has_flash:
        raise ValueError("model.attention='flash_attn' but flash-attn is not installed; use 'auto' or install it")
    if name != "sdpa" and device.type != "cuda":
        raise ValueError(f"model.attention={name!r} needs a CUDA device; use 'auto' or 'sdpa'")
    if name != "sdpa" and float32:
        raise ValueError(f"model.attention={name!r} computes in bfloat16, not model.precision='float32'; use 'auto'")
    return name


def _varlen(backend: str) -> Callable[..., Tensor]:
    """fn(q [T, H, D], k, v, cu_q, cu_k, max_q, max_k, scale, causal) -> [T, H, D]."""
    if backend == "flash_attn":
        from flash_attn import flash_attn_varlen_func

        def flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
                  scale: float | None, causal: bool) -> Tensor:  # fmt: skip
            same = torch.are_deterministic_algorithms_enabled()
            return flash_attn_varlen_func(
                q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=causal, deterministic=same
            )

        return flash
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 has no such argument, and takes fewer key than query heads without a word (equal to repeated ones).
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def torch_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
                     scale: float | None, causal: bool) -> Tensor:  # fmt: skip
        extra: dict[str, Any] = {"enable_gqa": True} if grouped else {}
        window = (-1, 0) if causal else (-1, -1)
        out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window, **extra)
        return cast(Tensor, out)  # alone, as no auxiliary output was asked for

    return torch_varlen


def _by_sequence(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """SDPA of one sequence after the other, its prompt's queries among them: causal from the start needs no mask."""
    parts = []
    ends_q, ends_k = packing.cu_seqlens_q.tolist(), packing.cu_seqlens_k.tolist()
    for start, end, own in zip(ends_k, ends_k[1:], torch.tensor(ends_q).diff().tolist(), strict=False):
        if own:
            q, k, v = (x[:, :, packing.kv_index[start:end]] for x in (query, key, value))
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
            parts.append(out[:, :, -own:])
    return torch.cat(parts, 2).transpose(1, 2)


def register(backend: str, sequence: SequenceGroup | None = None) -> None:
    """Make the two attention functions known to transformers, for this process, on the chosen backend.

    Args:
        sequence: the ranks that share a microbatch; each runs the attention of a part of the heads.
    """
    varlen = None if backend == "sdpa" else _varlen(backend)

    def packed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               packing: Packing, scaling: float | None = None, **_: Any) -> tuple[Tensor, None]:  # fmt: skip
        """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
        if varlen is None and packing.mask is None:
            return _by_sequence(query, key, value, packing, scaling), None
        if varlen is None:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=packing.mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
            )
            return out.transpose(1, 2), None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
        k, v = cast(Tensor, GatherKeys.apply(k, packing)), cast(Tensor, GatherKeys.apply(v, packing))
        out = varlen(q.contiguous(), k, v, packing.cu_seqlens_q, packing.cu_seqlens_k,
                     packing.max_seqlen_q, packing.max_seqlen_k, scaling, True)  # fmt: skip
        return out[None], None

    def vision(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               cu_seq_lens_q: Tensor, max_length_q: Any, scaling: float | None = None,
               **_: Any) -> tuple[Tensor, None]:  # fmt: skip
        """Each picture, or each of its windows, attends to itself; shapes as in `packed`."""
        assert varlen is not None, "vision varlen attention registered without a kernel"
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        longest, cu_seqlens = int(max_length_q), cu_seq_lens_q.to(torch.int32)
        return varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scaling, False)[None], None

    def no_mask(*_: Any, **__: Any) -> None:
        """The packing is the mask."""

    AttentionInterface.register(PACKED, over_heads(packed, sequence))
    AttentionMaskInterface.register(PACKED, no_mask)
    if varlen is not None:
        AttentionInterface.register(VISION, vision)
