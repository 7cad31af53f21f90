"""A checkpoint of adapters goes on with the same adapters only, and says why."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from r1.checkpoint_resume import check_resume
from r1.config import Config, LoraConfig, ModelConfig, TrainerConfig
from tests.test_merge_lora import save
from tests.test_policy_lora import adapted
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run(mesh: DeviceMesh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    source = make_tiny("qwen2", folder / "source")
    return save(adapted(source, mesh), source, folder / "run", "qwen2").parent.parent


def config_of(run: Path, **lora: Any) -> Config:
    return Config(
        model=ModelConfig(path=str(run.parent / "source"), lora=LoraConfig(**{"rank": 4, "alpha": 16, **lora})),
        trainer=TrainerConfig(output_dir=str(run.parent), experiment_name=run.name),
    )


def test_the_same_adapters_go_on_and_a_changed_dropout_is_said(run):
    assert check_resume(config_of(run)) == []
    lines = check_resume(config_of(run, dropout=0.1, adapter_path="elsewhere"))
    assert lines == [
        "changed since step_000001: model.lora.dropout 0.0 -> 0.1",
        "changed since step_000001: model.lora.adapter_path None -> 'elsewhere'",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, "model.lora.rank=4, now it is 8; that cannot change: it holds adapters of that rank"),
        ({"rank": 0}, "model.lora.rank=4, now it is 0"),
        ({"alpha": 8.0}, "model.lora.alpha=16, now it is 8.0; that cannot change: it decides what the adapters amount"),
        ({"use_dora": True}, "model.lora.use_dora=False, now it is True"),
        ({"target_modules": ("q_proj",)}, "model.lora.target_modules='all-linear', now it is ['q_proj']"),
        ({"parts": ("language", "vision")}, "model.lora.parts=['language'], now it is ['language', 'vision']"),
        ({"modules_to_save": ("lm_head",)}, "it decides which layers have adapters"),
    ],
)
def test_other_adapters_are_refused_before_a_model_loads(change, message, run):
    with pytest.raises(ValueError) as error:
        check_resume(config_of(run, **change))
    assert message in str(error.value)


def test_a_run_of_the_whole_model_does_not_go_on_with_adapters(run, tmp_path):
    # Also one that was saved before there were adapters.
    path = run / "checkpoints/step_000001/config.json"
    text = path.read_text()
    for saved in (None, dataclasses.asdict(LoraConfig(alpha=7.0))):
        config = json.loads(text)
        config["model"].pop("lora")
        config["model"] |= {} if saved is None else {"lora": saved}
        marker = json.loads((path.parent / "complete.json").read_text())
        path.write_text(json.dumps(config))
        marker["files"]["config.json"][0] = path.stat().st_size
        (path.parent / "complete.json").write_text(json.dumps(marker))
        with pytest.raises(ValueError, match=r"made with model.lora.rank=0, now it is 4; that cannot change"):
            check_resume(config_of(run))
        # Nothing reads the other settings of adapters that are off.
        assert check_resume(config_of(run, rank=0, alpha=3.0)) == []
