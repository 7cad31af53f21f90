"""Sampling with transformers.generate: the slow reference that vLLM is tested against, and for boxes without vLLM."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from r1.config import Config
from r1.parallel import is_first_rank
from r1.rollout.sampling import ModelFacts, WeightNames, make_rollout, request_seed
from r1.types import Prompt, Rollout, SamplingParams


class _SampledLogprobs(LogitsProcessor):
    """Keeps the logprob of each sampled token: [n] a step. Goes last, after temperature, top-k and top-p.

    A step's token is known only at the next call (or at the end), so the last scores are held back by one step; with
    output_scores=True generate would hold every step's [n, vocab].
    """

    def __init__(self) -> None:
        self.steps: list[Tensor] = []  # each [n] float32, nats
        self._pending: Tensor | None = None  # [n, vocab]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        self._pending = scores.float().log_softmax(dim=-1)
        return scores

    def _take(self, input_ids: Tensor) -> None:
        if self._pending is not None:
            self.steps.append(self._pending.gather(1, input_ids[:, -1:]).squeeze(1))

    def finish(self, sequences: Tensor) -> Tensor:
        """The logprobs of all steps, [n, C]; sequences is what generate returned."""
        self._take(sequences)
        return torch.stack(self.steps, dim=1)


class HfEngine:
    """Samples with its own copy of the model, in the engine's dtype; one prompt's responses at a time."""

    def __init__(
        self, model_path: str, config: Config, *, mm_processor_kwargs: dict[str, Any] | None, device: torch.device
    ) -> None:
        """mm_processor_kwargs is for engines that process pictures themselves; prompts bring theirs processed."""
        self._device = device
        self._facts = ModelFacts.load(model_path, config.model)
        self._model = self._facts.auto_class.from_pretrained(
            model_path,
            config=self._facts.hf_config,
            dtype=getattr(torch, config.engine_dtype),
            trust_remote_code=config.model.trust_remote_code,
        )
        self._model.to(device).eval().requires_grad_(False)
        self._names = WeightNames.of(self._model)
        # The folder's own sampling defaults (Qwen2.5-VL's repetition penalty, say) must not leak into ours.
        self._model.generation_config = GenerationConfig()
        self._progress = config.trainer.progress and is_first_rank()

    def wake(self) -> None:
        """Nothing to do: the weights stay where they are."""

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Copy every tensor by name.

        Raises:
            ValueError: a parameter got no tensor, or a name is not the model's.
        """
        own = dict(self._model.named_parameters(remove_duplicate=False))
        for name, tensor in self._names.checked(weights):
            own[name].copy_(tensor)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], groups: Sequence[int], sampling: SamplingParams) -> list[Rollout]:
        """Sample sampling.n responses to each prompt, in (prompt, sample) order.

        groups holds each prompt's index within the step over all ranks; with sampling.seed it seeds the prompt's
        draws, so that they do not depend on the rank. The caller's random state is left as it was.
        """
        rollouts = []
        devices = [self._device] if self._device.type == "cuda" else []
        pairs = list(zip(prompts, groups, strict=True))
        with torch.random.fork_rng(devices=devices):
            for prompt, group in tqdm(
                pairs, desc="rollout", leave=False, disable=not self._progress or None, dynamic_ncols=True
            ):
                torch.manual_seed(request_seed(sampling.seed, group, 0))
                rollouts += self._sample(prompt, group, sampling)
        return rollouts

    def sleep(self) -> None:
        """Nothing to do: this engine keeps its copy of the weights and has no KV cache between calls."""

    def close(self) -> None:
        """Give the memory back."""
        self._model.to("meta")

    def _sample(self, prompt: Prompt, group: int, sampling: SamplingParams) -> list[Rollout]:
        recorder = _SampledLogprobs()
        stop_ids = [] if sampling.ignore_eos else list(self._facts.stop_ids)
        sequences = self._model.generate(
            **self._inputs(prompt, sampling.n),
            generation_config=self._generation_config(sampling, stop_ids),
            logits_processor=LogitsProcessorList([*self._processors(sampling), recorder]),
        )
        logprobs = recorder.finish(sequences).tolist()
        responses = sequences[:, len(prompt.prompt_ids) :].tolist()
        rollouts = []
        for sample, (ids, values) in enumerate(zip(responses, logprobs, strict=True)):
            ends = [i for i, token in enumerate(ids) if token in stop_ids]
            length = ends[0] + 1 if ends else len(ids)
            rollouts.append(
                make_rollout(
                    prompt.prompt_ids, ids[:length], values[:length], group=group, sample=sample, truncated=not ends
                )
            )
        return rollouts

    def _generation_config(self, sampling: SamplingParams, stop_ids: list[int]) -> GenerationConfig:
        # Temperature, top-k and top-p are in our own processors, before the recorder.
        neutral = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            eos_token_id=stop_ids or None,
            pad_token_id=self._facts.stop_ids[0] if self._facts.stop_ids else 0,
            **(neutral if sampling.temperature > 0 else {"do_sample": False}),
        )

    def _inputs(self, prompt: Prompt, n: int) -> dict[str, Tensor]:
        ids = torch.tensor([prompt.prompt_ids], device=self._device).repeat(n, 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self._facts.image_token_id is not None:
            inputs["mm_token_type_ids"] = (ids == self._facts.image_token_id).long()
        if prompt.pixel_values is not None and prompt.image_grid_thw is not None:
            inputs["pixel_values"] = prompt.pixel_values.to(self._device, self._model.dtype).repeat(n, 1)
            inputs["image_grid_thw"] = prompt.image_grid_thw.to(self._device).repeat(n, 1)
        return inputs

    def _processors(self, sampling: SamplingParams) -> list[LogitsProcessor]:
        """Ban, temperature, top-k, top-p: vLLM's order."""
        processors: list[LogitsProcessor] = []
        if self._facts.banned_ids:
            processors.append(SuppressTokensLogitsProcessor(list(self._facts.banned_ids), device=str(self._device)))
        if sampling.temperature not in (0.0, 1.0):
            processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.temperature > 0 and sampling.top_k > 0:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.temperature > 0 and sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
        return processors
