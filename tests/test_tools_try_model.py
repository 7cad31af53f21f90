"""tools/try_model.py: pictures land where the question marks them."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.tiny import make_tiny
from tools.try_model import ask, load_row, message_content


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path, color in zip(paths, ("red", "blue"), strict=True):
        Image.new("RGB", (4, 4), color).save(path)
    return paths


def test_marks_become_pictures_in_order(pictures: list[Path]) -> None:
    content = message_content("<image>left <image> right", pictures)
    assert [part["type"] for part in content] == ["image", "text", "image", "text"]
    assert content[0]["image"].getpixel((0, 0)) == (255, 0, 0)
    assert content[3]["text"] == " right"


def test_pictures_without_marks_come_first(pictures: list[Path]) -> None:
    content = message_content("what?", pictures)
    assert [part["type"] for part in content] == ["image", "image", "text"]


def test_a_mark_without_its_picture_is_an_error(pictures: list[Path]) -> None:
    with pytest.raises(ValueError, match="3 <image> marks but 2 images"):
        message_content("<image><image><image>", pictures)


def test_load_row_names_the_rows_there_are(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"problem": str(i), "answer": "x"}) + "\n" for i in range(2)))
    assert load_row(file, 1)["problem"] == "1"
    with pytest.raises(ValueError, match="rows 0 to 1, got --row 2"):
        load_row(file, 2)


@pytest.mark.parametrize("with_picture", [True, False])
def test_a_saved_model_answers(with_picture: bool, pictures: list[Path], tmp_path: Path) -> None:
    model = make_tiny("qwen2_5_vl" if with_picture else "qwen2", tmp_path / "model")
    answers = {ask(model, "what?", pictures[:1] if with_picture else [], max_new_tokens=4) for _ in range(2)}
    assert len(answers) == 1, "greedy decoding gives one answer"
    assert answers != {""}
