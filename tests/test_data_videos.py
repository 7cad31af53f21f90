"""Videos: which frames are taken, any form gives the same; tokens and pixels equal the families' own processors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from r1.config import DataConfig
from r1.data.faults import ImageError, RowError
from r1.data.prompt import Renderer
from r1.data.videos import inspect_video, list_videos, load_video, sample_frames
from tests.tiny import VISION_FAMILIES, make_processor

cv2 = pytest.importorskip("cv2")


def write_video(path: Path, frames: int = 25, fps: float = 10.0, size: tuple[int, int] = (96, 64)) -> str:
    """A grey video that gets brighter by 10 each frame."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), fps, size)
    for i in range(frames):
        writer.write(np.full((size[1], size[0], 3), i * 10 % 256, np.uint8))
    writer.release()
    return path.name


def make_renderer(family: str, folder: Path, **options: Any) -> Renderer:
    config = DataConfig(**{"min_pixels": 3136, "max_pixels": 40000, "video_max_frames": 6, **options})
    processor = make_processor(family)
    return Renderer(config, processor.tokenizer, processor, image_dir=folder)


def test_frames_are_spread_evenly_and_their_number_is_even():
    assert sample_frames(25, 10.0, fps=2.0, max_frames=32) == (0, 8, 16, 24)  # 2.5 s: round(5) = 5, even: 4
    assert sample_frames(100, 10.0, fps=2.0, max_frames=6) == (0, 20, 40, 59, 79, 99)
    assert sample_frames(1, 10.0, fps=2.0, max_frames=32) == (0, 0)
    assert sample_frames(3, 30.0, fps=2.0, max_frames=32) == (0, 2)
    assert sample_frames(10, 2.0, fps=2.0, max_frames=32) == tuple(range(10))


def test_every_form_gives_the_same_frames(tmp_path):
    name = write_video(tmp_path / "a.avi")
    data = (tmp_path / name).read_bytes()
    values = []
    for form in (name, str(tmp_path / name), (tmp_path / name).as_uri(), data, {"bytes": data, "path": None},
                 {"bytes": None, "path": name}):  # fmt: skip
        footage = inspect_video(form, tmp_path, fps=2.0, max_frames=32)
        assert (footage.size, footage.total, footage.fps, footage.indices) == ((96, 64), 25, 10.0, (0, 8, 16, 24))
        values.append([frame.getpixel((5, 5))[0] for frame in load_video(form, tmp_path, footage)])
    assert values == [values[0]] * 6 and values[0] == pytest.approx([0, 80, 160, 240], abs=3)
    frames = [Image.new("RGB", (96, 64), (i, i, i)) for i in (0, 80, 160, 240)]
    footage = inspect_video(frames, None, fps=2.0, max_frames=32)
    assert (footage.total, footage.fps, footage.indices) == (4, 2.0, (0, 1, 2, 3))
    assert [f.getpixel((0, 0))[0] for f in load_video(frames, None, footage)] == [0, 80, 160, 240]


def test_cells_hold_videos_or_one_videos_frames():
    assert list_videos(None) == list_videos([]) == []
    assert list_videos("a.mp4") == ["a.mp4"] and list_videos(["a.mp4", "b.mp4"]) == ["a.mp4", "b.mp4"]
    assert list_videos(["0.png", "1.png"]) == [["0.png", "1.png"]]
    assert list_videos([["0.png", "1.png"], "b.mp4"]) == [["0.png", "1.png"], "b.mp4"]


def test_bad_videos_are_named(tmp_path):
    data = (tmp_path / write_video(tmp_path / "a.avi")).read_bytes()
    (tmp_path / "words.mp4").write_text("words")
    for value, message in [
        ("gone.mp4", r"gone\.mp4: no such file; relative paths start from"),
        ("words.mp4", r"cannot read video words\.mp4"),
        ("https://example.com/a.mp4", "not downloaded"),
        (3, "expected a path, URI"),
        (["gone.png"], "no such file"),
    ]:
        with pytest.raises(ImageError, match=message):
            inspect_video(value, tmp_path, fps=2.0, max_frames=8)
    footage = inspect_video(data, None, fps=2.0, max_frames=8)
    (tmp_path / "cut.avi").write_bytes(data[: len(data) // 2])
    with pytest.raises(ImageError, match=r"cut\.avi ends before frame \d+ of 25|cannot read video"):
        load_video("cut.avi", tmp_path, footage)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_ids_and_pixels_equal_the_familys_own_processor(family, tmp_path):
    write_video(tmp_path / "a.avi", frames=31)
    frames = [Image.effect_noise((200, 90), 60).convert("RGB") for _ in range(5)]
    row = {
        "problem": "<video>then <image> and <video>?",
        "answer": "",
        "images": Image.effect_noise((80, 70), 60).convert("RGB"),
        "videos": ["a.avi", frames],
    }
    renderer = make_renderer(family, tmp_path)
    prompt = renderer.build(0, row)
    assert [len(video) for video, _ in prompt.videos] == [6, 4] and len(prompt.images) == 1
    theirs = make_processor(family)(
        text=[prompt.text],
        images=prompt.images,
        videos=[video for video, _ in prompt.videos],
        video_metadata=[about for _, about in prompt.videos],
        do_sample_frames=False,
        return_tensors="pt",
        **renderer.mm_processor_kwargs,
    )
    assert prompt.prompt_ids == theirs["input_ids"][0].tolist()
    assert torch.equal(prompt.pixel_values_videos, theirs["pixel_values_videos"])
    assert torch.equal(prompt.video_grid_thw, theirs["video_grid_thw"])
    assert torch.equal(prompt.pixel_values, theirs["pixel_values"])
    assert renderer.length(row) == len(prompt.prompt_ids)
    if "second_per_grid_ts" in theirs:
        assert prompt.video_seconds == [float(torch.tensor(x)) for x in theirs["second_per_grid_ts"]]
    text = renderer.build(0, {"problem": "no <video> here", "answer": ""})
    assert text.videos == [] and "no <video> here" in text.text


def test_tags_and_videos_must_match_and_truncation_leaves_them_whole(tmp_path):
    write_video(tmp_path / "a.avi")
    renderer = make_renderer("qwen2_5_vl", tmp_path)
    with pytest.raises(RowError, match=r"has 0 <video> tags in the prompt but 1 video; put <video> where it belongs"):
        renderer.build(0, {"problem": "what?", "videos": "a.avi"})
    full = renderer.build(0, {"problem": "word " * 50 + "<video>?", "videos": "a.avi"})
    cut = make_renderer("qwen2_5_vl", tmp_path, overlong_prompts="truncate_left", max_prompt_length=60)
    prompt = cut.build(0, {"problem": "word " * 50 + "<video>?", "videos": "a.avi"})
    assert len(prompt.prompt_ids) == 60
    pads = [
        full.prompt_ids.count(renderer.vision.video_token_id),
        prompt.prompt_ids.count(renderer.vision.video_token_id),
    ]
    assert pads[0] == pads[1] > 0 and prompt.prompt_ids[-20:] == full.prompt_ids[-20:]
