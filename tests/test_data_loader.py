"""The loader: order from (seed, step), overlong rows, faults that end the run at the start, prompts made once."""

import dataclasses
import io
import json
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from r1.config import DataConfig
from r1.data.loader import Loader, check_columns
from r1.data.prompt import Renderer
from r1.data.rows import JsonRows
from tests.tiny import make_processor, make_tokenizer


def make_loader(
    path: Path,
    rows: list[dict[str, Any]],
    *,
    vision: bool = False,
    shuffle: bool = True,
    limit_images: int = 1,
    **options: Any,
) -> Loader:
    path.mkdir(exist_ok=True)
    (path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = DataConfig(
        **{"rollout_batch_size": 4, "min_pixels": 3136, "max_pixels": 40000, "num_workers": 2, **options}
    )
    processor = make_processor("qwen2_5_vl") if vision else None
    renderer = Renderer(config, processor.tokenizer if vision else make_tokenizer(), processor, image_dir=path)
    return Loader(str(path / "rows.jsonl"), config, renderer, shuffle=shuffle, limit_images=limit_images)


def text_rows(count: int) -> list[dict[str, Any]]:
    return [{"problem": f"q{i}", "answer": i} for i in range(count)]


def save_picture(path: Path, width: int, height: int) -> str:
    path.parent.mkdir(exist_ok=True)
    Image.effect_noise((width, height), 60).convert("RGB").save(path)
    return path.name


def test_order_is_a_function_of_seed_and_step(tmp_path):
    loader = make_loader(tmp_path, text_rows(11))
    steps = [loader.rows_at(step) for step in range(1, 7)]
    again = make_loader(tmp_path, text_rows(11))
    assert [again.rows_at(step) for step in (6, 1, 3)] == [steps[5], steps[0], steps[2]]
    # Two whole batches an epoch: 8 different rows of 11, in another order each epoch.
    for epoch in (0, 2, 4):
        drawn = steps[epoch] + steps[epoch + 1]
        assert len(set(drawn)) == 8 and set(drawn) <= set(range(11))
    assert steps[0] + steps[1] != steps[2] + steps[3]
    assert make_loader(tmp_path, text_rows(11), seed=2).rows_at(1) != steps[0]
    assert set().union(*steps) == set(range(11))  # rows left out of one epoch come in another


def test_order_without_shuffling_is_the_files(tmp_path):
    loader = make_loader(tmp_path, text_rows(9), shuffle=False)
    assert [loader.rows_at(step) for step in (1, 2, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_fewer_rows_than_a_batch_matters_only_to_training(tmp_path):
    loader = make_loader(tmp_path, text_rows(3))
    assert [prompt.row for prompt in loader.prepare(range(3))] == [0, 1, 2]
    with pytest.raises(ValueError, match="rows has 3 rows after filtering, fewer than"):
        loader.rows_at(1)


def test_D18_overlong_rows_are_dropped_with_a_count(tmp_path, capsys):
    rows = text_rows(6)
    rows[2]["problem"] = "1234567 " * 100
    loader = make_loader(tmp_path, rows, max_prompt_length=100, shuffle=False)
    assert (loader.num_rows, loader.dropped) == (5, 1)
    assert "1 of 6 rows dropped" in capsys.readouterr().out
    prompt = loader.prepare([2])[0]  # the third that is left
    assert (prompt.row, prompt.ground_truth) == (2, "3")
    with pytest.raises(ValueError, match=r"rows row 2 needs \d{3} prompt tokens, above data.max_prompt_length=100"):
        make_loader(tmp_path, rows, max_prompt_length=100, overlong_prompts="error")
    with pytest.raises(ValueError, match="all 6 rows of rows have prompts longer"):
        make_loader(tmp_path, rows, max_prompt_length=1)


def test_D17_image_tokens_count_and_name_the_needed_length(tmp_path):
    picture = save_picture(tmp_path / "wide.png", 192, 108)
    rows = [{"problem": "<image>", "answer": 1, "images": picture}]
    options = {"vision": True, "max_pixels": 4194304, "max_prompt_length": 40}
    # 192 x 108 becomes 196 x 112: 7 x 4 = 28 image tokens, and 19 or so of text.
    length = make_loader(tmp_path, rows, **options | {"max_prompt_length": 100}).prepare([0])[0].prompt_ids
    assert len(length) > 40
    with pytest.raises(ValueError, match=f"row 0 needs {len(length)} prompt tokens"):
        make_loader(tmp_path, rows, overlong_prompts="error", **options)


def test_rank_other_than_0_prints_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    rows = text_rows(5)
    rows[0]["problem"] = "1234567 " * 100
    assert make_loader(tmp_path, rows, max_prompt_length=100).dropped == 1
    out = capsys.readouterr()
    assert out.out == out.err == ""


def test_too_many_images_end_at_the_start(tmp_path):
    picture = save_picture(tmp_path / "a.png", 60, 60)
    rows = [{"problem": "<image>" * k, "answer": k, "images": [picture] * k} for k in (1, 2, 3)]
    with pytest.raises(
        ValueError, match=r"row 1 has 2 images, above rollout.limit_images=1; the most in any row is 3: .*\(2 such rows"
    ):
        make_loader(tmp_path, rows, vision=True)
    assert make_loader(tmp_path, rows, vision=True, limit_images=3).num_rows == 3


def test_bad_rows_end_at_the_start_with_their_place(tmp_path):
    rows = [*text_rows(5), {"problem": "<image>?", "answer": 1, "images": ["gone.png"]}, {"problem": "", "answer": 1}]
    with pytest.raises(ValueError, match=r"rows row 5 has an image .*gone\.png: no such file.*\(2 such rows in all\)"):
        make_loader(tmp_path, rows, vision=True)


def cut_picture(path: Path) -> str:
    """A JPEG that lost its second half; its header is whole."""
    data = (path.parent / save_picture(path.parent / "whole.jpg", 100, 100)).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path.name


def rows_with_a_cut_picture(path: Path) -> list[dict[str, Any]]:
    cut = cut_picture(path / "cut.jpg")
    rows = [{"problem": "1234567 " * 100, "answer": 0}, *text_rows(2), {"problem": "<image>", "images": cut}]
    return [*rows, {"problem": "<image>", "answer": 4, "images": "whole.jpg"}]


def test_D07_a_cut_image_ends_the_run_at_the_start_and_names_its_row(tmp_path):
    with pytest.raises(
        ValueError, match=r"rows row 3 has an image .*cut\.jpg.*truncated.*; data\.on_bad_row=skip trains without it"
    ):
        make_loader(tmp_path, rows_with_a_cut_picture(tmp_path), vision=True, max_prompt_length=100)


def test_D07_a_cut_image_is_skipped_and_counted(tmp_path, capsys):
    rows = [*rows_with_a_cut_picture(tmp_path), {"problem": "<image>", "answer": 1, "images": "gone.jpg"}]
    loader = make_loader(
        tmp_path, rows, vision=True, max_prompt_length=100, on_bad_row="skip", shuffle=False, rollout_batch_size=3
    )
    assert (loader.num_rows, loader.dropped, loader.skipped) == (3, 1, 2)
    out = capsys.readouterr().out
    assert "rows: 2 of 6 rows skipped" in out
    assert "1 x image cut short (rows row 3); the first has an image that cannot be used: cannot read" in out
    assert "1 x no such image file (rows row 5)" in out
    assert [p.ground_truth for p in loader.prepare(loader.rows_at(1))] == ["0", "1", "4"]  # a full batch
    bad = [{"problem": "<image>", "answer": 1, "images": "gone.jpg"}] * 2
    with pytest.raises(ValueError, match=r"rows row 0 has an image .*\(2 such rows in all\)"):
        make_loader(tmp_path, bad, vision=True, on_bad_row="skip")


def test_D07_damage_that_comes_after_the_check_puts_another_row_in_its_place(tmp_path, capsys):
    rows = rows_with_a_cut_picture(tmp_path)
    options = {"vision": True, "max_prompt_length": 100, "check_images": False, "shuffle": False}
    loader = make_loader(tmp_path, rows, on_bad_row="skip", **options)
    prompts = loader.prepare([1, 2, 3])
    assert [p.row for p in prompts] == [1, 3, 3] and [p.ground_truth for p in prompts] == ["1", "4", "4"]
    assert "rows row 3 has an image" in (out := capsys.readouterr().out) and "rows row 4 takes its place" in out
    again = make_loader(tmp_path, rows, on_bad_row="skip", **options)  # as on another rank
    assert again.prepare([2])[0].row == 3
    with pytest.raises(ValueError, match=r"^rows row 3 has an image .*cut\.jpg.*truncated"):
        make_loader(tmp_path, rows, **options).prepare([2])


def test_a_broken_line_is_a_bad_row(tmp_path):
    loader = make_loader(tmp_path, text_rows(5))
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text().replace('{"problem": "q2"', '{"problem" "q2"'))
    renderer, options = loader.renderer, {"shuffle": False, "limit_images": 1}
    with pytest.raises(ValueError, match=r"rows row 2 \(line 3 of its file\) is not JSON"):
        Loader(str(path), loader.config, renderer, **options)
    kept = Loader(str(path), dataclasses.replace(loader.config, on_bad_row="skip"), renderer, **options)
    assert [p.ground_truth for p in kept.prepare(range(4))] == ["0", "1", "3", "4"] and kept.skipped == 1


def test_D17_D18_truncation_takes_text_from_the_left_and_leaves_images_whole(tmp_path):
    picture = save_picture(tmp_path / "a.png", 84, 84)  # 3 x 3 = 9 image tokens
    rows = [
        {"problem": " ".join(map(str, range(200))), "answer": 1},
        {"problem": "left " * 30 + "<image>" + "right " * 30, "answer": 2, "images": picture},
    ]
    full = make_loader(tmp_path, rows, vision=True, shuffle=False).prepare([0, 1])
    options = {"vision": True, "shuffle": False, "overlong_prompts": "truncate_left"}
    loader = make_loader(tmp_path, rows, max_prompt_length=50, **options)
    text, image = loader.prepare([0, 1])
    assert text.prompt_ids == full[0].prompt_ids[-50:] == text.sampler_ids
    assert text.text.endswith("199<|im_end|>\n<|im_start|>assistant\n") and len(text.text) < len(full[0].text)
    pad, start, end = (loader.renderer.tokenizer.convert_tokens_to_ids(f"<|{t}|>") for t in
                       ("image_pad", "vision_start", "vision_end"))  # fmt: skip
    assert len(image.prompt_ids) == 50 and image.prompt_ids[:11] == [start, *[pad] * 9, end]
    assert image.prompt_ids[11:] == full[1].prompt_ids[-39:]
    assert image.sampler_ids == [start, pad, *image.prompt_ids[10:]] and image.image_grid_thw.tolist() == [[1, 6, 6]]
    with pytest.raises(
        ValueError, match=r"row 1 needs \d+ prompt tokens, .*, 11 of them for images, which are not cut"
    ):
        make_loader(tmp_path, rows, max_prompt_length=11, **options)


def test_D01_sources_are_joined_and_rows_keep_their_own_folder(tmp_path):
    red, blue = Image.new("RGB", (60, 60), "red"), Image.new("RGB", (60, 60), "blue")
    (tmp_path / "a").mkdir()
    red.save(tmp_path / "a" / "x.png")
    loader = make_loader(
        tmp_path / "a", [{"problem": "<image>", "answer": "red", "images": ["x.png"]}], vision=True, shuffle=False
    )
    (tmp_path / "b").mkdir()
    blue.save(tmp_path / "b" / "x.png")
    (tmp_path / "b" / "more.json").write_text(
        json.dumps(
            [{"problem": "<image>", "answer": "blue", "images": "x.png", "level": 3}, {"problem": "p", "answer": 1}]
        )
    )
    config = dataclasses.replace(loader.config, rollout_batch_size=3)
    both = Loader(
        [str(tmp_path / "a" / "rows.jsonl"), f"{tmp_path}/b/*.json"],
        config,
        loader.renderer,
        shuffle=False,
        limit_images=1,
    )
    prompts = both.prepare(both.rows_at(1))
    assert [p.ground_truth for p in prompts] == ["red", "blue", "1"] and both.name == "rows+b"
    assert [p.images[0].getpixel((3, 3)) for p in prompts[:2]] == [(255, 0, 0), (0, 0, 255)]
    assert [p.fields["level"] for p in prompts] == [None, 3, None] and prompts[2].pixel_values is None
    (tmp_path / "c.json").write_text('[{"problem": "p"}]')
    with pytest.raises(ValueError, match=r"c\.json has no column 'answer'"):
        Loader(
            [f"{tmp_path}/a/rows.jsonl", f"{tmp_path}/c.json"], config, loader.renderer, shuffle=True, limit_images=1
        )


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_are_shares_of_what_is_drawn(tmp_path, shuffle):
    loader = make_loader(tmp_path, text_rows(30))
    (tmp_path / "small.json").write_text(json.dumps([{"problem": f"s{i}", "answer": i} for i in range(7)]))
    sources = [f"{tmp_path}/rows.jsonl*1", f"{tmp_path}/small.json*3"]
    config = dataclasses.replace(loader.config, rollout_batch_size=12)
    mixed = Loader(sources, config, loader.renderer, shuffle=shuffle, limit_images=1)
    steps = [mixed.rows_at(step) for step in range(1, 31)]  # 37 rows: 3 steps, 36 draws an epoch
    for epoch in range(10):
        drawn = [row for step in steps[3 * epoch : 3 * epoch + 3] for row in step]
        assert sum(row < 30 for row in drawn) == 9 and sum(row >= 30 for row in drawn) == 27
    every = [row for step in steps for row in step]
    counts = [every.count(row) for row in range(37)]
    assert counts[:30] == [3] * 30  # 90 draws of 30 rows: each source goes round its rows
    assert max(counts[30:]) - min(counts[30:]) <= 1 and sum(counts[30:]) == 270
    again = Loader(sources, config, loader.renderer, shuffle=shuffle, limit_images=1)
    assert [again.rows_at(step) for step in (17, 2)] == [steps[16], steps[1]]
    with pytest.raises(ValueError, match=r"rows\.jsonl' has no weight but another source has"):
        Loader([f"{tmp_path}/rows.jsonl", sources[1]], config, loader.renderer, shuffle=True, limit_images=1)


def test_the_next_steps_prompts_are_made_ahead(tmp_path, monkeypatch):
    pictures = [save_picture(tmp_path / f"{i}.png", 60, 60) for i in range(12)]
    rows = [{"problem": "<image>", "answer": i, "images": p} for i, p in enumerate(pictures)]
    loader = make_loader(tmp_path, rows, vision=True)
    built: list[int] = []
    build = loader.renderer.build

    def counted(index: int, row: dict[str, Any]) -> Any:
        built.append(index)
        return build(index, row)

    monkeypatch.setattr(type(loader.renderer), "build", lambda self, index, row: counted(index, row))
    first = loader.prepare(loader.rows_at(1))
    loader.prefetch(2, slice(0, 4), keep=loader.rows_at(1))
    wait([*loader._ahead.values()])
    assert sorted(built) == sorted(loader.rows_at(1) + loader.rows_at(2))
    loader.prepare(loader.rows_at(2))
    assert [a is b for a, b in zip(first, loader.prepare(loader.rows_at(1)), strict=True)] == [True] * 4
    assert len(built) == 8  # nothing is made twice
    loader.prefetch(3, slice(0, 2), keep=loader.rows_at(2))  # this rank's half; step 1 is forgotten
    wait([*loader._ahead.values()])
    assert set(loader._cache) == set(loader.rows_at(2)) | set(loader.rows_at(3)[:2])
    monkeypatch.setattr("r1.data.loader.CACHE_BYTES", 1)  # no room: made when they are asked for
    loader.prefetch(3, slice(0, 4), keep=loader.rows_at(2))
    wait([*loader._ahead.values()])
    assert len(built) == 10 and [p.row for p in loader.prepare(loader.rows_at(3))] == loader.rows_at(3)


def test_D21_missing_columns_list_those_found(tmp_path):
    with pytest.raises(
        ValueError, match=r"has no column 'answer'; its columns are problem, solution: set data\.answer_key"
    ):
        make_loader(tmp_path, [{"problem": "q", "solution": 1}])
    with pytest.raises(ValueError, match="has no column 'prompt'"):
        check_columns(JsonRows([{"problem": "q", "answer": 1}]), DataConfig(prompt_key="prompt"))
    check_columns(JsonRows([{"problem": "q", "answer": 1}]), DataConfig())


def test_a_prompt_is_made_once_until_the_cache_is_full(tmp_path, monkeypatch):
    picture = save_picture(tmp_path / "a.png", 100, 100)
    rows = [{"problem": f"{i}<image>", "answer": i, "images": picture} for i in range(4)]
    loader = make_loader(tmp_path, rows, vision=True)
    first = loader.prepare([0, 1, 2])
    assert [a is b for a, b in zip(first, loader.prepare([0, 1, 2]), strict=True)] == [True] * 3
    size = first[0].pixel_values.nbytes + 3 * first[0].images[0].width * first[0].images[0].height
    monkeypatch.setattr("r1.data.loader.CACHE_BYTES", 2 * size)
    loader.prepare([3])  # 0 and 1, the oldest, go
    kept = loader.prepare([2, 3])
    assert kept[0] is first[2]
    assert loader.prepare([0])[0] is not first[0]


def test_many_threads_share_one_tokenizer(tmp_path):
    loader = make_loader(tmp_path, text_rows(300), num_workers=8)
    loader.renderer.tokenizer.backend_tokenizer.enable_padding(length=64)
    assert [p.ground_truth for p in loader.prepare(range(300))] == [str(i) for i in range(300)]


@pytest.mark.slow
def test_a_hundred_thousand_text_rows_are_checked_within_a_minute(tmp_path):
    rows = [
        {"problem": f"What is {i} plus {i}? " + "Reason step by step. " * 5, "answer": 2 * i} for i in range(100_000)
    ]
    start = time.process_time()  # of this process, which the machine's other work does not slow
    assert make_loader(tmp_path, rows, max_prompt_length=1024).num_rows == 100_000
    assert time.process_time() - start < 60


def test_images_in_parquet_rows(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    buffer = io.BytesIO()
    Image.new("RGB", (60, 60), "red").save(buffer, "PNG")
    rows = [{"problem": "<image>?", "answer": "red", "images": [{"bytes": buffer.getvalue(), "path": None}]}]
    datasets.Dataset.from_list([*rows, {"problem": "no", "answer": "a", "images": None}]).to_parquet(
        tmp_path / "a.parquet"
    )
    config = DataConfig(min_pixels=3136)
    processor = make_processor("qwen2_5_vl")
    renderer = Renderer(config, processor.tokenizer, processor, image_dir=None)
    loader = Loader(str(tmp_path / "a.parquet"), config, renderer, shuffle=False, limit_images=1)
    prompts = loader.prepare([0, 1])
    assert prompts[0].images[0].getpixel((5, 5)) == (255, 0, 0) and prompts[1].images == []
