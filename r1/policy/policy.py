"""The policy that learns: packs rollouts, scores them and takes optimizer steps; its frozen reference is beside it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from r1.algorithms.groups import next_kl_coef
from r1.algorithms.kl import KL_PENALTIES
from r1.algorithms.loss import LOSSES, Tokens, kl_to_reference, microbatch_loss
from r1.algorithms.named import function_of
from r1.config import Config
from r1.faults import memory_explained
from r1.parallel import Ranks, gather_objects, local_part
from r1.policy.attention import choose_backend, register
from r1.policy.balance import plan_minibatch
from r1.policy.logprobs import Head, Scored
from r1.policy.lora import adapters_off, base_head, set_dropout
from r1.policy.model import load_model
from r1.policy.offload import Offload, free_cache, reshard
from r1.policy.optim import (
    learning_rates,
    make_optimizer,
    make_scheduler,
    mean_norm,
    optimizer_step,
    reduce_over_replicas,
)
from r1.policy.packing import Microbatch, pack
from r1.policy.recompute import Recompute
from r1.policy.router_load import RouterLoad
from r1.policy.sequence_parallel import own_positions, split_sequence
from r1.policy.vision import VisionSpec
from r1.types import Prompt, Rollout


class Policy:
    """The model under training, its optimizer and its reference, on one rank.

    Args:
        config: the run's.
        ranks: where this rank stands; every method is collective.
        num_steps: passes of the training loop, for the learning-rate schedule.
    """

    def __init__(self, config: Config, ranks: Ranks, num_steps: int) -> None:
        self.config, self.ranks = config, ranks
        self.backend = choose_backend(config.model.attention, ranks.device, float32=config.model.precision == "float32")
        register(self.backend, ranks.sequence)
        self.loss_fn = function_of(config.algorithm.loss, LOSSES, option="algorithm.loss")
        self.model = load_model(config.model, ranks.mesh, ranks.device, self.backend, trainable=True)
        split_sequence(self.model, ranks.sequence)
        self.vision = VisionSpec.from_config(self.model.config)
        self.reference: PreTrainedModel | None = None
        adapted = config.model.lora.rank > 0
        if config.algorithm.kl_coef > 0 and adapted:
            self.reference = self.model  # with its adapters off: no second copy
        elif config.algorithm.kl_coef > 0:
            self.reference = load_model(config.model, ranks.mesh, ranks.device, self.backend, trainable=False)
            split_sequence(self.reference, ranks.sequence)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.recompute = Recompute(self.model, ranks, config.model.gradient_checkpointing)
        self.router_load = RouterLoad(self.model, ranks.device)
        self.offload = Offload(config, ranks.device, self.model, self.optimizer, self.reference)
        self.offload.store_reference()
        self.scheduler = make_scheduler(self.optimizer, config.optim, num_steps)
        self.kl_coef = config.algorithm.kl_coef  # moves where kl_target is set
        self.version = 0  # optimizer steps taken

    def pack(
        self, rollouts: Sequence[Rollout], homes: Sequence[int], prompts: Mapping[int, Prompt]
    ) -> list[list[Microbatch]]:
        """This rank's microbatches of every minibatch of the step; the ranks of a sequence group have the same.

        Args:
            rollouts: the step's, in (group, sample) order, the same on every rank.
            homes: for each rollout, the rank that sampled it.
            prompts: by group; those not here yet are prepared when looked up.
        """
        update, size = self.config.update, self.ranks.sequence_parallel_size
        minibatches = []
        groups = sorted({r.group for r in rollouts})
        for start in range(0, len(groups), update.global_batch_size):
            chosen = set(groups[start : start + update.global_batch_size])
            rows = [(r, h) for r, h in zip(rollouts, homes, strict=True) if r.group in chosen]
            plan = plan_minibatch(
                [r for r, _ in rows],
                [h // size for _, h in rows],
                self.ranks.num_learners,
                update.max_tokens_per_microbatch * size,
            )
            options: dict[str, Any] = {"with_mask": self.backend == "sdpa", "multiple_of": size}
            minibatches.append([pack(p, prompts, self.vision, **options) for p in plan[self.ranks.learner]])
        return minibatches

    def _score(self, model: PreTrainedModel, microbatch: Microbatch, **options: Any) -> Scored:
        head = Head(
            temperature=self.config.rollout.temperature,
            chunk_tokens=self.config.update.logprob_chunk_tokens,
            banned=() if self.vision is None else self.vision.banned_ids,
            **options,
        )
        return model(*microbatch.model_inputs(self.ranks.device), microbatch.labels.to(self.ranks.device), head)

    @torch.no_grad()
    def set_logprobs(self, minibatches: Sequence[Sequence[Microbatch]]) -> None:
        """Fill old_logprobs, and ref_logprobs where there is a reference, of every microbatch.

        Those of the first minibatch are left to its update, whose forward pass has the same weights, where nothing
        needs them before.
        """
        algorithm, first = self.config.algorithm, int(self.config.defers_old_logprobs)
        for microbatch in (m for minibatch in minibatches for m in minibatch):
            if algorithm.old_logprobs == "rollout":
                microbatch.old_logprobs = microbatch.rollout_logprobs
        if algorithm.old_logprobs == "recompute":
            for microbatch in (m for minibatch in minibatches[first:] for m in minibatch):
                with memory_explained(microbatch.sizes()):
                    microbatch.old_logprobs = self._score(self.model, microbatch).logprobs
        reshard(self.model)
        if self.reference is None or algorithm.kl_penalty == "full":
            return
        self.offload.fetch_reference()
        with adapters_off(self.reference):
            for microbatch in (m for minibatch in minibatches for m in minibatch):
                with memory_explained(microbatch.sizes()):
                    microbatch.ref_logprobs = self._score(self.reference, microbatch).logprobs
        self.offload.store_reference()

    def set_kl_penalties(
        self, rollouts: Sequence[Rollout], minibatches: Sequence[Sequence[Microbatch]]
    ) -> dict[str, float]:
        """Give every rollout, on every rank, the KL that is charged to its reward (kl_in="reward"); returns metrics."""
        algorithm = self.config.algorithm
        if self.reference is None or algorithm.kl_in != "reward":
            return {}
        mine = {}
        for microbatch in (m for minibatch in minibatches for m in minibatch):
            assert microbatch.old_logprobs is not None and microbatch.ref_logprobs is not None, "logprobs are not set"
            kl = KL_PENALTIES[algorithm.kl_penalty](microbatch.old_logprobs, microbatch.ref_logprobs)
            mine |= microbatch.by_rollout((self.kl_coef * kl).cpu())
        every = {key: part for rank in gather_objects(mine) for key, part in rank.items()}
        for rollout in rollouts:
            rollout.kl_penalties = every[rollout.group, rollout.sample]
        penalties = torch.cat([every[r.group, r.sample] for r in rollouts])
        return {"reward/kl": float(penalties.mean()) / self.kl_coef, "policy/kl_coef": self.kl_coef}

    def update(
        self, minibatches: Sequence[Sequence[Microbatch]], global_valid_tokens: Sequence[int]
    ) -> dict[str, float]:
        """One optimizer step a minibatch, ppo_epochs times; metrics are means over those steps, the same on all ranks.

        Args:
            minibatches: from `pack`, with logprobs set; advantages and weights are those of their rollouts.
            global_valid_tokens: for each minibatch, its trained tokens on all ranks.
        """
        self.offload.fetch_optimizer()
        full_kl = self.config.algorithm.kl_penalty == "full"
        if full_kl:
            self.offload.fetch_reference()
        for microbatch in (m for minibatch in minibatches for m in minibatch):
            microbatch.take_advantages()
        set_dropout(self.model, True)
        had_states = bool(self.optimizer.state)
        steps = list(zip(minibatches, global_valid_tokens, strict=True)) * self.config.update.ppo_epochs
        totals: dict[str, Tensor] = {}
        norms: list[float] = []
        quiet = self.ranks.rank != 0 or not self.config.trainer.progress  # or None: where there is no terminal
        with tqdm(total=sum(len(m) for m, _ in steps), desc="update", leave=False, disable=quiet or None) as bar:
            for minibatch, valid_tokens in steps:
                for microbatch in minibatch:
                    reduce_over_replicas(self.model, last=microbatch is minibatch[-1])
                    self.recompute.begin_microbatch(microbatch.input_ids.numel())
                    with memory_explained(microbatch.sizes()):
                        sums = self._backward(microbatch, valid_tokens)
                    for name, value in sums.items():
                        totals[name] = totals.get(name, torch.zeros_like(value)) + value
                    bar.update()
                self.offload.await_optimizer()
                limit = self.config.update.max_grad_norm if valid_tokens else None
                norm, stepped = optimizer_step(self.model, self.optimizer, limit)
                self.version += stepped
                norms.append(norm)
        copies = len(steps) * self.ranks.sequence_parallel_size  # a group's ranks all hold its microbatches' metrics
        metrics = {name: value / copies for name, value in sum_tensors(totals).items()}
        self.recompute.end_update(has_states=had_states or len(steps) > 1)
        metrics |= self._end_update(norms) | self.router_load.take_metrics()
        if full_kl:
            self.offload.store_reference()
        return metrics

    def _end_update(self, norms: Sequence[float]) -> dict[str, float]:
        metrics = {
            "policy/grad_norm": mean_norm(norms),
            "policy/skipped_steps": float(sum(not math.isfinite(norm) for norm in norms)),
        } | learning_rates(self.optimizer)
        self.scheduler.step()
        set_dropout(self.model, False)
        reshard(self.model)
        self.offload.store_optimizer()
        free_cache(self.ranks.device)  # the engine wakes next
        return metrics

    def _backward(self, microbatch: Microbatch, global_valid_tokens: int) -> dict[str, Tensor]:
        """Add this microbatch's gradient; returns its detached metrics, to be summed over microbatches and ranks."""
        device, algorithm = self.ranks.device, self.config.algorithm
        assert microbatch.advantages is not None and microbatch.weights is not None, "microbatch is not complete"
        options: dict[str, Any] = {"entropy_grad": algorithm.entropy_coef > 0}
        if self.reference is not None and algorithm.kl_penalty == "full":
            with torch.no_grad(), adapters_off(self.reference):
                labels = microbatch.labels.to(device)
                options["ref_hidden"] = self.reference(*microbatch.model_inputs(device), labels, None)
            options["ref_lm_head"] = base_head(self.reference)  # the root keeps it gathered until the update's end
        trained = microbatch.hidden_index[microbatch.weights > 0]
        with self.router_load.counting(own_positions(trained, microbatch.input_ids.numel(), self.ranks.sequence)):
            scored = self._score(self.model, microbatch, **options)
        ref_logprobs = None if microbatch.ref_logprobs is None else microbatch.ref_logprobs.to(device)
        if microbatch.old_logprobs is None:  # these are the weights that old_logprobs are of
            microbatch.old_logprobs = scored.logprobs.detach()
        kl = scored.kl if scored.kl is not None else kl_to_reference(scored.logprobs, ref_logprobs, algorithm)
        weights = microbatch.weights.to(device)
        tokens = Tokens(
            logprobs=scored.logprobs,
            entropy=scored.entropy,
            old_logprobs=microbatch.old_logprobs.to(device),
            rollout_logprobs=microbatch.rollout_logprobs.to(device),
            advantages=microbatch.advantages.to(device),
            owners=microbatch.owners().to(device),
            loss_mask=weights > 0,
            weights=weights,
            kl=kl,
        )
        loss, metrics = microbatch_loss(
            tokens, self.loss_fn, kl_coef=self.kl_coef, global_valid_tokens=global_valid_tokens, config=algorithm
        )
        # FSDP averages gradients over ranks; the loss is a share of a global mean, so they must be summed.
        (loss * self.ranks.world_size).backward()
        return metrics

    def end_step(self, step: int, metrics: Mapping[str, float], num_responses: int) -> None:
        """Adapt kl_coef and move the reference, where the config asks for it."""
        algorithm = self.config.algorithm
        self.kl_coef = next_kl_coef(
            self.kl_coef, metrics.get("loss/kl", metrics.get("reward/kl", math.nan)), num_responses, algorithm
        )
        every = algorithm.reference_update_steps
        if self.reference is not None and every is not None and step % every == 0:
            self.move_reference(algorithm.reference_polyak)

    @torch.no_grad()
    def move_reference(self, fraction: float) -> None:
        """Move the reference's weights this far to the policy's; both are sharded alike, so no rank needs another."""
        assert self.reference is not None, "there is no reference to move"
        reshard(self.model)
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            target = local_part(theirs)
            target.lerp_(local_part(ours).to(target.device, target.dtype), fraction)

    def before_cache(self) -> None:
        """The engine holds the weights now: make room for its KV cache."""
        reshard(self.model)
        self.offload.store_params()
        free_cache(self.ranks.device)

    def after_sampling(self) -> None:
        """The engine sleeps: take the GPU back."""
        self.offload.fetch_params()


def sum_tensors(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Sum [] tensors over ranks, all in one collective; every rank holds the same names."""
    names = sorted(totals)
    sums = torch.stack([totals[name].double() for name in names])
    dist.all_reduce(sums)
    return dict(zip(names, sums.tolist(), strict=True))
