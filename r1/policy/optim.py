"""Optimizers and learning-rate schedules."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from r1.config import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """AdamW (arXiv 1711.05101) over the trainable parameters; norms and biases are not decayed.

    Float32 weights get torch's AdamW. Bfloat16 weights get optimi's with Kahan summation: a plain bfloat16 update at
    lr 1e-6 rounds to nothing (1 - 100 x 6e-4 must be 0.94, not 1).
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if not groups:
        raise ValueError("every parameter is frozen, nothing would be trained; see model.freeze_vision_tower")
    if trained[0].dtype == torch.bfloat16:
        from optimi import AdamW as KahanAdamW

        return KahanAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, kahan_sum=True, triton=False)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def optimizer_step(model: nn.Module, optimizer: Optimizer, max_grad_norm: float) -> tuple[float, bool]:
    """Clip, step and clear the gradients.

    Returns:
        The gradient norm before clipping, over all parameters and ranks, and whether the step was taken: where the
        norm is not finite, no rank takes it.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    total = get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = total.full_tensor() if isinstance(total, DTensor) else total
    value = float(norm)
    finite = math.isfinite(value)
    if finite:
        clip_grads_with_norm_(parameters, max_grad_norm, norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value, finite


def lr_factor(step: int, num_steps: int, config: OptimConfig) -> float:
    """Share of config.lr at optimizer step `step`, counted from 0, of num_steps."""
    warmup = config.warmup_steps if config.warmup_steps is not None else int(config.warmup_ratio * num_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def make_scheduler(optimizer: Optimizer, config: OptimConfig, num_steps: int) -> LambdaLR:
    """The schedule over num_steps passes of the training loop."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, num_steps, config))
