"""Packed groups with shared prompts equal every sequence alone: log-probabilities, and gradients of every weight."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from r1.policy import attention
from r1.policy.attention import GatherKeys, Packing, register
from r1.policy.balance import Piece
from r1.policy.logprobs import Head, Scored
from r1.policy.model import _packed_forward, _set_attention
from r1.policy.packing import Microbatch, pack
from r1.policy.vision import VisionSpec, mrope_positions, prompt_positions
from r1.types import Prompt, Rollout
from tests.tiny import FAMILIES, VISION_FAMILIES, make_tiny


def load(folder: Path) -> nn.Module:
    auto = AutoModelForImageTextToText if "vl" in folder.name else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).train()


def make_prompts(config: object, vision: VisionSpec | None, seed: int = 0) -> dict[int, Prompt]:
    """Three prompts of uneven length: for vision models with one, two and no pictures."""
    g = torch.Generator().manual_seed(seed)
    prompts = {}
    for group, (length, images) in enumerate([(9, 1), (14, 2), (5, 0)]):
        ids = torch.randint(0, 256, (length,), generator=g).tolist()
        pixels = grids = None
        if vision is not None and images:
            m = vision.merge_size
            sizes = [(1, 2 * m, 3 * m), (1, 4 * m, 2 * m)][:images]
            expanded = ids[:2]
            for _, h, w in sizes:
                expanded += [vision.image_token_id] * (h * w // m**2) + ids[2:4]
            ids = expanded + ids[4:]
            pixels = torch.randn(sum(h * w for _, h, w in sizes), vision.patch_dim, generator=g)
            grids = torch.tensor(sizes)
        prompts[group] = Prompt(
            row=group, text="", prompt_ids=ids, sampler_ids=ids, pixel_values=pixels, image_grid_thw=grids
        )
    return prompts


def make_rollouts(prompts: dict[int, Prompt], lengths: dict[int, list[int]], seed: int = 1) -> list[Rollout]:
    g = torch.Generator().manual_seed(seed)
    return [
        Rollout(
            group=group,
            sample=i,
            prompt_ids=prompts[group].prompt_ids,
            response_ids=torch.randint(0, 256, (length,), generator=g).tolist(),
            rollout_logprobs=[0.0] * length,
            truncated=False,
        )
        for group, row in lengths.items()
        for i, length in enumerate(row)
    ]


def alone(model: nn.Module, rollout: Rollout, prompt: Prompt, vision: VisionSpec | None, temperature: float) -> Tensor:
    """[C] logprobs by transformers' own forward on the plain sequence, positions and mask left to it."""
    ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if prompt.pixel_values is not None:
        inputs |= {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
        inputs["mm_token_type_ids"] = (ids == vision.image_token_id).int()
    logits = model(**inputs, use_cache=False).logits[0].float() / temperature
    if vision is not None:
        logits[:, list(vision.banned_ids)] = -torch.inf
    at = torch.arange(len(rollout.prompt_ids) - 1, ids.shape[1] - 1)
    return logits[at].log_softmax(-1).gather(-1, ids[0, at + 1][:, None])[:, 0]


def packed(model: nn.Module, microbatch: Microbatch, vision: VisionSpec | None, chunk_tokens: int = 64) -> Scored:
    head = Head(temperature=0.7, chunk_tokens=chunk_tokens, banned=() if vision is None else vision.banned_ids)
    return _packed_forward(model, *microbatch.model_inputs(torch.device("cpu")), microbatch.labels, head)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_shared_prompts_equal_separate_rows(family, tmp_path):
    folder = make_tiny(family, tmp_path / family)
    reference, model = load(folder), load(folder)
    vision = VisionSpec.from_config(model.config)
    prompts = make_prompts(model.config, vision)
    rollouts = make_rollouts(prompts, {0: [7, 1, 3], 1: [2, 11], 2: [4, 4]})
    weights = torch.randn(sum(len(r.response_ids) for r in rollouts), generator=torch.Generator().manual_seed(2))

    expected = torch.cat([alone(reference, r, prompts[r.group], vision, 0.7) for r in rollouts])
    (expected * weights).sum().backward()

    register("sdpa")
    _set_attention(model, "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    pieces = [Piece(rollouts=[r for r in rollouts if r.group == g]) for g in prompts]
    microbatch = pack(pieces, prompts, vision, with_mask=True)
    scored = packed(model, microbatch, vision, chunk_tokens=5)
    (scored.logprobs * weights).sum().backward()

    torch.testing.assert_close(scored.logprobs, expected, rtol=0, atol=2e-5)
    assert microbatch.input_ids.shape[1] < sum(len(r.prompt_ids) + len(r.response_ids) for r in rollouts)
    assert (scored.entropy > 0).all()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if q.grad is not None:
            scale = q.grad.abs().max().clamp(min=1e-3)
            assert (p.grad - q.grad).abs().max() < 1e-5 * scale + 1e-6, name


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_positions_equal_transformers(family, tmp_path):
    model = load(make_tiny(family, tmp_path / family))
    vision = VisionSpec.from_config(model.config)
    for prompt in make_prompts(model.config, vision).values():
        if prompt.image_grid_thw is None:
            continue
        ids = torch.tensor([prompt.prompt_ids])
        kinds = (ids == vision.image_token_id).int()
        expected, _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=prompt.image_grid_thw)
        torch.testing.assert_close(mrope_positions(prompt.prompt_ids, prompt.image_grid_thw, vision), expected[:, 0])


def test_text_only_microbatch_of_a_vision_model_holds_a_blank_picture_that_changes_nothing(tmp_path):
    model = load(make_tiny("qwen2_5_vl", tmp_path / "qwen2_5_vl"))
    reference = load(tmp_path / "qwen2_5_vl")
    register("sdpa")
    _set_attention(model, "sdpa")
    vision = VisionSpec.from_config(model.config)
    prompts = make_prompts(model.config, vision)
    rollouts = make_rollouts(prompts, {2: [4, 6]})
    microbatch = pack([Piece(rollouts=rollouts)], prompts, vision, with_mask=True)
    assert microbatch.pixel_values is not None
    got = packed(model, microbatch, vision).logprobs
    expected = torch.cat([alone(reference, r, prompts[2], vision, 0.7) for r in rollouts])
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    got.sum().backward()
    grads = [p.grad for p in model.model.visual.parameters()]
    assert all(g is not None and g.abs().max() == 0 for g in grads)


def make_video_prompts(vision: VisionSpec, family: str) -> dict[int, Prompt]:
    """Two prompts: a video and an image, then text; and an image alone."""
    g, m = torch.Generator().manual_seed(3), vision.merge_size
    frame, picture = [vision.video_token_id] * 6, [vision.image_token_id] * 2
    between = [7, 8] if family == "qwen3_vl" else []  # as its time stamps
    ids = [1, 2, *picture, 3, *between, *frame, *between, *frame, *between, *frame, 4, 5, 6]
    video = torch.randn(3 * 6 * m * m, vision.patch_dim, generator=g)
    image = torch.randn(2, 2 * m * m, vision.patch_dim, generator=g)
    prompts = {}
    for group, prompt_ids in enumerate([ids, [9, *picture, 4]]):
        prompts[group] = Prompt(row=group, text="", prompt_ids=prompt_ids, sampler_ids=prompt_ids)
        prompts[group].pixel_values = image[group]
        prompts[group].image_grid_thw = torch.tensor([[1, m, 2 * m]])
    prompts[0].pixel_values_videos, prompts[0].video_grid_thw = video, torch.tensor([[3, 2 * m, 3 * m]])
    prompts[0].video_seconds = [0.8]
    return prompts


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_videos_beside_images_equal_separate_rows(family, tmp_path):
    folder = make_tiny(family, tmp_path / family)
    reference, model = load(folder), load(folder)
    vision = VisionSpec.from_config(model.config)
    prompts = make_video_prompts(vision, family)
    rollouts = make_rollouts(prompts, {0: [5, 2], 1: [3]})

    def expected(rollout: Rollout) -> Tensor:
        # The family's own path: separate image and video inputs; positions are ours, tested below.
        prompt, ids = prompts[rollout.group], torch.tensor([rollout.prompt_ids + rollout.response_ids])
        places = prompt_positions(prompt, rollout.prompt_ids, vision)
        after = (torch.arange(len(rollout.response_ids)) + int(places.max()) + 1).expand(3, -1)
        inputs = {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
        if prompt.pixel_values_videos is not None:
            inputs |= {"pixel_values_videos": prompt.pixel_values_videos, "video_grid_thw": prompt.video_grid_thw}
        positions = torch.cat([places, after], dim=1)[:, None]
        logits = reference(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits[0].float() / 0.7
        logits[:, list(vision.banned_ids)] = -torch.inf
        at = torch.arange(len(rollout.prompt_ids) - 1, ids.shape[1] - 1)
        return logits[at].log_softmax(-1).gather(-1, ids[0, at + 1][:, None])[:, 0]

    register("sdpa")
    _set_attention(model, "sdpa")
    pieces = [Piece(rollouts=[r for r in rollouts if r.group == g]) for g in prompts]
    microbatch = pack(pieces, prompts, vision, with_mask=True)
    assert vision.video_token_id not in microbatch.input_ids
    got = packed(model, microbatch, vision).logprobs
    torch.testing.assert_close(got, torch.cat([expected(r) for r in rollouts]), rtol=0, atol=2e-5)


def test_positions_of_a_video_step_along_time_and_the_text_goes_on_after_the_largest():
    spec = VisionSpec(image_token_id=90, video_token_id=91, merge_size=2, patch_dim=1, banned_ids=())
    grids = {"video_grid_thw": torch.tensor([[2, 4, 4]]), "video_seconds": [0.8]}  # 2 pairs of frames of 2 x 2 tokens
    ids = [1, *[91] * 8, 2]
    rows, columns = [1, 1, 2, 2, 1, 1, 2, 2], [1, 2, 1, 2, 1, 2, 1, 2]
    got = mrope_positions(ids, None, spec, **grids).tolist()  # Qwen2-VL
    assert got == [[0, 1, 1, 1, 1, 2, 2, 2, 2, 3], [0, *rows, 3], [0, *columns, 3]]
    timed = dataclasses.replace(spec, tokens_per_second=4)  # Qwen2.5-VL: 0.8 s are 3.2 steps
    got = mrope_positions(ids, None, timed, **grids).tolist()
    assert got == [[0, 1, 1, 1, 1, 4, 4, 4, 4, 5], [0, *rows, 5], [0, *columns, 5]]
    stamped = dataclasses.replace(spec, separate_frames=True)  # Qwen3-VL: 7 is a time stamp before each frame
    got = mrope_positions([7, *[91] * 4, 7, *[91] * 4, 2], None, stamped, **grids).tolist()
    assert got[0] == [0, 1, 1, 1, 1, 3, 4, 4, 4, 4, 6]
    assert got[1] == [0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6] and got[2] == [0, 1, 2, 1, 2, 3, 4, 5, 4, 5, 6]


def test_rows_too_long_for_a_mask_attend_sequence_by_sequence(tmp_path, monkeypatch):
    model = load(make_tiny("qwen2", tmp_path / "qwen2"))
    register("sdpa")
    _set_attention(model, "sdpa")
    prompts = make_prompts(model.config, None)
    rollouts = make_rollouts(prompts, {0: [7, 1, 3], 1: [2, 11], 2: [4, 4]})
    pieces = [Piece(rollouts=[r for r in rollouts if r.group == g]) for g in prompts]
    found = {}
    for limit in (8192, 10):
        monkeypatch.setattr(attention, "MASK_TOKENS", limit)
        microbatch = pack(pieces, prompts, None, with_mask=True, multiple_of=8)
        assert microbatch.input_ids.numel() % 8 == 0 and (microbatch.packing.mask is None) == (limit == 10)
        logprobs = packed(model, microbatch, None).logprobs
        model.zero_grad()
        logprobs.sum().backward()
        found[limit] = [logprobs, *(p.grad.clone() for p in model.parameters())]
    for masked, by_sequence in zip(found[8192], found[10], strict=True):
        torch.testing.assert_close(by_sequence, masked, rtol=1e-4, atol=2e-5)


def test_gradients_of_gathered_keys_are_sums_over_uses():
    groups = [(3, [2, 4]), (2, []), (4, [1]), (5, [2, 3, 1])]
    packing = Packing.from_groups(groups, with_mask=False)
    tokens = int(packing.cu_seqlens_q[-1])
    keys = torch.randn(tokens, 2, 4, requires_grad=True)
    weights = torch.randn(len(packing.kv_index), 2, 4)
    gathered = GatherKeys.apply(keys, packing)
    assert torch.equal(gathered, keys[packing.kv_index])
    (gathered * weights).sum().backward()
    expected = torch.zeros(tokens, 2, 4).index_add_(0, packing.kv_index, weights)
    torch.testing.assert_close(keys.grad, expected)
