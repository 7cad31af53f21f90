"""Vision towers compute the same after their layers have been replaced."""

import copy

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from r1.config import LoraConfig
from r1.policy.lora import peft_config
from r1.policy.vision_tower import adapt_vision_tower
from tests.tiny import make_tiny

GRID = torch.tensor([[1, 4, 6], [1, 8, 4]])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_output_and_gradients_stay_as_they_were(family, tmp_path):
    model = odd_model(family, tmp_path)
    visual, adapted = model.model.visual, copy.deepcopy(model.model.visual)
    adapt_vision_tower(adapted, liger=False)
    patches = torch.randn(int(GRID.prod(1).sum()), patch_dim(visual), dtype=torch.float64)
    results = []
    for tower in (visual, adapted):
        out = tower(patches, GRID).pooler_output
        out.square().sum().backward()
        results.append([out, *(p.grad for p in tower.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_adapters_in_an_mlp_still_count(tmp_path):
    model = odd_model("qwen2_5_vl", tmp_path)
    adapt_vision_tower(model.model.visual, liger=False)
    peft.inject_adapter_in_model(peft_config(model, LoraConfig(rank=2, parts=("vision",))), model)
    model.double()
    patches = torch.randn(int(GRID.prod(1).sum()), patch_dim(model.model.visual), dtype=torch.float64)
    out = model.model.visual(patches, GRID).pooler_output
    out.square().sum().backward()
    adapters = {n: p for n, p in model.model.visual.named_parameters() if "lora_B" in n}
    assert adapters
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters.values())


def odd_model(family, folder):
    """A tiny model in float64 whose vision MLPs are of no even width."""
    config = AutoConfig.from_pretrained(make_tiny(family, folder / family))
    if hasattr(config.vision_config, "intermediate_size"):
        config.vision_config.intermediate_size = 27
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float64)


def patch_dim(visual):
    vision = visual.config
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
