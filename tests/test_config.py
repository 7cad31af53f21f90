"""Config files and overrides: every mistake ends before a model loads, with what would fit."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from r1.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
    config_to_json,
    load_config,
)
from r1.dry_run import dry_run
from r1.train import prepare
from tests.shell import ROOT, run
from tests.tiny import make_tiny


def write(folder: Path, text: str) -> str:
    path = folder / "run.py"
    path.write_text("from r1.config import *\n" + text)
    return str(path)


def test_overrides_replace_fields_by_their_dotted_path(tmp_path):
    path = write(tmp_path, "config = Config(rollout=RolloutConfig(n=4))")
    words = ["--rollout.n", "8", "--data.shuffle", "False", "--optim.lr", "2e-6", "--rollout.val.temperature", "0"]
    config = load_config(path, [*words, "--data.val_files", "a.jsonl", "b.jsonl"])
    assert (config.rollout.n, config.data.shuffle, config.optim.lr) == (8, False, 2e-6)
    assert config.rollout.val.temperature == 0 and config.data.val_files == ("a.jsonl", "b.jsonl")
    assert load_config(path).rollout.n == 4


def test_F03_unknown_option_names_the_nearest(tmp_path, capsys):
    path = write(tmp_path, "config = Config()")
    with pytest.raises(SystemExit) as exit_:
        load_config(path, ["--algorithm.clip_hihg", "0.3"])
    assert exit_.value.code == 2
    assert "clip-high" in capsys.readouterr().err


def test_F03_unknown_field_in_a_file_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"AlgorithmConfig has no field 'clip_ratio_cc'; did you mean .*'clip_low'"):
        load_config(write(tmp_path, "config = Config(algorithm=AlgorithmConfig(clip_ratio_cc=3))"))
    with pytest.raises(ValueError, match="Config has no field 'rolout'; did you mean 'rollout'"):
        load_config(write(tmp_path, "config = Config(rolout=1)"))


def test_a_rule_broken_by_an_override_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        load_config(write(tmp_path, "config = Config()"), ["--rollout.temperature", "0"])
    assert "rollout.temperature must be above 0" in " ".join(capsys.readouterr().err.split())


def test_a_file_without_config_and_a_missing_file_say_so(tmp_path):
    with pytest.raises(ValueError, match="must define `config = Config"):
        load_config(write(tmp_path, "settings = 3"))
    with pytest.raises(ValueError, match="no such file"):
        load_config(str(tmp_path / "absent.py"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"update": UpdateConfig(global_batch_size=100)}, "512 prompts do not divide .* set it to 4 or 512"),
        ({"rollout": RolloutConfig(max_model_len=4000)}, "max_model_len=4000 is below .* = 4096"),
        ({"update": UpdateConfig(max_tokens_per_microbatch=100)}, "raise it to 4096"),
        ({"rollout": RolloutConfig(n=1)}, "rollout.n=1 .* use at least 2"),
    ],
)
def test_rules_across_sections_say_what_would_fit(sections, message):
    with pytest.raises(ValueError, match=message):
        Config(**sections)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RolloutConfig(top_p=0), "rollout.top_p must be in"),
        (lambda: DataConfig(min_pixels=10, max_pixels=5), "data.min_pixels=10 is above"),
        (lambda: AlgorithmConfig(clip_low=1.5), r"algorithm.clip_low must be in \(0, 1\)"),
        (lambda: AlgorithmConfig(kl_coef=-0.1), "algorithm.kl_coef must be >= 0"),
        (lambda: TrainerConfig(loggers=("console", "wanb")), "'wanb' is not one of"),
        (lambda: TrainerConfig(max_steps=0), "trainer.max_steps must be at least 1"),
    ],
)
def test_rules_of_one_section(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        (Config(), 6, "512 prompts do not divide over 6 engines .* use 510 or 516"),
        (
            Config(data=DataConfig(rollout_batch_size=2), update=UpdateConfig(global_batch_size=2)),
            4,
            "data.rollout_batch_size=2 prompts do not divide over 4 engines .* use 4",
        ),
        (Config(rollout=RolloutConfig(tensor_parallel_size=3)), 8, r"does not divide 8 ranks a node .* \[1, 2, 4, 8\]"),
        (Config(parallel=ParallelConfig(fsdp_size=3)), 8, r"one of \[1, 2, 4, 8\]"),
        (
            Config(update=UpdateConfig(global_batch_size=1)),
            8,
            "= 5 responses are fewer than 8 ranks; use at least 2",
        ),
        (Config(parallel=ParallelConfig(sequence_parallel_size=3)), 8, r"does not divide 8 ranks .* \[1, 2, 4, 8\]"),
    ],
)
def test_X03_world_size_rules_say_what_would_fit(config, world, message):
    with pytest.raises(ValueError, match=message):
        config.check_world_size(world, world)


def test_sequence_parallel_ranks_share_a_microbatch():
    long = DataConfig(max_prompt_length=2000, max_response_length=32_000)
    with pytest.raises(ValueError, match="34000 tokens; raise it to 34000, or share them among more ranks"):
        Config(data=long)
    shared = Config(data=long, parallel=ParallelConfig(sequence_parallel_size=2), update=UpdateConfig(
        global_batch_size=1, max_tokens_per_microbatch=17_000))  # fmt: skip
    shared.check_world_size(8, 8)  # 4 groups for 5 responses
    with pytest.raises(ValueError, match=r"does not divide 2 ranks a node .* nor is it whole nodes; use one of \[1, 2"):
        dataclasses.replace(shared, parallel=ParallelConfig(sequence_parallel_size=3)).check_world_size(6, 2)


def test_dry_run_says_where_each_rank_stands():
    config = Config(
        rollout=RolloutConfig(tensor_parallel_size=4), parallel=ParallelConfig(fsdp_size=8, sequence_parallel_size=2)
    )
    lines = dry_run(config, 16, 8).splitlines()
    assert sum(line.startswith("rank ") for line in lines) == 16
    assert (
        "rank 11    node 1, weights 4/8 of replica 1, engine 2, its part 4/4, microbatches 5, their tokens' part 2/2"
        in lines
    )
    many = [line for line in dry_run(config, 64, 8).splitlines() if line.startswith(("rank ", "           …"))]
    assert len(many) == 17 and many[-1].startswith("rank 63    node 7, weights 8/8 of replica 7, engine 15")


def test_F04_updates_and_steps_are_counted_in_prompts():
    config = Config(
        data=DataConfig(rollout_batch_size=16),
        rollout=RolloutConfig(n=8),
        update=UpdateConfig(global_batch_size=4),
        trainer=TrainerConfig(total_epochs=3),
    )
    assert config.steps_per_epoch(100) == 6 and config.num_steps(100) == 18
    with pytest.raises(ValueError, match=r"fewer than data\.rollout_batch_size=16; lower it to 9"):
        config.steps_per_epoch(9)
    assert "updates    4 optimizer steps a step, of 4 prompts = 32 rollouts" in dry_run(config, 2, 2)


def test_the_saved_config_is_the_resolved_one():
    assert json.loads(config_to_json(Config()))["rollout"]["val"]["temperature"] == 0.6


def test_dry_run_checks_local_files_and_counts_steps(tmp_path):
    make_tiny("qwen2", tmp_path / "model")
    rows = [{"problem": f"{i} + 1?", "answer": i + 1} for i in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = Config(
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(train_files=str(tmp_path / "train.jsonl"), val_files=(), rollout_batch_size=4,
                        max_prompt_length=64, max_response_length=64),
        update=UpdateConfig(global_batch_size=4),
        trainer=TrainerConfig(total_epochs=2),
    )  # fmt: skip
    text = dry_run(config, 2, 2)
    assert "20 rows, 0 dropped" in text and "5 an epoch, 10 in all" in text and "all checks passed" in text


def test_D21_dry_run_lists_the_columns_found(tmp_path):
    make_tiny("qwen2", tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}')
    config = Config(
        model=ModelConfig(path=str(tmp_path / "model")),
        data=DataConfig(train_files=str(tmp_path / "train.jsonl"), val_files=(), rollout_batch_size=1),
        update=UpdateConfig(global_batch_size=1),
    )
    with pytest.raises(ValueError, match="no column 'problem'; its columns are question, answer"):
        dry_run(config, 1, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward.function", "nope.py:f"], "nope.py"),
        (["--reward.function", "mth"], "math"),
        (["--data.format_prompt", "nope.jinja"], "data.format_prompt='nope.jinja' does not exist"),
        (["--data.train_files", "./nope.jsonl"], "no such file"),
        (["--model.path", "./nope"], "no such folder"),
        (["--algorithm.loss", "gpso"], "algorithm.loss='gpso' is not known; did you mean 'gspo'?"),
        (["--algorithm.advantage", "nope.py:mine"], "algorithm.advantage='nope.py:mine': no file 'nope.py'"),
    ],
)
def test_mistakes_end_before_anything_loads(tmp_path, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(["--config", write(tmp_path, "config = Config()"), "--world-size", "8", "--dry-run", *words])


def test_a_mistake_is_one_line_in_the_shell(tmp_path):
    path, message = write(tmp_path, "config = Config()"), "data.format_prompt='nope.jinja' does not exist"
    words = ["--config", path, "--world-size", "8", "--data.format_prompt", "nope.jinja", "--dry-run"]
    done = run([sys.executable, "-m", "r1.train", *words], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert "Traceback" not in done.stderr


def test_geo3k_dry_run_says_what_would_run_on_8_gpus():
    words = ["--config", "configs/geo3k.py", "--dry-run", "--world-size", "8"]
    done = run([sys.executable, "-m", "r1.train", *words], ROOT)
    assert done.returncode == 0, done.stderr
    assert "512 prompts" in done.stdout and "2560 rollouts" in done.stdout and "all checks passed" in done.stdout
