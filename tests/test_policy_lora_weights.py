"""What adapters amount to, by hand, and the names that weights have with and without them."""

import math

import pytest
import torch

from r1.policy.lora_weights import base_name, file_name, is_adapter, merged_weight

# Rank 8, of which one slot is used.
A, B = torch.zeros(8, 2), torch.zeros(2, 8)
A[0], B[:, 0] = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])


def test_C11_rank_8_and_alpha_16_add_twice_b_a():
    weight = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    delta = merged_weight(weight, A, B, scaling=16 / 8) - weight
    assert delta.tolist() == [[6, 8], [12, 16]]
    # rsLoRA: 16 / sqrt(8) = 5.657 times [[3, 4], [6, 8]].
    delta = merged_weight(0 * weight, A, B, scaling=16 / math.sqrt(8))
    assert delta.flatten().tolist() == pytest.approx([16.971, 22.627, 33.941, 45.255], abs=1e-3)


def test_a_dora_magnitude_is_the_length_of_its_row():
    # W + BA has rows [3, 4] and [0, 2], of lengths 5 and 2; magnitudes make them 10 and 1.
    merged = merged_weight(torch.tensor([[0.0, 0.0], [-6.0, -6.0]]), A, B, 1.0, torch.tensor([10.0, 1.0]))
    assert merged.tolist() == [[6, 8], [0, 1]]


def test_a_bfloat16_weight_is_merged_in_float32():
    # 256 + 1 rounds to 256 in bfloat16.
    merged = merged_weight(torch.full((1, 2), 256.0).bfloat16(), A / torch.tensor([3.0, 4.0]), B[:1], 1.0)
    assert merged.dtype == torch.float32 and merged.tolist() == [[257, 257]]


def test_names():
    q = "model.layers.0.self_attn.q_proj"
    assert base_name(f"{q}.base_layer.weight") == f"{q}.weight"
    assert base_name("lm_head.modules_to_save.default.weight") == base_name("lm_head.original_module.weight")
    assert base_name("model.norm.weight") == "model.norm.weight"
    assert [is_adapter(f"{q}.{n}") for n in ("lora_A.default.weight", "base_layer.weight")] == [True, False]
    assert is_adapter("lm_head.modules_to_save.default.weight") and not is_adapter("lm_head.original_module.weight")
    assert file_name(f"{q}.lora_B.default.weight") == f"base_model.model.{q}.lora_B.weight"
    assert file_name(f"{q}.lora_magnitude_vector.default.weight") == f"base_model.model.{q}.lora_magnitude_vector"
    assert file_name("lm_head.modules_to_save.default.weight") == "base_model.model.lm_head.weight"
