"""Token ids from the sampler to the loss: never re-tokenized, masked by length, ends kept for training only."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from r1.config import DataConfig
from r1.data.loader import Loader
from r1.data.prompt import Renderer
from r1.policy.balance import Piece
from r1.policy.packing import Microbatch, pack
from r1.policy.vision import VisionSpec
from r1.rollout.responses import _flatten, _unflatten, decode_responses
from r1.rollout.sampling import banned_token_ids
from r1.types import Prompt, Rollout
from tests.tiny import VISION_FAMILIES, make_config, make_processor, make_tokenizer

TOKENIZER = make_tokenizer()
EOS, THINK = (TOKENIZER.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<think>"))


def rollout(response_ids: list[int], *, sample: int = 0, truncated: bool = False, group: int = 0) -> Rollout:
    return Rollout(group=group, sample=sample, prompt_ids=[1, 2], response_ids=response_ids,
                   rollout_logprobs=[-0.5] * len(response_ids), truncated=truncated)  # fmt: skip


def packed(rollouts: list[Rollout]) -> Microbatch:
    prompt = Prompt(row=0, text="", prompt_ids=[1, 2], sampler_ids=[1, 2])
    return pack([Piece(rollouts=rollouts)], {0: prompt}, None, with_mask=False)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_T01_image_and_video_tokens_are_banned_in_sampler_and_trainer(family):
    config = make_config(family)
    banned = {TOKENIZER.convert_tokens_to_ids(t) for t in ("<|image_pad|>", "<|video_pad|>")}
    assert set(banned_token_ids(config)) == set(VisionSpec.from_config(config).banned_ids) == banned


def test_T02_the_end_token_is_trained_on_though_it_is_also_the_pad_token():
    microbatch = packed([rollout([5, 6, EOS]), rollout([7, EOS], sample=1)])
    assert microbatch.labels.tolist() == [5, 6, EOS, 7, EOS]
    assert microbatch.lengths().tolist() == [3, 2]


def test_T03_a_cut_response_ends_at_its_length():
    cut = rollout([5, 6, 7], truncated=True)
    microbatch = packed([cut, rollout([8, EOS, EOS, EOS][:2], sample=1)])
    assert microbatch.lengths().tolist() == [3, 2] and microbatch.labels.tolist() == [5, 6, 7, 8, EOS]


def test_T06_sampled_ids_are_trained_on_as_they_came():
    merged = TOKENIZER("the", add_special_tokens=False)["input_ids"]
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "the"]
    assert letters != merged and TOKENIZER.decode(letters) == "the"  # other ids would come of encoding it again
    ids = [*letters, EOS]
    travelled = _unflatten(_flatten([rollout(ids)]))
    assert [r.response_ids for r in travelled] == [ids]
    assert packed(travelled).labels.tolist() == ids


def test_ends_are_stripped_from_the_text_that_is_graded_and_tags_are_not():
    hi = TOKENIZER("hi", add_special_tokens=False)["input_ids"]
    rollouts = [rollout([THINK, *hi, EOS])]
    decode_responses(rollouts, TOKENIZER, skip_special_tokens=True)
    assert rollouts[0].response == "<think>hi" and rollouts[0].response_ids[-1] == EOS


def mixed_loader(folder: Path) -> Loader:
    for i in range(3):
        Image.effect_noise((60 + 30 * i, 60), 60).convert("RGB").save(folder / f"{i}.png")
    rows: list[dict[str, Any]] = [
        {"problem": "<image>one", "answer": 1, "images": ["0.png"]},
        {"problem": "none", "answer": 2, "images": None},
        {"problem": "<image>two<image>", "answer": 3, "images": ["1.png", "2.png"]},
        {"problem": "<image>again", "answer": 4, "images": "0.png"},
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(min_pixels=3136, max_pixels=40000, rollout_batch_size=4, num_workers=2)
    processor = make_processor("qwen2_5_vl")
    renderer = Renderer(config, processor.tokenizer, processor, image_dir=None)
    return Loader(str(folder / "rows.jsonl"), config, renderer, shuffle=False, limit_images=2)


def test_D02_D20_a_microbatch_of_mixed_rows_holds_each_rows_own_pixels(tmp_path):
    prompts = dict(enumerate(mixed_loader(tmp_path).prepare(range(4))))
    vision = VisionSpec.from_config(make_config("qwen2_5_vl"))
    pieces = [Piece(rollouts=[dataclasses.replace(rollout([5, EOS], group=g), prompt_ids=p.prompt_ids)])
              for g, p in prompts.items()]  # fmt: skip
    for chosen in ([0, 1, 2, 3], [2, 0], [1, 3], [2]):
        microbatch = pack([pieces[g] for g in chosen], prompts, vision, with_mask=False)
        pixels = [prompts[g].pixel_values for g in chosen if prompts[g].pixel_values is not None]
        assert torch.equal(microbatch.pixel_values, torch.cat(pixels))
        assert len(microbatch.image_grid_thw) == sum(len(prompts[g].images) for g in chosen)
        tokens = int((microbatch.input_ids == vision.image_token_id).sum())
        assert tokens == int(microbatch.image_grid_thw.prod(dim=1).sum()) // 4
