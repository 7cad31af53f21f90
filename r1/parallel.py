"""Process groups, the device mesh, seeds and collectives: everything a rank needs to know about the others."""

import datetime
import os
import random
import socket
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from r1.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """Consecutive ranks that train on the same microbatches, each on its slice of the tokens."""

    size: int
    rank: int  # in the group
    process_group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands. Engines are numbered along the ranks: ranks [0, tp) share engine 0, and so on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    tensor_parallel_size: int
    device: torch.device
    mesh: DeviceMesh  # "shard", or "replicate" x "shard"
    sequence: SequenceGroup | None = None  # None: every rank has microbatches of its own

    @property
    def engine(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def num_engines(self) -> int:
        return self.world_size // self.tensor_parallel_size

    @property
    def speaks_for_engine(self) -> bool:
        """Whether this rank hands on the engine's outputs; the others of its tensor-parallel group hold copies."""
        return self.rank % self.tensor_parallel_size == 0

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that train on one microbatch."""
        return 1 if self.sequence is None else self.sequence.size

    @property
    def learner(self) -> int:
        """Which of num_learners: those that each have microbatches of their own, ranks or groups of ranks."""
        return self.rank // self.sequence_parallel_size

    @property
    def num_learners(self) -> int:
        return self.world_size // self.sequence_parallel_size

    def engine_share(self, num_prompts: int) -> slice:
        """This engine's consecutive share of num_prompts; sizes differ by at most one."""
        low, high = (num_prompts * i // self.num_engines for i in (self.engine, self.engine + 1))
        return slice(low, high)

    def learner_share(self, num_prompts: int) -> slice:
        """What the engines of this rank and of those that share its microbatches sample: it packs these, mostly."""
        size, tp = self.sequence_parallel_size, self.tensor_parallel_size
        first, end = self.learner * size // tp, -(-(self.learner + 1) * size // tp)
        return slice(num_prompts * first // self.num_engines, num_prompts * end // self.num_engines)


def world_from_env() -> tuple[int, int]:
    """(world size, ranks a node) that torchrun set; (1, 1) outside of it.

    Raises:
        ValueError: srun started several processes of which none knows of the others.
    """
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "WORLD_SIZE" not in os.environ and tasks > 1:
        raise ValueError(
            f"srun started {tasks} processes, and each would train alone, on the same GPU and in the same run folder; "
            "have it start one torchrun a node, as launch/slurm.sbatch does"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return world, int(os.environ.get("LOCAL_WORLD_SIZE") or min(world, 8))


def init_ranks(config: ParallelConfig, tensor_parallel_size: int) -> Ranks:
    """Join the process group (gloo for CPU tensors, NCCL for CUDA tensors) and lay out the mesh."""
    alone = "RANK" not in os.environ  # plain `python -m r1.train`: a launch of one
    if alone:  # vLLM reads these too
        of_one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(of_one, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=config.timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=_store_of_one() if alone else _join_store(timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    shard = world_size if config.fsdp_size == -1 else config.fsdp_size
    if shard == world_size:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device.type, (world_size // shard, shard), mesh_dim_names=("replicate", "shard"))
    sequence = None
    if config.sequence_parallel_size > 1:
        groups = dist.new_subgroups(config.sequence_parallel_size, timeout=timeout)
        own = cast(dist.ProcessGroup, groups[0])
        sequence = SequenceGroup(size=dist.get_world_size(own), rank=dist.get_rank(own), process_group=own)
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        tensor_parallel_size=tensor_parallel_size,
        device=device,
        mesh=mesh,
        sequence=sequence,
    )


def _store_of_one() -> Store:
    """In this process: it takes no port, which another program could have taken since it was found free."""
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def _join_store(timeout: datetime.timedelta) -> Store:
    """The launcher's store; for ranks that torchrun started again a part of it that the dead ones never wrote to."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    # With --standalone torchrun (2.13) keeps one store for all attempts. The agents of several hosts count their
    # attempts apart, so there launch/torchrun.py makes torchrun open a new store each time.
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    return PrefixStore(f"r1/{attempt}", store)


def is_first_rank() -> bool:
    """Whether this process speaks for the run; before there is a process group, by the launcher's word."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return rank == 0


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, its own memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered, which is collective; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def set_whole(target: Tensor, values: Tensor) -> None:
    """Copy this rank's shard of values that every rank holds, without a collective."""
    values = values.to(device=target.device, dtype=target.dtype)
    if isinstance(target, DTensor):
        # src_data_rank=None: every rank slices what it already holds.
        values = distribute_tensor(values, target.device_mesh, target.placements, src_data_rank=None).to_local()
    local_part(target).copy_(values)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed Python, NumPy and torch alike on every rank; what must differ by rank derives its own seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank (pickled over gloo; for small things)."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out
