"""A merged LoRA run is its base plus its adapters, in one folder; its adapter alone is what peft and vLLM load."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoProcessor, AutoTokenizer

from r1.checkpoint import Checkpoints, TrainerState
from r1.config import CheckpointConfig, Config, LoraConfig, ModelConfig, TrainerConfig
from r1.policy.lora_weights import is_adapter
from r1.rollout.weight_sync import stream_weights
from tests.test_merge import auto_class
from tests.test_merge import save as save_whole
from tests.test_policy_lora import ALL, adapted
from tests.tiny import VISION_FAMILIES, make_tiny
from tools.merge import main, merge
from tools.merge_files import Shards


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def save(model: Any, source: Path, run: Path, family: str, **options: Any) -> Path:
    """A checkpoint of a LoRA run as training saves it."""
    config = Config(
        model=ModelConfig(path=str(source), lora=LoraConfig(**{"rank": 4, "alpha": 16, **options})),
        checkpoint=CheckpointConfig(),
        trainer=TrainerConfig(output_dir=str(run.parent), experiment_name=run.name),
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    checkpoints = Checkpoints(
        config,
        tokenizer=AutoTokenizer.from_pretrained(source),
        processor=AutoProcessor.from_pretrained(source) if family in VISION_FAMILIES else None,
    )
    learner = SimpleNamespace(model=model, optimizer=optimizer, scheduler=LambdaLR(optimizer, lambda _: 1.0))
    path = checkpoints.save(TrainerState(step=1, policy_version=1), learner)
    checkpoints.finish()
    return path


CASES: list[tuple[str, bool, dict[str, Any]]] = [
    ("llama3", False, {"use_rslora": True}),
    ("qwen3", True, {"target_modules": ("q_proj", "down_proj")}),
    ("qwen2", False, {"use_dora": True, "modules_to_save": ("lm_head",)}),
    ("qwen3_moe", False, {}),
    ("qwen2_vl", False, {"parts": ("language", "projector")}),
    ("qwen2_5_vl", False, {"parts": ALL, "use_dora": True}),
    ("qwen2_5_vl", True, {}),
    ("qwen3_vl", True, {"parts": ("vision",), "modules_to_save": ("merger",)}),
]


@pytest.mark.parametrize(("family", "tie", "options"), CASES)
def test_C12_merged_run_and_its_adapter_alone_are_base_plus_adapter(family, tie, options, mesh, tmp_path):
    source = make_tiny(family, tmp_path / "source", tie=tie)
    model = adapted(source, mesh, **options)
    path = save(model, source, tmp_path / "run", family, **options)
    assert {n for n in Shards(path).tensors} == {n for n, p in model.named_parameters() if is_adapter(n)}
    merge(tmp_path / "run", tmp_path / "out", dtype="float32", max_shard_gb=2e-4)
    merge(tmp_path / "run", tmp_path / "adapter", dtype="float32", adapter_only=True)

    cls = auto_class(family)
    merged = cls.from_pretrained(tmp_path / "out", dtype=torch.float32)
    stream = dict(stream_weights(model))  # what the engine samples from
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter.detach(), stream[name], rtol=0, atol=1e-6, msg=name)
    theirs = peft.PeftModel.from_pretrained(cls.from_pretrained(source, dtype=torch.float32), tmp_path / "adapter")
    ids = torch.arange(5, 25)[None]
    inputs: dict[str, Any] = {"input_ids": ids}
    if family in VISION_FAMILIES:
        merge_size, token = merged.config.vision_config.spatial_merge_size, merged.config.image_token_id
        ids[0, 3:5] = token
        grid = torch.tensor([[1, merge_size, 2 * merge_size]])
        pixels = merged.model.visual.patch_embed.proj.weight[0].numel()
        inputs |= {"pixel_values": torch.randn(int(grid.prod()), pixels), "image_grid_thw": grid}
        inputs["mm_token_type_ids"] = (ids == token).int()
    with torch.no_grad():
        torch.testing.assert_close(merged(**inputs).logits, theirs(**inputs).logits, rtol=0, atol=3e-5)
        base = cls.from_pretrained(source, dtype=torch.float32)(**inputs).logits
        assert (merged(**inputs).logits - base).abs().max() > 0.05
    assert merged.generation_config.eos_token_id == [313, 311]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_C11_adapter_config_has_the_runs_rank_alpha_and_targets(mesh, tmp_path):
    source = make_tiny("qwen2_5_vl", tmp_path / "source")
    options: dict[str, Any] = {"rank": 8, "alpha": 16, "use_rslora": True, "dropout": 0.1}
    save(adapted(source, mesh, **options), source, tmp_path / "run", "qwen2_5_vl", **options)
    merge(tmp_path / "run", tmp_path / "adapter", dtype="bfloat16", adapter_only=True)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["use_dora"]) == (8, 16, True, False)
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == str(source)
    # The vision tower has layers of the same last names, so that whole names are needed.
    assert len(config["target_modules"]) == 14
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    q = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    assert tensors[f"{q}.lora_A.weight"].shape == (8, 128) and tensors[f"{q}.lora_B.weight"].dtype == torch.bfloat16
    assert len(tensors) == 28


def test_base_that_moved_and_wrong_configs_are_named(mesh, tmp_path, monkeypatch):
    source = make_tiny("qwen2", tmp_path / "source")
    path = save(adapted(source, mesh), source, tmp_path / "run", "qwen2")
    shutil.move(source, tmp_path / "moved")
    with pytest.raises(ValueError, match=r"source, which is not there or has no plain safetensors .* --base"):
        merge(path, tmp_path / "out")
    words = ["merge.py", str(path), "--output", str(tmp_path / "out"), "--base", str(tmp_path / "moved")]
    monkeypatch.setattr(sys, "argv", words)
    main()
    assert (tmp_path / "out/model.safetensors").exists()
    config = json.loads((path / "config.json").read_text())
    config["model"]["lora"]["rank"] = 8
    (path / "config.json").write_text(json.dumps(config))
    # A checkpoint's files have checksums: an edited one is noticed first.
    with pytest.raises(ValueError, match="is damaged"):
        merge(path, tmp_path / "other", base=str(tmp_path / "moved"))


def test_a_run_without_adapters_has_none_to_write(tmp_path):
    source = make_tiny("qwen2", tmp_path / "source")
    save_whole(auto_class("qwen2").from_pretrained(source), source, tmp_path / "run")
    with pytest.raises(ValueError, match="is of no LoRA run; leave --adapter-only and --base out"):
        merge(tmp_path / "run", tmp_path / "out", adapter_only=True)
