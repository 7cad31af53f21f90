"""The transformers engine, the seeds and names that engines share, and the stream of weights into them."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from r1.config import ModelConfig
from r1.rollout.engines import ENGINES
from r1.rollout.sampling import ModelFacts, WeightNames, banned_token_ids, request_seed
from r1.rollout.weight_sync import stream_weights
from r1.types import SamplingParams
from tests import tiny
from tests.vllm_probe import CPU, make_config, make_prompts, teacher_forced


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_tiny("qwen2", tmp_path_factory.mktemp("qwen2"), seed=3)


def make_engine(folder):
    return ENGINES["hf"](str(folder), make_config(folder), mm_processor_kwargs=None, device=CPU)


def test_request_seeds_differ_by_run_group_and_sample_and_fit_int64():
    seeds = {request_seed(s, g, i) for s in range(3) for g in range(20) for i in range(8)}
    assert len(seeds) == 3 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    # A fixed value: seeds must not change with the Python process, as hash() would.
    assert request_seed(1, 2, 3) == 3751671686878481423


@pytest.mark.parametrize("family", tiny.VISION_FAMILIES)
def test_image_and_video_tokens_are_banned(family):
    config = tiny.make_config(family)
    assert set(banned_token_ids(config)) == {config.image_token_id, config.video_token_id}


def test_responses_end_at_both_end_tokens_of_the_generation_config(folder):
    tokenizer = tiny.make_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    facts = ModelFacts.load(str(folder), ModelConfig(path=str(folder)))
    assert set(facts.stop_ids) == set(ends)
    assert facts.banned_ids == ()


def test_overrides_reach_the_model(folder):
    facts = ModelFacts.load(str(folder), ModelConfig(path=str(folder), override_config={"tie_word_embeddings": True}))
    names = facts.weight_names(trust_remote_code=False)
    assert "lm_head.weight" not in names.required and "lm_head.weight" in names.allowed


def test_sampled_logprobs_are_those_of_a_plain_forward_pass(folder):
    prompts = make_prompts("qwen2", folder)
    rollouts = make_engine(folder).generate(
        prompts, [4, 5], SamplingParams(n=3, temperature=0.7, max_tokens=20, seed=1)
    )
    assert [(r.group, r.sample) for r in rollouts] == [(4, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 2)]
    model = AutoModelForCausalLM.from_pretrained(folder)
    for rollout in rollouts:
        prompt = prompts[rollout.group - 4]
        expected = teacher_forced(model, prompt, rollout.response_ids, 0.7)
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), torch.tensor(expected), rtol=0, atol=1e-5)


def test_truncated_means_no_end_token_and_ignore_eos_samples_on(folder):
    engine, prompts = make_engine(folder), make_prompts("qwen2", folder)
    sampling = SamplingParams(n=16, temperature=2.0, max_tokens=64, seed=1)
    ends = set(engine._facts.stop_ids)
    rollouts = engine.generate(prompts, [0, 1], sampling)
    assert {r.truncated for r in rollouts} == {True, False}
    for rollout in rollouts:
        stops = [i for i, token in enumerate(rollout.response_ids) if token in ends]
        # An end token is the last of the response and is kept: the policy learns to end.
        assert stops == ([] if rollout.truncated else [len(rollout.response_ids) - 1])
        assert len(rollout.response_ids) == 64 or not rollout.truncated
    full = engine.generate(prompts, [0, 1], SamplingParams(n=4, max_tokens=48, ignore_eos=True))
    assert [len(r.response_ids) for r in full] == [48] * 8 and all(r.truncated for r in full)


def test_samples_depend_on_seed_and_group_not_on_the_batch_or_the_caller(folder):
    engine, prompts = make_engine(folder), make_prompts("qwen2", folder)
    sampling = SamplingParams(n=2, max_tokens=8, seed=5)
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    both = engine.generate(prompts, [0, 1], sampling)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == state
    torch.manual_seed(99)
    alone = engine.generate(prompts[1:], [1], sampling)
    assert [r.response_ids for r in both[2:]] == [r.response_ids for r in alone]
    other_group = engine.generate(prompts[1:], [2], sampling)
    assert [r.response_ids for r in alone] != [r.response_ids for r in other_group]


def test_top_k_one_is_greedy_with_certainty(folder):
    engine, prompts = make_engine(folder), make_prompts("qwen2", folder)
    greedy = engine.generate(prompts, [0, 1], SamplingParams(temperature=0.0, max_tokens=8))
    top = engine.generate(prompts, [0, 1], SamplingParams(temperature=0.7, top_k=1, max_tokens=8))
    assert [r.response_ids for r in greedy] == [r.response_ids for r in top]
    assert all(abs(value) < 1e-6 for r in top for value in r.rollout_logprobs)


def test_sync_replaces_the_weights_and_refuses_other_names(folder, tmp_path):
    engine, prompts = make_engine(folder), make_prompts("qwen2", folder)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    before = engine.generate(prompts, [0, 1], greedy)
    other = AutoModelForCausalLM.from_pretrained(tiny.make_tiny("qwen2", tmp_path, seed=4))
    engine.load_weights(stream_weights(other))
    after = engine.generate(prompts, [0, 1], greedy)
    assert [r.response_ids for r in before] != [r.response_ids for r in after]
    weights = dict(stream_weights(other))
    with pytest.raises(ValueError, match=r"which the engine's model does not have"):
        engine.load_weights(iter({"model.no_such.weight": torch.ones(1), **weights}.items()))
    weights.pop("model.layers.1.self_attn.k_proj.bias")
    with pytest.raises(ValueError, match=r"left out 1 of \d+ weights \(model\.layers\.1\.self_attn\.k_proj\.bias\)"):
        engine.load_weights(iter(weights.items()))


@pytest.mark.parametrize("tie", [False, True])
def test_stream_is_every_parameter_once_in_the_wanted_dtype(tmp_path, tie):
    folder = tiny.make_tiny("qwen3_vl", tmp_path, tie=tie)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    streamed = dict(stream_weights(model, dtype=torch.bfloat16))
    assert ("lm_head.weight" in streamed) != tie
    assert set(streamed) == WeightNames.of(model).required
    assert {tensor.dtype for tensor in streamed.values()} == {torch.bfloat16}
    name, parameter = next(model.named_parameters())
    assert torch.equal(streamed[name], parameter.bfloat16())
