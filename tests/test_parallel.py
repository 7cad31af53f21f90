"""Where a rank stands: engines, groups that share microbatches, and what of a step's prompts each prepares."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from r1.parallel import Ranks, SequenceGroup


def make_ranks(rank: int, world_size: int, tensor_parallel_size: int, sequence_parallel_size: int) -> Ranks:
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        tensor_parallel_size=tensor_parallel_size,
        device=torch.device("cpu"),
        mesh=DeviceMesh.__new__(DeviceMesh),
    )
    if sequence_parallel_size == 1:
        return ranks
    group = SequenceGroup.__new__(SequenceGroup)
    object.__setattr__(group, "size", sequence_parallel_size)
    return replace(ranks, sequence=group)


@pytest.mark.parametrize(
    ("tensor_parallel", "sequence_parallel", "learners", "sampled", "packed"),
    [
        (1, 1, [0, 1, 2, 3], [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (1, 2, [0, 0, 1, 1], [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 4), (0, 4), (4, 8), (4, 8)]),
        (2, 1, [0, 1, 2, 3], [(0, 4), (0, 4), (4, 8), (4, 8)], [(0, 4), (0, 4), (4, 8), (4, 8)]),
        (2, 4, [0, 0, 0, 0], [(0, 4), (0, 4), (4, 8), (4, 8)], [(0, 8)] * 4),
        (4, 2, [0, 0, 1, 1], [(0, 8)] * 4, [(0, 8)] * 4),
    ],
)
def test_engines_and_learners_are_numbered_along_the_ranks(
    tensor_parallel, sequence_parallel, learners, sampled, packed
):
    every = [make_ranks(rank, 4, tensor_parallel, sequence_parallel) for rank in range(4)]
    assert [r.learner for r in every] == learners
    assert [(r.engine_share(8).start, r.engine_share(8).stop) for r in every] == sampled
    assert [(r.learner_share(8).start, r.learner_share(8).stop) for r in every] == packed
