"""The shared cases of logs: steps that rise, services that die, rows with pictures in them."""

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from r1.loggers import Logger
from r1.rollout.responses import sample_record
from tests.test_data_loader import make_loader
from tests.test_loggers import FakeService, config_of, lines
from tests.test_policy_packing import make_rollouts


@pytest.mark.parametrize("resumed", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("torn", [False, True])
def test_L01_validation_stays_at_its_step_and_steps_rise_whatever_is_resumed(
    tmp_path: Path, resumed: int, torn: bool
) -> None:
    def life(first: int, last: int, run: int) -> None:
        logger = Logger(config_of("file", "tensorboard"), tmp_path, resumed_step=first - 1)
        if first == 1:
            logger.log(0, {"val/geo3k/reward": 0.0, "run": run})
        for step in range(first, last + 1):
            validation = {"val/geo3k/reward": step / 10} if step % 5 == 0 else {}
            logger.log(step, {"reward/mean": step / 100, "run": run} | validation)
            logger.samples(step, "train", [{"response": f"{run}/{step}"}])
        logger.close()

    life(1, 5, 1)
    if torn:  # killed in the middle of a line
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "reward/me')
    life(resumed + 1, 10, 2)
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(11))
    assert [row["run"] for row in rows if row["step"]] == [1] * resumed + [2] * (10 - resumed)
    assert {row["step"]: row["val/geo3k/reward"] for row in rows if "val/geo3k/reward" in row} == {0: 0, 5: 0.5, 10: 1}
    assert [row["step"] for row in lines(tmp_path / "samples.jsonl")] == list(range(1, 11))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == list(range(1, 11))
    assert [event.step for event in events.Scalars("val/geo3k/reward")] == [0, 5, 10]


@pytest.mark.parametrize(
    ("name", "package", "call"),
    [("wandb", "wandb", "log"), ("swanlab", "swanlab", "log"), ("mlflow", "mlflow", "log_metrics")],
)
@pytest.mark.parametrize("when", [1, 2, 3])
def test_L02_a_service_that_raises_at_any_step_costs_only_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    capsys: Any,
    name: str,
    package: str,
    call: str,
    when: int,
) -> None:
    service = FakeService()
    monkeypatch.setitem(sys.modules, package, service)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking")
    logger = Logger(config_of(name, "console", "file"), tmp_path)
    for step in (1, 2, 3):
        service.fail = call if step == when else service.fail
        logger.log(step, {"x": 1.0})
    logger.close()
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert capsys.readouterr().out.count("step ") == 3
    assert len(caplog.messages) == 1 and f"logger {name} failed (ConnectionResetError" in caplog.text
    assert len(service.named(call)) == when  # not tried again


@pytest.mark.parametrize("form", ["data_url", "bytes", "base64", "text"])
def test_L04_a_row_with_its_picture_inside_leaves_none_of_it_in_the_log(tmp_path: Path, form: str) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((80, 60), 50).convert("RGB").save(buffer, "png")
    text = base64.b64encode(buffer.getvalue()).decode()
    url = f"data:image/png;base64,{text}"
    row: dict[str, Any] = {"problem": "<image>how many?", "answer": "4", "images": [url]}
    if form == "bytes":  # as parquet files of the hub have them, here through JSON
        row["images"] = [{"bytes": text, "path": None}]
    elif form == "base64":
        row["images"] = [text]
    elif form == "text":  # pasted into the question by mistake
        row |= {"problem": f"<image>how many? {url}", "answer": url}
    loader = make_loader(tmp_path / "data", [row], vision=True, rollout_batch_size=1, max_prompt_length=20_000)
    (prompt,) = loader.prepare([0])
    (rollout,) = make_rollouts({0: prompt}, {0: [3]})
    rollout.response = f"there are 4, see {url}"
    logger = Logger(config_of("file", "tensorboard"), tmp_path)
    logger.samples(1, "train", [sample_record(rollout, prompt)])
    logger.close()
    (record,) = lines(tmp_path / "samples.jsonl")
    assert "how many?" in record["prompt"] and "there are 4, see <image/png, " in record["response"]
    assert len(json.dumps(record)) < 2000
    for path in (tmp_path / "samples.jsonl", *(tmp_path / "tensorboard").iterdir()):
        assert text[:200].encode() not in path.read_bytes() and text[-200:].encode() not in path.read_bytes()
