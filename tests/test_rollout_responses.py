"""What samples.jsonl gets of a response: its text and rewards, and small copies of what the prompt shows."""

import numpy as np
from PIL import Image

from r1.rollout.responses import sample_record
from r1.types import Prompt, Rollout


def rollout() -> Rollout:
    return Rollout(
        group=0, sample=1, prompt_ids=[1, 2], response_ids=[3, 4, 5], rollout_logprobs=[0.0] * 3, truncated=True,
        response="four", rewards={"overall": 1.0},
    )  # fmt: skip


def prompt(**media: list) -> Prompt:
    return Prompt(row=7, text="How many?", prompt_ids=[1, 2], sampler_ids=[1, 2], ground_truth="4", **media)


def test_a_record_of_text_holds_no_pictures() -> None:
    assert sample_record(rollout(), prompt()) == {
        "row": 7, "sample": 1, "prompt": "How many?", "response": "four", "ground_truth": "4",
        "rewards": {"overall": 1.0}, "response_length": 3, "truncated": True,
    }  # fmt: skip


def test_pictures_are_small_copies_and_a_video_is_three_frames() -> None:
    image = Image.new("RGB", (1600, 800))
    frames = np.stack([np.full((20, 30, 3), 10 * i, np.uint8) for i in range(9)])
    shown = sample_record(rollout(), prompt(images=[image], videos=[(frames, {})]))["images"]
    assert [picture.size for picture in shown] == [(320, 160), (30, 20), (30, 20), (30, 20)]
    assert [np.asarray(picture)[0, 0, 0] for picture in shown[1:]] == [0, 40, 80]
    assert image.size == (1600, 800), "what the model is given stays as it is"
    assert "images" not in sample_record(rollout(), prompt(images=[image]), pictures=False)
