"""PPO's value model: the policy's architecture and starting weights with a value head, on the same FSDP2 stack."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from r1.algorithms.advantage import gae_returns
from r1.algorithms.scores import scores_of
from r1.config import Config
from r1.faults import memory_explained
from r1.parallel import Ranks, gather_objects
from r1.policy.model import load_model
from r1.policy.offload import (
    HostMemory,
    fetch_model,
    fetch_optimizer,
    free_cache,
    reshard,
    store_model,
    store_optimizer,
)
from r1.policy.optim import make_optimizer, make_scheduler, mean_norm, optimizer_step, reduce_over_replicas
from r1.policy.packing import Microbatch
from r1.policy.policy import sum_tensors
from r1.policy.sequence_parallel import split_sequence
from r1.types import Rollout


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float) -> Tensor:
    """Squared error of the values, the worse of plain and clipped to old +- clip (PPO's code, arXiv 2005.12729).

        sum of weights * max((V - R)^2, (old + clamp(V - old, -clip, clip) - R)^2) / 2

    All [T] float32; returns [] float32. weights are 0 for masked tokens.
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    error = torch.maximum((values - returns).square(), (clipped - returns).square())
    return torch.where(weights > 0, 0.5 * error * weights, 0.0).sum()


class Critic:
    """The value model and its optimizer on one rank; every method is collective."""

    def __init__(self, config: Config, ranks: Ranks, backend: str, num_steps: int) -> None:
        self.config, self.ranks = config, ranks
        self.model = load_model(config.model, ranks.mesh, ranks.device, backend, trainable=True, value_head=True)
        split_sequence(self.model, ranks.sequence)
        optim = replace(config.optim, lr=config.algorithm.critic_lr, lr_vision_tower=None, lr_projector=None)
        self.optimizer = make_optimizer(self.model, optim)
        self.scheduler = make_scheduler(self.optimizer, optim, num_steps)
        self._memory = HostMemory()
        self.sleep(updated=True)

    def wake(self) -> None:
        """Bring the weights back to the GPU."""
        fetch_model(self.model, self.ranks.device)

    def sleep(self, *, updated: bool) -> None:
        """Give the GPU's memory to the engine and the policy; updated: since it woke, and with its optimizer."""
        if self.ranks.device.type == "cuda":
            store_model(self.model, self._memory, changed=lambda _: updated)
            if updated:
                store_optimizer(self.optimizer, self._memory)
            free_cache(self.ranks.device)

    @torch.no_grad()
    def set_values(self, rollouts: Sequence[Rollout], minibatches: Sequence[Sequence[Microbatch]]) -> None:
        """Fill values of every microbatch, and of every rollout on every rank."""
        self.wake()
        mine = {}
        for microbatch in (m for minibatch in minibatches for m in minibatch):
            with memory_explained(microbatch.sizes()):
                values = self.model(*microbatch.model_inputs(self.ranks.device)).cpu()
            microbatch.values = values
            mine |= microbatch.by_rollout(values)
        reshard(self.model)
        self.sleep(updated=False)
        every = {key: part for rank in gather_objects(mine) for key, part in rank.items()}
        for rollout in rollouts:
            rollout.values = every[rollout.group, rollout.sample]

    def _set_returns(self, rollouts: list[Rollout]) -> None:
        algorithm = self.config.algorithm
        scores = scores_of(rollouts, self.config.rollout.n)
        _, returns = gae_returns(scores, algorithm.gamma, algorithm.lam)
        for rollout, part in zip(rollouts, returns.split(scores.lengths.flatten().tolist()), strict=True):
            rollout.returns = part

    def update(
        self,
        rollouts: list[Rollout],
        minibatches: Sequence[Sequence[Microbatch]],
        global_valid_tokens: Sequence[int],
    ) -> dict[str, float]:
        """One optimizer step a minibatch, ppo_epochs times, on the same tokens and weights as the policy."""
        self._set_returns(rollouts)
        self.wake()
        if self.ranks.device.type == "cuda":
            fetch_optimizer(self.optimizer, self.ranks.device)
        device, totals, norms = self.ranks.device, {}, []
        steps = list(zip(minibatches, global_valid_tokens, strict=True)) * self.config.update.ppo_epochs
        for minibatch, valid_tokens in steps:
            for microbatch in minibatch:
                reduce_over_replicas(self.model, last=microbatch is minibatch[-1])
                microbatch.take_advantages()
                assert microbatch.values is not None and microbatch.returns is not None, "values or returns not set"
                assert microbatch.weights is not None, "weights not set"
                with memory_explained(microbatch.sizes()):
                    values = self.model(*microbatch.model_inputs(device))
                    old, returns = microbatch.values.to(device), microbatch.returns.to(device)
                    weights = microbatch.weights.to(device)
                    loss = value_loss(values, old, returns, weights, self.config.algorithm.critic_clip)
                    (loss * self.ranks.world_size).backward()
                totals["critic/loss"] = totals.get("critic/loss", 0.0) + loss.detach()
            limit = self.config.update.max_grad_norm if valid_tokens else None
            norms.append(optimizer_step(self.model, self.optimizer, limit)[0])
        self.scheduler.step()
        reshard(self.model)
        self.sleep(updated=True)
        copies = len(steps) * self.ranks.sequence_parallel_size
        metrics = {name: value / copies for name, value in sum_tensors(totals).items()}
        return metrics | {"critic/grad_norm": mean_norm(norms)}
