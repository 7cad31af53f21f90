"""vLLM's own processor leaves our images as they are and expands our sampler ids to our prompt ids."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from r1.config import DataConfig
from r1.data.prompt import Renderer
from r1.rollout.vllm_engine import VllmEngine
from r1.types import Prompt
from tests.tiny import VISION_FAMILIES, make_config, make_processor, make_tiny

pytest.importorskip("vllm")


@pytest.mark.slow
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vllm_sees_the_ids_and_pixels_that_we_train_on(family, tmp_path):
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    # Wider than the bounds in the model's folder on both sides: without our options vLLM would resize.
    config = DataConfig(min_pixels=32 * 32, max_pixels=700 * 700)
    processor = make_processor(family)
    renderer = Renderer(config, processor.tokenizer, processor, image_dir=None)
    sizes = [(1, 1), (900, 900), (640, 31), (30, 5000), (200, 100)]
    images = [Image.effect_noise(size, 60).convert("RGB") for size in sizes]
    prompt = renderer.build(0, {"problem": "a <image>b" * len(images), "answer": "", "images": images})

    engine_config = ModelConfig(
        model=str(make_tiny(family, tmp_path)),
        dtype="float32",
        limit_mm_per_prompt={"image": len(images), "video": 0},
        mm_processor_kwargs=renderer.mm_processor_kwargs,
        mm_processor_cache_gb=0,
    )
    theirs = MULTIMODAL_REGISTRY.create_processor(engine_config)
    items = theirs.info.parse_mm_data({"image": prompt.images})
    output = theirs.apply(ProcessorInputs(prompt.sampler_ids, items), TimingContext())
    assert output["prompt_token_ids"] == prompt.prompt_ids
    data = output["mm_kwargs"].get_data()
    assert torch.equal(data["image_grid_thw"], prompt.image_grid_thw)
    pixels = prompt.pixel_values
    if data["pixel_values"].dtype == torch.uint8:  # vLLM 0.32 normalizes on the device; compare before that
        mean, std = (
            torch.tensor(x).view(1, 3, 1)
            for x in (renderer.vision.image_processor.image_mean, renderer.vision.image_processor.image_std)
        )
        pixels = ((pixels.view(len(pixels), 3, -1) * std + mean) * 255).round().flatten(1).to(torch.uint8)
    assert torch.equal(data["pixel_values"], pixels)
    assert theirs.info.get_max_image_tokens() <= config.max_pixels // renderer.vision.bounds["factor"] ** 2


@pytest.mark.slow
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_vllm_sees_the_frames_that_we_train_on(family, tmp_path):
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    config = DataConfig(min_pixels=32 * 32, max_pixels=300 * 300, video_max_frames=6)
    processor = make_processor(family)
    renderer = Renderer(config, processor.tokenizer, processor, image_dir=None)
    videos = [
        [Image.effect_noise(size, 60).convert("RGB") for _ in range(n)] for size, n in (((90, 60), 9), ((31, 640), 3))
    ]
    row = {"problem": "<video>a <image>b<video>", "answer": "", "images": Image.new("RGB", (80, 50)), "videos": videos}
    prompt = renderer.build(0, row)

    engine_config = ModelConfig(
        model=str(make_tiny(family, tmp_path)),
        dtype="float32",
        limit_mm_per_prompt={"image": 1, "video": 2},
        mm_processor_kwargs=renderer.mm_processor_kwargs,
        mm_processor_cache_gb=0,
    )
    theirs = MULTIMODAL_REGISTRY.create_processor(engine_config)
    items = theirs.info.parse_mm_data(media_of(prompt, family))
    output = theirs.apply(ProcessorInputs(prompt.sampler_ids, items), TimingContext())
    assert output["prompt_token_ids"] == prompt.prompt_ids
    data = output["mm_kwargs"].get_data()
    assert torch.equal(data["video_grid_thw"], prompt.video_grid_thw)
    pixels = prompt.pixel_values_videos
    if data["pixel_values_videos"].dtype == torch.uint8:
        video_processor = renderer.vision.video_processor
        mean, std = (torch.tensor(x).view(1, 3, 1) for x in (video_processor.image_mean, video_processor.image_std))
        pixels = ((pixels.view(len(pixels), 3, -1) * std + mean) * 255).round().flatten(1).to(torch.uint8)
    assert torch.equal(data["pixel_values_videos"], pixels)
    if family == "qwen2_5_vl":
        assert data["second_per_grid_ts"].flatten().tolist() == prompt.video_seconds


def media_of(prompt: Prompt, family: str) -> dict[str, Any]:
    """As VllmEngine hands them over."""
    engine = VllmEngine.__new__(VllmEngine)
    engine._facts = SimpleNamespace(hf_config=make_config(family))
    return engine._media(prompt)
