"""The loader: order from (seed, step), overlong rows, faults that end the run at the start, prompts made once."""

import io
import json
import time
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


def test_d18_overlong_rows_are_dropped_with_a_count(tmp_path, capsys):
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


def test_d17_image_tokens_count_and_name_the_needed_length(tmp_path):
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


def test_d07_damage_behind_the_header_names_the_row_in_the_file(tmp_path):
    picture = save_picture(tmp_path / "a.jpg", 100, 100)
    data = (tmp_path / picture).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    rows = [{"problem": "1234567 " * 100, "answer": 0}, *text_rows(2)]
    rows.append({"problem": "<image>", "answer": 1, "images": "cut.jpg"})
    loader = make_loader(tmp_path, rows, vision=True, max_prompt_length=100)
    with pytest.raises(ValueError, match=r"rows row 3 has an image .*cut\.jpg.*truncated"):
        loader.prepare([2])


def test_d21_missing_columns_list_those_found(tmp_path):
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
    start = time.monotonic()
    assert make_loader(tmp_path, rows, max_prompt_length=1024).num_rows == 100_000
    assert time.monotonic() - start < 60


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
