"""tools/bench.py learn: every algorithm's settings are a config, finished runs are kept, and the table adds up."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.loss import LOSSES
from r1.config import load_config
from tools import bench_learn
from tools.bench_learn import ALGORITHMS, METRICS, add_options, changes_of, read_curve, run, summarize, table


class Trainer:
    """Stands in for torchrun: writes what a run would, or ends with status 1."""

    def __init__(self, failing: str = "") -> None:
        self.started: list[str] = []
        self.failing = failing

    def __call__(self, program: Sequence[str], nproc: int, log: Path) -> "Trainer":
        config = load_config(program[program.index("--config") + 1], program[4:])
        self.started.append(log.parent.name)
        log.write_text("it said this\n")
        self.status = int(log.parent.name == self.failing)
        rows = [{"step": 0, METRICS[0]: 0.4}, {"step": 1, "reward/mean": 0.5},
                {"step": 2, METRICS[0]: 0.4 + config.data.seed}]  # fmt: skip
        assert (config.run_dir, config.trainer.max_steps) == (str(log.parent), 2)
        if not self.status:
            (log.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self

    def wait(self) -> int:
        return self.status


def options_of(folder: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    (folder / "data" / "model").mkdir(parents=True, exist_ok=True)
    own = ["--output", str(folder / "out"), "--data", str(folder / "data"), "--steps", "2"]
    return parser.parse_args([*own, *words])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_a_config_with_as_many_responses_as_the_demo(name: str, tmp_path: Path) -> None:
    changes = changes_of(name, 3, 30, tmp_path / "run", tmp_path)
    text = bench_learn.CONFIG.format(title=name, seed=3, changes=changes, further="",
                                     demo=str(bench_learn.ROOT / "configs" / "demo.py"))  # fmt: skip
    (tmp_path / "config.py").write_text(text)
    config = load_config(str(tmp_path / "config.py"))
    config.check_world_size(2, 2)
    assert config.data.rollout_batch_size * config.rollout.n == 256
    assert config.update.global_batch_size * config.rollout.n == 128
    assert (config.data.seed, config.rollout.seed, config.trainer.seed, config.trainer.val_freq) == (3, 3, 3, 5)


def test_every_advantage_and_loss_is_among_them() -> None:
    sections = [changes.get("algorithm", {}) for _, changes in ALGORITHMS.values()]
    assert {s.get("advantage", "grpo") for s in sections} == set(ADVANTAGES)
    assert {s.get("loss", "ppo") for s in sections} == set(LOSSES)


def test_finished_runs_are_kept_and_a_changed_one_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_learn, "start", trainer := Trainer(failing="gspo-1"))
    words = ["--algorithms", "grpo", "gspo", "--seeds", "0", "1"]
    with pytest.raises(RuntimeError, match=r"(?s)it said this.*gspo, seed 1, ended with status 1"):
        run(options_of(tmp_path, *words), [])
    assert trainer.started == ["grpo-0", "gspo-0", "grpo-1", "gspo-1"]
    report = json.loads((tmp_path / "out" / "learn.json").read_text())
    assert [line["seeds"] for line in report["algorithms"]] == [[0, 1], [0]]  # what did not fail is there
    trainer.failing = ""
    run(options_of(tmp_path, *words, "--parallel", "2"), [])
    assert trainer.started[4:] == ["gspo-1"]
    assert "grpo, seed 1: 0.400 -> 1.400 kept from before" in capsys.readouterr().out
    run(options_of(tmp_path, "--algorithms", "grpo", "--seeds", "0"), ["--optim.lr", "1e-4"])
    assert trainer.started[5:] == ["grpo-0"]


def test_accuracy_has_another_name_beside_a_second_reward(tmp_path: Path) -> None:
    rows = [{"step": 0, "val/held_out/math/accuracy": 0.4, "val/held_out/reward": 0.3}, {"step": 5, "reward/mean": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 10, "val')
    assert read_curve(tmp_path / "metrics.jsonl") == {0: 0.4}


def test_mean_and_range_over_seeds_by_hand() -> None:
    ends = {0: 0.8, 1: 0.9, 2: 1.0}
    records = [
        {"algorithm": "rloo", "seed": seed, "seconds": 50.0 + seed, "accuracy": {"0": 0.4, "5": 0.6, "10": end}}
        for seed, end in ends.items()
    ]
    (line,) = summarize(records)
    assert line["gain"] == pytest.approx({"mean": 0.5, "min": 0.4, "max": 0.6})
    assert line["steps"] == [0, 5, 10] and line["curves"][1] == [0.4, 0.6, 0.9]
    head, _, row = table([line]).splitlines()
    assert head == "| algorithm | seeds | before | step 5 | step 10 | gain | s a run |"
    assert row == "| RLOO | 3 | 0.400 | 0.600 | 0.900 (0.800 to 1.000) | +0.500 (+0.400 to +0.600) | 51 |"


def test_the_plot_is_a_small_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tools.bench_learn_plot import plot

    records = [
        {"algorithm": name, "seed": seed, "seconds": 1.0, "accuracy": {"0": 0.4, "5": 0.6 + seed / 20, "10": 0.9}}
        for name in ALGORITHMS
        for seed in range(3)
    ]
    plot(summarize(records), tmp_path / "learn.png")
    assert 10_000 < (tmp_path / "learn.png").stat().st_size < 150_000
