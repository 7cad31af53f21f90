"""tools/bench.py parts and trl, and the picture of a step: combinations, sums, tables and sizes by hand."""

import dataclasses
import json
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import tools.bench_trl
from r1.config import load_config
from tools.bench import main, parse
from tools.bench_options import work_of
from tools.bench_parts import comparison, parts_of, sum_of_parts, table, variants_of
from tools.bench_profile import kernel_table, kind_of
from tools.bench_report import read_step
from tools.bench_step import summarize_runs
from tools.bench_timeline import Phase, phases_of, tick, timeline_svg
from tools.bench_trl import accumulation, parse_setting, trl_batch, trl_settings
from tools.bench_trl import table as trl_table
from tools.bench_work import Work, model_of, response_lengths, write_config

WORK = Work(model="tiny", prompts=64, n=5, prompt_tokens=343, response_tokens=361, lengths="mixed", image=None,
            minibatches=4, precision="float32", steps=4, nproc=2)  # fmt: skip
ENGINE = [
    {"variant": "a", "part": "rollout", "seconds": [2.0, 4.0, 3.0], "counted_tokens": 1500, "response_tokens": 900},
    {"variant": "a", "part": "weight_sync", "seconds": [0.5]},
    {"variant": "a", "part": "sleep_wake", "seconds": [0.5]},
]


def trainer(variant: str, update: float) -> list[dict]:
    return [
        {"variant": variant, "part": "logprobs", "seconds": [1.0], "counted_tokens": 1000, "computed_tokens": 875,
         "passes": 1.75, "mfu": [0.25]},
        {"variant": variant, "part": "optimizer", "seconds": [0.25], "times": 4},
        {"variant": variant, "part": "update", "seconds": [update], "counted_tokens": 1000, "computed_tokens": 500,
         "mfu": [0.4], "peak_gib": 70.0},
    ]  # fmt: skip


def test_settings_vary_in_every_combination() -> None:
    found = variants_of(["update.max_tokens_per_microbatch=16384,32768", "model.gradient_checkpointing=true,false"])
    assert len(found) == 4
    assert found["update.max_tokens_per_microbatch=32768 model.gradient_checkpointing=False"] == [
        "--update.max_tokens_per_microbatch", "32768", "--model.gradient_checkpointing", "False"]  # fmt: skip
    assert variants_of([]) == {"": []}
    with pytest.raises(ValueError, match="expected key=value,value"):
        variants_of(["gradient_checkpointing=true"])


def test_the_sum_of_parts_by_hand() -> None:
    rows = [*ENGINE, *trainer("a", 4.0), *trainer("b", 2.0)]
    assert list(parts_of(rows, "b")) == ["rollout", "logprobs", "update", "optimizer", "weight_sync", "sleep_wake"]
    # Sampling takes 3 s for 1500 tokens, so 2 s for 1000; 1 + 4 + 4 x 0.25 + 0.5 + 0.5 for the rest.
    total = sum_of_parts(rows, "a", WORK)
    assert total["seconds"] == pytest.approx(9.0) and total["counted_tokens"] == 1000
    assert total["tokens_per_s_per_gpu"] == pytest.approx(1000 / 9 / 2)
    assert sum_of_parts(rows, "b", WORK)["seconds"] == pytest.approx(7.0)


def test_the_table_compares_a_step_with_its_parts() -> None:
    speeds = {"perf/tokens_per_s_per_gpu": {"median": 50.0}, "bench/response_tokens_per_s": {"median": 140.0}}
    step = {"summary": speeds, "overrides": []}
    text = table([*ENGINE, *trainer("a", 4.0)], "a", WORK, step)
    lines = [line.split() for line in text.splitlines()]
    assert ["log-probabilities,", "1.75", "passes", "1.000", "1.000", "1.000", "500", "438", "25.0"] in lines
    assert ["forward", "+", "backward", "4.000", "4.000", "4.000", "125", "62", "40.0", "70.0"] in lines
    assert "vLLM alone: 150 response tokens/s/GPU" in text
    assert "1.111 x its parts" in text  # 55.6 tokens/s of the parts against 50
    assert "vLLM in it: 140 response tokens/s/GPU" in text
    assert "its parts" not in table([*ENGINE, *trainer("a", 4.0)], "a", WORK, None)


def test_a_variant_that_ran_out_of_memory_stays_in_the_comparison() -> None:
    rows = [*ENGINE, *trainer("a", 4.0), {"variant": "b", "part": "failed", "error": "out of memory in a microbatch"}]
    good, bad = comparison(rows, ["a", "b"], WORK).splitlines()[1:]
    assert good.split()[-2:] == ["56", "a"] and bad.split() == ["failed", "b"]
    assert "out of memory in a microbatch" in table(rows, "b", WORK, None)


def test_a_step_is_compared_only_if_it_did_the_same_work(tmp_path: Path) -> None:
    assert read_step(tmp_path, WORK) is None
    (tmp_path / "bench.json").write_text(json.dumps({"work": dataclasses.asdict(WORK), "summary": {}}))
    assert read_step(tmp_path, dataclasses.replace(WORK, steps=9)) is not None
    assert read_step(tmp_path, dataclasses.replace(WORK, n=8)) is None


def test_made_up_lengths_are_those_that_are_sampled() -> None:
    lengths = response_lengths(WORK, 320)
    assert statistics.fmean(lengths) == pytest.approx(361, rel=0.005) and max(lengths) == 1253 and min(lengths) >= 1
    assert lengths == response_lengths(WORK, 320) and lengths != sorted(lengths)
    assert set(response_lengths(dataclasses.replace(WORK, lengths="equal"), 10)) == {361}


def test_kernels_are_listed_by_time_and_kind() -> None:
    rows = [
        ("void flash_fwd_kernel<...>", 4, 3.0),
        ("nvjet_tst_128x256_64x4", 10, 6.0),
        ("triton_poi_fused_mul", 2, 1.0),
    ]
    lines = kernel_table(rows, 12.0, "a microbatch").splitlines()
    assert lines[1] == "12.0 ms in all, 10.0 ms in kernels"
    assert lines[4].split() == ["6.00", "60.0", "10", "matrix", "products"]
    assert lines[9].split() == ["6.00", "60.0", "10", "600.0", "nvjet_tst_128x256_64x4"]
    assert kind_of("ncclDevKernel_AllGather_RING_LL") == "communication"
    assert kind_of("Memcpy HtoD (Pinned -> Device)") == "copies"


def test_a_timeline_shows_every_second_of_the_step() -> None:
    step = {"step": 2.0, "time/weight_sync_s": 0.5, "time/rollout_s": 6.0, "time/update_s": 3.0, "time/step_s": 10.0,
            "mem/rollout_peak_gib": 90.0}  # fmt: skip
    phases = phases_of(step)
    assert [p.name for p in phases] == ["weight_sync", "rollout", "update", "between phases"]
    assert phases[-1].seconds == pytest.approx(0.5) and phases[1].peak_gib == 90.0
    picture = ElementTree.fromstring(timeline_svg(phases, "One step <of> r1", "below"))
    tag = "{http://www.w3.org/2000/svg}"
    bars = [r for r in picture.iter(tag + "rect") if r.find(tag + "title") is not None]
    assert sum(float(r.attrib["width"]) for r in bars) == pytest.approx(832, abs=0.1)
    words = [t.text for t in picture.iter(tag + "text")]
    assert {"One step <of> r1", "rollout", "6.00 s", "60.0%", "90.0"} <= set(words)
    assert "peak memory, GiB" in words
    bare = timeline_svg([Phase(name="rollout", seconds=0.01, peak_gib=None)], "t", "s")
    assert "peak memory" not in bare and ElementTree.fromstring(bare) is not None


def test_ticks_are_round() -> None:
    assert (tick(19.1, 10), tick(0.35, 10), tick(106, 6)) == (2, pytest.approx(0.05), 20)


def test_runs_are_summed_up_by_their_medians() -> None:
    def steps(seconds: float) -> list[dict[str, float]]:
        row = {
            "step": 1,
            "time/rollout_s": 1.0,
            "engine/generate_s": 1.0,
            "time/step_s": seconds,
            "response/length_mean": 10.0,
        }
        return [row | {"time/step_s": 99.0}, row, row]

    summary = summarize_runs([steps(3.0), steps(5.0), steps(4.0)], WORK)
    assert summary["time/step_s"] == {"median": 4.0, "min": 3.0, "max": 5.0}


def test_the_geo3k_preset_mixes_prompts_pictures_and_responses(tmp_path: Path) -> None:
    options, _ = parse("step --preset geo3k --model tiny-vl --prompts 5 --minibatches 1 --image 140 --n 2".split())
    work = work_of(options, steps=2)
    assert (work.lengths, work.prompt_lengths, work.image_sizes, work.prompt_tokens) == (*["mixed"] * 3, 127)
    assert work.picture(0) == (140, 140) and work.picture(1) == (168, 112)
    config = load_config(str(write_config(work, model_of(work, tmp_path / "models"), tmp_path)))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    lengths = [len(row["problem"]) for row in rows]
    assert min(lengths) < 0.6 * statistics.fmean(lengths) and max(lengths) > 1.4 * statistics.fmean(lengths)
    assert config.data.max_prompt_length > 150


def test_trl_gets_the_same_work(tmp_path: Path) -> None:
    assert trl_batch(WORK) == {"per_device_train_batch_size": 10}  # of 320 / 4 / 2 = 40 responses
    assert accumulation(WORK, 10) == {"gradient_accumulation_steps": 4, "steps_per_generation": 16}
    with pytest.raises(ValueError, match="does not divide the 40 responses"):
        accumulation(WORK, 7)
    work = dataclasses.replace(WORK, lengths="equal")
    config = load_config(str(write_config(work, model_of(work, tmp_path / "models"), tmp_path)))
    settings = trl_settings(work, config, on_gpu=True)
    assert settings["beta"] == 0.01 and settings["max_steps"] == 16 and settings["vllm_max_model_length"] == 704
    assert settings["generation_kwargs"] == {"ignore_eos": True, "detokenize": False}
    assert "use_vllm" not in trl_settings(work, config, on_gpu=False)


def test_settings_of_trl_are_read() -> None:
    assert parse_setting("beta=0.02") == ("beta", 0.02) and parse_setting("optim=adamw_torch") == (
        "optim",
        "adamw_torch",
    )
    assert parse_setting("use_liger_kernel=False") == ("use_liger_kernel", False)
    with pytest.raises(ValueError, match="expected KEY=VALUE"):
        parse_setting("beta")


def test_trl_and_r1_stand_side_by_side() -> None:
    def side(seconds: float, speed: float) -> dict[str, dict[str, float]]:
        return {name: {"median": value} for name, value in (("time/step_s", seconds), ("mem/peak_gib", 90.0),
                                                            ("perf/tokens_per_s_per_gpu", speed))}  # fmt: skip

    text = trl_table(side(30.0, 7000.0), side(12.0, 17500.0))
    assert ["step,", "s", "30.00", "12.00", "2.50"] in [line.split() for line in text.splitlines()]
    assert text.endswith("r1 does 2.50 x TRL's counted tokens/s")


def test_without_trl_there_is_a_line_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tools.bench_trl.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install trl"):
        main(["trl", "--model", "tiny", "--output", str(tmp_path)])


@pytest.mark.engine
@pytest.mark.slow
def test_parts_measures_each_part_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "parts --model tiny --prompts 4 --n 2 --response-tokens 12 --lengths mixed --repeats 1 --profile"
    main([*words.split(), "--vary", "update.max_tokens_per_microbatch=256,512", "--output", str(tmp_path)])
    report = json.loads((tmp_path / "parts.json").read_text())
    names = [row["part"] for row in report["parts"]]
    own = ["logprobs", "optimizer", "update", "optimizer_offload"]
    assert names == ["loading", "rollout", "sleep_wake", "weight_sync", *own, *own]  # one model serves both
    assert all(len(row["seconds"]) == 1 for row in report["parts"])
    assert 1 < report["parts"][4]["passes"] < 2  # the first update makes its own old logprobs
    assert "aten::" in (tmp_path / "profile-1.txt").read_text()
    assert "sum of parts:" in capsys.readouterr().out


@pytest.mark.slow
def test_trl_does_the_work_where_it_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    words = "trl --model tiny --prompts 4 --n 2 --minibatches 2 --steps 2 --response-tokens 12 --lengths mixed".split()
    options, _ = parse([*words, "--output", str(tmp_path)])
    speeds = {"perf/tokens_per_s_per_gpu": {"median": 1.0}}
    step = {"work": dataclasses.asdict(work_of(options, steps=2)), "overrides": [], "summary": speeds}
    (tmp_path / "bench.json").write_text(json.dumps(step))  # r1's side has a test of its own
    main([*words, "--output", str(tmp_path)])
    report = json.loads((tmp_path / "trl.json").read_text())
    assert len(report["steps"]) == 2 and report["settings"]["gradient_accumulation_steps"] == 1
    assert report["steps"][0]["counted_tokens"] == 8 * 64 + report["steps"][0]["response_tokens"]
    assert "x TRL's counted tokens/s" in capsys.readouterr().out
