"""The report reads whole and half-written run folders, stays light for long runs, and holds model texts as data."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from r1.config import Config, TrainerConfig, config_to_json
from r1.loggers import Logger
from r1.report.__main__ import main, output_of
from r1.report.charts import sections
from r1.report.page import as_script_data, page_data
from r1.report.read import read_run, shorten
from r1.report.samples import Place, cut, ranked, samples, thin
from tests.shell import ROOT, run

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--<script>"


def make_run(folder: Path, *, num_steps: int = 12, shift: float = 0.0, lr: float = 1e-6, pictures: bool = True) -> Path:
    """A run folder as the loggers write it: every third sample has a picture, one response is an attack."""
    config = Config(trainer=TrainerConfig(loggers=("file",), max_steps=num_steps))
    logger = Logger(config, folder, num_steps=num_steps, resumed_step=0)
    (folder / "config.json").write_text(config_to_json(config))
    logger.log(
        0, {"val/held/accuracy": 0.25, "val/other/accuracy": 0.5, "val/held/pass@1": 0.2, "val/held/pass@2": 0.3}
    )
    for step in range(1, num_steps + 1):
        reward = shift + 1 - math.exp(-step / 5)
        logger.log(
            step,
            {
                "reward/mean": reward, "reward/accuracy": reward, "reward/failed_frac": 0.0,
                "reward/zero_std_frac": 0.1,
                "response/length_mean": 300.0 + step, "response/clip_frac": 0.0, "policy/entropy": 0.4,
                "policy/lr": lr, "mismatch/abs_mean": 1e-3 / step, "policy/grad_norm": 1.0 + step % 3,
                "time/rollout_s": 2.0 + step // 7, "time/update_s": 3.0, "time/step_s": 6.0 + step // 7,
                "perf/tokens_per_s_per_gpu": 5e3,
                "mem/peak_gib": 40.0, "mine/own_figure": float(step),
            }
            | ({"val/held/accuracy": min(1.0, 0.25 + step / 16)} if step % 4 == 0 else {}),
        )  # fmt: skip
        logger.samples(step, "train", [sample(step, i, num_steps, pictures=pictures) for i in range(4)])
    logger.close()
    return folder


def sample(step: int, i: int, num_steps: int, *, pictures: bool) -> dict[str, Any]:
    last = step == num_steps and i == 0
    image = Image.new("RGB", (64, 48), (20 * i, (step * 40) % 256, 90))
    return {
        "row": step * 10 + i, "sample": i, "prompt": f"<image>How many in picture {step}?",
        "response": EVIL if last else f"response {i} of step {step}\nzażółć \ud83d" + " word" * 200,
        "ground_truth": str(i), "rewards": None if i == 3 else {"overall": i / 2, "format": 1.0},
        "response_length": 200 + i, "truncated": i == 1,
    } | ({"images": [image]} if pictures and i % 3 == 0 else {})  # fmt: skip


class Parts(HTMLParser):
    """Elements of a page, and the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


def test_a_finished_run_has_its_page_which_needs_nothing_else(tmp_path: Path) -> None:
    text = (make_run(tmp_path / "one") / "report.html").read_text()
    parts = Parts()
    parts.feed(text)
    assert [tag for tag, _ in parts.tags].count("script") == 2, "a model's text opened a script of its own"
    data = json.loads(parts.scripts[0])
    assert EVIL in data["samples"]["texts"]
    assert not [a for tag, attrs in parts.tags for a in ("src", "href") if tag != "link" and attrs.get(a)]
    assert "http://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text) and "https://" not in text
    policy = next(attrs["content"] for _, attrs in parts.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'")


def test_no_metric_is_lost_and_each_is_drawn_once(tmp_path: Path) -> None:
    one = read_run(make_run(tmp_path / "one"))
    curves = [c["name"] for s in sections([one]) for chart in s["charts"] + s["flat"] for c in chart["curves"]]
    assert sorted(curves) == sorted([*one.keys, "other"])
    found = {c["title"]: c for s in sections([one]) for c in s["charts"] + s["flat"]}
    assert [c["name"] for c in found["accuracy"]["curves"]] == ["val/held/accuracy", "val/other/accuracy"]
    assert [c["name"] for c in found["pass@k"]["curves"]] == ["val/held/pass@1", "val/held/pass@2"]
    # The first step took 6 s, of which 2 and 3 are rollout and update.
    stack = found["Time of a step by phase"]["curves"]
    assert [(c["name"], c["y"][0]) for c in stack] == [("time/rollout_s", 2), ("time/update_s", 3), ("other", 1)]


def test_a_run_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", num_steps=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 4, "kind": "tra')
    (folder / "config.json").write_text("")
    one = read_run(folder)
    assert one.step == 3 and one.config == {} and len(samples([one])["rows"]) == 12


def test_a_folder_without_a_run_is_an_error_that_says_what_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl; give a run folder" in capsys.readouterr().err


def test_long_curves_become_means_with_their_extremes() -> None:
    short = shorten([float(i) for i in range(1000)], [float(i % 10) for i in range(1000)], points=100)
    assert short["x"][:2] == [4.5, 14.5]
    assert set(short["y"]) == {4.5} and set(short["low"]) == {0} and set(short["high"]) == {9}
    assert shorten([1.0, 2.0], [0.123456789, 5.0]) == {"x": [1, 2], "y": [0.12346, 5]}


def test_ten_thousand_steps_make_a_light_page(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    keys = [f"policy/figure_{i}" for i in range(40)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(10_000):
            file.write(
                json.dumps(
                    {"step": step, "time/step_s": 1.5} | {k: math.sin(step / 50 + i) for i, k in enumerate(keys)}
                )
                + "\n"
            )
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(10_000):
            for i in range(4):
                record = {
                    "step": step,
                    "kind": "train",
                    "prompt": f"p{step}",
                    "response": "word " * 60,
                    "rewards": {"overall": i},
                }
                file.write(json.dumps(record) + "\n")
    data = page_data([read_run(folder)])
    assert len(as_script_data(data)) < 1_200_000
    shown = data["samples"]
    assert shown["total"] == 40_000 and len(shown["rows"]) == 1200
    steps = [row["step"] for row in shown["rows"]]
    assert steps[0] == 0 and steps[-1] == 9999
    assert {row["rank"] for row in shown["rows"]} == {"best", "worst"}


def places(rewards: dict[int, list[float | None]]) -> list[Place]:
    return ranked(Place(100 * step + i, "train", step, r, "") for step, rs in rewards.items() for i, r in enumerate(rs))


def test_best_and_worst_are_of_their_step() -> None:
    marked = places({1: [0.5, 1.0, 0.0, None], 2: [1.0, 1.0]})
    assert [(p.step, p.reward, p.rank) for p in marked] == [
        (1, 0.5, ""), (1, 1.0, "best"), (1, 0.0, "worst"), (1, None, ""), (2, 1.0, ""), (2, 1.0, ""),
    ]  # fmt: skip
    kept = thin(marked, 4)
    assert [(p.step, p.reward) for p in kept] == [(1, 1.0), (1, 0.0), (2, 1.0)]
    assert len(thin(marked, 6)) == 6


def test_a_long_text_keeps_both_ends() -> None:
    short = cut("a" * 600 + "b" * 600, 100)
    assert short.startswith("a" * 50 + "\n[… 1,100 characters left out") and short.endswith("\n" + "b" * 50)


def test_pictures_are_inside_once_and_missing_ones_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    shown = samples([read_run(folder)])
    files = sorted(path.stem for path in (folder / "images").iterdir())
    assert sorted(shown["pictures"]) == files and len(files) == 24  # two a step
    assert all(url.startswith("data:image/jpeg;base64,") for url in shown["pictures"].values())
    (folder / "images" / f"{files[0]}.jpg").unlink()
    again = samples([read_run(folder)])
    assert files[0] not in again["pictures"] and any(files[0] in row["images"] for row in again["rows"])


def test_a_record_cannot_name_files_outside_of_the_pictures(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", num_steps=1, pictures=False)
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    with (folder / "samples.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 1, "kind": "train", "images": ["../secret.jpg", str(tmp_path / "secret.jpg")]}) + "\n"
        )
    assert samples([read_run(folder)])["pictures"] == {}


def test_runs_side_by_side_share_charts_and_tell_what_differs(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", num_steps=6, shift=-0.2)
    data = page_data([read_run(a), read_run(b)])
    reward = next(c for s in data["sections"] for c in s["charts"] if c["title"] == "Reward")
    assert [(c["run"], c["name"]) for c in reward["curves"][:2]] == [(0, "reward/mean"), (1, "reward/mean")]
    assert [row["name"] for row in data["settings"] if row["differs"]] == ["trainer.max_steps"]
    assert {row["run"] for row in data["samples"]["rows"]} == {0, 1}
    assert output_of([a, b]) == tmp_path / "report.html" and output_of([a]) == a / "report.html"


def test_settings_that_are_not_the_default_are_marked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    (folder / "config.json").write_text('{"optim": {"lr": 0.5}, "rollout": {"n": 5}, "gone": {"key": 1}}')
    changed = {row["name"]: row["changed"] for row in page_data([read_run(folder)])["settings"]}
    assert changed == {"optim.lr": True, "rollout.n": False, "gone.key": True}


def test_the_command_writes_a_page_and_follows_a_run_to_its_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    (folder / "config.json").write_text('{"trainer": {"max_steps": 12}}')
    tool = [sys.executable, str(ROOT / "tools" / "report.py"), str(folder), "--output", str(tmp_path / "page.html")]
    done = run([*tool, "--watch", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("one: step 12 of 12") == 1
    assert '"refresh_s":null' in (tmp_path / "page.html").read_text(), (
        "a finished run's page need not load itself again"
    )
    assert run([*tool, "--watch", "0"], tmp_path).stderr.startswith("error: --watch takes whole seconds")
