"""Run under torchrun by test_policy_weights: models read in shards, against transformers' own reading of the folder.

torchrun --nproc_per_node 2 -m tests.dist.weights OUT.json FAMILY=FOLDER …
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from r1.config import ModelConfig, ParallelConfig
from r1.parallel import init_ranks
from r1.policy.attention import register
from r1.policy.model import _build, load_model, load_model_config
from r1.policy.weights import WeightFiles, find_on_all_ranks
from r1.faults import leave


def compare(folder: str, mesh: Any, **options: Any) -> dict[str, Any]:
    """Tensors that differ from transformers' and whether the shards were read from the files."""
    config = ModelConfig(path=folder, precision="float32")
    hf_config = load_model_config(config)
    in_shards = find_on_all_ranks(folder, _build(config, hf_config, torch.float32, weights=False)) is not None
    read, original = [], WeightFiles.read

    def counting(self: WeightFiles, name: str, rows: slice = slice(None)) -> torch.Tensor:
        tensor = original(self, name, rows)
        read.append(tensor.numel())
        return tensor

    WeightFiles.read = counting
    model = load_model(config, mesh, torch.device("cpu"), "sdpa", trainable=True, **options)
    WeightFiles.read = original
    full = _build(config, hf_config, torch.float32, weights=True)
    theirs = {**dict(full.named_parameters()), **dict(full.named_buffers())}
    differ = []
    for name, ours in [*model.named_parameters(), *model.named_buffers()]:
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        expected = torch.zeros_like(whole) if options and name == "lm_head.weight" else theirs.pop(name)
        if not torch.equal(whole, expected):
            differ.append(name)
    missing = [] if options else sorted(theirs)
    share = sum(read) / sum(p.numel() for p in full.parameters())
    return {"in_shards": in_shards, "differ": differ, "missing": missing, "share": share}


def main() -> None:
    out, folders = Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
    ranks = init_ranks(ParallelConfig(), 1)
    register("sdpa")
    results = {name: compare(folder, ranks.mesh) for name, folder in folders.items()}
    results |= {f"{n}-value": compare(f, ranks.mesh, value_head=True) for n, f in folders.items() if "qwen3-" in n}
    if ranks.rank == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
