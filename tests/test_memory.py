"""Memory of the whole program stays flat: 200 steps with vLLM, pictures, rewards, validations, saves and logs."""

import json
import sys
from pathlib import Path
from statistics import median

import pytest
from PIL import Image

from tests import shell
from tests.tiny import make_tiny

STEPS = 200
MIB = 2**20

CONFIG = """
from r1.config import *

HERE = {here!r}
config = Config(
    model=ModelConfig(path=HERE + "/model", precision={precision!r}),
    data=DataConfig(train_files=HERE + "/train.jsonl", val_files=("held=" + HERE + "/val.jsonl",), max_prompt_length=64,
                    max_response_length=8, rollout_batch_size=4, min_pixels=784, max_pixels=12544, num_workers=1),
    rollout=RolloutConfig(n=2, gpu_memory_utilization=0.1, enforce_eager=True),
    reward=RewardConfig(function=HERE + "/reward.py:compute_score", num_workers=1),
    optim=OptimConfig(lr=1e-4),
    update=UpdateConfig(global_batch_size=4, max_tokens_per_microbatch=256),
    parallel=ParallelConfig(offload_params=True),
    checkpoint=CheckpointConfig(save_freq=10, save_limit=2),
    trainer=TrainerConfig(output_dir=HERE + "/runs", max_steps={steps}, val_freq=10, progress=False,
                          loggers=("file", "tensorboard")),
)
"""
REWARD = "def compute_score(xs):\n    return [{'overall': sum(c in 'aeiou' for c in x['response']) / 30} for x in xs]\n"


def run_watched(folder: Path, precision: str, steps: int) -> list[tuple[int, int, int]]:
    """(own, children's, GPU) bytes, four times a second, of a rank that trains a tiny Qwen2.5-VL for so many steps."""
    make_tiny("qwen2_5_vl", folder / "model")
    rows = []
    for i in range(24):
        names = [f"{i}.png"] if i % 4 else []
        for name in names:
            Image.new("RGB", (40 + 2 * i, 70), (i * 9, 99, 200)).save(folder / name)
        rows.append({"problem": "<image>" * len(names) + f"what is {i} + 1?", "answer": i + 1, "images": names})
    for name, part in (("train", rows), ("val", rows[:4])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.py").write_text(CONFIG.format(here=str(folder), precision=precision, steps=steps))
    words = (str(folder / "memory.txt"), "--config", str(folder / "config.py"))
    done = shell.run(shell.torchrun("tests.dist.watched", *words, ranks=1), folder, timeout_s=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (folder / "memory.txt").read_text().splitlines()
    return [(int(own), int(children), int(gpu)) for own, children, gpu in map(str.split, lines)]


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "runs/demo/metrics.jsonl").read_text().splitlines()][1:]


def early_and_late(values: list[float]) -> tuple[float, float]:
    """The middle of the second fifth and of the last: a start's growth is over by then."""
    fifth = len(values) // 5
    return median(values[fifth : 2 * fifth]), median(values[-fifth:])


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.dist
def test_host_memory_of_the_whole_program_is_flat_over_200_steps(tmp_path: Path) -> None:
    watched = run_watched(tmp_path, "float32", STEPS)
    assert len(steps_of(tmp_path)) == STEPS
    for name, values in (("own", [own for own, _, _ in watched]), ("children's", [more for _, more, _ in watched])):
        early, late = early_and_late(values)
        sys.stdout.write(f"{name}: {early / MIB:.0f} MiB early, {late / MIB:.0f} MiB late, {len(values)} readings\n")
        assert late < early + 24 * MIB
