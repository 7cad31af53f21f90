"""Between engine and trainer: decode responses for the reward, and hand every rank all of a step's rollouts."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL.Image import Image, fromarray
from transformers import PreTrainedTokenizerBase

from r1.loggers_files import thumbnail
from r1.parallel import Ranks, gather_objects
from r1.types import Prompt, Rollout

TAG = re.compile(r"</?[A-Za-z_]+>")


def decode_responses(
    rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool
) -> None:
    """Fill rollout.response with its text, without special tokens.

    Tags such as `<think>` stay even where the tokenizer calls them special: reward functions look for them.
    """
    if not rollouts:  # transformers decodes an empty batch as one empty text
        return
    hidden: set[int] = set()
    if skip_special_tokens:
        added = tokenizer.added_tokens_decoder
        hidden = {i for i, token in added.items() if token.special and not TAG.fullmatch(token.content)}
    kept = [[t for t in r.response_ids if t not in hidden] for r in rollouts]
    for rollout, text in zip(rollouts, tokenizer.batch_decode(kept, skip_special_tokens=False), strict=True):
        rollout.response = text


def reward_inputs(rollouts: Sequence[Rollout], prompts: Sequence[Prompt], first_group: int) -> list[dict[str, Any]]:
    """What the reward function gets for each rollout: the row's other columns, and the fixed keys over them.

    Sizes are (width, height) in pixels: image_sizes of the files, model_image_sizes of what the model sees.
    """
    inputs = []
    for rollout in rollouts:
        prompt = prompts[rollout.group - first_group]
        inputs.append(
            {
                **prompt.fields,
                "response": rollout.response,
                "response_length": len(rollout.response_ids),
                "ground_truth": prompt.ground_truth,
                "prompt": prompt.text,
                "row": prompt.row,
                "truncated": rollout.truncated,
            }
        )
        if prompt.images:  # image_sizes is among the fields
            inputs[-1]["model_image_sizes"] = [image.size for image in prompt.images]
    return inputs


def sample_record(rollout: Rollout, prompt: Prompt, *, pictures: bool = True) -> dict[str, Any]:
    """One line of samples.jsonl; "images", where the prompt has some and pictures asks for them, are small copies."""
    record = {
        "row": prompt.row,
        "sample": rollout.sample,
        "prompt": prompt.text,
        "response": rollout.response,
        "ground_truth": prompt.ground_truth,
        "rewards": rollout.rewards,
        "response_length": len(rollout.response_ids),
        "truncated": rollout.truncated,
    }
    if pictures and (prompt.images or prompt.videos):
        record["images"] = [thumbnail(image) for image in [*prompt.images, *_frames(prompt)]]
    return record


def _frames(prompt: Prompt) -> list[Image]:
    """The first, middle and last frame of each video."""
    return [fromarray(frames[i]) for frames, _ in prompt.videos for i in sorted({0, len(frames) // 2, len(frames) - 1})]


def gather_rollouts(local: Sequence[Rollout], ranks: Ranks) -> tuple[list[Rollout], list[int]]:
    """All ranks' rollouts in (group, sample) order, and for each the rank that holds its prompt's pictures.

    Only ids and logprobs travel, as flat arrays: 12 bytes a token. With everything in every rank's hands, balance,
    advantages and token counts are pure functions that need no further exchange.
    """
    mine = _flatten(local) if ranks.speaks_for_engine else None
    rollouts, homes = [], []
    for rank, flat in enumerate(gather_objects(mine)):
        for rollout in [] if flat is None else _unflatten(flat):
            rollouts.append(rollout)
            # The ranks of a tensor-parallel group all hold the prompt; they take its groups in turn.
            homes.append(rank + rollout.group % ranks.tensor_parallel_size)
    order = sorted(range(len(rollouts)), key=lambda i: (rollouts[i].group, rollouts[i].sample))
    return [rollouts[i] for i in order], [homes[i] for i in order]


def _flatten(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    prompts = {r.group: r.prompt_ids for r in rollouts}
    return {
        "rollouts": np.array(
            [(r.group, r.sample, len(r.response_ids), r.truncated) for r in rollouts], np.int64
        ).reshape(-1, 4),
        "response_ids": np.array([t for r in rollouts for t in r.response_ids], np.int32),
        "rollout_logprobs": np.array([x for r in rollouts for x in r.rollout_logprobs], np.float64),
        "prompts": np.array([(g, len(ids)) for g, ids in prompts.items()], np.int64).reshape(-1, 2),
        "prompt_ids": np.array([t for ids in prompts.values() for t in ids], np.int32),
    }


def _unflatten(flat: dict[str, np.ndarray]) -> list[Rollout]:
    prompts, at = {}, 0
    for group, length in flat["prompts"].tolist():
        prompts[group] = flat["prompt_ids"][at : at + length].tolist()
        at += length
    rollouts, at = [], 0
    for group, sample, length, truncated in flat["rollouts"].tolist():
        tokens = slice(at, at + length)
        rollouts.append(
            Rollout(
                group=group,
                sample=sample,
                prompt_ids=prompts[group],
                response_ids=flat["response_ids"][tokens].tolist(),
                rollout_logprobs=flat["rollout_logprobs"][tokens].tolist(),
                truncated=bool(truncated),
            )
        )
        at += length
    return rollouts
