"""Layers of a vision tower that compute the same by kernels that suit a GPU: no convolution, no odd widths."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

ALIGNED = 8
"""bfloat16 values in 16 bytes, what Hopper's kernels of matrix products load at once. Qwen2.5-VL's MLPs are 3,420 wide,
no multiple: cuBLAS took kernels made for Ampere, 16% of the time of an update with a picture in each prompt."""


def adapt_vision_tower(visual: Any, *, liger: bool) -> None:
    """Replace the forward of the patch embedding and of the blocks' MLPs; their weights stay as they are.

    Args:
        visual: of Qwen2-VL, Qwen2.5-VL or Qwen3-VL, before adapters are put in.
        liger: whether rotary embeddings and SwiGLU run as liger-kernel's, which replaces those of language models.
    """
    _set_forward(visual.patch_embed.proj, embed_patches)
    multiply = _silu_times
    if liger:
        from liger_kernel.ops import LigerSiLUMulFunction
        from liger_kernel.transformers.rope import liger_rotary_pos_emb_vision

        cast(Any, sys.modules[type(visual).__module__]).apply_rotary_pos_emb_vision = liger_rotary_pos_emb_vision
        multiply = cast(Callable[[Tensor, Tensor], Tensor], LigerSiLUMulFunction.apply)
    for block in visual.blocks:
        if hasattr(block.mlp, "gate_proj") and visual.config.hidden_act == "silu":
            _set_forward(block.mlp, functools.partial(gated_mlp, multiply=multiply))


def _set_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = types.MethodType(forward, module)


def embed_patches(projection: nn.Conv3d, patches: Tensor) -> Tensor:
    """[N, C, T, P, P] patches -> [N, E]: one product, as the kernel is as large as a patch.

    The convolution takes four times as long on a CPU, and in bfloat16 it is slow or wrong under some versions of cuDNN
    (github.com/pytorch/pytorch/issues/166643 and 163539).
    """
    return F.linear(patches.flatten(1), projection.weight.flatten(1), projection.bias)


def gated_mlp(mlp: Any, hidden: Tensor, *, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """down(silu(gate(x)) * up(x)), [N, H] -> [N, H], over zeros that fill its width up to a multiple of ALIGNED."""
    linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    more = -mlp.gate_proj.out_features % ALIGNED
    # Adapters are parts of these modules.
    if more == 0 or any(type(linear) is not nn.Linear for linear in linears):
        return mlp.down_proj(multiply(mlp.gate_proj(hidden), mlp.up_proj(hidden)))
    gate, up, down = linears
    wide = [F.linear(hidden, F.pad(x.weight, (0, 0, 0, more)), F.pad(x.bias, (0, more))) for x in (gate, up)]
    gated = multiply(*wide)
    return F.linear(gated, F.pad(down.weight, (0, more)), down.bias)


def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
