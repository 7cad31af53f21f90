"""tools/check_data.py finds every planted fault, says what is filtered, and no file makes it or the loader crash."""

import base64
import dataclasses
import io
import json
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from r1.config import DataConfig
from r1.data.loader import Loader
from r1.data.prompt import Renderer
from tests.tiny import make_processor, make_tiny
from tools.check_data import Setup, check_set, main
from tools.check_data_report import row_numbers

ROOT = Path(__file__).parent.parent


def encode(size: tuple[int, int] = (60, 60), kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


def bomb() -> bytes:
    """A PNG of a few bytes that says it has 400 million pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


def write_pictures(folder: Path) -> None:
    png, jpeg = encode(), encode((90, 90), "JPEG")
    broken = bytearray(png)
    broken[len(png) // 2 : len(png) // 2 + 40] = b"\x00" * 40
    files = {
        "good.png": png,
        "cut.jpg": jpeg[: len(jpeg) // 2],
        "cut.png": png[: len(png) // 2],
        "cut.gif": encode(kind="GIF")[:400],
        "cut.webp": encode(kind="WEBP")[:100],
        "cut.bmp": encode(kind="BMP")[:5000],
        "broken.png": bytes(broken),
        "empty.png": b"",
        "notes.png": b"these are words",
        "words.mp4": b"these are words",
        "page.png": b"<!DOCTYPE html><html>404</html>",
        "drawing.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "bomb.png": bomb(),
        "thin.png": encode((1, 300)),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "folder.png").mkdir()


def with_image(value: Any, problem: Any = "<image> what?") -> dict[str, Any]:
    return {"problem": problem, "answer": "a", "images": value}


def chat(*turns: Any) -> dict[str, Any]:
    return {"problem": list(turns), "answer": "a"}


def planted(folder: Path) -> list[tuple[str, Any]]:
    """(kind, row or raw line) of every fault."""
    user = {"role": "user", "content": "hi"}
    long = "word " * 500
    text = base64.b64encode(encode()).decode()
    return [
        ("line is not JSON", b'{"problem": "p", "answer": }'),
        ("line is not JSON", b'{"problem": "p", "ans'),
        ("line is not UTF-8", b'{"problem": "caf\xe9", "answer": 1}'),
        ("row is not an object", b'["p", "a"]'),
        ("row is not an object", b'"p"'),
        ("prompt is not text", {"answer": "a"}),
        ("prompt is not text", {"problem": None, "answer": "a"}),
        ("prompt is not text", {"problem": 7, "answer": "a"}),
        ("prompt is not text", {"problem": {"text": "p"}, "answer": "a"}),
        ("prompt is empty", {"problem": "", "answer": "a"}),
        ("prompt is empty", {"problem": " \n", "answer": "a"}),
        ("prompt is empty", chat()),
        ("prompt is empty", chat({"role": "user", "content": []})),
        ("prompt is not valid Unicode", b'{"problem": "half \\ud83d", "answer": 1}'),
        ("message is malformed", chat("hi")),
        ("message is malformed", chat({"from": "human", "value": "hi"})),
        ("message is malformed", chat({"role": "robot", "content": "hi"})),
        ("message is malformed", chat({"role": "user", "content": None})),
        ("message is malformed", chat({"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]})),
        ("message is malformed", chat({"role": "user", "content": [{"type": "text"}]})),
        ("prompt does not end with the user", chat(user, {"role": "assistant", "content": "hello"})),
        ("prompt does not end with the user", chat({"role": "system", "content": "be brief"})),
        ("images and tags differ", with_image("good.png", "no tag")),
        ("images and tags differ", with_image(None)),
        ("images and tags differ", with_image("good.png", "<image><image>")),
        ("images and tags differ", with_image(["good.png", "good.png"])),
        ("images and tags differ", with_image([None, "good.png"], "<image><image>")),
        ("images in two places", chat({"role": "user", "content": [{"type": "image", "image": "good.png"}]})
         | {"images": ["good.png"]}),
        ("prompt spells a vision token", {"problem": "say <|image_pad|>", "answer": "a"}),
        ("prompt spells a vision token", {"problem": "say <|video_pad|>", "answer": "a"}),
        ("no such image file", with_image("gone.png")),
        ("no such image file", with_image(["folder.png"])),
        ("no such image file", with_image((folder / "gone.png").as_uri())),
        ("no such image file", with_image({"bytes": None, "path": "gone.png"})),
        ("no such image file", with_image("x" * 5000)),
        ("not an image", with_image("notes.png")),
        ("not an image", with_image("page.png")),
        ("not an image", with_image("empty.png")),
        ("not an image", with_image("drawing.svg")),
        ("not an image", with_image("data:image/png;base64," + base64.b64encode(b"words").decode())),
        ("image cut short", with_image("cut.jpg")),
        ("image cut short", with_image("cut.png")),
        ("image cut short", with_image("cut.bmp")),
        ("image cut short", with_image("data:image/png;base64," + text[: len(text) // 2])),
        (None, with_image("cut.gif")),  # None: any kind, as Pillow's readers word it
        (None, with_image("cut.webp")),
        (None, with_image("broken.png")),
        ("image has too many pixels", with_image("bomb.png")),
        ("image too long and thin", with_image("thin.png")),
        ("image on the web", with_image("https://example.com/a.png")),
        ("bad data URI", with_image("data:image/png," + text)),
        ("bad base64", with_image("data:image/png;base64,ä@@@")),
        ("not a form of an image", with_image(3)),
        ("not a form of an image", with_image({"picture": "good.png"})),
        ("not a form of an image", with_image([["good.png"]])),
        ("videos and tags differ", {"problem": "what?", "answer": "a", "videos": "clip.avi"}),
        ("no such video file", {"problem": "<video>", "answer": "a", "videos": ["gone.mp4"]}),
        ("not a video", {"problem": "<video>", "answer": "a", "videos": ["words.mp4"]}),
        ("not a form of a video", {"problem": "<video>", "answer": "a", "videos": 5}),
        ("too many videos", {"problem": "<video>", "answer": "a", "videos": ["good.png", "good.png"]}),
        ("too many images", with_image(["good.png"] * 3, "<image>" * 3)),
        ("prompt too long", {"problem": long, "answer": "a"}),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def setup_set(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    config = DataConfig(min_pixels=3136, max_pixels=40000, max_prompt_length=200, num_workers=2)
    processor = make_processor("qwen2_5_vl")
    renderer = Renderer(config, processor.tokenizer, processor, image_dir=None)
    return Setup(data=config, renderer=renderer, limit_images=2, limit_videos=0, unit="tokens")


def write_planted(folder: Path) -> tuple[Path, list[tuple[str, Any]]]:
    write_pictures(folder)
    faults = planted(folder)
    lines = []
    for _, row in faults:  # a good row before each bad one
        lines.append(json.dumps({"problem": f"<image> good {len(lines)}", "answer": 1, "images": "good.png"}).encode())
        lines.append(row if isinstance(row, bytes) else json.dumps(row).encode())
    (folder / "rows.jsonl").write_bytes(b"\n".join(lines))
    return folder / "rows.jsonl", faults


def test_every_planted_fault_is_found_and_no_good_row_is_blamed(tmp_path, setup_set):
    path, faults = write_planted(tmp_path)
    assert len(faults) >= 40
    with ThreadPoolExecutor(2) as pool:
        checked = check_set("planted", str(path), setup_set, pool)
    found = {i: fault for i, fault in [*checked.faults, *checked.overlong]}
    for number, (kind, row) in enumerate(faults):
        fault = found.pop(2 * number + 1, None)
        assert fault is not None, f"not found: {kind} {str(row)[:100]}"
        assert kind in (None, fault.kind), f"{fault.kind} for {kind} {str(row)[:100]}: {fault}"
        assert fault.kind and fault.problem and len(str(fault)) < 1200
    assert found == {} and [fault.kind for _, fault in checked.overlong] == ["prompt too long"]


def test_the_loader_skips_exactly_what_the_checker_finds(tmp_path, setup_set, capsys):
    path, faults = write_planted(tmp_path)
    config = dataclasses.replace(setup_set.data, on_bad_row="skip", rollout_batch_size=16)
    loader = Loader(str(path), config, setup_set.renderer, shuffle=True, limit_images=2)
    assert loader.kept == list(range(0, 2 * len(faults), 2))
    assert (loader.skipped, loader.dropped) == (len(faults) - 1, 1)
    assert len(loader.prepare(loader.rows_at(1))) == 16
    assert f"{len(faults) - 1} of {2 * len(faults)} rows skipped" in capsys.readouterr().out


def test_command_line_with_a_config_prints_tables_and_writes_a_page(tmp_path, capsys):
    model = make_tiny("qwen2_5_vl", tmp_path / "model")
    path, faults = write_planted(tmp_path)
    (tmp_path / "val.jsonl").write_text(
        "\n".join(json.dumps({"problem": p, "answer": a}) for p, a in [("2+2?", "4"), ("2+2?", None), ("3?", [1])])
    )
    (tmp_path / "run.py").write_text(
        "from r1.config import *\n"
        f"config = Config(model=ModelConfig(path={str(model)!r}), data=DataConfig(train_files={str(path)!r}, "
        f"val_files=({str(tmp_path / 'val.jsonl')!r},), min_pixels=3136, max_pixels=40000, max_prompt_length=200, "
        "rollout_batch_size=4), update=UpdateConfig(global_batch_size=4), rollout=RolloutConfig(limit_images=2))\n"
    )
    page = tmp_path / "page.html"
    assert main(["--config", str(tmp_path / "run.py"), "--html", str(page)]) == 1
    out = capsys.readouterr().out
    bad = len(faults) - 1
    assert f"== training ({2 * len(faults)} rows: {len(faults)} used, {bad} bad, 1 too long)" in out
    assert "4  prompt is not text: row 11, 13, 15, 17" in out
    assert "Would be filtered (data.max_prompt_length=200):" in out
    assert "Prompt length in tokens: min" in out and "Images: " in out and "|####" in out
    assert out.count("as the model sees it --") == 6 and "<|vision_start|><|image_pad|><|vision_end|> good 0" in out
    assert "== validation 1 (3 rows: 3 used, 0 bad, 0 too long)" in out
    for note in ("1  no answer: row 1", "1  prompt seen before: row 1", "1  answer is not text or a number: row 2"):
        assert note in out
    html = page.read_text()
    assert "data:image/jpeg;base64," in html and "http" not in html.replace("https://example.com", "")
    assert "<script" not in html and "image cut short" in html
    assert main(["--config", str(tmp_path / "run.py"), "--data.train_files", str(tmp_path / "val.jsonl")]) == 0


def test_files_without_a_model(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps([{"q": "2+2?", "a": 4}, {"q": "", "a": 1}]))
    words = [str(tmp_path / "a.json"), "--prompt-key", "q", "--answer-key", "a"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "(2 rows: 1 used, 1 bad, 0 too long)" in out and "bytes and image tokens (no --model was given)" in out
    assert main([words[0]]) == 1
    assert "a.json has no column 'problem'; its columns are q, a" in capsys.readouterr().out
    assert main([*words, "--max-prompt-length", "20"]) == 2
    assert "give --model too" in capsys.readouterr().err
    (tmp_path / "good.json").write_text(json.dumps([{"problem": "2+2?", "answer": 4}]))
    program = [sys.executable, str(ROOT / "tools" / "check_data.py"), "good.json"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "1 used" in done.stdout, done.stderr


def test_row_numbers_are_ranges_by_file(tmp_path, setup_set):
    for name in "ab":
        rows = [{"problem": "p", "answer": 1}] * 5
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    with ThreadPoolExecutor(1) as pool:
        checked = check_set("two", [f"{tmp_path}/a.json", f"{tmp_path}/b.json"], setup_set, pool)
    assert row_numbers(checked.rows, [0, 1, 2, 4, 5, 9]) == "a row 0-2, 4; b row 0, 4"


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=12)
words = st.sampled_from(
    ["<image>", "<video>", "<|image_pad|>", "<|vision_start|>", "\ud800", "\x00", "{{ content }}", "hi"]
)
texts = st.lists(words | st.text(st.characters(), max_size=8), max_size=5).map("".join)
anything = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "video", "image_url", "x"])},
                              optional={"text": texts, "image": anything, "image_url": anything})  # fmt: skip
turns = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "x"])},
                              optional={"content": texts | st.lists(parts, max_size=3)})  # fmt: skip
images = st.sampled_from(["good.png", "cut.png", "bomb.png", "folder.png", "gone.png", "..", "/", "file:///", "data:,"])
image_cells = images | st.lists(images | anything, max_size=3) | st.dictionaries(
    st.sampled_from(["bytes", "path", "picture"]), images | anything, max_size=2)  # fmt: skip
video_names = st.sampled_from(["words.mp4", "good.png", "folder.png", "gone.mp4", "file://[", "http://x", "\x00"])
video_cells = video_names | st.lists(video_names | images | st.lists(images, max_size=3), max_size=3)
rows = st.fixed_dictionaries({}, optional={"problem": texts | st.lists(turns, max_size=3) | anything,
                                           "answer": anything, "images": image_cells | anything,
                                           "videos": video_cells | anything})  # fmt: skip


def raw_line(row: Any, cut: int) -> bytes:
    line = json.dumps(row).encode()
    return line[: len(line) - cut] if cut else line


@given(st.lists(st.tuples(rows | anything, st.sampled_from([0, 0, 0, 0, 1, 7])), min_size=50, max_size=50))
@settings(max_examples=20, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow,
                                 HealthCheck.large_base_example, HealthCheck.data_too_large])  # fmt: skip
def test_a_thousand_fuzzed_rows_crash_neither_checker_nor_loader(tmp_path_factory, setup_set, fuzzed):
    folder = tmp_path_factory.mktemp("fuzz")
    write_pictures(folder)
    good = [{"problem": f"good {i}", "answer": i} for i in range(4)]
    lines = [*(raw_line(row, cut) for row, cut in fuzzed), *(json.dumps(row).encode() for row in good)]
    (folder / "rows.jsonl").write_bytes(b"\n".join(lines))
    with ThreadPoolExecutor(2) as pool:
        checked = check_set("fuzz", str(folder / "rows.jsonl"), setup_set, pool)
    assert checked.rows is not None and len(checked.rows) >= 4
    config = dataclasses.replace(setup_set.data, on_bad_row="skip", rollout_batch_size=4)
    loader = Loader(str(folder / "rows.jsonl"), config, setup_set.renderer, shuffle=True, limit_images=2)
    assert loader.num_rows >= 4
    assert loader.skipped == len(checked.faults) and loader.dropped == len(checked.overlong)
    assert len(loader.prepare(range(loader.num_rows))) == loader.num_rows


def test_limits_of_zero_and_paths_that_cannot_be_written_are_not_passed_over(tmp_path, capsys):
    (tmp_path / "good.png").write_bytes(encode())
    rows = [{"problem": "<image> what?", "answer": "1", "images": ["good.png"]}, {"problem": "what?", "answer": "1"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert main([str(file)]) == 0
    assert main([str(file), "--limit-images", "0"]) == 1 and "too many images: row 0" in capsys.readouterr().out
    for words in (["--num-workers", "0"], ["--html", str(tmp_path / "none" / "page.html")]):
        with pytest.raises(SystemExit, match="2"):
            main([str(file), *words])
