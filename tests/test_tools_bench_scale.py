"""tools/bench.py scale: the order of its runs, the table's arithmetic, its budget, and going on after a cut call."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import bench_scale, bench_step
from tools.bench import main, parse
from tools.bench_scale import plan
from tools.bench_work import Work

STEP = {"step": 1.0, "time/update_s": 3.0, "time/step_s": 8.0, "engine/generate_s": 4.0, "response/length_mean": 10.0}
SPEEDS = {(1, 1): 4000.0, (2, 1): 3800.0, (2, 2): 3000.0}  # of (ranks, ranks of an engine)
WORDS = "scale --model tiny --prompts 4 --n 2 --response-tokens 8 --prompt-tokens 40 --steps 2".split()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(ranks, ranks of an engine) of the trainers that were started; none really is."""
    runs: list[tuple[int, int]] = []

    def trainer(config: Path, work: Work, overrides: Sequence[str], **_: Any) -> list[dict[str, float]]:
        runs.append((work.nproc, int(overrides[overrides.index("--rollout.tensor_parallel_size") + 1])))
        if "--trainer.seed" in overrides and work.nproc == 2:
            raise RuntimeError("NCCL said no\nthe trainer ended after 0 of 2 steps")
        return [STEP | {"perf/tokens_per_s_per_gpu": SPEEDS[runs[-1]]}] * work.steps

    monkeypatch.setattr(bench_scale, "run_trainer", trainer)
    monkeypatch.setattr(bench_scale.torch.cuda, "device_count", lambda: 0)
    return runs


def rows(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| tiny")]


def test_each_gpu_does_the_same_work_and_scaling_is_to_one(
    started: list[tuple[int, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*WORDS, "--output", str(tmp_path)])
    assert started == [(1, 1), (2, 1), (2, 2)]
    works = [r["work"] for r in json.loads((tmp_path / "scale.json").read_text())["results"]]
    assert [(w["nproc"], w["prompts"]) for w in works] == [(1, 4), (2, 8), (2, 8)]
    found = rows((tmp_path / "scale.md").read_text())
    assert [row[2:6] for row in found] == [
        ["1", "1", "1.00", "4,000"],
        ["2", "1", "0.95", "3,800"],
        ["2", "2", "0.75", "3,000"],
    ]
    assert (tmp_path / "scale.md").read_text().strip() in capsys.readouterr().out
    main([*WORDS, "--output", str(tmp_path)])
    assert len(started) == 3  # all there already


def test_a_budget_leaves_out_what_does_not_fit_and_a_later_call_runs_it(
    started: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_scale.Report, "seconds_of", lambda self, batch: 100.0 * len(self._results))
    main([*WORDS, "--output", str(tmp_path), "--budget-s", "90"])
    assert started == [(1, 1)]
    assert "left out, as --budget-s does not hold them: tiny-float32-2-tp1, tiny-float32-2-tp2" in (
        tmp_path / "scale.md"
    ).read_text()  # fmt: skip
    main([*WORDS, "--output", str(tmp_path)])
    assert started == [(1, 1), (2, 1), (2, 2)]
    assert "left out" not in (tmp_path / "scale.md").read_text()


def test_a_run_that_fails_costs_its_row(started: list[tuple[int, int]], tmp_path: Path) -> None:
    main([*WORDS, "--output", str(tmp_path), "--trainer.seed", "3"])
    text = (tmp_path / "scale.md").read_text()
    assert started == [(1, 1), (2, 1), (2, 2)] and len(rows(text)) == 1
    assert "failed: tiny-float32-2-tp1: the trainer ended after 0 of 2 steps" in text
    assert "NCCL said no" in json.loads((tmp_path / "scale.json").read_text())["failed"]["tiny-float32-2-tp1"]


def test_several_models_run_alone_side_by_side_first() -> None:
    options, _ = parse(["scale", "--model", "qwen2.5-3b,qwen2.5-7b:bf16,qwen2.5-vl-3b", "--nproc", "4"])
    names = [[r.name for r in batch] for batch in plan(options, 4)]
    assert names[0] == ["qwen2.5-3b-amp-1-tp1", "qwen2.5-7b-bf16-1-tp1", "qwen2.5-vl-3b-amp-1-tp1"]
    assert [batch[0] for batch in names[1:5]] == [
        "qwen2.5-3b-amp-4-tp1", "qwen2.5-7b-bf16-4-tp1", "qwen2.5-vl-3b-amp-4-tp1", "qwen2.5-3b-amp-4-tp2",
    ]  # fmt: skip
    assert [batch[0] for batch in names[7:]] == [
        "qwen2.5-3b-amp-2-tp1", "qwen2.5-7b-bf16-2-tp1", "qwen2.5-vl-3b-amp-2-tp1",
    ]  # fmt: skip
    options, _ = parse(["scale", "--model", "qwen2.5-3b,qwen2.5-7b:bf16,qwen2.5-vl-3b"])
    assert [
        [(r.work.model[8:], r.work.nproc, r.tensor_parallel_size) for r in batch] for batch in plan(options, 2)
    ] == [
        [("3b", 1, 1), ("7b", 1, 1)],
        [("3b", 2, 1)],
        [("7b", 2, 1)],
        [("3b", 2, 2)],
        [("vl-3b", 1, 1)],
        [("vl-3b", 2, 1)],
        [("7b", 2, 2)],
        [("vl-3b", 2, 2)],
    ]


@pytest.mark.parametrize("done", [1, 2])
def test_a_run_out_of_time_counts_the_steps_it_has_done(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(program: Sequence[str], nproc: int, log: Path, **_: Any) -> subprocess.Popen[bytes]:
        log.write_text("at work\n")
        (tmp_path / "run").mkdir()
        rows = [json.dumps(STEP | {"step": i + 1}) + "\n" for i in range(done)]
        (tmp_path / "run" / "metrics.jsonl").write_text("".join(rows))
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(bench_step, "start", start)
    options, _ = parse([*WORDS, "--steps", "3"])
    work, until = plan(options, 1)[0][0].work, time.monotonic() + 0.5
    if done == 2:
        assert len(bench_step.run_trainer(tmp_path / "config.py", work, [], until=until)) == 2
    else:
        with pytest.raises(RuntimeError, match=r"(?s)at work.*out of time after 1 of 3 steps"):
            bench_step.run_trainer(tmp_path / "config.py", work, [], until=until)
    assert time.monotonic() < until + 10
