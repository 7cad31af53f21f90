"""tools/bench.py: random models end their responses as asked, prompts have the asked length, and the table adds up."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from r1.config import ModelConfig, load_config
from r1.data.loader import Loader
from r1.data.prompt import Renderer
from r1.data.tokenizer import load_tokenizer
from tools.bench import main, parse
from tools.bench_model import SHAPES, make_config, make_model, make_tokenizer
from tools.bench_options import work_of
from tools.bench_step import summarize, table
from tools.bench_work import Work, model_of, uncut_mean, write_config

TINY = Work(model="tiny", prompts=4, n=2, prompt_tokens=40, response_tokens=12, lengths="mixed", image=None,
            minibatches=2, precision="float32", steps=2, nproc=1)  # fmt: skip


@pytest.mark.parametrize("name", ["tiny", "tiny-vl"])
def test_a_random_model_ends_once_in_mean_length_tokens_and_is_near_uniform(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path, mean_length=50)
    auto = AutoModelForCausalLM if name == "tiny" else AutoModelForImageTextToText
    model, info = auto.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    end = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    ids = torch.randint(500, (2, 64), generator=torch.Generator().manual_seed(0))
    logprobs = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.log_softmax(-1)
    assert 1 / logprobs[..., end].exp().mean().item() == pytest.approx(50, rel=0.03)
    others = torch.cat([logprobs[..., :end], logprobs[..., end + 1 :]], dim=-1).exp()
    assert others.max() < 1.5 * others.min()


def test_untied_models_end_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", dataclasses.replace(SHAPES["tiny"], tie_word_embeddings=False))
    make_model("tiny", tmp_path, mean_length=50)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    end = model.config.eos_token_id
    ids = torch.arange(64)[None]
    assert 1 / model(input_ids=ids).logits.softmax(-1)[..., end].mean().item() == pytest.approx(50, rel=0.03)


def test_lengths_cut_at_the_longest_keep_their_mean() -> None:
    # E[min(G, M)] summed by hand: P(G >= k) = (1 - 1 / m)^(k - 1).
    m = uncut_mean(361, 1253)
    assert 370 < m < 380
    assert sum((1 - 1 / m) ** (k - 1) for k in range(1, 1254)) == pytest.approx(361)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.544), ("qwen2.5-3b", 3.086), ("qwen2.5-7b", 7.616),
     ("qwen2.5-vl-3b", 3.755), ("qwen2.5-vl-7b", 8.292)],
)  # fmt: skip
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    ids = {token: 9 for token in ("<|endoftext|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>",
                                  "<|vision_end|>")}  # fmt: skip
    config = make_config(SHAPES[name], ids)
    auto = AutoModelForCausalLM if SHAPES[name].vision is None else AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)


def test_every_id_of_a_full_vocabulary_decodes_to_text() -> None:
    tokenizer = make_tokenizer(151936)
    assert len(tokenizer) == 151936
    assert all(len(text) == 4 for text in tokenizer.batch_decode([[300], [100000], [151928]]))


@pytest.mark.parametrize(("model", "image", "prompt_tokens"), [("tiny", None, 40), ("tiny-vl", 84, 60)])
def test_every_prompt_has_the_asked_length(model: str, image: int | None, prompt_tokens: int, tmp_path: Path) -> None:
    work = dataclasses.replace(TINY, model=model, image=image, prompt_tokens=prompt_tokens)
    folder = model_of(work, tmp_path / "models")
    config = load_config(str(write_config(work, folder, tmp_path)))
    assert config.data.max_response_length == 42 and not config.rollout.ignore_eos  # 3.47 x 12
    renderer = Renderer(config.data, *load_tokenizer(ModelConfig(path=str(folder))), image_dir=tmp_path)
    loader = Loader(config.data.train_files, config.data, renderer, shuffle=True, limit_images=1)
    assert loader.num_rows == 12 and loader.dropped == 0
    prompts = loader.prepare(loader.rows_at(1))
    assert [len(p.prompt_ids) for p in prompts] == [prompt_tokens] * 4
    assert len({p.text for p in prompts}) == 4
    assert all(len(p.images) == (image is not None) for p in prompts)


def test_equal_lengths_ignore_the_end_token(tmp_path: Path) -> None:
    work = dataclasses.replace(TINY, lengths="equal")
    config = load_config(str(write_config(work, model_of(work, tmp_path), tmp_path)))
    assert config.data.max_response_length == 12 and config.rollout.ignore_eos
    assert AutoConfig.from_pretrained(config.model.path).vocab_size == 512


def test_the_first_step_is_not_counted_and_phases_add_up() -> None:
    row = {"step": 1, "time/weight_sync_s": 1.0, "time/rollout_s": 4.0, "time/update_s": 3.0, "time/step_s": 9.0,
           "engine/generate_s": 4.0,
           "response/length_mean": 10.0, "perf/tokens_per_s_per_gpu": 50.0}  # fmt: skip
    summary = summarize([row | {"time/step_s": 99.0}, row, row | {"time/step_s": 11.0}, row], TINY)
    assert summary["time/step_s"] == {"median": 9.0, "min": 9.0, "max": 11.0}
    assert summary["time/other_s"]["median"] == 1.0
    assert summary["bench/response_tokens_per_s"]["median"] == 4 * 2 * 10 / 4
    lines = [line.split() for line in table(summary).splitlines()]
    assert ["update,", "s", "3.00", "3.00", "3.00"] in lines
    assert ["counted", "tokens/s/GPU", "50", "50", "50"] in lines
    assert not any("MFU," in line for line in lines)  # a CPU has none


def test_a_model_that_sees_gets_the_picture_and_prompts_of_its_data() -> None:
    options, overrides = parse(["step", "--model", "qwen2.5-vl-3b", "--lengths", "mixed", "--rollout.seed", "7"])
    work = work_of(options, steps=options.steps)
    assert (work.image, work.prompt_tokens, work.max_response_tokens, work.precision) == (504, 426, 1253, "amp")
    assert (options.benchmark, overrides) == ("step", ["--rollout.seed", "7"])


@pytest.mark.parametrize(
    ("words", "message"),
    [("--model qwen", "there is no such shape"), ("--model tiny --image 56", "for the models that see"),
     ("--model tiny --steps 1", "use at least 2"), ("--model tiny --minibatches 3", "does not divide"),
     ("--model tiny --prompt-tokens 5", "use at least"), ("--model tiny-vl --image 100", "multiple of 28")],
)  # fmt: skip
def test_mistakes_end_before_the_trainer_starts(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["step", *words.split(), "--output", str(tmp_path)])


def test_an_unknown_option_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["step", "--presicion", "amp"])
    assert "unknown option --presicion" in capsys.readouterr().err


def test_an_unknown_setting_of_r1_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["step", "--model", "tiny", "--output", str(tmp_path), "--rollout.no_such_field", "3"])
    assert "rollout.no_such_field" in capsys.readouterr().err.replace("-", "_")


@pytest.mark.engine
@pytest.mark.dist
def test_step_measures_the_real_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "step --model tiny --precision float32 --prompts 4 --n 2 --steps 3 --response-tokens 24 --lengths mixed"
    main([*words.split(), "--output", str(tmp_path)])
    report = json.loads((tmp_path / "bench.json").read_text())
    assert len(report["runs"][0]) == 3 and report["work"]["prompts"] == 4
    assert report["summary"]["mismatch/abs_max"]["max"] < 1e-4
    assert report["summary"]["response/length_max"]["max"] <= 83
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
    assert "counted tokens/s/GPU" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.dist
def test_a_trainer_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)nowhere.jsonl.*the trainer ended after 0 of 4 steps"):
        main(["step", "--model", "tiny", "--output", str(tmp_path), "--data.train_files", "./nowhere.jsonl"])
