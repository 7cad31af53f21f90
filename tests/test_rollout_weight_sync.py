"""A weight sync streams: it never holds much more than one whole tensor, however large the model is."""

import json

import pytest

from tests import shell
from tests.tiny import make_tiny


@pytest.mark.dist
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_sync_holds_one_tensor_at_a_time(lora_rank, tmp_path):
    model, out = make_tiny("qwen3", tmp_path / "model"), tmp_path / "out.json"
    command = shell.torchrun("tests.dist.stream_memory", str(out), str(model), str(lora_rank), ranks=2)
    done = shell.run(command, shell.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in json.loads(out.read_text()):
        assert rank["peak"] <= 2 * rank["largest"] < rank["total"] / 3
