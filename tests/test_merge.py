"""A merged checkpoint is the folder that save_pretrained would have written: names, weights, configs, processor."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import tools.merge
from r1.checkpoint import Checkpoints, TrainerState
from r1.config import Config, ModelConfig, TrainerConfig
from tests.tiny import FAMILIES, VISION_FAMILIES, make_tiny
from tools.merge import main, merge


def save(model: nn.Module, source: Path, run: Path, *, step: int = 1) -> Path:
    """A checkpoint of model as a run would save it, with an optimizer's states beside the weights."""
    config = Config(
        model=ModelConfig(path=str(source)), trainer=TrainerConfig(output_dir=str(run.parent), experiment_name=run.name)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    vision = (source / "preprocessor_config.json").exists() or (source / "processor_config.json").exists()
    checkpoints = Checkpoints(
        config,
        tokenizer=AutoTokenizer.from_pretrained(source),
        processor=AutoProcessor.from_pretrained(source) if vision else None,
    )
    state = TrainerState(step=step, policy_version=step)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    path = checkpoints.save(state, SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler))
    checkpoints.finish()
    return path


def auto_class(family: str) -> type:
    return AutoModelForImageTextToText if family in VISION_FAMILIES else AutoModelForCausalLM


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_model_is_what_save_pretrained_writes(family: str, tie: bool, tmp_path: Path) -> None:
    source = make_tiny(family, tmp_path / "source", tie=tie)
    model = auto_class(family).from_pretrained(source, dtype=torch.float32)
    save(model, source, tmp_path / "run")
    merge(tmp_path / "run", tmp_path / "out", dtype="float32", max_shard_gb=2e-4)
    model.save_pretrained(tmp_path / "expected")
    tensors, expected = written(tmp_path / "out"), written(tmp_path / "expected")
    assert tensors.keys() == expected.keys() == written(source).keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys() and len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())

    loaded = auto_class(family).from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)
    assert loaded.generation_config.eos_token_id == [313, 311]
    assert loaded.generation_config.top_k == 20
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    if family in VISION_FAMILIES:
        rendered = [AutoProcessor.from_pretrained(f).apply_chat_template(messages) for f in (source, tmp_path / "out")]
    else:
        messages[0]["content"] = "hi"
        rendered = [
            AutoTokenizer.from_pretrained(f).apply_chat_template(messages, tokenize=False)
            for f in (source, tmp_path / "out")
        ]
    assert rendered[0] == rendered[1]


def test_default_is_bfloat16_in_weights_and_config(tmp_path: Path) -> None:
    source = make_tiny("qwen2_5_vl", tmp_path / "source")
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    save(model, source, tmp_path / "run")
    merge(tmp_path / "run", tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        head = tensors.get_tensor("lm_head.weight")
    assert torch.equal(head, model.lm_head.weight.to(torch.bfloat16))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["text_config"].get("dtype", "bfloat16") == "bfloat16"
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def test_stacked_experts_are_written_one_by_one(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    source = make_tiny("qwen2", tmp_path / "source")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save(model, source, tmp_path / "run")
    merge(tmp_path / "run", tmp_path / "out", dtype="float32", max_shard_gb=1e-5)
    model.save_pretrained(tmp_path / "expected")
    tensors, expected = written(tmp_path / "out"), written(tmp_path / "expected")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in tensors and tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_run_folder_means_its_newest_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_tiny("qwen2", tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    for step in (9, 10):
        save(model, source, tmp_path / "run", step=step)
    (tmp_path / "run/checkpoints/step_000011").mkdir()
    command = ["merge.py", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"taking {tmp_path}/run/checkpoints/step_000010"
    parameters = sum(p.numel() for p in model.parameters())
    assert lines[-1].startswith(f"merged step_000010 into {tmp_path}/out: 27 tensors, {parameters:,} parameters")

    with pytest.raises(SystemExit, match="is not empty; give a new folder"):
        main()
    monkeypatch.setattr(sys, "argv", ["merge.py", str(source), "--output", str(tmp_path / "other")])
    with pytest.raises(SystemExit, match=r"merge: .* holds no checkpoint"):
        main()


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    source = make_tiny("qwen2", tmp_path / "source")
    path = save(AutoModelForCausalLM.from_pretrained(source), source, tmp_path / "run")
    config = json.loads((path / "hf/config.json").read_text())
    (path / "hf/config.json").write_text(json.dumps(config | {"vocab_size": 384}))
    with pytest.raises(ValueError, match=r"does not fit .*config.json: missing \[\], unknown or of another shape"):
        merge(path, tmp_path / "out")
    (path / "hf/config.json").write_text(json.dumps(config | {"architectures": ["Qwen9ForCausalLM"]}))
    with pytest.raises(ValueError, match=r"architecture 'Qwen9ForCausalLM', which transformers .* has not"):
        merge(path, tmp_path / "out")


def test_wrong_weights_on_disk_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tiny("qwen2", tmp_path / "source")
    path = save(AutoModelForCausalLM.from_pretrained(source), source, tmp_path / "run")
    real = tools.merge.save_file

    def drop_one(tensors: dict[str, torch.Tensor], *args: object, **kwargs: object) -> None:
        tensors.pop("model.norm.weight", None)
        real(tensors, *args, **kwargs)

    monkeypatch.setattr(tools.merge, "save_file", drop_one)
    with pytest.raises(ValueError, match=r"lacks \['model.norm.weight'\]"):
        merge(path, tmp_path / "out")
