"""LoRA and DoRA: peft's adapters inside the model, where they go, how they start, and the model without them.

An adapted layer keeps its frozen weight as `<name>.base_layer.weight`; nothing else of the model changes, so that
FSDP2, packing and the forward pass treat it as any other. Run with peft 0.21.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from r1.config import LoraConfig
from r1.parallel import local_part, set_whole
from r1.policy.lora_weights import file_name, is_adapter
from r1.policy.parts import part_of

if TYPE_CHECKING:
    import peft


_PARTS = {"language": "language_model", "projector": "projector", "vision": "vision_tower"}


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or re.fullmatch(pattern, name) is not None


def _patterns(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def saved_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Whole names of the modules that train whole; ValueError where modules_to_save names none, or half a tied pair."""
    matched = [n for n, _ in model.named_modules() if any(_matches(n, p) for p in config.modules_to_save)]
    for pattern in config.modules_to_save:
        if not any(_matches(name, pattern) for name in matched):
            raise ValueError(f"model.lora.modules_to_save: {type(model).__name__} has no module {pattern!r}")
    if model.config.tie_word_embeddings and any(n == "lm_head" or n.endswith("embed_tokens") for n in matched):
        raise ValueError(
            "model.lora.modules_to_save: this model's LM head is its embedding (tie_word_embeddings), and a trained "
            "copy of one would part them; take embed_tokens and lm_head out"
        )
    return [name for name in matched if not any(name.startswith(f"{other}.") for other in matched)]


def target_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Whole names of the linear layers that get an adapter; never the LM head.

    Raises:
        ValueError: a pattern of target_modules fits none of them.
    """
    saved = saved_names(model, config)
    parts = {_PARTS[part] for part in config.parts}
    free = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith("model.")
        and part_of(name) in parts
        and not any(name == whole or name.startswith(f"{whole}.") for whole in saved)
        and not any(_matches(name, pattern) for pattern in _patterns(config.exclude_modules))
    ]
    if config.target_modules == "all-linear":
        chosen = free
    else:
        chosen = [name for name in free if any(_matches(name, p) for p in _patterns(config.target_modules))]
        for pattern in _patterns(config.target_modules):
            if not any(_matches(name, pattern) for name in free):
                raise ValueError(
                    f"model.lora.target_modules: {pattern!r} fits no linear layer of {', '.join(config.parts)}; there "
                    f"are {', '.join(sorted({name.rpartition('.')[2] for name in free}))}"
                )
    if not chosen:
        raise ValueError(
            f"model.lora: {type(model).__name__} has no linear layer in {', '.join(config.parts)} that exclude_modules "
            "leaves; widen model.lora.parts or target_modules"
        )
    return chosen


def peft_config(model: PreTrainedModel, config: LoraConfig) -> "peft.LoraConfig":
    """What peft needs to know to make the same adapters, here and where they are loaded."""
    import peft  # seconds of imports, for runs that use it

    chosen = target_names(model, config)
    last = {name.rpartition(".")[2] for name in chosen}
    alike = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last}
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=cast(int, int(config.alpha) if config.alpha == int(config.alpha) else config.alpha),
        lora_dropout=config.dropout,
        target_modules=sorted(last) if alike == set(chosen) else chosen,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        modules_to_save=saved_names(model, config) or None,
    )


def add_adapters(model: PreTrainedModel, config: LoraConfig, dtype: torch.dtype) -> None:
    """Put adapters, in dtype and without values, into a model on the meta device and freeze the rest.

    A value head (an LM head of one output) stays trainable.

    Raises:
        ValueError: by target_names.
    """
    import peft

    settings = peft_config(model, config)
    head = model.lm_head
    with torch.device("meta"):
        peft.inject_adapter_in_model(settings, model)
    if isinstance(head, nn.Linear) and head.out_features == 1:
        head.requires_grad_(True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def start_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Give the adapters of a loaded model their first values: none changes what the model computes.

    A is drawn from the run's seed alike on every rank, B is 0, a DoRA magnitude is its row's length; copies of whole
    modules are already loaded. With adapter_path all of them are read.
    """
    saved = None if config.adapter_path is None else _read_adapter(model, config)
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        if saved is not None:
            set_whole(parameter, saved[file_name(name)])
        elif ".lora_A." in name:
            # Uniform within 1 / sqrt(inputs), as peft draws it.
            whole = torch.rand(parameter.shape, generator=generator) * 2 - 1
            set_whole(parameter, whole / math.sqrt(parameter.shape[1]))
        elif ".lora_B." in name:
            local_part(parameter).zero_()
        elif ".lora_magnitude_vector." in name:
            layer: Any = model.get_submodule(name.partition(".lora_magnitude_vector.")[0])
            local_part(parameter).copy_(local_part(layer.base_layer.weight).float().norm(dim=1))


def check_adapter(config: LoraConfig) -> Any:
    """The settings of the adapter at adapter_path, as peft reads them; ValueError unless config has the same."""
    import peft

    path = config.adapter_path
    assert path is not None, "there is no adapter to check"
    try:
        there: Any = peft.PeftConfig.from_pretrained(path)
    except ValueError as error:
        raise ValueError(f"model.lora.adapter_path={path!r} is no peft adapter: {error}") from error
    for option, theirs, ours in (
        ("rank", there.r, config.rank),
        ("alpha", there.lora_alpha, config.alpha),
        ("use_dora", there.use_dora, config.use_dora),
        ("use_rslora", there.use_rslora, config.use_rslora),
    ):
        if theirs != ours:
            raise ValueError(
                f"model.lora.adapter_path={path!r} has {option} {theirs}, and model.lora.{option} is {ours}; "
                f"set it to {theirs}"
            )
    return there


def _read_adapter(model: PreTrainedModel, config: LoraConfig) -> dict[str, Tensor]:
    """The tensors of a peft adapter, by their names in its file; ValueError unless they are those of this config."""
    import peft

    there, path = check_adapter(config), str(config.adapter_path)
    tensors = peft.utils.load_peft_weights(path, device="cpu")
    wanted = {file_name(name): tuple(p.shape) for name, p in model.named_parameters() if is_adapter(name)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        raise ValueError(
            f"model.lora.adapter_path={path!r} has other adapters than model.lora asks for, which differ in "
            f"{len(wrong)} tensors: {', '.join(wrong[:3])}; set parts, target_modules and modules_to_save to its "
            f"target_modules {there.target_modules} and modules_to_save {there.modules_to_save}"
        )
    return tensors


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model computes as it did before training: the reference. Without adapters it stays as it is."""
    # Not peft's enable_adapters: that also switches requires_grad, which FSDP2 has read already.
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def base_head(model: PreTrainedModel) -> nn.Module:
    """The LM head of the model without its adapters."""
    return getattr(model.lm_head, "original_module", model.lm_head)


def set_dropout(model: nn.Module, on: bool) -> None:
    """Switch the adapters' dropout: on in updates only, or old logprobs would not be the policy's."""
    for name, module in model.named_modules():
        if ".lora_dropout." in name:
            module.train(on)
