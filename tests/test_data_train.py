"""A run on files as people have them: pictures, videos and text mixed, from weighted sources, one row in twenty bad."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.shell import run, torchrun
from tests.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.dist]
cv2 = pytest.importorskip("cv2")

CONFIG = """
from r1.config import *

HERE = {here!r}
config = Config(
    model=ModelConfig(path=HERE + "/model", precision="float32", gradient_checkpointing=False),
    data=DataConfig(train_files=(HERE + "/seen.jsonl*0.75", HERE + "/text/*.json*0.25"), val_files=(),
                    max_prompt_length=128, max_response_length=8, rollout_batch_size=8, min_pixels=784,
                    on_bad_row="skip", max_pixels=12544, num_workers=2, video_max_frames=4),
    rollout=RolloutConfig(n=2, limit_videos=1),
    reward=RewardConfig(function=HERE + "/reward.py:compute_score", num_workers=1),
    optim=OptimConfig(lr=1e-3),
    update=UpdateConfig(global_batch_size=8, max_tokens_per_microbatch=256),
    trainer=TrainerConfig(output_dir=HERE + "/runs", experiment_name="mixed", max_steps=2, progress=False,
                          samples_to_log=8, loggers=("console", "file")),
)
"""
REWARD = """
def compute_score(reward_inputs):
    return [{"overall": float(len(set(x["response"])))} for x in reward_inputs]
"""


def write_rows(folder: Path) -> None:
    writer = cv2.VideoWriter(str(folder / "a.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 4.0, (64, 48))
    for i in range(9):
        writer.write(np.full((48, 64, 3), 25 * i, np.uint8))
    writer.release()
    Image.effect_noise((60, 40), 60).convert("RGB").save(folder / "a.jpg")
    data = (folder / "a.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(data[: len(data) // 2])
    kinds = [
        {"problem": "<image>what is it?", "images": ["a.jpg"]},
        {"problem": "<video>and in <image>?", "images": "a.jpg", "videos": ["a.avi"]},
        {"problem": "no picture"},
        {"problem": [{"role": "user", "content": [{"type": "video", "video": "a.avi"}]}]},
    ]
    rows = [json.dumps(kinds[i % 4] | {"answer": i}) for i in range(38)]
    rows.insert(7, json.dumps({"problem": "<image>", "answer": 0, "images": ["cut.jpg"]}))
    rows.insert(20, '{"problem": "half a li')
    (folder / "seen.jsonl").write_text("\n".join(rows))
    (folder / "text").mkdir()
    (folder / "text" / "a.json").write_text(json.dumps([{"problem": f"{i} + 1?", "answer": i + 1} for i in range(5)]))


def test_D07_D22_a_run_on_mixed_rows_of_which_some_are_bad(tmp_path):
    make_tiny("qwen2_5_vl", tmp_path / "model")
    write_rows(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "config.py").write_text(CONFIG.format(here=str(tmp_path)))
    done = run(torchrun("r1.train", "--config", "config.py", ranks=2), tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "2 of 45 rows skipped" in done.stdout
    assert "image cut short (seen row 7)" in done.stdout and "line is not JSON (seen row 20)" in done.stdout
    steps = [json.loads(line) for line in (tmp_path / "runs" / "mixed" / "metrics.jsonl").read_text().splitlines()]
    # What the sampler saw of videos and pictures is what the trainer saw.
    assert all(step["mismatch/abs_max"] < 1e-3 for step in steps if "mismatch/abs_max" in step)
    assert len(steps) == 2 and all(np.isfinite(step["policy/grad_norm"]) for step in steps)
