"""A config file is Python: what stands in a field is checked against the field's type and choices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.groups import keeps_group
from r1.algorithms.named import function_of
from r1.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
    ValSamplingConfig,
    load_config,
    override_config,
)
from r1.rewards.functions import to_outcome


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        (
            DataConfig,
            {"overlong_prompts": "filters"},
            r"data.overlong_prompts must be one of .*; did you mean 'filter'",
        ),
        (DataConfig, {"shuffle": "False"}, "data.shuffle must be True or False, got 'False'"),
        (DataConfig, {"max_prompt_length": "512"}, "data.max_prompt_length must be a whole number, got '512'"),
        (DataConfig, {"max_prompt_length": True}, "a whole number, got True"),
        (DataConfig, {"val_files": None}, "data.val_files must be a tuple"),
        (DataConfig, {"system_prompt": 5}, "data.system_prompt must be text or None, got 5"),
        (RolloutConfig, {"engine": "sglang"}, "rollout.engine must be one of 'vllm', 'hf', got 'sglang'"),
        (RolloutConfig, {"n": 2.5}, "rollout.n must be a whole number"),
        (RolloutConfig, {"val": {"n": 4}}, "rollout.val must be a ValSamplingConfig"),
        (RewardConfig, {"function": ["math"]}, "reward.function must be text or a dict from text to a number"),
        (ModelConfig, {"gradient_checkpointing": "false"}, "must be True or False or None, got 'false'"),
        (LoraConfig, {"rank": 8, "parts": ("lang",)}, "model.lora.parts must be a tuple"),
        (OptimConfig, {"lr": "1e-6"}, "optim.lr must be a number, got '1e-6'"),
        (OptimConfig, {"betas": (0.9,)}, "optim.betas must be a tuple of a number and a number"),
        (AlgorithmConfig, {"correction": "token_mas"}, "did you mean 'token_mask'"),
        (AlgorithmConfig, {"kl_coef": float("nan")}, "algorithm.kl_coef must be a number, got nan"),
        (CheckpointConfig, {"deadline": 3600}, "checkpoint.deadline must be text or None"),
        (TrainerConfig, {"loggers": "wandb"}, "trainer.loggers must be a tuple"),
        (Config, {"model": "Qwen/Qwen3-4B"}, "model must be a ModelConfig"),
    ],
)
def test_F03_a_value_of_another_type_or_choice_is_named(
    section: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        section(**options)


def test_lists_are_tuples_and_whole_numbers_are_numbers() -> None:
    assert OptimConfig(betas=[0, 0.99]).betas == (0, 0.99)  # pyright: ignore[reportArgumentType]
    assert DataConfig(train_files=["a.jsonl"]).train_files == ("a.jsonl",)  # pyright: ignore[reportArgumentType]
    assert UpdateConfig(max_grad_norm=float("inf")).max_grad_norm == float("inf")


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        (DataConfig, {"train_files": ()}, "train_files is empty"),
        (DataConfig, {"prompt_key": ""}, "prompt_key is empty"),
        (DataConfig, {"seed": -1}, "seed must be at least 0"),
        (ValSamplingConfig, {"temperature": float("inf")}, "finite"),
        (RolloutConfig, {"limit_images": -1}, "limit_images must be at least 0"),
        (RolloutConfig, {"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        (RolloutConfig, {"kv_cache_gib": 0}, "kv_cache_gib must be above 0"),
        (LoraConfig, {"rank": 8, "target_modules": "("}, "no regular expression"),
        (OptimConfig, {"eps": 0.0}, "eps must be above 0"),
        (OptimConfig, {"warmup_steps": -1}, "warmup_steps must be at least 0"),
        (ParallelConfig, {"timeout_s": 0.0}, "timeout_s must be above 0"),
        (AlgorithmConfig, {"kl_target": 0.0}, "kl_target must be above 0"),
        (AlgorithmConfig, {"reference_update_steps": 0}, "reference_update_steps must be at least 1"),
        (AlgorithmConfig, {"kl_target": 0.1, "kl_coef": 0.0}, "needs the reference"),
        (AlgorithmConfig, {"reference_update_steps": 5, "kl_coef": 0.0}, "needs the reference"),
        (TrainerConfig, {"experiment_name": ""}, "experiment_name is empty"),
        (TrainerConfig, {"samples_to_log": -1}, "samples_to_log must be at least 0"),
    ],
)
def test_values_out_of_range_are_named(section: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        section(**options)


def test_a_best_metric_of_validation_needs_a_validation_set() -> None:
    with pytest.raises(ValueError, match="best_metric='val/x/reward' is measured in validation"):
        Config(data=DataConfig(val_files=()), checkpoint=CheckpointConfig(best_metric="val/x/reward"))


def test_F03_configs_in_another_form_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model:\n  bf16: true\n")
    with pytest.raises(ValueError, match="a config is a Python file"):
        load_config(str(tmp_path / "config.yaml"))
    (tmp_path / "config.py").write_text("from r1.config import Config\nconfig = Config()\nconfig.rollout.n = 4\n")
    with pytest.raises(ValueError, match="give it to its section"):
        load_config(str(tmp_path / "config.py"))
    with pytest.raises(ValueError, match=r"'rollout\.n=8' is no option; write --rollout\.n 8"):
        override_config(Config(), ["rollout.n=8"], prog="train")


def test_names_of_functions_in_capitals_and_home_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        function_of("GRPO", ADVANTAGES, option="algorithm.advantage")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.py").write_text("def f(scores, config):\n    return scores.rewards\n")
    assert function_of("~/own.py:f", ADVANTAGES, option="algorithm.advantage").__name__ == "f"


def test_R11_rewards_that_float32_cannot_hold_and_keys_that_some_responses_lack() -> None:
    outcome = to_outcome({"overall": 1e39})
    assert isinstance(outcome, str) and "not a finite number" in outcome
    config = AlgorithmConfig(filter_by="mean", filter_key="accuracy")
    with pytest.raises(ValueError, match="filter_key='accuracy' is not among the reward's keys"):
        keeps_group([{"accuracy": 1.0, "overall": 1.0}, {"overall": 0.0}], config)


def test_paths_become_text_wherever_a_field_holds_text() -> None:
    assert ModelConfig(path=Path("models") / "mine").path == "models/mine"  # pyright: ignore[reportArgumentType]
    data = DataConfig(train_files=Path("a.jsonl"), val_files=[Path("b.jsonl"), "c=d.jsonl"])  # pyright: ignore[reportArgumentType]
    assert (data.train_files, data.val_files) == ("a.jsonl", ("b.jsonl", "c=d.jsonl"))
    assert DataConfig(train_files="a.jsonl", val_files=Path("b.jsonl")).val_files == ("b.jsonl",)  # pyright: ignore[reportArgumentType]
