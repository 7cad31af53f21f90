"""The policy that learns: packs rollouts, scores them and takes optimizer steps; its frozen reference is beside it."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from tqdm import tqdm
from transformers import PreTrainedModel

from r1.algorithms.loss import microbatch_loss
from r1.config import Config
from r1.parallel import Ranks
from r1.policy.attention import choose_backend, register
from r1.policy.balance import plan_minibatch
from r1.policy.model import load_model
from r1.policy.offload import free_cache, move_model, move_optimizer, reshard
from r1.policy.optim import make_optimizer, make_scheduler
from r1.policy.packing import Microbatch, VisionSpec, pack
from r1.types import Prompt, Rollout

CPU = torch.device("cpu")


class Policy:
    """The model under training, its optimizer and its reference, on one rank.

    Args:
        config: the run's.
        ranks: where this rank stands; every method is collective.
        num_steps: passes of the training loop, for the learning-rate schedule.
    """

    def __init__(self, config: Config, ranks: Ranks, num_steps: int) -> None:
        self.config, self.ranks = config, ranks
        backend = choose_backend(config.model.attention, ranks.device)
        register(backend)
        self.with_mask = backend == "sdpa"
        self.model = load_model(config.model, ranks.mesh, ranks.device, backend, trainable=True)
        self.vision = VisionSpec.from_config(self.model.config)
        self.reference: PreTrainedModel | None = None
        if config.algorithm.kl_coef > 0:
            self.reference = load_model(config.model, ranks.mesh, ranks.device, backend, trainable=False)
            self._offload(self.reference, config.parallel.offload_reference)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.scheduler = make_scheduler(self.optimizer, config.optim, num_steps)
        self.version = 0  # optimizer steps taken
        self.skipped = 0  # optimizer steps left out for a gradient that was not finite

    def pack(
        self, rollouts: Sequence[Rollout], homes: Sequence[int], prompts: Mapping[int, Prompt]
    ) -> list[list[Microbatch]]:
        """This rank's microbatches of every minibatch of the step.

        Args:
            rollouts: the step's, in (group, sample) order, the same on every rank.
            homes: for each rollout, the rank that sampled it.
            prompts: by group; those not here yet are prepared when looked up.
        """
        update = self.config.update
        minibatches = []
        groups = sorted({r.group for r in rollouts})
        for start in range(0, len(groups), update.global_batch_size):
            chosen = set(groups[start : start + update.global_batch_size])
            rows = [(r, h) for r, h in zip(rollouts, homes, strict=True) if r.group in chosen]
            plan = plan_minibatch(
                [r for r, _ in rows], [h for _, h in rows], self.ranks.world_size, update.max_tokens_per_microbatch
            )
            mine = plan[self.ranks.rank]
            minibatches.append([pack(pieces, prompts, self.vision, with_mask=self.with_mask) for pieces in mine])
        return minibatches

    def _forward(self, model: PreTrainedModel, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """logprobs and entropy, [R] float32 nats, on the device."""
        device = self.ranks.device
        inputs = {"input_ids": microbatch.input_ids.to(device), "position_ids": microbatch.position_ids.to(device)}
        if microbatch.pixel_values is not None and microbatch.image_grid_thw is not None:
            inputs["pixel_values"] = microbatch.pixel_values.to(device)
            inputs["image_grid_thw"] = microbatch.image_grid_thw.to(device)
        return model(
            inputs,
            microbatch.packing.to(device),
            microbatch.hidden_index.to(device),
            microbatch.labels.to(device),
            self.config.rollout.temperature,
            self.config.update.logprob_chunk_tokens,
        )

    @torch.no_grad()
    def set_logprobs(self, minibatches: Sequence[Sequence[Microbatch]]) -> None:
        """Fill old_logprobs, and ref_logprobs where there is a reference, of every microbatch."""
        for microbatch in (m for minibatch in minibatches for m in minibatch):
            microbatch.old_logprobs = self._forward(self.model, microbatch)[0].cpu()
        reshard(self.model)
        if self.reference is None:
            return
        self._onload(self.reference, self.config.parallel.offload_reference)
        for microbatch in (m for minibatch in minibatches for m in minibatch):
            microbatch.ref_logprobs = self._forward(self.reference, microbatch)[0].cpu()
        reshard(self.reference)
        self._offload(self.reference, self.config.parallel.offload_reference)

    def update(
        self, minibatches: Sequence[Sequence[Microbatch]], global_valid_tokens: Sequence[int]
    ) -> dict[str, float]:
        """One optimizer step a minibatch, ppo_epochs times; metrics are means over those steps, the same on all ranks.

        Args:
            minibatches: from `pack`, with logprobs set; rewards and advantages are those of their rollouts.
            global_valid_tokens: for each minibatch, its trained tokens on all ranks.
        """
        if self.config.parallel.offload_optimizer:
            move_optimizer(self.optimizer, self.ranks.device)
        for microbatch in (m for minibatch in minibatches for m in minibatch):
            microbatch.set_advantages()
        steps = list(zip(minibatches, global_valid_tokens, strict=True)) * self.config.update.ppo_epochs
        totals: dict[str, Tensor] = {}
        skipped_before = self.skipped
        norms = []
        quiet = self.ranks.rank != 0 or not self.config.trainer.progress
        with tqdm(total=sum(len(m) for m, _ in steps), desc="update", leave=False, disable=quiet) as bar:
            for minibatch, valid_tokens in steps:
                for microbatch in minibatch:
                    for name, value in self._backward(microbatch, valid_tokens).items():
                        totals[name] = totals.get(name, 0.0) + value
                    bar.update()
                norms.append(self._step())
        lr = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        reshard(self.model)
        if self.config.parallel.offload_optimizer:
            move_optimizer(self.optimizer, CPU)
        names = sorted(totals)
        sums = torch.stack([totals[name].double() for name in names])
        dist.all_reduce(sums)
        metrics = {name: value / len(steps) for name, value in zip(names, sums.tolist(), strict=True)}
        finite = [n for n in norms if n == n and n != float("inf")]
        metrics["policy/grad_norm"] = sum(finite) / max(len(finite), 1)
        metrics["policy/lr"] = lr
        metrics["policy/skipped_steps"] = float(self.skipped - skipped_before)
        return metrics

    def _backward(self, microbatch: Microbatch, global_valid_tokens: int) -> dict[str, Tensor]:
        """Add this microbatch's gradient; returns its detached metrics, to be summed over microbatches and ranks."""
        device = self.ranks.device
        assert microbatch.old_logprobs is not None and microbatch.advantages is not None, "microbatch is not complete"
        assert microbatch.loss_mask is not None, "microbatch has no loss mask"
        logprobs, entropy = self._forward(self.model, microbatch)
        loss, metrics = microbatch_loss(
            logprobs,
            microbatch.old_logprobs.to(device),
            None if microbatch.ref_logprobs is None else microbatch.ref_logprobs.to(device),
            microbatch.advantages.to(device),
            microbatch.loss_mask.to(device),
            entropy=entropy,
            global_valid_tokens=global_valid_tokens,
            config=self.config.algorithm,
        )
        # FSDP averages gradients over ranks; the loss is a share of a global mean, so they must be summed.
        (loss * self.ranks.world_size).backward()
        return metrics

    def _step(self) -> float:
        """Clip, step and clear; returns the gradient norm before clipping.

        The norm is over all ranks, so where it is not finite all of them skip the step.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        total = get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        value = float(norm)
        if value != value or value == float("inf"):
            self.skipped += 1
        else:
            clip_grads_with_norm_(parameters, self.config.update.max_grad_norm, norm)
            self.optimizer.step()
            self.version += 1
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def before_cache(self) -> None:
        """The engine holds the weights now: make room for its KV cache."""
        reshard(self.model)
        self._offload(self.model, self.config.parallel.offload_params)
        free_cache(self.ranks.device)

    def after_sampling(self) -> None:
        """The engine sleeps: take the GPU back."""
        self._onload(self.model, self.config.parallel.offload_params)

    def _offload(self, model: PreTrainedModel, wanted: bool) -> None:
        if wanted and self.ranks.device.type == "cuda":
            move_model(model, CPU)
            free_cache(self.ranks.device)

    def _onload(self, model: PreTrainedModel, wanted: bool) -> None:
        if wanted and self.ranks.device.type == "cuda":
            move_model(model, self.ranks.device)
