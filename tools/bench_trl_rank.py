"""The program behind `bench.py trl`: TRL's GRPOTrainer does the work of a step, cycle after cycle."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer

from r1.config import Config, load_config
from r1.faults import run_rank
from r1.metrics import GpuMemory, peak_memory_gib
from tools.bench_trl import trl_settings
from tools.bench_work import Work


def reward(completions: list[Any], **_: Any) -> list[float]:
    """As the reward of r1's run: it differs between responses."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [text.count("e") / max(len(text), 1) for text in texts]


def load_rows(path: str, folder: Path) -> Dataset:
    """The prompts of r1's run as TRL takes them."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    columns: dict[str, list[Any]] = {
        "prompt": [[{"role": "user", "content": row["problem"].replace("<image>", "")}] for row in rows]
    }
    if not rows[0]["images"]:
        return Dataset.from_dict(columns)
    columns["image"] = [str(folder / row["images"][0]) for row in rows]
    return Dataset.from_dict(columns).cast_column("image", Image())


class Clock:
    """Seconds of the current cycle by phase, and the tokens that it counted."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added to the phase's, on a GPU until its work is done."""

        def run(*args: Any, **kwargs: Any) -> Any:
            _synchronize()
            began = time.perf_counter()
            result = function(*args, **kwargs)
            _synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
            return result

        return run


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Cycles(TrainerCallback):
    """Writes a line for each cycle: one generation and the optimizer steps on it.

    As in r1's step, weight_sync is with waking and rollout with sleep; logprobs is with decoding and rewards.
    """

    def __init__(self, clock: Clock, minibatches: int, results: Path) -> None:
        self.clock, self.minibatches, self.results = clock, minibatches, results
        self._memory: GpuMemory | None = None
        self._began = 0.0

    def on_train_begin(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._restart()

    def on_step_end(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self.minibatches:
            return
        _synchronize()
        seconds, whole = dict(self.clock.seconds), time.perf_counter() - self._began
        sync = seconds.get("weight_sync", 0.0)
        line = {
            "step": state.global_step // self.minibatches,
            "time/weight_sync_s": sync,
            "time/rollout_s": seconds["generate"] - sync,
            "time/logprobs_s": seconds["generate_and_score"] - seconds["generate"],
            "time/update_s": whole - seconds["generate_and_score"],
            "time/step_s": whole,
            **self.clock.counts,
            "mem/peak_gib": self._memory.peak_gib() if self._memory else peak_memory_gib(),
        }
        if state.is_world_process_zero:
            with self.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._restart()

    def _restart(self) -> None:
        self.clock.seconds.clear()
        self.clock.counts.clear()
        self._memory = GpuMemory() if torch.cuda.is_available() else None
        self._began = time.perf_counter()


def instrument(trainer: GRPOTrainer, clock: Clock) -> None:
    """Time TRL's own methods, and count the tokens they return."""
    score = clock.timed("generate_and_score", trainer._generate_and_score_completions)

    def counted(*args: Any, **kwargs: Any) -> Any:
        batch = score(*args, **kwargs)
        sizes = torch.stack([batch["prompt_mask"].sum(), batch["completion_mask"].sum()])
        prompts, responses = trainer.accelerator.reduce(sizes, "sum").tolist()
        clock.counts = {"counted_tokens": int(prompts + responses), "response_tokens": int(responses)}
        return batch

    trainer._generate_and_score_completions = counted
    trainer._generate_single_turn = clock.timed("generate", trainer._generate_single_turn)
    if trainer.use_vllm:  # called from within the above
        trainer.vllm_generation.sync_weights = clock.timed("weight_sync", trainer.vllm_generation.sync_weights)


def main(request_path: str) -> None:
    request = json.loads(Path(request_path).read_text())
    work, config = Work(**request["work"]), load_config(request["config"], request["overrides"])
    rows = load_rows(str(config.data.train_files), Path(request["config"]).parent)
    trainer = GRPOTrainer(
        model=config.model.path,
        reward_funcs=reward,
        args=make_arguments(work, config, request),
        train_dataset=rows,
    )
    clock = Clock()
    instrument(trainer, clock)
    trainer.add_callback(Cycles(clock, work.minibatches, Path(request["results"])))
    trainer.train()


def make_arguments(work: Work, config: Config, request: dict[str, Any]) -> GRPOConfig:
    on_gpu = torch.cuda.is_available()
    settings = trl_settings(work, config, on_gpu=on_gpu) | request["settings"]
    return GRPOConfig(output_dir=str(Path(request["results"]).parent / "trl"), **settings)


if __name__ == "__main__":
    run_rank(lambda: main(sys.argv[1]))
