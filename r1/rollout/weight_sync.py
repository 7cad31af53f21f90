"""Hand the policy's weights to an engine, one whole tensor at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from r1.parallel import whole
from r1.policy.lora_weights import merged_parameters


@torch.no_grad()
def stream_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every parameter, in the model's own order.

    With FSDP2 each step is an all-gather of one parameter, so every rank must run the iterator to its end; only one
    whole tensor exists at a time. Tied weights come once, under the name that named_parameters() gives, as engines
    expect of a tied model. A shard is cast before it is gathered: bfloat16 engines cost half the traffic. Adapters are
    merged into their weights on the way, shard by shard, and the model's own weights stay as they are.

    Args:
        model: plain or FSDP2; its parameters on the device that its process group works on.
        dtype: of the floating-point tensors yielded; None leaves each as it is, and merged ones in float32.
    """
    for name, parameter in merged_parameters(model):
        tensor = parameter.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield name, whole(tensor)
