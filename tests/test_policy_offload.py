"""What leaves the GPU while the engine samples."""

import torch
from torch import nn

from r1.policy.offload import HostMemory, local_bytes, plan_offload, state_tensors, store_optimizer

AUTO = dict.fromkeys(("params", "optimizer", "reference"))


def test_what_fits_beside_the_engine_stays_and_the_dearest_to_move_comes_first():
    sizes = {"params": 12, "optimizer": 25, "reference": 6}
    assert plan_offload(sizes, AUTO, 43) == {"params": False, "optimizer": False, "reference": False}
    assert plan_offload(sizes, AUTO, 42) == {"params": False, "optimizer": False, "reference": True}
    assert plan_offload(sizes, AUTO, 20) == {"params": False, "optimizer": True, "reference": False}
    assert plan_offload(sizes, AUTO, 11) == {"params": True, "optimizer": True, "reference": False}


def test_a_choice_of_the_config_stands():
    sizes = {"params": 12, "optimizer": 25, "reference": 6}
    wanted = {"params": True, "optimizer": False, "reference": None}
    assert plan_offload(sizes, wanted, 26) == {"params": True, "optimizer": False, "reference": True}


def test_states_stay_the_same_through_host_memory_and_counters_stay_where_they_are():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    memory = HostMemory()
    for _ in range(3):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        before = [t.clone() for t in state_tensors(optimizer)]
        store_optimizer(optimizer, memory)
        assert all(torch.equal(a, b) for a, b in zip(before, state_tensors(optimizer), strict=True))
    assert local_bytes(state_tensors(optimizer)) == 2 * 4 * (6 + 2)
