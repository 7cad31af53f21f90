"""Each rank reads its own rows of the weights, and they are the weights that transformers reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from r1.config import ModelConfig
from r1.policy.model import _build, load_model_config
from r1.policy.weights import WeightFiles
from tests import shell
from tests.tiny import FAMILIES, make_tiny


def find(folder: Path) -> WeightFiles | None:
    config = ModelConfig(path=str(folder))
    return WeightFiles.find(str(folder), _build(config, load_model_config(config), torch.float32, weights=False))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("weights")
    words = [
        f"{name}={make_tiny(family, folder / name, tie=tie)}"
        for family in FAMILIES
        for name, tie in ((f"{family}-untied", False), (f"{family}-tied", True))
    ]
    # No safetensors: rank 0 reads it all, as it reads whatever transformers can.
    legacy = make_tiny("qwen2", folder / "legacy")
    torch.save(load_file(legacy / "model.safetensors"), legacy / "pytorch_model.bin")
    (legacy / "model.safetensors").unlink()
    command = shell.torchrun("tests.dist.weights", str(folder / "out.json"), *words, f"legacy={legacy}", ranks=2)
    done = shell.run(command, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.dist
def test_two_ranks_hold_the_weights_and_buffers_of_the_folder(loaded: dict[str, Any]) -> None:
    assert len(loaded) == 2 * len(FAMILIES) + 1 + 2
    for name, result in loaded.items():
        assert not result["differ"] and not result["missing"], name
        assert result["in_shards"] == (name != "legacy"), name


@pytest.mark.dist
def test_a_rank_reads_half_of_the_weights(loaded: dict[str, Any]) -> None:
    for name, result in loaded.items():
        assert result["share"] <= 0.51 if name != "legacy" else result["share"] == 0, name


def test_split_files_are_found_by_their_index(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny("qwen3", tmp_path / "one"))
    model.save_pretrained(tmp_path / "split", max_shard_size="100KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    files = find(tmp_path / "split")
    assert files is not None
    weight = model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(files.read("model.layers.1.mlp.up_proj.weight", slice(3, 7)), weight[3:7])


def test_a_folder_with_a_missing_or_misshapen_weight_is_left_to_transformers(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for changed in ({name: weights[name][:5]}, {}):
        rest = {key: value for key, value in weights.items() if key != name}
        save_file({**rest, **changed}, folder / "model.safetensors", metadata={"format": "pt"})
        assert find(folder) is None


def test_experts_are_read_one_by_one_and_a_missing_one_is_left_to_transformers(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_moe", tmp_path)
    model, files = AutoModelForCausalLM.from_pretrained(folder), find(folder)
    assert files is not None
    for name in ("gate_up_proj", "down_proj"):
        expected = model.get_parameter(f"model.layers.1.mlp.experts.{name}")
        assert torch.equal(files.read(f"model.layers.1.mlp.experts.{name}", slice(2, 5)), expected[2:5])
        assert torch.equal(files.read(f"model.layers.1.mlp.experts.{name}"), expected)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert find(folder) is None


def test_stacked_experts_are_read_in_the_published_layout_and_in_transformers_own(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_vl_moe", tmp_path / "published")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved")
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    shapes = [load_file(path / "model.safetensors")[name].shape for path in (folder, tmp_path / "saved")]
    assert shapes == [(6, 128, 192), (6, 192, 128)]
    for path in (folder, tmp_path / "saved"):
        files = find(path)
        assert files is not None
        assert torch.equal(files.read(name, slice(2, 5)), model.get_parameter(name)[2:5])
