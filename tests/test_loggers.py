"""Logs are complete, readable and monotone, hold no pictures, and never end a run."""

import base64
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from r1.config import Config, TrainerConfig
from r1.loggers import Logger, check_installed, plain
from r1.loggers_files import Pictures


def config_of(*names: str) -> Config:
    return Config(trainer=TrainerConfig(loggers=names, project_name="geo", experiment_name="one"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class FakeService(types.ModuleType):
    """Stands in for a package: notes every call; `fail` names the one that raises."""

    def __init__(self, fail: str = "") -> None:
        super().__init__("fake")
        self.calls: list[tuple[str, tuple, dict]] = []
        self.fail = fail

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> "FakeService":
            self.calls.append((name, args, kwargs))
            if name == self.fail:
                raise ConnectionResetError("the service is gone")
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple, dict]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


def test_console_line_reads_like_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = Logger(config_of("console"), tmp_path, num_steps=100)
    metrics = {"reward/mean": 0.41249, "response/length_mean": 361.2, "loss/kl": 0.0012, "time/step_s": 30.0}
    logger.log(10, metrics | {"val/geo3k/accuracy": 0.5125, "perf/mfu": 0.4})
    logger.log(11, {"time/step_s": 60.0})
    first, second = capsys.readouterr().out.splitlines()
    # 90 steps of 30 s are 45 minutes; 89 of (30 + 60) / 2 s are 4,005 s.
    assert first == (
        "step 10/100  reward 0.412  length 361  kl 1.20e-03  seconds 30.0  val/geo3k/accuracy 0.5125  left 0:45:00"
    )
    assert second == "step 11/100  seconds 60.0  left 1:06:45"


def test_files_take_what_is_not_finite_as_null(tmp_path: Path) -> None:
    logger = Logger(config_of("file"), tmp_path)
    logger.log(1, {"reward/mean": 0.5, "policy/grad_norm": math.nan, "loss/kl": math.inf})
    logger.samples(1, "train", [{"prompt": "é", "rewards": {"overall": math.nan}, "n": 3}])
    logger.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.5, "policy/grad_norm": None, "loss/kl": None}
    ]
    assert lines(tmp_path / "samples.jsonl") == [
        {"step": 1, "kind": "train", "prompt": "é", "rewards": {"overall": None}, "n": 3}
    ]


def test_L04_pictures_are_stubs_and_text_is_whole(tmp_path: Path) -> None:
    pixels = base64.b64encode(bytes(range(256)) * 8).decode()
    assert plain(f"see data:image/png;base64,{pixels} here") == "see <image/png, 2,732 characters of base64> here"
    assert plain(pixels) == "<AAECAwQFBgcICQoL... 2,732 characters>"
    assert plain([b"1234", Image.new("RGB", (6, 4))]) == ["<4 bytes>", "<image 6x4>"]
    response = "The answer is \\boxed{4}. " * 200
    assert plain({"response": response}) == {"response": response}


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (4, 5)):
        logger = Logger(config_of("file"), tmp_path)
        for step in steps:
            logger.log(step, {"x": float(step)})
        logger.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_L01_steps_done_again_after_a_kill_stay_monotone_and_nothing_is_lost(tmp_path: Path) -> None:
    logger = Logger(config_of("file"), tmp_path, resumed_step=0)
    for step in range(5):
        logger.log(step, {"x": 0.0})
        logger.samples(step, "train", [{"response": "old"}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')  # killed while writing
    logger = Logger(config_of("file"), tmp_path, resumed_step=2)
    logger.log(3, {"x": 1.0})
    kept = lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["x"]) for line in kept] == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 1.0)]
    aside = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert aside == ['{"step": 3, "x": 0.0}', '{"step": 4, "x": 0.0}', '{"step": 5, "x"']
    assert [line["step"] for line in lines(tmp_path / "samples.jsonl")] == [0, 1, 2]
    Logger(config_of("file"), tmp_path, resumed_step=0)  # the folder is used for a new run
    assert lines(tmp_path / "metrics.jsonl") == []
    assert len((tmp_path / "metrics.superseded.jsonl").read_text().splitlines()) == 7


def test_L01_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    for resumed, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        logger = Logger(config_of("tensorboard"), tmp_path, resumed_step=resumed)
        for step in steps:
            logger.log(step, {"reward/mean": step + 10.0 * resumed, "bad": math.nan})
        logger.samples(steps[-1], "train", [{"response": "hi"}])
        logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1), (2, 2), (3, 23), (4, 24), (5, 25)]
    assert events.Tags()["scalars"] == ["reward/mean"]


def test_L02_a_dead_backend_warns_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = FakeService(fail="log")
    monkeypatch.setitem(sys.modules, "wandb", service)
    logger = Logger(config_of("wandb", "file"), tmp_path)
    for step in (1, 2, 3):
        logger.log(step, {"x": 1.0})
    logger.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert caplog.messages == [
        "logger wandb failed (ConnectionResetError: the service is gone); it is off for the rest of this run"
    ]
    assert len(service.named("log")) == 1


def test_L02_a_backend_that_cannot_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", FakeService(fail="init"))
    logger = Logger(config_of("swanlab", "file"), tmp_path)
    logger.log(1, {"x": 1.0})
    assert "logger swanlab failed" in caplog.text and len(lines(tmp_path / "metrics.jsonl")) == 1


def test_L02_a_full_disk_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = Logger(config_of("file"), tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()  # stands for any reason not to be able to write
    logger.log(1, {"x": 1.0})
    logger.log(2, {"x": 1.0})
    (tmp_path / "metrics.jsonl").rmdir()
    logger.log(3, {"x": 1.0})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [3]
    assert len(caplog.messages) == 1 and "tried again at each step" in caplog.text


def test_a_package_that_is_not_installed_is_an_error_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("swanlab", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"names 'swanlab', which cannot be imported .* pip install swanlab"):
        Logger(config_of("console", "swanlab"), tmp_path)
    with pytest.raises(ValueError, match="pip install mlflow-skinny"):
        check_installed(["mlflow"])
    check_installed(["console", "file", "tensorboard"])


def test_L01_wandb_keeps_its_page_and_our_steps_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    monkeypatch.setitem(sys.modules, "wandb", service)
    for resumed, step in ((0, 1), (1, 2), (0, 1)):
        logger = Logger(config_of("wandb"), tmp_path, resumed_step=resumed)
        logger.log(step, {"x": 1.0, "bad": math.nan})
        logger.samples(step, "train", [{"prompt": "p", "reward": 1.0}])
        logger.close()
    starts = [kwargs for _, kwargs in service.named("init")]
    assert starts[0]["id"] == starts[1]["id"] != starts[2]["id"]
    assert (starts[0]["project"], starts[0]["name"]) == ("geo", "one")
    assert service.named("log")[0] == (({"step": 1, "x": 1.0},), {})  # no step= of wandb's own, which drops rows
    assert service.named("Table")[0] == ((), {"columns": ["prompt", "reward"], "data": [["p", "1.0"]]})
    assert len(service.named("finish")) == 3


def test_swanlab_and_mlflow_get_finite_metrics_at_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swanlab, mlflow = FakeService(), FakeService()
    monkeypatch.setitem(sys.modules, "swanlab", swanlab)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking")
    logger = Logger(config_of("swanlab", "mlflow"), tmp_path)
    logger.log(7, {"x": 1.0, "bad": math.inf})
    logger.samples(7, "val/geo3k", [{"prompt": "p"}])
    logger.close()
    assert swanlab.named("log")[0] == (({"x": 1.0},), {"step": 7})
    assert swanlab.named("log")[1][0][0].keys() == {"samples/val/geo3k"}
    assert mlflow.named("log_metrics") == [(({"x": 1.0},), {"step": 7})]
    assert mlflow.named("log_params")[0][0][0]["optim.lr"] == "1e-06"
    assert not mlflow.named("set_tracking_uri") and len(mlflow.named("end_run")) == 1
    assert caplog.messages == []


def test_L04_pictures_are_small_files_and_stubs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    monkeypatch.setitem(sys.modules, "wandb", service)
    logger = Logger(config_of("file", "wandb"), tmp_path)
    record = {"prompt": "p", "images": [Image.new("RGBA", (3000, 1500), "red")] * 2 + [Image.new("L", (40, 30))]}
    logger.samples(1, "train", [record, record])
    first, second = lines(tmp_path / "samples.jsonl")
    assert first["images"] == second["images"] and first["images"][0] == first["images"][1]
    kept = sorted(path.relative_to(tmp_path).as_posix() for path in (tmp_path / "images").iterdir())
    assert sorted(set(first["images"])) == kept and len(kept) == 2
    sizes = [Image.open(tmp_path / name).size for name in first["images"]]
    assert sizes == [(320, 160), (320, 160), (40, 30)]
    assert service.named("Table")[0][1]["data"][0][1] == "['<image 3000x1500>', '<image 3000x1500>', '<image 40x30>']"
    assert len((tmp_path / "samples.jsonl").read_text()) < 500


def test_pictures_of_a_long_run_are_bounded_and_the_latest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r1.loggers_files.MAX_PICTURES", 3)
    pictures = Pictures(tmp_path)
    names = [pictures.save([Image.new("RGB", (8, 8), (60 * i, 0, 0))])[0] for i in range(3)]
    assert pictures.save([Image.new("RGB", (8, 8), (0, 0, 0))]) == [names[0]]  # seen again: it is the latest now
    newest = Pictures(tmp_path).save([Image.new("RGB", (8, 8), (240, 0, 0))])[0]  # after a resume
    kept = {f"images/{path.name}" for path in (tmp_path / "images").iterdir()}
    assert kept == {names[0], names[2], newest}
    many = pictures.save([Image.new("RGB", (8, 8))] * 10)
    assert many[8:] == ["<image 8x8>"] * 2


def test_a_response_may_hold_any_character(tmp_path: Path) -> None:
    texts = ["half \ud83d", "line\u2028separator\x85and\x0b", "nul \x00"]
    logger = Logger(config_of("file"), tmp_path, resumed_step=0)
    logger.log(1, {"x": 1.0})
    logger.samples(1, "train", [{"response": text} for text in texts])
    Logger(config_of("file"), tmp_path, resumed_step=1)
    kept = (tmp_path / "samples.jsonl").read_text().removesuffix("\n").split("\n")
    assert [json.loads(line)["response"] for line in kept] == texts
    assert not (tmp_path / "samples.superseded.jsonl").exists()


def test_the_end_of_a_run_leaves_its_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = Logger(config_of("file"), tmp_path)
    logger.log(1, {"reward/mean": 0.5})
    logger.close()
    assert "reward/mean" in (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()  # stands for any reason not to be able to write it
    logger = Logger(config_of("file"), tmp_path)
    logger.close()
    assert "logger report failed" in caplog.text
