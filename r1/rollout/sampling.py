"""What every engine derives alike: the seed of a request, where a response ends, which tokens it may not contain,
and the names of the weights that a sync must bring."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from r1.config import ModelConfig
from r1.policy.vision import banned_token_ids
from r1.types import Rollout


def request_seed(seed: int, group: int, sample: int) -> int:
    """A request's own seed, in [0, 2^63): a hash, so that it depends on nothing but the three numbers."""
    digest = hashlib.blake2b(f"{seed}/{group}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def override_fields(hf_config: PreTrainedConfig, overrides: dict[str, Any]) -> PreTrainedConfig:
    """Replace fields of a model's config in place: its own where it has them, else its text model's."""
    for name, value in overrides.items():
        setattr(hf_config if hasattr(hf_config, name) else hf_config.get_text_config(), name, value)
    return hf_config


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What sampling needs to know of a model folder, besides its weights."""

    hf_config: PreTrainedConfig
    stop_ids: tuple[int, ...]  # the generation config's end tokens and the tokenizer's
    banned_ids: tuple[int, ...]
    image_token_id: int | None  # None: a text model

    @classmethod
    def load(cls, model_path: str, config: ModelConfig) -> "ModelFacts":
        trust = config.trust_remote_code
        hf_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust)
        hf_config = override_fields(hf_config, config.override_config)
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path or model_path, trust_remote_code=trust)
        try:
            ends = GenerationConfig.from_pretrained(model_path).eos_token_id
        except OSError:  # the folder has no generation_config.json
            ends = hf_config.get_text_config().eos_token_id
        stop_ids = set(ends if isinstance(ends, list | tuple) else [ends]) | {tokenizer.eos_token_id}
        return cls(
            hf_config=hf_config,
            stop_ids=tuple(sorted(stop_ids - {None})),
            banned_ids=banned_token_ids(hf_config),
            image_token_id=getattr(hf_config, "image_token_id", None) if hasattr(hf_config, "vision_config") else None,
        )

    @property
    def auto_class(self) -> type:
        """The transformers class that loads this model."""
        return AutoModelForCausalLM if self.image_token_id is None else AutoModelForImageTextToText

    def weight_names(self, *, trust_remote_code: bool) -> "WeightNames":
        """The names of all parameters."""
        return WeightNames.of(self.empty_model(trust_remote_code=trust_remote_code))

    def empty_model(self, *, trust_remote_code: bool) -> PreTrainedModel:
        """The model without storage."""
        auto: Any = self.auto_class
        with torch.device("meta"):
            return auto.from_config(self.hf_config, trust_remote_code=trust_remote_code)


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """The names that a weight sync must bring, and may bring: tied weights may come under one name or both."""

    required: frozenset[str]
    allowed: frozenset[str]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "WeightNames":
        return cls(
            required=frozenset(name for name, _ in model.named_parameters()),
            allowed=frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)),
        )

    def checked(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass weights through; a name that the model lacks, or at the end a missing one, is a ValueError.

        A weight that a sync leaves out keeps its old value in the engine, and would sample from no policy of ours.
        """
        advice = "send named_parameters() of the same model class, under transformers' own names"
        received = set()
        for name, tensor in weights:
            if name not in self.allowed:
                raise ValueError(f"the weight sync brought {name!r}, which the engine's model does not have; {advice}")
            received.add(name)
            yield name, tensor
        missing = sorted(self.required - received)
        if missing:
            raise ValueError(
                f"the weight sync left out {len(missing)} of {len(self.required)} weights ({_few(missing)}); {advice}"
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def make_rollout(
    prompt_ids: list[int], response_ids: list[int], logprobs: list[float], *, group: int, sample: int, truncated: bool
) -> Rollout:
    """A rollout fresh from the engine; a response and its logprobs have one length."""
    assert len(response_ids) == len(logprobs), f"{len(response_ids)=} {len(logprobs)=}"
    return Rollout(
        group=group,
        sample=sample,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        rollout_logprobs=logprobs,
        truncated=truncated,
    )
