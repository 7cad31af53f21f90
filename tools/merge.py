"""Make a model folder that transformers and vLLM load out of a run or one of its checkpoints, without a GPU.

python tools/merge.py runs/demo --output merged [--dtype float32] [--max_shard_gb 2] [--push-to-hub owner/name]
python tools/merge.py runs/lora --output merged [--base folder-of-its-model] or --output adapter --adapter-only

A run gives its best checkpoint where its config has checkpoint.best_metric, else its newest. A LoRA run's adapters are
merged into the model they were trained on. Memory is bounded by the biggest tensor, twice, and one output file: a 7B
model takes under 8 GiB.
"""

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that `python tools/merge.py` finds its parts where r1 is not installed

from r1.checkpoint_files import (  # noqa: E402
    CONFIG,
    HF,
    SHARDS,
    best_checkpoints,
    complete_checkpoints,
    damaged_files,
    find_checkpoint,
    metric_of,
    read_marker,
)
from r1.config import CheckpointConfig  # noqa: E402
from r1.policy.expert_weights import published_layout  # noqa: E402
from tools.merge_files import DTYPES, Shards, checked, plan_files, verify, write_files  # noqa: E402
from tools.merge_lora import Merged, base_of, lora_of, put_adapters, write_adapter  # noqa: E402


def choose(source: str | Path) -> tuple[Path, str]:
    """The checkpoint that source means, and why it is that one."""
    newest = find_checkpoint(source)
    if newest == Path(source):
        return newest, "as given"
    settings = json.loads((newest / CONFIG).read_text())["checkpoint"]
    config = CheckpointConfig(best_metric=settings["best_metric"], best_mode=settings["best_mode"])
    if config.best_metric is None:
        return newest, "the newest; the run's config names no checkpoint.best_metric"
    best = best_checkpoints(complete_checkpoints(newest.parent), config)
    if not best:
        return newest, f"the newest; no checkpoint has a value of {config.best_metric}"
    return best[0], f"the best: {config.best_metric} {metric_of(read_marker(best[0]) or {}, config):.4g}"


def check_source(checkpoint: Path) -> None:
    """Raise ValueError if the checkpoint's bytes are not those that were saved."""
    damaged = damaged_files(checkpoint, read_marker(checkpoint) or {"files": {}})
    if damaged:
        raise ValueError(f"{checkpoint} is damaged: {', '.join(damaged[:3])}; give an earlier checkpoint")


def empty_model(hf_folder: Path) -> PreTrainedModel:
    """The model of a config.json on the meta device: names and shapes, no memory."""
    config = transformers.AutoConfig.from_pretrained(hf_folder)
    name = (config.architectures or ["none"])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise ValueError(
            f"{hf_folder}/config.json names the architecture {name!r}, which transformers "
            f"{transformers.__version__} has not; install the version the run was made with"
        )
    with torch.device("meta"):
        return model_class(config)


def saved_tensors(shards: Shards, model: PreTrainedModel) -> dict[str, Tensor]:
    """{in-memory name: meta tensor} of the checkpoint's weights, in the model's order.

    Raises:
        ValueError: a weight of the model is missing (a tied one may be), or has another shape.
    """
    expected, there = model.state_dict(), shards.tensors
    missing = [name for name in expected if name not in there and name not in model.all_tied_weights_keys]
    wrong = [name for name, entry in there.items() if name not in expected or entry.shape != expected[name].shape]
    if missing or wrong:
        checkpoint = shards.checkpoint
        raise ValueError(
            f"{checkpoint}/{SHARDS} does not fit {checkpoint}/{HF}/config.json: missing {missing[:3]}, unknown or of "
            f"another shape {wrong[:3]}; {HF}/ must be the one that was saved with it"
        )
    return {name: there[name] for name in expected if name in there}


def published(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """{saved name: tensor} of in-memory tensors: what save_pretrained writes, in the layout of published files.

    Of Qwen3-VL's experts the two differ: vLLM 0.32 reads the published one only, transformers both.
    """
    saved = revert_weight_conversion(model, tensors)
    return {name: published_layout(name, tensor, model.config.model_type) for name, tensor in saved.items()}


def conversion_groups(model: PreTrainedModel, tensors: dict[str, Tensor]) -> list[tuple[list[str], dict[str, Tensor]]]:
    """What to convert together: (in-memory names, {saved name: meta tensor}).

    Nearly every tensor becomes one or more saved tensors by itself, so it can be read, converted and written alone;
    those that the file format joins with others form one last group.
    """
    whole = {name: tensor.shape for name, tensor in published(model, dict(tensors)).items()}
    groups, together = [], []
    for name, tensor in tensors.items():
        alone = published(model, {name: tensor})
        if all(whole.get(saved) == part.shape for saved, part in alone.items()):
            groups.append(([name], alone))
        else:
            together.append(name)
    if together:
        groups.append((together, published(model, {name: tensors[name] for name in together})))
    names = [saved for _, parts in groups for saved in parts]
    assert sorted(names) == sorted(whole), f"conversion in parts gives other names: {set(names) ^ set(whole)}"
    return groups


def read_converted(
    read: Callable[[str], Tensor],
    model: PreTrainedModel,
    groups: list[tuple[list[str], dict[str, Tensor]]],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """(saved name, tensor in dtype) in the order of groups, one of which is in memory at a time.

    read gives a whole tensor by its in-memory name.
    """
    for names, _ in groups:
        values = {name: read(name) for name in names}
        for name, tensor in published(model, values).items():
            yield name, checked(name, tensor, dtype).contiguous()


def _with_dtype(value: Any, dtype: str) -> Any:
    """A config.json with every dtype in it replaced, those of nested configs too."""
    if isinstance(value, dict):
        return {k: dtype if k in ("dtype", "torch_dtype") else _with_dtype(v, dtype) for k, v in value.items()}
    return value


def merge(
    source: str | Path,
    output: Path,
    *,
    dtype: str = "bfloat16",
    max_shard_gb: float = 2.0,
    base: str | None = None,
    adapter_only: bool = False,
) -> None:
    """Write the model of a run (its best checkpoint, or its newest) or of one checkpoint to output.

    Args:
        base: where a LoRA run's model.path is now; None: where it was.
        adapter_only: write a LoRA run's adapters alone, as peft does.
    """
    checkpoint, reason = choose(source)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty; give a new folder or empty it")
    print(f"taking {checkpoint} ({reason})")
    check_source(checkpoint)
    shards, model, lora = Shards(checkpoint), empty_model(checkpoint / HF), lora_of(checkpoint)
    if lora is None and (adapter_only or base is not None):
        raise ValueError(f"{checkpoint} is of no LoRA run; leave --adapter-only and --base out")
    base = base or base_of(checkpoint)
    if lora is not None and adapter_only:
        count = write_adapter(shards, model, lora, base, output, DTYPES[dtype])
        print(
            f"wrote the adapter of {checkpoint.name} on {base} to {output}: {count} tensors, {dtype}, for peft and vLLM"
        )
        return
    if lora is None:
        tensors, read = saved_tensors(shards, model), shards.read
    else:
        adapted = empty_model(checkpoint / HF)
        put_adapters(shards, adapted, lora)
        merged = Merged(shards, model, adapted, base)
        tensors, read = merged.tensors, merged.read
        print(f"merging the adapters into {base}")
    write_model(checkpoint, model, tensors, read, output, dtype, max_shard_gb)


def write_model(
    checkpoint: Path,
    model: PreTrainedModel,
    tensors: dict[str, Tensor],
    read: Callable[[str], Tensor],
    output: Path,
    dtype: str,
    max_shard_gb: float,
) -> None:
    """Convert, write and verify what read gives of tensors, beside the checkpoint's configs and tokenizer."""
    groups = conversion_groups(model, tensors)
    expected = {name: tensor for _, parts in groups for name, tensor in parts.items()}
    file_of = plan_files(groups, DTYPES[dtype], max_shard_gb * 1e9)
    shutil.copytree(checkpoint / HF, output, dirs_exist_ok=True)
    config = json.loads((output / "config.json").read_text())
    config = {"dtype": dtype} | _with_dtype(config, dtype)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    checksums = write_files(read_converted(read, model, groups, DTYPES[dtype]), file_of, output)
    verify(output, file_of, expected, DTYPES[dtype], checksums)
    parameters = sum(tensor.numel() for tensor in expected.values())
    print(
        f"merged {checkpoint.name} into {output}: {len(expected)} tensors, {parameters:,} parameters, {dtype}, "
        f"{len(set(file_of.values()))} file(s), reopened and checked. transformers and vLLM load this folder"
    )


def push(folder: Path, repository: str) -> None:
    """Upload the folder to the hub, into a repository that is made, private, if it is not there."""
    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Merged by r1")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise ValueError(
            f"{folder} is merged, but could not be pushed to {repository}: {error}; "
            f"log in with `hf auth login` and run `hf upload {repository} {folder}`"
        ) from error
    print(f"pushed to {repository}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "source", help="run folder (its best checkpoint by checkpoint.best_metric, or newest) or checkpoint"
    )
    parser.add_argument("--output", type=Path, required=True, help="new folder for the model")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: bfloat16, of an adapter alone float32")
    parser.add_argument("--max_shard_gb", type=float, default=2.0, help="size of a safetensors file; bounds memory")
    parser.add_argument("--base", help="of a LoRA run: folder or hub id of the model it trained (default: model.path)")
    parser.add_argument("--adapter-only", action="store_true", help="of a LoRA run: only its adapters, as peft does")
    parser.add_argument(
        "--push-to-hub", metavar="OWNER/NAME", help="also upload the folder; a new repository is private"
    )
    arguments = parser.parse_args()
    if not arguments.max_shard_gb > 0:
        parser.error(f"--max_shard_gb must be above 0, got {arguments.max_shard_gb}")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be here
    try:
        merge(
            arguments.source,
            arguments.output,
            dtype=arguments.dtype or ("float32" if arguments.adapter_only else "bfloat16"),
            max_shard_gb=arguments.max_shard_gb,
            base=arguments.base,
            adapter_only=arguments.adapter_only,
        )
        if arguments.push_to_hub is not None:
            push(arguments.output, arguments.push_to_hub)
    except ValueError as error:
        raise SystemExit(f"merge: {error}") from error


if __name__ == "__main__":
    main()
