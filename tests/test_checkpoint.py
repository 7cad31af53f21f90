"""Checkpoints resume bit for bit, survive kills and full disks, keep the right ones, and say what is wrong."""

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer

import r1.checkpoint_save
from r1.checkpoint import Checkpoints, TrainerState
from r1.checkpoint_files import find_checkpoint
from r1.checkpoint_resume import check_resume, checkpoint_to_resume
from r1.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimConfig, TrainerConfig, UpdateConfig
from r1.sections_training import time_of_deadline
from tests.tiny import make_tiny
from tools.merge import merge


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("tiny"), tie=True)


def make_config(
    tiny: Path, folder: Path, *, limit: int = -1, load_path: str | None = None, seed: int = 1, **settings: Any
) -> Config:
    return Config(
        model=ModelConfig(path=str(tiny)),
        data=DataConfig(seed=seed),
        checkpoint=CheckpointConfig(save_limit=limit, load_path=load_path, **settings),
        trainer=TrainerConfig(output_dir=str(folder), experiment_name="run"),
    )


def make_checkpoints(config: Config) -> Checkpoints:
    return Checkpoints(config, tokenizer=AutoTokenizer.from_pretrained(config.model.path))


class Trainee:
    """A model with optimizer and schedule that trains on tokens drawn from torch's global RNG."""

    def __init__(self, tiny: Path, *, lr: float = 1e-2, shard: bool = False) -> None:
        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        if shard:
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer: Optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (step + 1))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            ids = torch.randint(0, 256, (1, 12))
            self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {n: getattr(p, "full_tensor", lambda p=p: p)().clone() for n, p in self.model.named_parameters()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def save_steps(checkpoints: Checkpoints, trainee: Trainee, *steps: int, rewards: Sequence[float] = ()) -> None:
    for i, step in enumerate(steps):
        metrics = {"val/a/reward": rewards[i]} if rewards else {}
        checkpoints.save(TrainerState(step=step, policy_version=4 * step), trainee, metrics=metrics)
    checkpoints.finish()


def test_resumed_run_equals_the_unbroken_one_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    checkpoints = make_checkpoints(make_config(tiny, tmp_path))
    straight = Trainee(tiny)
    straight.train(2)
    state = TrainerState(step=2, policy_version=8, kl_coef=0.5)
    path = checkpoints.save(state, straight)
    straight.train(2)  # while the copy is written
    checkpoints.finish()
    assert checkpoints.take_metrics().keys() == {"time/save_s"}
    assert checkpoints.take_metrics() == {}  # no save since then
    draws = random.random(), np.random.rand(), torch.rand(())

    resumed = Trainee(tiny)
    assert checkpoints.to_resume() == path == tmp_path / "run/checkpoints/step_000002"
    assert checkpoints.load(path, resumed) == state
    assert resumed.scheduler.last_epoch == 2
    resumed.train(2)
    assert_same(resumed.weights(), straight.weights())
    assert (random.random(), np.random.rand(), torch.rand(())) == draws


def test_kahan_optimizer_resumes_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    optimi = pytest.importorskip("optimi")

    def trainee() -> Trainee:
        t = Trainee(tiny)
        t.model.bfloat16()
        t.optimizer = optimi.AdamW(t.model.parameters(), lr=1e-4, kahan_sum=True, triton=False)
        t.scheduler = LambdaLR(t.optimizer, lambda step: 1.0)
        return t

    checkpoints = make_checkpoints(make_config(tiny, tmp_path))
    straight, resumed = trainee(), trainee()
    straight.train(3)
    save_steps(checkpoints, straight, 3)
    straight.train(2)
    checkpoints.load(checkpoints.latest(), resumed)
    resumed.train(2)
    assert_same(resumed.weights(), straight.weights())
    assert resumed.optimizer.param_groups[0]["step"] == 5


def test_C06_parameters_that_never_had_a_gradient_resume(tiny: Path, tmp_path: Path) -> None:
    # As a vision tower in a run that has met only text so far.
    checkpoints = make_checkpoints(make_config(tiny, tmp_path))
    first, second = Trainee(tiny), Trainee(tiny)
    unused = first.model.model.layers[1].mlp.up_proj.weight
    unused.requires_grad_(False)
    first.train(1)
    save_steps(checkpoints, first, 1)
    second.train(1)  # states that must go
    checkpoints.load(checkpoints.latest(), second)
    assert second.model.model.layers[1].mlp.up_proj.weight not in second.optimizer.state
    second.train(1)
    assert second.optimizer.state[second.model.model.layers[1].mlp.up_proj.weight]["step"] == 1
    assert second.optimizer.state[second.model.model.embed_tokens.weight]["step"] == 2


def test_a_new_learning_rate_is_used_at_the_saved_place_of_the_schedule(tiny: Path, tmp_path: Path) -> None:
    checkpoints = make_checkpoints(make_config(tiny, tmp_path))
    first, second = Trainee(tiny, lr=0.5), Trainee(tiny, lr=0.25)
    first.train(3)
    save_steps(checkpoints, first, 3)
    checkpoints.load(checkpoints.latest(), second)
    assert second.optimizer.param_groups[0]["lr"] == 0.25 / 4
    second.train(1)
    assert second.scheduler.get_last_lr() == [0.25 / 5]


@pytest.mark.parametrize("stage", ["save_shards", "write_synced", "write_text_atomically"])
def test_C09_kill_during_a_save_leaves_the_earlier_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    checkpoints, trainee = make_checkpoints(make_config(tiny, tmp_path)), Trainee(tiny)
    save_steps(checkpoints, trainee, 2)

    class Killed(BaseException):
        """As SystemExit: nothing in r1 catches it."""

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(r1.checkpoint_save, stage, die)
        with pytest.raises(Killed):
            save_steps(checkpoints, trainee, 4)
    half = checkpoints.folder / "step_000004"
    assert half.exists() and checkpoints.to_resume() == checkpoints.folder / "step_000002"
    save_steps(checkpoints, trainee, 6)
    assert not half.exists() and checkpoints.latest().name == "step_000006"


def test_C09_a_file_cut_by_half_takes_the_checkpoint_out(tiny: Path, tmp_path: Path, caplog: Any) -> None:
    checkpoints, trainee = make_checkpoints(make_config(tiny, tmp_path)), Trainee(tiny)
    save_steps(checkpoints, trainee, 2, 4)
    shard = checkpoints.folder / "step_000004/shards/__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert checkpoints.latest().name == "step_000002"
    with pytest.raises(ValueError, match=r"step_000004 is damaged.*complete checkpoints: step_000002"):
        checkpoints.load(checkpoints.folder / "step_000004", trainee)
    assert checkpoints.resume(trainee).step == 2
    assert "step_000004 is damaged: a file of it is missing or cut short; it is passed over" in caplog.text


def test_C08_what_cannot_be_cleared_away_costs_no_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    checkpoints, trainee = make_checkpoints(make_config(tiny, tmp_path, limit=1)), Trainee(tiny)
    save_steps(checkpoints, trainee, 2)

    def held(folder: Path) -> None:
        raise OSError(39, "Directory not empty", str(folder))  # as a network disk says while a file is open

    with monkeypatch.context() as patch:
        patch.setattr(r1.checkpoint_save, "remove", held)
        save_steps(checkpoints, trainee, 4)
    assert "step_000004 is saved, but what it replaces could not be cleared away" in caplog.text
    assert sorted(p.name for p in checkpoints.folder.glob("step_*")) == ["step_000002", "step_000004"]
    assert checkpoints.latest().name == "step_000004"
    save_steps(checkpoints, trainee, 6)
    assert [p.name for p in checkpoints.folder.glob("step_*")] == ["step_000006"]


def test_editing_the_copied_config_keeps_the_checkpoint(tiny: Path, tmp_path: Path) -> None:
    checkpoints = make_checkpoints(make_config(tiny, tmp_path))
    save_steps(checkpoints, Trainee(tiny), 2)
    (checkpoints.folder / "step_000002/hf/generation_config.json").write_text("{}")
    assert checkpoints.latest() is not None


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos")])
def test_full_disk_is_an_oserror_and_keeps_the_earlier_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, error: Exception, asynchronous: bool
) -> None:
    checkpoints, trainee = (
        make_checkpoints(make_config(tiny, tmp_path, limit=1, asynchronous=asynchronous)),
        Trainee(tiny),
    )
    save_steps(checkpoints, trainee, 2)

    def full(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(r1.checkpoint_save, "write_synced", full)
        checkpoints.save(TrainerState(step=3, policy_version=1), trainee)
        trainee.train(1)  # goes on
        with pytest.raises(OSError, match=r"step_000004 could not be saved \(rank 0: .*free disk space"):
            save_steps(checkpoints, trainee, 4)
    assert caplog.text.count("NOT SAVED") == 2 and "training goes on" in caplog.text
    assert [p.name for p in checkpoints.folder.glob("step_*")] == ["step_000002"]  # the room is given back
    assert checkpoints.latest().name == "step_000002"
    save_steps(checkpoints, trainee, 6)  # the disk has room again
    assert checkpoints.latest().name == "step_000006"


def test_training_goes_on_while_a_save_is_written(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, trainee = make_checkpoints(make_config(tiny, tmp_path)), Trainee(tiny)
    trainee.train(1)
    saved, gate, real = trainee.weights(), threading.Event(), r1.checkpoint_save.save_shards

    def slowly(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(r1.checkpoint_save, "save_shards", slowly)
    path = checkpoints.save(TrainerState(step=1, policy_version=1), trainee)
    trainee.train(2)
    assert checkpoints.latest() is None  # it does not count before it is whole
    gate.set()
    assert checkpoints.finish() == path
    resumed = Trainee(tiny)
    checkpoints.load(path, resumed)
    assert_same(resumed.weights(), saved)


def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_is_taken(tiny: Path, tmp_path: Path, caplog: Any) -> None:
    checkpoints, trainee = make_checkpoints(make_config(tiny, tmp_path)), Trainee(tiny)
    trainee.train(1)
    save_steps(checkpoints, trainee, 2, 4)
    shard = checkpoints.folder / "step_000004/shards/__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 4
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"step_000004 is damaged: the bytes of shards/__0_0.distcp are not those"):
        checkpoints.load(checkpoints.folder / "step_000004", trainee)
    assert checkpoints.resume(Trainee(tiny)).step == 2
    assert "resuming from the checkpoint before it" in caplog.text
    asked = make_checkpoints(make_config(tiny, tmp_path, load_path=str(tmp_path / "run/checkpoints/step_000004")))
    with pytest.raises(ValueError, match="step_000004 is damaged"):
        asked.resume(Trainee(tiny))


@pytest.mark.parametrize(("mode", "best"), [("max", "step_000002"), ("min", "step_000003")])
def test_C08_best_and_newest_are_kept(tiny: Path, tmp_path: Path, mode: str, best: str) -> None:
    config = make_config(tiny, tmp_path, limit=1, best_metric="val/a/reward", best_mode=mode)
    checkpoints, trainee = make_checkpoints(config), Trainee(tiny)
    save_steps(checkpoints, trainee, 1, 2, 3, 4, rewards=[0.5, 0.9, 0.1, 0.6])
    assert sorted(p.name for p in checkpoints.folder.glob("step_*")) == [best, "step_000004"]
    pointer = json.loads((checkpoints.folder / "best.json").read_text())
    assert pointer["path"] == best and pointer["metric"] == "val/a/reward"
    save_steps(checkpoints, trainee, 5)  # without the metric: no candidate, and no end of the best
    save_steps(checkpoints, trainee, 6, rewards=[float("nan")])
    assert sorted(p.name for p in checkpoints.folder.glob("step_*")) == [best, "step_000006"]
    from_best = make_checkpoints(replace(config, checkpoint=replace(config.checkpoint, load_path="best")))
    assert from_best.to_resume().name == best
    save_steps(from_best, trainee, 7)
    assert from_best.to_resume().name == "step_000007"  # started again with the same command, it goes on


def test_best_limit_keeps_so_many_and_of_equals_the_newer(tiny: Path, tmp_path: Path) -> None:
    config = make_config(tiny, tmp_path, limit=1, best_metric="val/a/reward", best_limit=2)
    checkpoints = make_checkpoints(config)
    save_steps(checkpoints, Trainee(tiny), 1, 2, 3, 9, 10, rewards=[0.9, 0.9, 0.9, 0.2, 0.1])
    kept = sorted(p.name for p in checkpoints.folder.glob("step_*"))
    assert kept == ["step_000002", "step_000003", "step_000010"]


def test_save_model_only_resumes_weights_and_says_so(tiny: Path, tmp_path: Path, caplog: Any) -> None:
    full = make_checkpoints(make_config(tiny, tmp_path / "full"))
    small = make_checkpoints(make_config(tiny, tmp_path / "small", save_model_only=True))
    trainee = Trainee(tiny)
    trainee.train(2)
    save_steps(full, trainee, 2)
    save_steps(small, trainee, 2)
    sizes = [sum(p.stat().st_size for p in (c.latest() / "shards").iterdir()) for c in (small, full)]
    assert sizes[0] < 0.4 * sizes[1]
    resumed = Trainee(tiny)
    assert small.resume(resumed).step == 2
    assert_same(resumed.weights(), trainee.weights())
    assert not resumed.optimizer.state and resumed.scheduler.last_epoch == 2
    assert "has weights and no optimizer states (checkpoint.save_model_only): the optimizer starts fresh" in caplog.text


def test_critic_and_moving_reference_come_back(tiny: Path, tmp_path: Path, caplog: Any) -> None:
    checkpoints = make_checkpoints(make_config(tiny, tmp_path))
    policy, critic, reference = Trainee(tiny), Trainee(tiny), Trainee(tiny)
    policy.train(1)
    critic.train(3)
    reference.train(2)
    state = TrainerState(step=1, policy_version=1)
    checkpoints.save(state, policy, critic=critic, reference=reference.model)
    checkpoints.finish()
    fresh = Trainee(tiny), Trainee(tiny), Trainee(tiny)
    checkpoints.load(checkpoints.latest(), fresh[0], critic=fresh[1], reference=fresh[2].model)
    for old, new in zip((policy, critic, reference), fresh, strict=True):
        assert_same(old.weights(), new.weights())
    assert fresh[1].scheduler.last_epoch == 3
    assert fresh[1].optimizer.state[fresh[1].model.model.embed_tokens.weight]["step"] == 3
    save_steps(checkpoints, policy, 2)
    checkpoints.load(checkpoints.latest(), fresh[0], critic=fresh[1])
    assert "has no critic: it starts from model.path" in caplog.text


def test_C08_a_run_from_load_path_goes_on_from_its_own_checkpoints(tiny: Path, tmp_path: Path) -> None:
    first, trainee = make_checkpoints(make_config(tiny, tmp_path / "a")), Trainee(tiny)
    save_steps(first, trainee, 2, 4)
    start = str(first.folder / "step_000002")
    config = make_config(tiny, tmp_path / "b", load_path=start)
    second = make_checkpoints(config)
    assert second.to_resume() == Path(start)
    save_steps(second, trainee, 3)
    assert second.to_resume().name == "step_000003"
    always = replace(config, checkpoint=replace(config.checkpoint, resume=False))
    assert checkpoint_to_resume(always) == Path(start)


def test_a_changed_config_is_told_and_what_cannot_change_is_refused(tiny: Path, tmp_path: Path) -> None:
    config = make_config(tiny, tmp_path)
    assert check_resume(config) == []
    save_steps(make_checkpoints(config), Trainee(tiny), 2)
    assert check_resume(config) == []
    quiet = replace(config, checkpoint=CheckpointConfig(save_freq=7), trainer=replace(config.trainer, progress=False))
    assert check_resume(quiet) == []
    told = replace(config, optim=OptimConfig(lr=3e-6), data=DataConfig(seed=5))
    assert check_resume(told) == [
        "changed since step_000002: data.seed 1 -> 5",
        "changed since step_000002: optim.lr 1e-06 -> 3e-06",
        "with data.seed the order of rows changed: some may come twice in this epoch, or not at all",
    ]
    for changed, words in [
        (
            {"path": "Qwen/Qwen3-4B"},
            r"step_000002 was made with model.path='.*', now it is 'Qwen/Qwen3-4B'; that cannot",
        ),
        ({"override_config": {"rope_theta": 5.0}}, r"model.override_config=\{\}, now it is \{'rope_theta': 5.0\}"),
        ({"precision": "bf16"}, r"model.precision='amp', now it is 'bf16'; .*another trainer.experiment_name"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_resume(replace(config, model=replace(config.model, **changed)))
    moved = replace(config, model=replace(config.model, path=f"/elsewhere/{tiny.name}", precision="float32"))
    assert len(check_resume(moved)) == 2  # the same model in another folder; float32 states, both


def test_C01_resuming_at_an_epochs_end_takes_the_next_one(tiny: Path, tmp_path: Path) -> None:
    # 64 rows, 16 a step: four steps an epoch. Saved after step 4 of 8, four more steps take every row once more.
    config = Config(
        model=ModelConfig(path=str(tiny)),
        data=DataConfig(rollout_batch_size=16),
        update=UpdateConfig(global_batch_size=16),
        trainer=TrainerConfig(total_epochs=2, output_dir=str(tmp_path)),
    )
    checkpoints = make_checkpoints(config)
    checkpoints.save(TrainerState(step=4, policy_version=4, draws=4), Trainee(tiny))
    checkpoints.finish()
    state = checkpoints.resume(Trainee(tiny))
    assert list(range(state.step + 1, config.num_steps(64) + 1)) == [5, 6, 7, 8] and state.draws == 4


@pytest.mark.parametrize("text", ["soon", "", "3 hours", "12", "2030-13-01"])
def test_deadline_must_be_a_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.deadline must be a duration like \"3h30m\" or an ISO time"):
        CheckpointConfig(deadline=text)


def test_deadline_counts_from_the_start_or_names_a_time() -> None:
    assert time_of_deadline("3h30m", since=1000.0) == 1000 + 3.5 * 3600
    assert time_of_deadline("1d2h3m4s", since=0.0) == 86400 + 7200 + 180 + 4
    assert time_of_deadline("2030-01-31T08:00+00:00", since=5.0) == 1896076800


def test_C08_limit_keeps_the_newest_in_numeric_order(tiny: Path, tmp_path: Path) -> None:
    checkpoints, trainee = make_checkpoints(make_config(tiny, tmp_path, limit=2)), Trainee(tiny)
    save_steps(checkpoints, trainee, 9, 10, 100)
    assert sorted(p.name for p in checkpoints.folder.glob("step_*")) == ["step_000010", "step_000100"]
    assert json.loads((checkpoints.folder / "latest.json").read_text()) == {"step": 100, "path": "step_000100"}


def test_C08_in_a_reused_folder_the_new_run_is_the_newest(tiny: Path, tmp_path: Path) -> None:
    checkpoints, trainee = make_checkpoints(make_config(tiny, tmp_path)), Trainee(tiny)
    save_steps(checkpoints, trainee, 1000)
    keep_one = make_checkpoints(make_config(tiny, tmp_path, limit=1))
    save_steps(keep_one, trainee, 10)
    assert [p.name for p in keep_one.folder.glob("step_*")] == ["step_000010"]
    save_steps(keep_one, trainee, 10)  # saved again, as after going back to an earlier step
    assert keep_one.latest().name == "step_000010"


def test_a_load_path_that_is_none_says_what_is_there(tiny: Path, tmp_path: Path) -> None:
    checkpoints = make_checkpoints(make_config(tiny, tmp_path))
    assert checkpoints.to_resume() is None
    with pytest.raises(ValueError, match=r"gone/step_000002 does not exist. .* has .* and no checkpoint"):
        find_checkpoint(tmp_path / "gone" / "step_000002")
    save_steps(checkpoints, Trainee(tiny), 2, 10)
    (checkpoints.folder / "step_000012").mkdir()
    run = tmp_path / "run"
    assert find_checkpoint(run) == find_checkpoint(run / "checkpoints") == run / "checkpoints/step_000010"
    for name, problem in (("step_000012", "is half written"), ("step_000003", "does not exist")):
        bad = make_checkpoints(make_config(tiny, tmp_path, load_path=str(run / "checkpoints" / name)))
        with pytest.raises(ValueError, match=f"{name} {problem}.*complete checkpoints: step_000002, step_000010"):
            bad.to_resume()
    with pytest.raises(ValueError, match="holds no checkpoint"):
        find_checkpoint(tiny)


def test_checkpoint_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    checkpoints = make_checkpoints(make_config(tiny, tmp_path))
    save_steps(checkpoints, Trainee(tiny), 2)
    untied = Trainee(make_tiny("qwen2", tmp_path / "untied"))
    with pytest.raises(ValueError, match=r"of another model: lm_head.weight is not in the checkpoint"):
        checkpoints.load(checkpoints.latest(), untied)
    wider = Trainee(tiny)
    wider.model.resize_token_embeddings(384)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[320, 128\] in the checkpoint and \[384, 128\]"):
        checkpoints.load(checkpoints.latest(), wider)


def test_C10_C14_checkpoint_carries_tokenizer_template_and_generation_config(tiny: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    config = Config(
        model=ModelConfig(path=str(tiny)),
        data=DataConfig(override_chat_template=str(template)),
        trainer=TrainerConfig(output_dir=str(tmp_path), experiment_name="run"),
    )
    checkpoints = make_checkpoints(config)
    save_steps(checkpoints, Trainee(tiny), 2)
    hf = checkpoints.latest() / "hf"
    tokenizer = AutoTokenizer.from_pretrained(hf)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert (hf / "generation_config.json").read_text() == (tiny / "generation_config.json").read_text()
    assert len(json.loads((hf / "generation_config.json").read_text())["eos_token_id"]) == 2


def _in_two_ranks(rank: int, work: Callable[[int, Path, Path], None], tiny: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    work(rank, tiny, folder)
    dist.barrier()
    dist.destroy_process_group()


def _save_and_load_on_two_ranks(rank: int, tiny: Path, folder: Path) -> None:
    checkpoints = make_checkpoints(make_config(tiny, folder))
    torch.manual_seed(rank)  # each rank draws its own numbers
    straight = Trainee(tiny, shard=True)
    straight.train(2)
    with torch.no_grad():  # leaves the root's weights gathered
        straight.model(input_ids=torch.arange(8)[None], use_cache=False)
    torch.rand(3 * rank)
    save_steps(checkpoints, straight, 2)
    straight.train(2)
    after, draw = straight.weights(), torch.rand(())

    resumed = Trainee(tiny, shard=True)
    checkpoints.load(checkpoints.latest(), resumed)
    if rank == 0:
        torch.save(resumed.weights(), folder / "weights.pt")
    else:
        resumed.weights()
    resumed.train(2)
    assert_same(resumed.weights(), after)
    assert torch.rand(()) == draw

    real = r1.checkpoint_save.write_synced
    if rank == 1:
        r1.checkpoint_save.write_synced = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match=r"rank 1: OSError: .*No space left"):
        save_steps(checkpoints, straight, 4)
    r1.checkpoint_save.write_synced = real


@pytest.mark.dist
def test_C05_X05_two_ranks_save_and_two_or_one_load(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mp.spawn(_in_two_ranks, args=(_save_and_load_on_two_ranks, tiny, tmp_path), nprocs=2)
    checkpoints, alone = make_checkpoints(make_config(tiny, tmp_path)), Trainee(tiny)
    assert checkpoints.latest().name == "step_000002"
    torch.manual_seed(7)
    expected = torch.rand(())
    torch.manual_seed(7)
    checkpoints.load(checkpoints.latest(), alone)
    assert torch.rand(()) == expected  # no rank's old generator fits
    assert "saved on 2 ranks and is loaded on 1: random number generators start fresh" in caplog.text
    assert_same(alone.weights(), torch.load(tmp_path / "weights.pt"))
    step = alone.optimizer.state[alone.model.model.embed_tokens.weight]["step"]
    assert step == 2 and alone.scheduler.last_epoch == 2
    merge(tmp_path / "run", tmp_path / "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same(dict(merged.named_parameters()), alone.weights())
    alone.train(1)
