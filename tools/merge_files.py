"""Tensors one by one: out of a checkpoint's shards, into safetensors files of bounded size, and read back to check."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from r1.checkpoint_files import SHARDS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Shards:
    """The policy's tensors in a checkpoint, by their names in the model."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        metadata = FileSystemReader(checkpoint / SHARDS).read_metadata().state_dict_metadata
        self.tensors = {  # on the meta device: sizes without values
            name.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in metadata.items()
            if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """A whole tensor, in host memory."""
        values = {f"model.{name}": torch.empty_like(self.tensors[name], device="cpu")}
        load_shards(values, checkpoint_id=self.checkpoint / SHARDS, no_dist=True)
        return values[f"model.{name}"]


def plan_files(groups: list[tuple[list[str], dict[str, Tensor]]], dtype: torch.dtype, limit: float) -> dict[str, str]:
    """{saved name: file}, filled in order, each file up to limit bytes or one tensor."""
    numbers, size, number = {}, 0, 0
    for _, parts in groups:
        for name, tensor in parts.items():
            nbytes = tensor.numel() * converted(tensor, dtype).element_size()
            if size and size + nbytes > limit:
                number, size = number + 1, 0
            numbers[name], size = number, size + nbytes
    if number == 0:
        return dict.fromkeys(numbers, "model.safetensors")
    return {name: f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors" for name, n in numbers.items()}


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def checked(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in dtype; ValueError where a finite value has become infinite."""
    result = converted(tensor, dtype)
    # The biggest magnitudes tell, without copies of the size of the tensor.
    if dtype == torch.float16 and tensor.numel() and tensor.is_floating_point():
        low, high = torch.aminmax(tensor)
        if max(-float(low), float(high)) > torch.finfo(dtype).max:
            raise ValueError(
                f"{name} has values up to {max(-float(low), float(high)):.3g}, which float16 cannot hold; "
                "use --dtype bfloat16"
            )
    return result


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy())


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
                have, want = tensors.get_tensor(name), converted(expected[name], dtype)
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
