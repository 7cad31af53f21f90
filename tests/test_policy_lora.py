"""Adapters inside the sharded model: equal to peft around a plain one, off for the reference, merged in the sync."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from r1.config import AlgorithmConfig, Config, LoraConfig, ModelConfig
from r1.dry_run import check_files
from r1.policy.attention import register
from r1.policy.balance import Piece
from r1.policy.logprobs import Head
from r1.policy.lora import adapters_off, set_dropout
from r1.policy.lora_weights import file_name, is_adapter
from r1.policy.model import load_model
from r1.policy.packing import Microbatch, pack
from r1.policy.vision import VisionSpec
from r1.rollout.weight_sync import stream_weights
from r1.sections_model import OptimConfig
from tests.test_policy_packing import alone, load, make_prompts, make_rollouts
from tests.tiny import make_tiny

CPU = torch.device("cpu")
ALL: tuple[Any, ...] = ("language", "projector", "vision")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lora")
    tied = ("qwen3", "qwen3_vl")
    return {f: make_tiny(f, folder / f, tie=f in tied) for f in ("qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl")}


def adapted(folder: Path, mesh: DeviceMesh, precision: Any = "float32", **options: Any) -> Any:
    """A sharded model whose adapters are random, as if it had learned."""
    register("sdpa")
    lora = LoraConfig(**{"rank": 4, "alpha": 16, **options})
    model = load_model(ModelConfig(path=str(folder), precision=precision, lora=lora), mesh, CPU, "sdpa", trainable=True)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if is_adapter(name) and isinstance(parameter, DTensor):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.to_local().add_((0.05 * noise).to(parameter.dtype))
    return model


def microbatch_of(model: Any) -> tuple[Microbatch, list[Any], dict[int, Any], VisionSpec | None]:
    vision = VisionSpec.from_config(model.config)
    prompts = make_prompts(model.config, vision)
    rollouts = make_rollouts(prompts, {0: [7, 1, 3], 1: [2, 11], 2: [4, 4]})
    pieces = [Piece(rollouts=[r for r in rollouts if r.group == g]) for g in prompts]
    return pack(pieces, prompts, vision, with_mask=True), rollouts, prompts, vision


def score(model: Any, microbatch: Microbatch, vision: VisionSpec | None) -> torch.Tensor:
    head = Head(temperature=0.7, chunk_tokens=5, banned=() if vision is None else vision.banned_ids)
    return model(*microbatch.model_inputs(CPU), microbatch.labels, head).logprobs


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"use_rslora": True, "target_modules": ("q_proj", r".*\.1\.mlp\..*"), "exclude_modules": "up_proj"}),
    ("qwen2", {"use_dora": True, "modules_to_save": ("lm_head", "embed_tokens")}),
    ("qwen2_5_vl", {}),
    ("qwen2_5_vl", {"parts": ("language", "projector")}),
    ("qwen2_5_vl", {"parts": ALL, "use_dora": True}),
    ("qwen3_vl", {"parts": ("vision",), "modules_to_save": ("merger",)}),
]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_logprobs_and_gradients_equal_pefts_own_model(family, options, models, mesh, tmp_path):
    model = adapted(models[family], mesh, **options)
    microbatch, rollouts, prompts, vision = microbatch_of(model)
    weights = torch.randn(len(microbatch.labels), generator=torch.Generator().manual_seed(2))
    logprobs = score(model, microbatch, vision)
    (logprobs * weights).sum().backward()

    # peft around transformers' plain model, which gets the adapters by the names that its files have.
    theirs = peft.get_peft_model(load(models[family]), model.peft_config["default"])
    named = {file_name(n): p.full_tensor() for n, p in model.named_parameters() if is_adapter(n)}
    loaded = peft.set_peft_model_state_dict(theirs, named)
    assert not loaded.unexpected_keys
    expected = torch.cat([alone(theirs.base_model.model, r, prompts[r.group], vision, 0.7) for r in rollouts])
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=3e-5)
    grads = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    ours = {f"base_model.model.{n}": p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == ours.keys() and all(is_adapter(name) for name in grads)
    for name, grad in grads.items():
        assert (ours[name] - grad).abs().max() < 1e-5 * grad.abs().max().clamp(min=1), name

    # The merged stream is the same model without adapters, under the base's names.
    plain = load(models[family])
    stream = dict(stream_weights(model))
    assert stream.keys() == {name for name, _ in plain.named_parameters()}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(stream[name])
        merged = torch.cat([alone(plain, r, prompts[r.group], vision, 0.7) for r in rollouts])
    torch.testing.assert_close(merged, expected.detach(), rtol=0, atol=3e-5)


@pytest.mark.parametrize("options", [{}, {"use_dora": True, "modules_to_save": ("merger", "lm_head"), "parts": ALL}])
def test_without_its_adapters_the_model_is_the_one_it_started_as(options, models, mesh):
    model = adapted(models["qwen2_5_vl"], mesh, **options)
    microbatch, rollouts, prompts, vision = microbatch_of(model)
    plain = load(models["qwen2_5_vl"])
    with torch.no_grad():
        expected = torch.cat([alone(plain, r, prompts[r.group], vision, 0.7) for r in rollouts])
        with adapters_off(model):
            off = score(model, microbatch, vision)
        on = score(model, microbatch, vision)
    torch.testing.assert_close(off, expected, rtol=0, atol=3e-5)
    assert (on - off).abs().max() > 0.1


@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_a_fresh_adapter_changes_nothing(options, models, mesh):
    lora = LoraConfig(rank=4, parts=ALL, **options)
    model = load_model(
        ModelConfig(path=str(models["qwen2_5_vl"]), precision="float32", lora=lora), mesh, CPU, "sdpa", trainable=True
    )
    microbatch, _, _, vision = microbatch_of(model)
    with torch.no_grad(), adapters_off(model):
        off = score(model, microbatch, vision)
    torch.testing.assert_close(score(model, microbatch, vision), off, rtol=0, atol=1e-6)
    source = dict(load(models["qwen2_5_vl"]).named_parameters())
    for name, tensor in stream_weights(model):
        torch.testing.assert_close(tensor, source[name].detach(), rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize(("precision", "trained"), [("amp", torch.float32), ("bf16", torch.bfloat16)])
def test_frozen_weights_are_bfloat16_and_adapters_as_precise_as_weights_in_training(precision, trained, models, mesh):
    model = adapted(models["qwen2_5_vl"], mesh, precision, modules_to_save=("merger",))
    dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
    assert dtypes == {True: trained, False: torch.bfloat16}
    microbatch, _, _, vision = microbatch_of(model)
    score(model, microbatch, vision).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(is_adapter(n) and g.dtype == trained and g.full_tensor().isfinite().all() for n, g in grads.items())
    assert {t.dtype for _, t in stream_weights(model, dtype=torch.bfloat16)} == {torch.bfloat16}


def test_dropout_is_on_in_updates_only(models, mesh):
    model = adapted(models["qwen2"], mesh, dropout=0.3)
    microbatch, _, _, vision = microbatch_of(model)
    with torch.no_grad():
        first, second = score(model, microbatch, vision), score(model, microbatch, vision)
        set_dropout(model, True)
        dropped = score(model, microbatch, vision)
        set_dropout(model, False)
        third = score(model, microbatch, vision)
    assert torch.equal(first, second) and torch.equal(first, third) and not torch.equal(first, dropped)


def save_adapter(model: Any, folder: Path) -> None:
    folder.mkdir()
    model.peft_config["default"].save_pretrained(str(folder))
    tensors = {file_name(n): p.full_tensor().detach() for n, p in model.named_parameters() if is_adapter(n)}
    save_file(tensors, folder / "adapter_model.safetensors")


def test_an_existing_adapter_is_where_training_starts(models, mesh, tmp_path):
    options: dict[str, Any] = {"use_dora": True, "modules_to_save": ("lm_head",)}
    model = adapted(models["qwen2"], mesh, **options)
    save_adapter(model, tmp_path / "adapter")
    lora = LoraConfig(rank=4, alpha=16, adapter_path=str(tmp_path / "adapter"), **options)

    def start(config: LoraConfig) -> Any:
        path = str(models["qwen2"])
        return load_model(ModelConfig(path=path, precision="float32", lora=config), mesh, CPU, "sdpa", trainable=True)

    for (name, ours), (_, theirs) in zip(start(lora).named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor()), name
    for change, message in (
        ({"rank": 8}, "has rank 4, and model.lora.rank is 8; set it to 4"),
        ({"alpha": 4.0}, "has alpha 16, and model.lora.alpha is 4.0"),
        ({"modules_to_save": ()}, r"which differ in 1 tensors: base_model.model.lm_head.weight; set parts"),
        ({"adapter_path": str(models["qwen3"])}, "is no peft adapter"),
    ):
        with pytest.raises(ValueError, match=message):
            start(dataclasses.replace(lora, **change))


def test_a_missing_adapter_is_named_before_anything_loads():
    lora = LoraConfig(rank=4, adapter_path="./nowhere")
    with pytest.raises(ValueError, match=r"adapter_path='./nowhere': no such folder"):
        check_files(Config(model=ModelConfig(lora=lora)))


def test_targets_that_are_not_there_are_named(models, mesh):
    for family, options, message in (
        (
            "qwen2",
            {"target_modules": "query"},
            "target_modules: 'query' fits no linear layer of language; there",
        ),
        ("qwen2", {"target_modules": "lm_head"}, "'lm_head' fits no linear layer"),
        ("qwen2", {"parts": ("vision",)}, "has no linear layer in vision"),
        ("qwen2", {"modules_to_save": ("head",)}, "has no module 'head'"),
        ("qwen3", {"modules_to_save": ("lm_head",)}, "LM head is its embedding"),
    ):
        with pytest.raises(ValueError, match=message):
            adapted(models[family], mesh, **options)


def test_a_value_head_trains_beside_the_adapters(models, mesh):
    lora = LoraConfig(rank=4)
    config = ModelConfig(path=str(models["qwen2"]), precision="float32", lora=lora)
    model = load_model(config, mesh, CPU, "sdpa", trainable=True, value_head=True)
    trained = {n for n, p in model.named_parameters() if p.requires_grad and not is_adapter(n)}
    assert trained == {"lm_head.weight"}
    assert isinstance(model.lm_head, nn.Linear) and model.lm_head.weight.full_tensor().count_nonzero() == 0


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="freeze_vision_tower contradicts"):
        ModelConfig(freeze_vision_tower=True, lora=LoraConfig(rank=8, parts=("vision",)))
    with pytest.raises(ValueError, match=r"adapter_path='a' needs model\.lora\.rank"):
        LoraConfig(adapter_path="a")
    with pytest.raises(ValueError, match=r"alpha must be above 0 \(0 would train nothing\)"):
        LoraConfig(rank=8, alpha=0)
    with pytest.raises(ValueError, match="reference_update_steps moves the reference"):
        Config(
            model=ModelConfig(lora=LoraConfig(rank=8)),
            algorithm=AlgorithmConfig(reference_update_steps=5),
            optim=OptimConfig(),
        )
