"""Rows from every kind of local source, and messages for the broken ones."""

import json
import os
import subprocess
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
from PIL import Image

from r1.data.faults import RowError
from r1.data.rows import load_parts, load_rows
from r1.data.sources import data_dir, parse_source, set_name


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def lines(*rows: object) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def test_D14_mixed_types_in_a_json_column_load(tmp_path):
    answers = [5, "5", "x=5", 2.5, [1, 2], None]
    rows = load_rows(write(tmp_path / "a.jsonl", lines(*({"problem": "p", "answer": a} for a in answers))))
    assert len(rows) == 6
    assert [rows[i]["answer"] for i in range(6)] == answers
    assert rows.column_names == ["problem", "answer"]


def test_a_missing_key_is_none_and_columns_are_the_union(tmp_path):
    rows = load_rows(write(tmp_path / "a.jsonl", lines({"p": 1}, {"q": 2})))
    assert rows.column_names == ["p", "q"]
    assert rows[0] == {"p": 1, "q": None}


@pytest.mark.parametrize(
    "text",
    [
        '[{"p": "a"}, {"p": "b\\u2028c"}]',
        '{"data": [{"p": "a"}, {"p": "b\\u2028c"}]}',
        '\ufeff{"p": "a"}\n\n{"p": "b\u2028c"}\n',
    ],
    ids=["list", "object with a list", "lines under the name json, BOM, blank line"],
)
def test_layouts_of_json(tmp_path, text):
    rows = load_rows(write(tmp_path / "a.json", text))
    assert [rows[i]["p"] for i in range(len(rows))] == ["a", "b\u2028c"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '[{"p": 1},\n {"p" 2}]', r"a\.json line 2 is not JSON"),
        ("a.json", "[1]", r"a\.json has no row that can be read; its first is a int"),
        ("a.jsonl", "1\n2", r"its first \(line 1 of its file\) is a int"),
        ("a.json", "3", r"a\.json holds a int"),
        ("a.jsonl", " \n", r"a\.jsonl is empty"),
        ("a.json", "[]", "has no rows"),
        ("a.csv", "p\n1", r"a\.csv is not a \.json"),
        ("a.parquet", "hello", r"a\.parquet is not a readable parquet file"),
        ("a.arrow", "hello", r"cannot read .*a\.arrow"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        load_rows(write(tmp_path / name, text))


def test_file_that_is_not_utf8_or_not_there(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"p": "\xff"}')
    with pytest.raises(ValueError, match="not UTF-8 at byte 7 of the line"):
        load_rows(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"no file or folder .*nothing\.jsonl"):
        load_rows(str(tmp_path / "nothing.jsonl@train"))
    with pytest.raises(ValueError, match="empty"):
        load_rows("")


def test_parquet_and_arrow_keep_images_encoded(tmp_path):
    features = datasets.Features(
        {"problem": datasets.Value("string"), "images": datasets.List(datasets.Image()), "one": datasets.Image()}
    )
    image = Image.new("RGB", (8, 6), (1, 2, 3))
    table = datasets.Dataset.from_list([{"problem": "<image>", "images": [image], "one": image}], features=features)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for source in (tmp_path / "a.parquet", tmp_path / "saved", arrow):
        row = load_rows(str(source))[0]
        assert row["problem"] == "<image>"
        assert row["images"][0]["bytes"].startswith(b"\x89PNG")
        assert row["one"]["bytes"].startswith(b"\x89PNG")


def test_saved_dict_picks_the_split(tmp_path):
    split = {name: datasets.Dataset.from_list([{"p": name}]) for name in ("train", "test")}
    datasets.DatasetDict(split).save_to_disk(tmp_path / "saved")
    assert load_rows(f"{tmp_path}/saved@test")[0] == {"p": "test"}
    assert load_rows(f"{tmp_path}/saved")[0] == {"p": "train"}
    with pytest.raises(ValueError, match="no split 'val'; it has train, test"):
        load_rows(f"{tmp_path}/saved@val")


def test_folder_of_files_picks_the_split_by_name(tmp_path):
    write(tmp_path / "data" / "train-00000-of-00002.jsonl", lines({"p": 0}))
    write(tmp_path / "data" / "train-00001-of-00002.jsonl", lines({"p": 1}))
    write(tmp_path / "data" / "test.jsonl", lines({"p": 2}))
    train = load_rows(str(tmp_path))
    assert [train[i]["p"] for i in range(len(train))] == [0, 1]
    assert load_rows(f"{tmp_path}@test")[0]["p"] == 2
    with pytest.raises(ValueError, match="no file of split 'dev'; its file names say test, train"):
        load_rows(f"{tmp_path}@dev")


def test_folder_faults(tmp_path):
    with pytest.raises(ValueError, match="holds no"):
        load_rows(str(tmp_path))
    write(tmp_path / "a.jsonl", lines({"p": 0}))
    datasets.Dataset.from_list([{"p": 1}]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="mixes"):
        load_rows(str(tmp_path))


def test_split_of_a_file_and_slices(tmp_path):
    path = write(tmp_path / "rows.jsonl", lines(*({"p": i} for i in range(10))))
    taken = {"@train": 10, "@train[:3]": 3, "@train[-4:]": 4, "@train[:50%]": 5, "@train[2:5]": 3}
    assert {split: len(load_rows(path + split)) for split in taken} == taken
    assert load_rows(path + "@train[2:5]")[0] == {"p": 2}
    with pytest.raises(ValueError, match="is one split"):
        load_rows(path + "@test")
    with pytest.raises(ValueError, match="not understood"):
        load_rows(path + "@train[3]")
    with pytest.raises(ValueError, match="has no rows"):
        load_rows(path + "@train[10:]")


def test_a_path_with_at_or_equals_sign_that_exists_is_taken_whole(tmp_path):
    path = write(tmp_path / "me@home" / "lr=1@test.jsonl", lines({"p": 0}))
    assert len(load_rows(path)) == len(load_rows(path + "@test")) == len(load_rows("mine=" + path)) == 1
    assert data_dir("mine=" + path + "@test") == tmp_path / "me@home"


def test_names_and_folders_of_sets(tmp_path):
    path = write(tmp_path / "val.v2.jsonl", lines({"p": 0}))
    assert set_name("hiyouga/geometry3k@test") == "geometry3k"
    assert set_name("geo3k=hiyouga/geometry3k@test") == "geo3k"
    assert set_name(path) == "val.v2"
    assert set_name(str(tmp_path)) == tmp_path.name
    assert data_dir("hiyouga/geometry3k@test") is None
    assert data_dir(path) == data_dir(str(tmp_path)) == tmp_path


def test_a_broken_line_costs_its_row_only(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"p": 1}\n{"p": \n\n[1]\n{"p": "\xff"}\n' + b"[" * 5000 + b'\n{"p": 2}')
    rows = load_rows(str(path))
    assert len(rows) == 6 and rows[0] == {"p": 1} and rows[5] == {"p": 2}
    for i, (kind, text) in enumerate(
        [
            ("line is not JSON", r"\(line 2 of its file\) is not JSON \(Expecting value.*; mend or delete the line"),
            ("row is not an object", r"\(line 4 of its file\) is a list; write an object"),
            ("line is not UTF-8", r"\(line 5 of its file\) is not UTF-8 at byte 7 of the line"),
            ("line is not JSON", r"\(line 6 of its file\) "),
        ],
        start=1,
    ):
        with pytest.raises(RowError, match=text) as caught:
            rows[i]
        assert caught.value.kind == kind
    mixed = load_rows(write(tmp_path / "b.json", '[{"p": 1}, 5]'))
    with pytest.raises(RowError, match="is a int; write an object"):
        mixed[1]


def test_globs_give_one_part_a_file(tmp_path):
    write(tmp_path / "a" / "train.jsonl", lines({"p": 0}, {"p": 1}))
    write(tmp_path / "b" / "train.json", lines({"p": 2}))
    write(tmp_path / "b" / "test.json", lines({"p": 3}))
    (tmp_path / "c").mkdir()
    datasets.Dataset.from_list([{"p": 4}, {"p": 5}]).to_parquet(tmp_path / "c" / "train.parquet")
    write(tmp_path / "b" / "notes.txt", "none of ours")

    def read(source: str) -> list[list[int]]:
        return [[part.rows[i]["p"] for i in range(len(part.rows))] for part in load_parts(str(tmp_path) + source)]

    assert read("/*/train.*") == read("/[abc]/*.*@train") == [[0, 1], [2], [4, 5]]
    assert read("/*/train.*@train[1:4]") == [[1], [2], [4]]
    assert read("/*/t*.json*@test") == [[3]]
    assert [part.name for part in load_parts(f"{tmp_path}/*/train.*")] == ["a/train", "b/train", "c/train"]
    assert [part.folder for part in load_parts(f"{tmp_path}/*/*.jsonl")] == [tmp_path / "a"]
    assert set_name(f"{tmp_path}/a/*.jsonl") == "a" and set_name(f"mine={tmp_path}/*/*.jsonl") == "mine"
    with pytest.raises(ValueError, match=r"none/\*\.json matches no .json"):
        load_parts(f"{tmp_path}/none/*.json")


def test_a_weight_is_the_last_word_of_a_source(tmp_path):
    path = write(tmp_path / "a.jsonl", lines({"p": 0}))
    weights = {path: None, path + "*2": 2.0, f"x={path}@train[:1]*.5": 0.5, "owner/set@a*0.25": 0.25}
    assert {source: parse_source(source).weight for source in weights} == weights
    starred = write(tmp_path / "part*3", "{}")
    assert parse_source(starred).weight is None
    with pytest.raises(ValueError, match="has the weight 0"):
        parse_source(path + "*0")


def test_modelscope_is_asked_where_the_environment_says_so(monkeypatch):
    class MsDataset:
        @staticmethod
        def load(name: str, split: str) -> "MsDataset":
            if name == "no/one":
                raise ValueError("not found")
            assert (name, split) == ("owner/set", "test")
            return MsDataset()

        def to_hf_dataset(self) -> datasets.Dataset:
            return datasets.Dataset.from_list([{"p": i} for i in range(4)])

    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ValueError, match=r"client is not installed .* pip install modelscope"):
        load_rows("owner/set@test")
    module = types.ModuleType("modelscope.msdatasets")
    module.MsDataset = MsDataset
    monkeypatch.setitem(sys.modules, "modelscope", types.ModuleType("modelscope"))
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", module)
    assert len(load_rows("owner/set@test[:3]")) == 3
    with pytest.raises(ValueError, match="no/one@train could not be loaded from ModelScope: not found"):
        load_rows("no/one")


def test_hf_endpoint_is_where_hub_ids_are_asked_for(tmp_path):
    asked: list[str] = []

    class Mirror(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    program = "from r1.data.rows import load_rows\nload_rows('someone/some_rows')"
    root = Path(__file__).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True, timeout=100
    )
    server.shutdown()
    server.server_close()
    assert any("someone/some_rows" in path for path in asked)
    assert "ValueError: someone/some_rows@train is no local path and could not be loaded" in result.stderr


def test_unreachable_hub_id_is_one_message(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"someone/rows@train is no local path .* no route; check the name"):
        load_rows("someone/rows")


def test_a_subset_of_a_hub_id_follows_a_colon(monkeypatch):
    asked = []

    def load(*args: object, **kwargs: object) -> datasets.Dataset:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list([{"p": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    load_rows("openai/gsm8k:main@test")
    load_rows("owner/rows")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"}), (("owner/rows", None), {"split": "train"})]
    assert set_name("openai/gsm8k:main@test") == "gsm8k"


def test_files_joined_end_to_end_keep_no_byte_order_mark(tmp_path):
    rows = load_rows(write(tmp_path / "a.jsonl", '\ufeff{"p": 1}\r\n\ufeff{"p": 2}\r\n'))
    assert [rows[i]["p"] for i in range(len(rows))] == [1, 2]
