"""Program that the vLLM tests run in a process of its own: what an engine gave, and what transformers gives, as JSON.

    python tests/vllm_probe.py parity OUT.json qwen2 qwen2_5_vl-tied …
    python tests/vllm_probe.py videos OUT.json qwen2_vl …
    torchrun --nproc_per_node 2 tests/vllm_probe.py ranks OUT.json TENSOR_PARALLEL_SIZE

A vLLM engine cannot be taken down in process, and its import takes longer than all that is done with it here.
"""

import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, Qwen2VLImageProcessor

from r1.config import Config, DataConfig, ModelConfig, RolloutConfig, TrainerConfig, UpdateConfig
from r1.data.prompt import Renderer
from r1.policy.attention import register
from r1.policy.balance import Piece
from r1.policy.logprobs import Head
from r1.policy.model import _packed_forward, _set_attention
from r1.policy.packing import pack
from r1.policy.vision import VisionSpec
from r1.rollout.engines import ENGINES, Engine
from r1.rollout.sampling import ModelFacts, banned_token_ids
from r1.rollout.weight_sync import stream_weights
from r1.types import Prompt, Rollout, SamplingParams
from tests import tiny

CPU = torch.device("cpu")
QUESTIONS = ("how many circles are there?", "name the colour of the largest shape, then stop.")


def make_config(folder: Path, *, tensor_parallel_size: int = 1) -> Config:
    return Config(
        model=ModelConfig(path=str(folder), precision="float32"),
        data=DataConfig(max_prompt_length=256, max_response_length=64, rollout_batch_size=4),
        update=UpdateConfig(global_batch_size=4),
        rollout=RolloutConfig(
            limit_images=2,
            kv_cache_gib=0.03,
            max_num_seqs=16,
            max_num_batched_tokens=64,  # fewer than the prompts of a step have
            tensor_parallel_size=tensor_parallel_size,
        ),
        trainer=TrainerConfig(progress=False),
    )


def noise(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 14, width // 14, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


def make_prompt(row: int, folder: Path, text: str, images: list[Image.Image]) -> Prompt:
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
    messages = [{"role": "user", "content": parts if images else text}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(rendered).input_ids
    prompt = Prompt(row=row, text=rendered, prompt_ids=ids, sampler_ids=ids, images=images)
    if images:
        inputs = AutoProcessor.from_pretrained(folder)(text=[rendered], images=images, return_tensors="pt")
        prompt.prompt_ids = inputs["input_ids"][0].tolist()
        prompt.pixel_values, prompt.image_grid_thw = inputs["pixel_values"], inputs["image_grid_thw"]
    return prompt


def make_prompts(family: str, folder: Path) -> list[Prompt]:
    """Two text prompts; of vision families also one with one picture and one with two."""
    prompts = [make_prompt(row, folder, text, []) for row, text in enumerate(QUESTIONS)]
    if family in tiny.VISION_FAMILIES:
        prompts.append(make_prompt(2, folder, QUESTIONS[0], [noise(224, 112, 1)]))
        prompts.append(make_prompt(3, folder, QUESTIONS[1], [noise(112, 112, 2), noise(112, 168, 3)]))
    return prompts


def summary(rollouts: list[Rollout]) -> list[dict[str, Any]]:
    names = ("group", "sample", "response_ids", "rollout_logprobs", "truncated")
    return [{name: getattr(rollout, name) for name in names} for rollout in rollouts]


def load(folder: Path) -> PreTrainedModel:
    facts = ModelFacts.load(str(folder), ModelConfig(path=str(folder)))
    return facts.auto_class.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def teacher_forced(
    model: PreTrainedModel, prompt: Prompt, response: list[int], temperature: float, banned: tuple[int, ...] = ()
) -> list[float]:
    """The logprobs of a given response in one plain forward pass, over the vocabulary without the banned tokens."""
    ids = torch.tensor([prompt.prompt_ids + response])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if hasattr(model.config, "image_token_id"):
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
    if prompt.images:
        inputs |= {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
    logits = model(**inputs).logits[0, len(prompt.prompt_ids) - 1 : -1] / temperature
    logits[:, list(banned)] = -torch.inf
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, torch.tensor(response)[:, None]).squeeze(1).tolist()


def random_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def host_state() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {"environment": environment, "threads": torch.get_num_threads(), "setter": torch.set_num_threads.__name__}


@contextmanager
def counted_images() -> Iterator[dict[str, int]]:
    """How many pictures any Qwen image processor of transformers processes meanwhile."""
    original, count = Qwen2VLImageProcessor._preprocess, {"images": 0}

    def counting(self: Qwen2VLImageProcessor, images: list[Any], *args: Any, **kwargs: Any) -> Any:
        count["images"] += len(images)
        return original(self, images, *args, **kwargs)

    Qwen2VLImageProcessor._preprocess = counting
    yield count
    Qwen2VLImageProcessor._preprocess = original


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def parity(name: str, root: Path) -> tuple[dict[str, Any], Engine]:
    """An engine built on model 0, synced with model 1, then with model 2, against transformers at each."""
    family, tied = name.removesuffix("-tied"), name.endswith("-tied")
    folders = [tiny.make_tiny(family, root / f"{name}-{seed}", seed=seed, tie=tied) for seed in range(3)]
    prompts = make_prompts(family, folders[0])
    groups = [10, 11, 12, 13][: len(prompts)]
    models, config = [load(folder) for folder in folders], make_config(folders[0])
    states, hosts = [random_state()], [host_state()]
    engine = ENGINES["vllm"](str(folders[0]), config, mm_processor_kwargs=None, device=CPU)
    states.append(random_state())
    hosts.append(host_state())
    reference = ENGINES["hf"](str(folders[0]), config, mm_processor_kwargs=None, device=CPU)
    result: dict[str, Any] = {"greedy": [], "reference": []}
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    for model in models[1:]:
        engine.wake()
        engine.load_weights(stream_weights(model))
        reference.load_weights(stream_weights(model))
        with counted_images() as processed:
            result["greedy"].append(summary(engine.generate(prompts, groups, greedy)))
            result["images"] = [sum(len(prompt.images) for prompt in prompts), processed["images"]]
        result["reference"].append(summary(reference.generate(prompts, groups, greedy)))
    result |= samples(engine, reference, models[2], prompts, groups)
    states.append(random_state())
    hosts.append(host_state())
    wrong = dataclasses.replace(prompts[0], row=41, prompt_ids=[*prompts[0].prompt_ids, 5])
    result["error_prompt"] = error_of(engine.generate, [wrong], [0], greedy)
    engine.sleep()
    result["random_state_kept"] = [state == states[0] for state in states]
    result["host_kept"] = [host == hosts[0] for host in hosts]
    result["banned"] = list(banned_token_ids(models[0].config))
    return result, engine


def samples(
    engine: Engine, reference: Engine, model: PreTrainedModel, prompts: list[Prompt], groups: list[int]
) -> dict[str, Any]:
    """Four samples a prompt: twice with one seed, once with another, and their logprobs by a plain forward pass."""
    sampling = SamplingParams(n=4, temperature=0.7, max_tokens=24, seed=7)
    engine.load_weights(stream_weights(model))  # empties the cache of processed pictures
    with counted_images() as processed:
        first = engine.generate(prompts, groups, sampling)
    return {
        "images_of_samples": processed["images"],
        "sampled": summary(first),
        "sampled_again": summary(engine.generate(prompts[::-1], groups[::-1], sampling)),
        "sampled_other_seed": summary(engine.generate(prompts, groups, dataclasses.replace(sampling, seed=8))),
        "sampled_reference": summary(reference.generate(prompts, groups, sampling)),
        "plain": [teacher_forced(model, prompts[groups.index(r.group)], r.response_ids, 0.7) for r in first],
        "plain_banned": [
            teacher_forced(model, prompts[groups.index(r.group)], r.response_ids, 0.7, banned_token_ids(model.config))
            for r in first
        ],
    }


def video_prompts(folder: Path) -> list[Prompt]:
    """A video and a picture, two videos, text."""
    processor = AutoProcessor.from_pretrained(folder)
    config = DataConfig(min_pixels=3136, max_pixels=40000, video_max_frames=8)
    renderer = Renderer(config, processor.tokenizer, processor, image_dir=None)
    videos = [[noise(112, 84, 10 * k + i) for i in range(n)] for k, n in enumerate((7, 4))]
    rows = [
        {"problem": "<video>a<image> " + QUESTIONS[0], "images": noise(112, 112, 1), "videos": videos[0]},
        {"problem": f"<video>{QUESTIONS[1]}<video>", "videos": videos},
        {"problem": QUESTIONS[0]},
    ]
    return [renderer.build(i, row) for i, row in enumerate(rows)]


def videos(family: str, root: Path) -> tuple[dict[str, Any], Engine]:
    """Samples of prompts with videos, and the logprobs that the trainer's packed row gives them."""
    folder = tiny.make_tiny(family, root / f"{family}-videos")
    config = make_config(folder)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, limit_videos=2))
    prompts, model = video_prompts(folder), load(folder)
    kwargs = {"size": {"shortest_edge": 3136, "longest_edge": 40000}}
    engine = ENGINES["vllm"](str(folder), config, mm_processor_kwargs=kwargs, device=CPU)
    engine.load_weights(stream_weights(model))
    sampled = engine.generate(prompts, range(3), SamplingParams(n=2, temperature=0.7, max_tokens=24, seed=3))
    register("sdpa")
    _set_attention(model, "sdpa")
    vision = VisionSpec.from_config(model.config)
    pieces = [Piece(rollouts=[r for r in sampled if r.group == g]) for g in range(3)]
    microbatch = pack(pieces, dict(enumerate(prompts)), vision, with_mask=True)
    head = Head(temperature=0.7, chunk_tokens=64, banned=vision.banned_ids)
    with torch.no_grad():
        scored = _packed_forward(model, *microbatch.model_inputs(CPU), microbatch.labels, head)
    return {"sampler": microbatch.rollout_logprobs.tolist(), "trainer": scored.logprobs.tolist()}, engine


def ranks(tensor_parallel_size: int, root: Path) -> dict[str, Any]:
    """Every rank's samples of one prompt: one group an engine. Weights come from FSDP2 shards."""
    rank, folders = dist.get_rank(), [root / str(seed) for seed in range(2)]
    if rank == 0:  # transformers saves nothing on other ranks
        for seed, folder in enumerate(folders):
            tiny.make_tiny("qwen2", folder, seed=seed)
    dist.barrier()
    config, model = make_config(folders[0], tensor_parallel_size=tensor_parallel_size), load(folders[1])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = ENGINES["vllm"](str(folders[0]), config, mm_processor_kwargs=None, device=CPU)
    engine.load_weights(stream_weights(model))
    prompt, group = make_prompt(0, folders[0], QUESTIONS[0], []), rank // tensor_parallel_size
    sampled = SamplingParams(n=4, max_tokens=16, seed=7)
    mine = [summary(engine.generate([prompt], [group], sampled)) for _ in range(2)]
    mine.append(summary(engine.generate([prompt], [group], SamplingParams(temperature=0.0, max_tokens=16))))
    reference = ENGINES["hf"](str(folders[1]), config, mm_processor_kwargs=None, device=CPU)
    mine.append(summary(reference.generate([prompt], [group], SamplingParams(temperature=0.0, max_tokens=16))))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    engine.close()
    return {"ranks": gathered, "rank": rank, "group_ended": not dist.is_initialized()}


def main() -> None:
    task, out, *arguments = sys.argv[1:]
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{out}.rendezvous", rank=0, world_size=1)
    root = Path(out).parent / "models"
    # vLLM makes the process group of experts with the first engine of a process, and for a model with experts only.
    arguments.sort(key=lambda name: "moe" not in name)
    if task == "parity":
        # Engines are kept: vLLM ends the default process group with the first one that is collected.
        pairs = {name: parity(name, root) for name in arguments}
        result = {name: pair[0] for name, pair in pairs.items()}
        # Last: a broken sync breaks rotary embeddings, which vLLM shares between all models of a process.
        last = arguments[-1]
        weights = list(stream_weights(load(root / f"{last}-0")))
        result["error_missing"] = error_of(pairs[last][1].load_weights, iter(weights[:3] + weights[4:]))
    elif task == "videos":
        kept = {name: videos(name, root) for name in arguments}
        result = {name: pair[0] for name, pair in kept.items()}
    else:
        result = ranks(int(arguments[0]), root)
    if int(os.environ["RANK"]) == 0:
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
