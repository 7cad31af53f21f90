"""Make a model folder that transformers and vLLM load out of a run or one of its checkpoints, without a GPU.

python tools/merge.py runs/demo --output merged [--dtype float32] [--max_shard_gb 2] [--push-to-hub owner/name]

A run gives its best checkpoint where its config has checkpoint.best_metric, else its newest. Memory is bounded by the
biggest tensor, twice, and one output file: a 7B model takes under 8 GiB.
"""

import argparse
import json
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from r1.checkpoint_files import (
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
from r1.config import CheckpointConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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


def saved_tensors(checkpoint: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """{in-memory name: meta tensor} of the checkpoint's weights, in the model's order.

    Raises:
        ValueError: a weight of the model is missing (a tied one may be), or has another shape.
    """
    metadata = FileSystemReader(checkpoint / SHARDS).read_metadata().state_dict_metadata
    there = {
        name.removeprefix("model."): entry
        for name, entry in metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    expected = model.state_dict()
    missing = [name for name in expected if name not in there and name not in model.all_tied_weights_keys]
    wrong = [name for name, entry in there.items() if name not in expected or entry.size != expected[name].shape]
    if missing or wrong:
        raise ValueError(
            f"{checkpoint}/{SHARDS} does not fit {checkpoint}/{HF}/config.json: missing {missing[:3]}, unknown or of "
            f"another shape {wrong[:3]}; {HF}/ must be the one that was saved with it"
        )
    return {
        name: torch.empty(there[name].size, dtype=there[name].properties.dtype, device="meta")
        for name in expected
        if name in there
    }


def conversion_groups(model: PreTrainedModel, tensors: dict[str, Tensor]) -> list[tuple[list[str], dict[str, Tensor]]]:
    """What to convert together: (in-memory names, {name that save_pretrained would write: meta tensor}).

    Nearly every tensor becomes one or more saved tensors by itself, so it can be read, converted and written alone;
    those that the file format joins with others form one last group.
    """
    whole = {name: tensor.shape for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}
    groups, together = [], []
    for name, tensor in tensors.items():
        alone = revert_weight_conversion(model, {name: tensor})
        if all(whole.get(saved) == part.shape for saved, part in alone.items()):
            groups.append(([name], alone))
        else:
            together.append(name)
    if together:
        groups.append((together, revert_weight_conversion(model, {name: tensors[name] for name in together})))
    names = [saved for _, parts in groups for saved in parts]
    assert sorted(names) == sorted(whole), f"conversion in parts gives other names: {set(names) ^ set(whole)}"
    return groups


def plan_files(groups: list[tuple[list[str], dict[str, Tensor]]], dtype: torch.dtype, limit: float) -> dict[str, str]:
    """{saved name: file}, filled in order, each file up to limit bytes or one tensor."""
    numbers, size, number = {}, 0, 0
    for _, parts in groups:
        for name, tensor in parts.items():
            nbytes = tensor.numel() * _converted(tensor, dtype).element_size()
            if size and size + nbytes > limit:
                number, size = number + 1, 0
            numbers[name], size = number, size + nbytes
    if number == 0:
        return dict.fromkeys(numbers, "model.safetensors")
    return {name: f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors" for name, n in numbers.items()}


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _checked(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in dtype; ValueError where a finite value has become infinite."""
    converted = _converted(tensor, dtype)
    # The biggest magnitudes tell, without copies of the size of the tensor.
    if dtype == torch.float16 and tensor.numel() and tensor.is_floating_point():
        low, high = torch.aminmax(tensor)
        if max(-float(low), float(high)) > torch.finfo(dtype).max:
            raise ValueError(
                f"{name} has values up to {max(-float(low), float(high)):.3g}, which float16 cannot hold; "
                "use --dtype bfloat16"
            )
    return converted


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy())


def read_converted(
    checkpoint: Path,
    model: PreTrainedModel,
    tensors: dict[str, Tensor],
    groups: list[tuple[list[str], dict[str, Tensor]]],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """(saved name, tensor in dtype) in the order of groups, one of which is in memory at a time; tensors has sizes."""
    for names, _ in groups:
        values = {f"model.{name}": torch.empty_like(tensors[name], device="cpu") for name in names}
        load_shards(values, checkpoint_id=checkpoint / SHARDS, no_dist=True)
        values = {name.removeprefix("model."): values[name] for name in list(values)}
        for name, tensor in revert_weight_conversion(model, values).items():
            yield name, _checked(name, tensor, dtype).contiguous()


def write_files(tensors: Iterator[tuple[str, Tensor]], file_of: dict[str, str], output: Path) -> dict[str, int]:
    """Write each file as soon as its last tensor has come, and the index if there are several. Returns CRC-32s."""
    current: dict[str, Tensor] = {}
    checksums: dict[str, int] = {}
    total = 0
    for name, tensor in tensors:
        if current and file_of[name] != file_of[next(iter(current))]:
            save_file(current, output / file_of[next(iter(current))], metadata={"format": "pt"})
            current = {}
        # A view of a bigger tensor (an expert of a stack) would be written with all of it in memory.
        current[name] = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        checksums[name] = _crc(tensor)
        total += tensor.nbytes
    save_file(current, output / file_of[next(iter(current))], metadata={"format": "pt"})
    if len(set(file_of.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return checksums


def _with_dtype(value: Any, dtype: str) -> Any:
    """A config.json with every dtype in it replaced, those of nested configs too."""
    if isinstance(value, dict):
        return {k: dtype if k in ("dtype", "torch_dtype") else _with_dtype(v, dtype) for k, v in value.items()}
    return value


def verify(
    output: Path,
    file_of: dict[str, str],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
    checksums: dict[str, int],
) -> None:
    """Read back what was written: every name once, its file, shape, dtype and bytes. Raises ValueError otherwise."""
    found: dict[str, str] = {}
    for file in sorted(set(file_of.values())):
        with safe_open(output / file, framework="pt") as tensors:
            for name in tensors.keys():
                have, want = tensors.get_tensor(name), _converted(expected[name], dtype)
                if have.shape != want.shape or have.dtype != want.dtype:
                    raise ValueError(
                        f"{output / file}: {name} is {have.dtype} {list(have.shape)} and should be {want.dtype} "
                        f"{list(want.shape)}; merge again into a new folder"
                    )
                if _crc(have) != checksums[name]:
                    raise ValueError(f"{output / file}: {name} has other bytes than were written; check the disk")
                found[name] = file
    if found != file_of:
        raise ValueError(f"{output} lacks {sorted(file_of.keys() - found.keys())[:3]}; merge again into a new folder")


def merge(source: str | Path, output: Path, *, dtype: str = "bfloat16", max_shard_gb: float = 2.0) -> None:
    """Write the model of a run (its best checkpoint, or its newest) or of one checkpoint to output."""
    checkpoint, reason = choose(source)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty; give a new folder or empty it")
    print(f"taking {checkpoint} ({reason})")
    check_source(checkpoint)
    model = empty_model(checkpoint / HF)
    tensors = saved_tensors(checkpoint, model)
    groups = conversion_groups(model, tensors)
    expected = {name: tensor for _, parts in groups for name, tensor in parts.items()}
    file_of = plan_files(groups, DTYPES[dtype], max_shard_gb * 1e9)
    shutil.copytree(checkpoint / HF, output, dirs_exist_ok=True)
    config = json.loads((output / "config.json").read_text())
    config = {"dtype": dtype} | _with_dtype(config, dtype)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    checksums = write_files(read_converted(checkpoint, model, tensors, groups, DTYPES[dtype]), file_of, output)
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
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--max_shard_gb", type=float, default=2.0, help="size of a safetensors file; bounds memory")
    parser.add_argument(
        "--push-to-hub", metavar="OWNER/NAME", help="also upload the folder; a new repository is private"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be here
    try:
        merge(arguments.source, arguments.output, dtype=arguments.dtype, max_shard_gb=arguments.max_shard_gb)
        if arguments.push_to_hub is not None:
            push(arguments.output, arguments.push_to_hub)
    except ValueError as error:
        raise SystemExit(f"merge: {error}") from error


if __name__ == "__main__":
    main()
