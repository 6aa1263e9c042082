"""Writing tensors as safetensors files of a limited size, a piece at a time."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Dtype = Literal["bf16", "fp16", "fp32"]
TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_CODES: dict[Dtype, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedTensor:
    """A tensor to be written.

    Attributes:
        name: Its name in the file.
        shape: Its shape.
        pieces: Its elements in order, each piece `[n]`.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]

    def size(self, dtype: Dtype) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * TORCH_DTYPES[dtype].itemsize


def write_safetensors(
    folder: Path, tensors: Sequence[StreamedTensor], *, dtype: Dtype, file_bytes: int
) -> list[Path]:
    """Write tensors in order; return the files, the index of several among them.

    Args:
        folder: Where the files go.
        tensors: Each is asked for its pieces once.
        dtype: What the elements are rounded to.
        file_bytes: Most bytes of a file, unless one tensor alone has more.
    """
    parts = list(_parts(tensors, dtype=dtype, file_bytes=file_bytes))
    if len(parts) == 1:
        names = [SINGLE]
    else:
        names = [
            f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            for number in range(1, len(parts) + 1)
        ]
    for name, part in zip(names, parts, strict=True):
        _write(folder / name, part, dtype=dtype)
    if len(parts) > 1:
        names.append(_write_index(folder, dict(zip(names, parts, strict=True)), dtype=dtype))
    return [folder / name for name in names]


def _parts(
    tensors: Sequence[StreamedTensor], *, dtype: Dtype, file_bytes: int
) -> Iterator[list[StreamedTensor]]:
    part: list[StreamedTensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.size(dtype)
        if part and filled + size > file_bytes:
            yield part
            part, filled = [], 0
        part.append(tensor)
        filled += size
    yield part


def _write(path: Path, tensors: Sequence[StreamedTensor], *, dtype: Dtype) -> None:
    """Write one file: the header's length, the header as JSON, the elements.

    The form is that of https://huggingface.co/docs/safetensors (little-endian, no holes); the
    header is filled up with spaces so that the elements begin at a multiple of 8.
    """
    header = json.dumps(_header(tensors, dtype=dtype), separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for tensor in tensors:
            for piece in tensor.pieces:
                rounded = piece.to(TORCH_DTYPES[dtype]).contiguous()
                file.write(rounded.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Sequence[StreamedTensor], *, dtype: Dtype) -> Mapping[str, object]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size(dtype)
        header[tensor.name] = {
            "dtype": _CODES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    return header


def _write_index(
    folder: Path, files: Mapping[str, Sequence[StreamedTensor]], *, dtype: Dtype
) -> str:
    sizes = [tensor.size(dtype) for part in files.values() for tensor in part]
    content = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {tensor.name: name for name, part in files.items() for tensor in part},
    }
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
    return INDEX
