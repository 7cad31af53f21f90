"""Optimizers over groups of parameters with a learning rate and weight decay of their own, and the schedule of all."""

import logging
import math
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from r1.config import OptimConfig
from r1.parallel import is_first_rank, whole
from r1.policy.parts import part_of

_log = logging.getLogger(__name__)
KAHAN_MAX_BETA2 = 0.99


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """The trainable parameters by part, and there by weight decay; each group's name is "<part>.<kind>".

    Vectors (norms and biases) are never decayed, nor what config.undecayed finds. Under muon the matrices of layers
    are a kind of their own: embeddings, heads, convolutions, routers, stacked experts and vectors stay with AdamW.

    Raises:
        ValueError: nothing is trainable, or a pattern of config.undecayed finds nothing.
    """
    rates = {"vision_tower": config.lr_vision_tower, "projector": config.lr_projector}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError("every parameter is frozen, nothing would be trained; see model.freeze_vision_tower")
    for pattern in config.undecayed:
        if not any(re.search(pattern, name) for name, _ in trained):
            names = ", ".join(name for name, _ in trained[:3])
            raise ValueError(f"optim.undecayed: {pattern!r} finds no trainable parameter; they are named {names} …")
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in trained:
        part = part_of(name)
        kept = parameter.ndim < 2 or any(re.search(pattern, name) for pattern in config.undecayed)
        kind = "undecayed" if kept else "decayed"
        if config.strategy == "muon" and parameter.ndim == 2 and not re.search(r"embed|lm_head|mlp\.gate\.", name):
            kind += "_muon"
        rate = rates.get(part)
        group = {"name": f"{part}.{kind}", "params": [], "lr": config.lr if rate is None else rate}
        group |= {"weight_decay": 0.0 if kept else config.weight_decay}
        groups.setdefault(group["name"], group)["params"].append(parameter)
    return [groups[name] for name in sorted(groups)]  # the same order whatever is frozen


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """config.strategy over the trainable parameters.

    Float32 weights get torch's AdamW (arXiv 1711.05101). Bfloat16 weights get optimi's with Kahan summation: a plain
    bfloat16 update at lr 1e-6 rounds to nothing (1 - 100 x 6e-4 must be 0.94, not 1). Its states are bfloat16, too,
    and stop falling where 1 - beta2 is under half a unit in the last place: beta2 is KAHAN_MAX_BETA2 at most.

    Raises:
        ValueError: see parameter_groups; or muon was asked to train bfloat16 weights.
    """
    groups = parameter_groups(model, config)
    parameters = [p for group in groups for p in group["params"]]
    half = any(p.dtype == torch.bfloat16 for p in parameters)
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.strategy in ("adamw_8bit", "adamw_stochastic"):
        from r1.policy.optim_torchao import AdamW8bit, AdamWStochastic

        kind: Any = AdamW8bit if config.strategy == "adamw_8bit" else AdamWStochastic
        return kind(groups, bf16_stochastic_round=True, **settings)
    # One kernel for all parameters of a group; its step counts lie on the GPU, beside the parameters.
    settings["fused"] = parameters[0].device.type == "cuda"
    if config.strategy == "muon":
        if half:
            raise ValueError(
                "optim.strategy='muon' trains float32 weights, bfloat16 ones would lose its updates; "
                "set model.precision='amp'"
            )
        return MuonAndAdamW(groups, settings)
    if half:
        return _kahan_adamw(groups, config)
    return torch.optim.AdamW(groups, **settings)


def _kahan_adamw(groups: list[dict[str, Any]], config: OptimConfig) -> Optimizer:
    from optimi import AdamW as KahanAdamW

    beta1, beta2 = config.betas
    if beta2 > KAHAN_MAX_BETA2 and is_first_rank():
        _log.warning("optim.betas: bfloat16 states cannot follow beta2=%s, %s is used", beta2, KAHAN_MAX_BETA2)
    betas = (beta1, min(beta2, KAHAN_MAX_BETA2))
    return KahanAdamW(groups, lr=config.lr, betas=betas, eps=config.eps, kahan_sum=True, triton=False)


class MuonAndAdamW(Optimizer):
    """torch's Muon for the groups named "…_muon", its AdamW for the others, as one optimizer.

    Muon orthogonalizes the momentum of whole matrices: on shards torch's runs it over DTensors, whose products gather
    what they need. Its step is scaled to the size of AdamW's (arXiv 2502.16982), so that one lr serves both.
    """

    def __init__(self, groups: list[dict[str, Any]], settings: dict[str, Any]) -> None:
        super().__init__(groups, {"lr": settings["lr"], "weight_decay": 0.0})
        kinds = [group["name"].endswith("_muon") for group in self.param_groups]
        muon = [g for g, is_muon in zip(self.param_groups, kinds, strict=True) if is_muon]
        rest = [g for g, is_muon in zip(self.param_groups, kinds, strict=True) if not is_muon]
        self.optimizers: list[Optimizer] = []
        if muon:
            self.optimizers.append(torch.optim.Muon(muon, lr=settings["lr"], adjust_lr_fn="match_rms_adamw"))
        if rest:
            self.optimizers.append(torch.optim.AdamW(rest, **settings))
        # Schedules and checkpoints see one list of groups and one table of states.
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for optimizer in self.optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for optimizer in self.optimizers:
            optimizer.step(closure)


def reduce_over_replicas(model: nn.Module, *, last: bool) -> None:
    """Before a microbatch: only a minibatch's last one sums gradients over replicas (parallel.fsdp_size), once for all.

    They come over the slow links between hosts. Within a replica every microbatch's are reduced to shards.
    """
    cast(FSDPModule, model).set_requires_all_reduce(last)


def optimizer_step(model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None) -> tuple[float, bool]:
    """Clip, step and clear the gradients.

    Args:
        max_grad_norm: None: no token was trained, and momentum and weight decay are not to move the weights.

    Returns:
        The gradient norm before clipping, over all parameters and ranks, and whether the step was taken: where the
        norm is not finite, no rank takes it.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    total = get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = whole(total)
    value = float(norm)
    stepped = False
    if max_grad_norm is not None and math.isfinite(value):
        clip_grads_with_norm_(parameters, max_grad_norm, norm)
        optimizer.step()
        stepped = True
    optimizer.zero_grad(set_to_none=True)
    return value, stepped


def mean_norm(norms: Sequence[float]) -> float:
    """Of the optimizer steps that were taken: those whose gradient norm is finite."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return sum(finite) / max(len(finite), 1)


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """{"policy/lr": the language model's, "policy/lr_<part>": another part's, where it differs}."""
    rates = {group["name"].partition(".")[0]: float(group["lr"]) for group in optimizer.param_groups}
    rate = rates.pop("language_model", None)
    if rate is None:  # frozen: whatever learns
        rate = max(rates.values())
    return {"policy/lr": rate} | {f"policy/lr_{part}": other for part, other in rates.items() if other != rate}


def lr_factor(step: int, num_steps: int, config: OptimConfig) -> float:
    """Share of a group's rate at optimizer step `step`, counted from 0, of num_steps."""
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


def set_rates(optimizer: Optimizer, rates: list[float]) -> None:
    """Give every group its rate; torchao keeps its own as a tensor that compiled code reads."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
