"""Which layers keep their activations for the backward pass, and which compute them again (gradient checkpointing)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from r1.parallel import Ranks
from r1.policy.model import text_layers

SPARE = 0.08
"""Share of the GPU that is left free: what the allocator loses between blocks of unlike sizes."""

FULL = 0.02
"""Below this share free the allocator's cache is handed back: kernels that CUDA loads on their first use need room."""


class Recompute:
    """Lets as many layers keep their activations as the GPU has room for; measured as training goes, not guessed.

    The first update recomputes every layer and measures what one of them would keep a token. Once the optimizer has
    its states, an update's peak shows what is left, and each microbatch's size then says how many layers need not be
    recomputed. Ranks may differ: FSDP2 gathers a layer's weights once in the backward pass in either case. Those that
    share a microbatch agree, as a recomputed layer exchanges its heads again.

    Args:
        wanted: model.gradient_checkpointing; None: as described, on a GPU.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks, wanted: bool | None) -> None:
        self._layers: list[Any] = text_layers(model)
        self._device, self._sequence = ranks.device, ranks.sequence
        self._adapts = wanted is None and ranks.device.type == "cuda"
        self._bytes_per_token = 0.0  # that one layer keeps
        self._input_bytes_per_token = 0.0  # of one layer's input, which is kept of every layer that is recomputed
        self._base_peak = 0  # bytes allocated at most in an update that recomputes everything
        self._base_tokens = 0  # packed tokens of its largest microbatch

    def begin_microbatch(self, num_tokens: int) -> None:
        """Choose the layers that keep the activations of a microbatch of num_tokens packed tokens."""
        if not self._adapts:
            return
        kept = 0
        if not self._base_peak:
            self._base_tokens = max(self._base_tokens, num_tokens)
        elif self._bytes_per_token:
            free, total = torch.cuda.mem_get_info(self._device)
            if free < FULL * total:  # blocks of the last microbatch, of other sizes than this one needs
                torch.cuda.empty_cache()
            kept = int(max(0.0, self._room(num_tokens)) / (self._bytes_per_token * num_tokens))
            if self._sequence is not None:
                fewest = torch.tensor(kept, device=self._device)
                dist.all_reduce(fewest, dist.ReduceOp.MIN, group=self._sequence.process_group)
                kept = int(fewest)
        for i, layer in enumerate(self._layers):
            layer.gradient_checkpointing = i >= kept
        if not self._bytes_per_token:
            self._measure(self._layers[-1], num_tokens)

    def _room(self, num_tokens: int) -> float:
        """Bytes between the peak with everything recomputed and what this GPU can hold.

        Responses grow in training: a microbatch larger than any before would have a higher peak, by the layers' inputs
        and by what the layer in work keeps and its gradients.
        """
        larger = max(0, num_tokens - self._base_tokens)
        peak = self._base_peak + larger * (self._input_bytes_per_token * len(self._layers) + 2 * self._bytes_per_token)
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)  # free, and ours
        return torch.cuda.memory_allocated(self._device) + held + free - SPARE * total - peak

    def _measure(self, layer: Any, num_tokens: int) -> None:
        """Have the layer keep its activations this once, and count their bytes."""
        before = 0

        def begin(_: Any, inputs: tuple[Tensor, ...]) -> None:
            nonlocal before
            before = torch.cuda.memory_allocated(self._device)
            self._input_bytes_per_token = inputs[0].numel() * inputs[0].element_size() / num_tokens

        def end(*_: Any) -> None:
            self._bytes_per_token = (torch.cuda.memory_allocated(self._device) - before) / num_tokens
            for handle in handles:
                handle.remove()

        # Between FSDP2's own hooks, which gather the layer's weights and free them again.
        handles = [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end, prepend=True)]
        layer.gradient_checkpointing = False

    def end_update(self, *, has_states: bool) -> None:
        """Learn from an update's peak; has_states: its backward passes had the optimizer's states beside them."""
        if self._adapts and has_states and not self._base_peak:
            self._base_peak = torch.cuda.max_memory_allocated(self._device)
