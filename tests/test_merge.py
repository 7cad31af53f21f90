"""A merged checkpoint is the folder that save_pretrained would have written: names, weights, configs, processor."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import tools.merge
import tools.merge_files
from r1.checkpoint import Checkpoints, TrainerState
from r1.config import CheckpointConfig, Config, ModelConfig, TrainerConfig
from tests.shell import ROOT, run
from tests.tiny import FAMILIES, VISION_FAMILIES, make_tiny
from tools.merge import main, merge


def save(
    model: nn.Module, source: Path, run: Path, *, step: int = 1, reward: float | None = None, **settings: Any
) -> Path:
    """A checkpoint of model as a run would save it, with an optimizer's states beside the weights."""
    config = Config(
        model=ModelConfig(path=str(source)),
        checkpoint=CheckpointConfig(**settings),
        trainer=TrainerConfig(output_dir=str(run.parent), experiment_name=run.name),
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
    path = checkpoints.save(
        state,
        SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler),
        metrics={} if reward is None else {"val/a/reward": reward},
    )
    checkpoints.finish()
    return path


def auto_class(family: str) -> type:
    return AutoModelForImageTextToText if family in VISION_FAMILIES else AutoModelForCausalLM


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_C10_C14_merged_model_is_what_save_pretrained_writes(family: str, tie: bool, tmp_path: Path) -> None:
    source = make_tiny(family, tmp_path / "source", tie=tie)
    model = auto_class(family).from_pretrained(source, dtype=torch.float32)
    save(model, source, tmp_path / "run")
    merge(tmp_path / "run", tmp_path / "out", dtype="float32", max_shard_gb=2e-4)
    model.save_pretrained(tmp_path / "expected")
    tensors, expected = written(tmp_path / "out"), written(tmp_path / "expected")
    assert tensors.keys() == expected.keys() == written(source).keys()
    if family == "qwen3_vl_moe":  # save_pretrained would write its experts as no published file has them
        expected |= {name: tensor.transpose(1, 2) for name, tensor in expected.items() if ".experts." in name}
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
    newest = f"taking {tmp_path}/run/checkpoints/step_000010 (the newest; the run's config names no "
    assert lines[0] == newest + "checkpoint.best_metric)"
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
    real = tools.merge_files.save_file

    def drop_one(tensors: dict[str, torch.Tensor], *args: object, **kwargs: object) -> None:
        tensors.pop("model.norm.weight", None)
        real(tensors, *args, **kwargs)

    monkeypatch.setattr(tools.merge_files, "save_file", drop_one)
    with pytest.raises(ValueError, match=r"lacks \['model.norm.weight'\]"):
        merge(path, tmp_path / "out")


def test_run_folder_means_its_best_checkpoint_where_the_config_names_a_metric(tmp_path: Path, capsys: Any) -> None:
    source = make_tiny("qwen2", tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source)
    for step, reward in ((1, 0.2), (2, 0.7), (3, 0.4)):
        save(model, source, tmp_path / "run", step=step, reward=reward, best_metric="val/a/reward")
        with torch.no_grad():
            model.model.norm.weight.mul_(2)
    merge(tmp_path / "run", tmp_path / "out", dtype="float32")
    path = tmp_path / "run/checkpoints/step_000002"
    assert f"taking {path} (the best: val/a/reward 0.7)" in capsys.readouterr().out
    merge(path, tmp_path / "same", dtype="float32")
    assert f"taking {path} (as given)" in capsys.readouterr().out
    best, same = written(tmp_path / "out"), written(tmp_path / "same")
    assert all(torch.equal(best[name], same[name]) for name in same)
    save(model, source, tmp_path / "other", step=1, best_metric="val/b/reward")
    merge(tmp_path / "other", tmp_path / "newest")
    assert "(the newest; no checkpoint has a value of val/b/reward)" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_a_resized_vocabulary_is_merged_and_loads(family: str, tmp_path: Path) -> None:
    source = make_tiny(family, tmp_path / "source", tie=True)
    model = auto_class(family).from_pretrained(source, dtype=torch.float32)
    model.resize_token_embeddings(384)
    save(model, source, tmp_path / "run")
    merge(tmp_path / "run", tmp_path / "out", dtype="float32")
    loaded = auto_class(family).from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert loaded.get_input_embeddings().weight.shape[0] == loaded.config.get_text_config().vocab_size == 384
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)


def test_float16_is_written_or_refused_where_it_would_overflow(tmp_path: Path) -> None:
    source = make_tiny("qwen2", tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    save(model, source, tmp_path / "run")
    merge(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert {t.dtype for t in written(tmp_path / "out").values()} == {torch.float16}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float16"
    with torch.no_grad():
        model.model.norm.weight[3] = -70_000
    save(model, source, tmp_path / "big")
    with pytest.raises(ValueError, match=r"model.norm.weight has values up to 7e\+04, which float16 cannot hold"):
        merge(tmp_path / "big", tmp_path / "bad", dtype="float16")


def test_flipped_bits_are_noticed_in_the_checkpoint_and_in_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny("qwen2", tmp_path / "source")
    path = save(AutoModelForCausalLM.from_pretrained(source), source, tmp_path / "run")
    real = tools.merge_files.save_file

    def flip_one(tensors: dict[str, torch.Tensor], *args: object, **kwargs: object) -> None:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        tensors["model.norm.weight"].view(torch.uint8)[5] ^= 16
        real(tensors, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(tools.merge_files, "save_file", flip_one)
        with pytest.raises(ValueError, match=r"model.norm.weight has other bytes than were written"):
            merge(path, tmp_path / "out")
    shard = path / "shards/__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"step_000001 is damaged: shards/__0_0.distcp; give an earlier checkpoint"):
        merge(path, tmp_path / "other")


def test_push_uploads_the_folder_and_says_what_to_do_when_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    source = make_tiny("qwen2", tmp_path / "source")
    save(AutoModelForCausalLM.from_pretrained(source), source, tmp_path / "run")
    pushed: list[tuple[str, list[str]]] = []

    class Hub:
        def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> None:
            assert private and exist_ok
            if repository == "mine/forbidden":
                raise ConnectionError("no network")

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
            pushed.append((repo_id, sorted(p.name for p in folder_path.iterdir())))

    monkeypatch.setattr(tools.merge, "HfApi", Hub)
    for name, out in (("mine/model", "out"), ("mine/forbidden", "other")):
        words = ["merge.py", str(tmp_path / "run"), "--output", str(tmp_path / out), "--push-to-hub", name]
        monkeypatch.setattr(sys, "argv", words)
        if out == "out":
            main()
        else:
            with pytest.raises(
                SystemExit, match=r"other is merged, but could not be pushed to mine/forbidden: no network"
            ):
                main()
    ((repository, files),) = pushed
    assert repository == "mine/model" and {"model.safetensors", "config.json", "tokenizer.json"} <= set(files)
    assert "pushed to mine/model" in capsys.readouterr().out


@pytest.mark.slow
def test_memory_is_bounded_by_the_biggest_tensor_and_one_file(tmp_path: Path) -> None:
    # 40 layers of 20 MB and an embedding of 154 MB: 0.95 GB, of which no more than the bound is held at a time.
    config = transformers.Qwen2Config(
        vocab_size=75_000, hidden_size=512, intermediate_size=2_800, num_hidden_layers=40, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    source = make_tiny("qwen2", tmp_path / "source")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save(model, source, tmp_path / "run", save_model_only=True, asynchronous=False)
    total = sum(p.nbytes for p in model.parameters())
    measure = (
        "import re, sys; from pathlib import Path; from tools.merge import empty_model, merge\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024\n"
        "empty_model(Path(sys.argv[1]) / 'checkpoints/step_000001/hf')\n"
        "before = peak()\n"
        "merge(sys.argv[1], Path(sys.argv[2]), dtype='float32', max_shard_gb=0.05)\n"
        "print(peak() - before)"
    )
    done = run([sys.executable, "-c", measure, str(tmp_path / "run"), str(tmp_path / "out")], ROOT)
    assert done.returncode == 0, done.stderr
    peak, biggest = int(done.stdout.split()[-1]), 75_000 * 512 * 4
    print(f"peak {peak / 2**20:.0f} MiB of {total / 2**20:.0f}")
    assert peak < 3 * biggest + 2 * 50e6 < 0.85 * total
