"""tools/plan.py: counts are exact, decisions are r1's own, and the change it names makes the run fit."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from r1.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    UpdateConfig,
)
from tests.shell import ROOT
from tests.tiny import make_tiny
from tools.plan import changes, find_model, hardware_table, main, mend, parse_gpus
from tools.plan_held import Machines, hold
from tools.plan_memory import ENGINE_EXTRA_GIB, GIB, plan
from tools.plan_shapes import known_config

ONE = Machines(num_gpus=1, per_node=1, gpu_gib=139.6, name="1xH200-141GB")
EIGHT = Machines(num_gpus=8, per_node=8, gpu_gib=79.2, name="8xH100-80GB")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-8b", 8.030), ("llama-70b", 70.554), ("qwen2.5-72b", 72.706), ("qwen3-8b", 8.191),
     ("qwen3-30b-a3b", 30.532), ("qwen2.5-vl-32b", 33.453), ("qwen3-vl-8b", 8.767)],
)  # fmt: skip
def test_known_models_have_the_published_number_of_parameters(name, billions):
    assert hold(known_config(name), Config(), ONE).parameters / 1e9 == pytest.approx(billions, abs=0.001)


def test_weights_gradients_and_states_are_counted_by_precision_and_rank():
    model, count = known_config("qwen2.5-3b"), 3_085_938_688
    amp, half = (Config(model=ModelConfig(precision=p)) for p in ("amp", "bf16"))
    held = hold(model, amp, ONE)
    assert (held.weights, held.gradients, held.states, held.reference) == (4 * count, 4 * count, 8 * count, 2 * count)
    held = hold(model, half, ONE)
    assert (held.weights, held.gradients, held.states) == (2 * count, 2 * count, 6 * count)  # Kahan's third state
    assert hold(model, amp, EIGHT).weights == pytest.approx(count / 2, rel=1e-3)
    hybrid = replace(amp, parallel=replace(amp.parallel, fsdp_size=2))
    assert hold(model, hybrid, EIGHT).weights == pytest.approx(2 * count, rel=1e-3)
    alone = replace(amp, algorithm=AlgorithmConfig(kl_coef=0.0))
    assert hold(model, alone, ONE).reference == 0


def test_adapters_train_alone_beside_half_precision_weights_and_no_reference():
    config = Config(model=ModelConfig(precision="amp", lora=LoraConfig(rank=64)))
    held = hold(known_config("qwen2.5-3b"), config, ONE)
    # Of each layer q, o (2048 + 2048), k, v (2048 + 256), gate, up, down (2048 + 11008): times the rank.
    assert held.trained == 36 * 64 * (2 * 4096 + 2 * 2304 + 3 * 13056)
    assert held.parameters == 3_085_938_688 and held.reference == 0
    assert held.weights == 2 * held.parameters + 4 * held.trained and held.states == 8 * held.trained


def test_a_phase_holds_what_it_uses():
    result = plan(known_config("qwen2.5-7b"), Config(model=ModelConfig(precision="amp")), EIGHT)
    assert result.phases["rollout"]["engine"] == pytest.approx(0.6 * 79.2 * GIB)
    assert "gradients" in result.phases["update"] and "gradients" not in result.phases["logprobs"]
    # 28 layers x 2 x 4 key-value heads of 128 in bfloat16: 57,344 bytes a token of what the engine's share leaves.
    left = 0.6 * 79.2 * GIB - 2 * 7_615_616_512 - 2.5 * GIB
    assert result.kv_tokens == int(left / 57_344)
    # 8 bytes of states and 4 of weights a parameter on a rank: 7.1 + 3.5 GiB fit beside 60% for the engine.
    assert result.leaves == {"params": False, "optimizer": False, "reference": False}


LORA = {"lora": LoraConfig(rank=64)}
MEASURED = [
    ("qwen2.5-3b", {}, "trainer alone", {"logprobs": 23.2, "update": 69.7, "optimizer": 53.1, "between": 43.6}),
    ("qwen2.5-3b", LORA, "trainer alone", {"logprobs": 12.2, "update": 17.0, "optimizer": 12.7, "between": 8.7}),
    ("qwen2.5-7b", LORA, "trainer alone", {"logprobs": 23.6, "update": 29.9, "optimizer": 24.3, "between": 18.3}),
    ("qwen2.5-vl-3b", {}, "trainer alone", {"logprobs": 27.8, "optimizer": 65.0, "between": 54.2}),
    ("qwen2.5-3b", {}, "beside an engine", {"rollout": 129.1, "logprobs": 49.4}),
    ("qwen2.5-7b", {"precision": "bf16"}, "beside an engine", {"rollout": 117.9, "logprobs": 40.8}),
]
"""GiB on one H200 by the driver's count (torch 2.11, vllm 0.26), precision amp where nothing is said: `bench.py parts`,
before whose first log-probabilities there are no states, and `bench.py step` with the engine's share at 0.6."""
LARGEST = 17_500
"""Packed tokens of the largest microbatch that was measured, of the 20,480 allowed."""


@pytest.mark.parametrize(("name", "model", "beside", "measured"), MEASURED)
def test_planned_memory_is_within_a_tenth_of_what_an_h200_held(name, model, beside, measured):
    config = Config(
        model=ModelConfig(gradient_checkpointing=True, **model),
        update=UpdateConfig(max_tokens_per_microbatch=LARGEST),
    )
    phases = plan(known_config(name), config, replace(ONE, gpu_gib=139.8)).phases
    planned = {phase: sum(parts.values()) / GIB for phase, parts in phases.items()}
    if beside == "trainer alone":
        update, engine = ({n: size / GIB for n, size in phases["update"].items()}, ENGINE_EXTRA_GIB)
        planned["update"] -= engine
        planned["logprobs"] -= engine + update["optimizer"]
        planned["between"] = sum(update[n] for n in ("CUDA context", "weights", "optimizer", "reference"))
        # What log-probabilities took stays in the allocator's cache, until an update has ended.
        planned["optimizer"] = max(planned["between"] + update["gradients"], planned["logprobs"])
    assert {phase: planned[phase] for phase in measured} == pytest.approx(measured, rel=0.1)


def test_what_is_recomputed_is_planned_and_what_fills_the_gpu_said(capsys):
    model = ["--model", "qwen2.5-3b", "--gpus", "1x141GB"]
    main(model)
    adaptive = capsys.readouterr().out
    assert "every layer recomputed" in adaptive and "of 128.4 GiB, 92% of the GPU, it fills on purpose" in adaptive
    main([*model, "--model.gradient_checkpointing", "True"])
    recomputed = capsys.readouterr().out
    assert "on purpose" not in recomputed
    totals = [re.findall(r"^sum .*$", text, re.MULTILINE)[0] for text in (adaptive, recomputed)]
    assert totals[0] == totals[1]
    with pytest.raises(SystemExit):
        main(["--model", "qwen2.5-7b", "--gpus", "8x80GB", "--model.gradient_checkpointing", "False"])
    assert "makes it fit: --model.gradient_checkpointing None\n" in capsys.readouterr().out


def long_responses(tokens: int, *, shared_by: int = 1) -> Config:
    return Config(
        model=ModelConfig(precision="bf16"),
        data=DataConfig(max_response_length=tokens - 2048),
        update=UpdateConfig(max_tokens_per_microbatch=tokens),
        parallel=ParallelConfig(sequence_parallel_size=shared_by),
    )


def test_long_responses_are_shared_among_ranks_where_they_divide():
    model, config = known_config("qwen2.5-7b"), long_responses(131_072)
    before = plan(model, config, EIGHT)
    assert not before.fits and before.phases["update"]["activations"] > before.limit / 2
    mended = mend(model, config, EIGHT, dear=False)
    assert mended is not None and mended[2].fits
    assert mended[0] == ["--parallel.sequence_parallel_size 2 --update.max_tokens_per_microbatch 65536"]
    mended[1].check_world_size(8, 8)
    # One rank has no other to share with, and 6 GPUs divide by 2, not by 4; half the ranks share already in the last.
    sizes = [
        [text.split()[1] for text, _ in changes(config, machines) if "sequence_parallel" in text]
        for config, machines in (
            (config, ONE),
            (replace(config, data=replace(config.data, rollout_batch_size=384)),
             Machines(num_gpus=6, per_node=6, gpu_gib=79.2, name="6x80GB")),
            (config, EIGHT),
            (long_responses(131_072, shared_by=4), EIGHT),
        )
    ]  # fmt: skip
    assert sizes == [[], ["2"], ["2", "4", "8"], ["8"]]


def test_microbatches_shrink_before_ranks_share_them():
    config = replace(long_responses(4096), update=UpdateConfig(max_tokens_per_microbatch=131_072))
    mended = mend(known_config("qwen2.5-7b"), config, EIGHT, dear=False)
    assert mended is not None and mended[0] == ["--update.max_tokens_per_microbatch 65536"]
    shared = replace(config, parallel=ParallelConfig(sequence_parallel_size=4))
    least = [text.split()[1] for text, _ in changes(shared, EIGHT) if text.startswith("--update.max_tokens")][-1]
    assert least == "1024"  # a quarter of a prompt and response


def test_the_cheapest_change_makes_it_fit():
    config = Config(model=ModelConfig(precision="bf16"), rollout=RolloutConfig(tensor_parallel_size=8))
    model = known_config("qwen2.5-32b")
    assert not plan(model, config, EIGHT).fits
    mended = mend(model, config, EIGHT, dear=True)
    assert mended is not None and mended[2].fits
    assert mended[1].model.precision == "bf16" and mended[1].model.lora.rank == 0
    assert all(word.startswith("--update.") or word.startswith("--parallel.") for word in mended[0]), mended[0]
    assert mend(model, config, replace(EIGHT, num_gpus=1, per_node=1, gpu_gib=23.0), dear=True) is None


def test_gpus_and_models_are_read_as_people_write_them(tmp_path):
    machines = parse_gpus("32xH100-80GB", None)
    assert (machines.num_gpus, machines.per_node, round(machines.gpu_gib, 1)) == (32, 8, 79.2)
    assert (parse_gpus("4x24GB", None).per_node, parse_gpus("2xRTX-4090-24gb", 1).per_node) == (4, 1)
    with pytest.raises(ValueError, match="as in 8xH100-80GB"):
        parse_gpus("8 H100", None)
    assert find_model("Qwen/Qwen2.5-VL-7B-Instruct").model_type == "qwen2_5_vl"
    assert find_model("meta-llama/Llama-3.3-70B-Instruct").num_hidden_layers == 80
    assert find_model(str(make_tiny("qwen3", tmp_path))).hidden_size == 128


def test_disk_of_checkpoints_is_12_bytes_a_parameter_and_of_adapters_small(capsys):
    main(["--model", "qwen2.5-3b", "--gpus", "2x80GB"])
    assert "34.5 GiB of disk for a checkpoint, 138 GiB with those kept\n" in capsys.readouterr().out
    main(["--model", "qwen2.5-3b", "--gpus", "1x80GB", "--checkpoint.save_limit", "-1", "--model.lora.rank", "64"])
    assert "1.3 GiB of disk for a checkpoint; all are kept (checkpoint.save_limit=-1)" in capsys.readouterr().out


def test_a_run_that_fits_says_so_and_one_that_does_not_what_would(capsys):
    main(["--config", str(ROOT / "configs/geo3k_32b_bf16.py"), "--gpus", "8xH100-80GB"])
    assert "fits: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--model", "qwen2.5-7b", "--gpus", "1x80GB", "--model.precision", "bf16"])
    output = capsys.readouterr().out
    assert "does not fit" in output and re.search(r"makes it fit: --\w+\.\w+", output)
    with pytest.raises(SystemExit, match="error: --gpus"):
        main(["--model", "qwen2.5-7b", "--gpus", "many"])


LARGE = [
    ("geo3k_32b_bf16", "8xH100-80GB", 8),
    ("math_70b", "32x80GB", 32),
    ("qwen3_30b_a3b_math", "8xH100-80GB", 8),
    ("qwen3_vl_30b_a3b_geo3k", "8xH100-80GB", 8),
]


@pytest.mark.parametrize(("name", "gpus", "world"), LARGE)
def test_large_configs_fit_what_their_page_says(name, gpus, world):
    config = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["config"]
    config.check_world_size(world, 8)
    result = plan(find_model(config.model.path), config, parse_gpus(gpus, 8))
    page = " ".join((ROOT / "configs" / f"{name}.py").read_text().split())
    update, rollout = (sum(result.phases[phase].values()) / GIB for phase in ("update", "rollout"))
    assert result.shortage(config.max_model_len) == 0
    assert f"{update:.0f} of 79 GiB a GPU at the update's peak" in page and f"{rollout:.0f} while sampling" in page


def test_smaller_microbatches_take_less():
    model, sizes = known_config("qwen2.5-vl-3b"), []
    for tokens in (4096, 16384):
        config = Config(update=UpdateConfig(max_tokens_per_microbatch=tokens))
        sizes.append(plan(model, config, ONE).phases["update"]["activations"])
    assert sizes[1] == pytest.approx(4 * sizes[0])


@pytest.mark.slow
def test_the_readmes_table_is_what_the_planner_prints():
    assert hardware_table() in Path(ROOT / "README.md").read_text()
