"""Contract 4 with bad rows: ranks share the check of the data, agree on the rows and on every step's batch."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests import shell

pytestmark = pytest.mark.dist


def results(folder: Path, ranks: int) -> list[dict]:
    program = shell.torchrun(
        "tests.dist.data_scan", str(folder / "rows.jsonl"), str(folder / f"out{ranks}"), ranks=ranks
    )
    done = shell.run(program, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("3 of 15 rows skipped") == 1  # said once
    return [json.loads((folder / f"out{ranks}.{rank}").read_text()) for rank in range(ranks)]


def test_C02_ranks_share_the_check_and_agree_on_every_steps_rows(tmp_path):
    Image.effect_noise((90, 90), 60).convert("RGB").save(tmp_path / "a.jpg")
    data = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    images = ["cut.jpg" if i in (0, 8, 14) else "a.jpg" for i in range(15)]
    rows = [{"problem": f"<image>{i}", "answer": i, "images": image} for i, image in enumerate(images)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    [alone] = results(tmp_path, 1)
    two = results(tmp_path, 2)
    assert alone["kept"] == [i for i in range(15) if images[i] == "a.jpg"] and alone["checked"] == 15
    for rank in two:
        assert (rank["kept"], rank["skipped"], rank["steps"]) == (alone["kept"], 3, alone["steps"])
    assert [rank["checked"] for rank in two] == [8, 7]
