"""Tensors: bitwise comparison, packing as bytes that are safe to read, and a cache larger than memory."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch

_IN_MEMORY = 256 << 20  # bytes of a `TensorCache`
_MOST_HEAD = 16 << 20  # bytes of a header: Python's objects take twenty times as many
_HEAD = 8  # bytes that hold the length of the JSON header


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have one shape, one dtype and the same bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return not a.numel() or torch.equal(_flat(a).view(torch.uint8), _flat(b).view(torch.uint8))


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits, or NaN with any bits, everywhere."""
    if not a.dtype.is_floating_point:
        return bool((a == b).all())
    a, b = a.double(), b.double()
    return bool((((a == b) & (torch.signbit(a) == torch.signbit(b))) | (a.isnan() & b.isnan())).all())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous 1-D view, with stride 1 even for a single element."""
    contiguous = tensor.detach().contiguous()
    return contiguous.as_strided((contiguous.numel(),), (1,))


def pack(value: Any) -> bytes:
    """Pack tensors, numbers, texts, None, and lists, tuples and dicts of these. Raises `TypeError` for other values."""
    contents: list[bytes] = []
    head = json.dumps(_serialised(value, contents)).encode()
    return b"".join([len(head).to_bytes(_HEAD, "little"), head, *contents])


def unpack(data: bytes) -> Any:
    """Unpack: tensors are on the CPU, without graph, with the same bits; tuples become lists."""
    view = memoryview(bytearray(data))  # tensors may be written to
    size = int.from_bytes(view[:_HEAD], "little")
    if size > _MOST_HEAD:
        raise ValueError(f"a header of {size} bytes")
    return _deserialised(json.loads(bytes(view[_HEAD : _HEAD + size])), view, [_HEAD + size])


def _serialised(value: Any, contents: list[bytes]) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        contents.append(_flat(plain).view(torch.uint8).numpy().tobytes())
        return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape), len(contents[-1])]}
    if isinstance(value, (list, tuple)):
        return [_serialised(part, contents) for part in value]
    if isinstance(value, dict):
        return {"dict": {name: _serialised(part, contents) for name, part in value.items()}}
    return value


def _deserialised(value: Any, view: memoryview, index: list[int]) -> Any:
    if isinstance(value, list):
        return [_deserialised(part, view, index) for part in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {name: _deserialised(part, view, index) for name, part in value["dict"].items()}
    name, shape, size = value["tensor"]
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"no dtype {name!r}")
    index[0] += size
    part = view[index[0] - size : index[0]]
    # cloned, since bytes within a message need not be aligned for the dtype
    flat = torch.frombuffer(part, dtype=torch.uint8).clone().view(dtype) if size else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


@dataclass(frozen=True, slots=True)
class _Spilled:
    """A tensor in the file, from offset ``start`` on."""

    start: int
    size: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class TensorCache:
    """Tensors in the order in which they are added, each returned bit for bit on its original device.

    Tensors beyond ``limit`` bytes are written to a temporary file, which is mapped for reading. The file has no name if
    the system allows that, so it vanishes with the cache, also if the process is killed.
    """

    def __init__(self, limit: int = _IN_MEMORY) -> None:
        self._free = limit
        self._tensors: list[torch.Tensor | _Spilled] = []
        self._file: IO[bytes] | None = None
        self._end = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Add a copy of a tensor."""
        tensor, size = tensor.detach(), tensor.numel() * tensor.element_size()
        if size <= self._free:
            self._free -= size
            self._tensors.append(tensor.clone())
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the cache
        self._file.seek(self._end)
        self._file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._file.flush()
        self._tensors.append(_Spilled(self._end, size, tensor.shape, tensor.dtype, tensor.device))
        self._end += size

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index]
        if isinstance(tensor, torch.Tensor):
            return tensor
        assert self._file is not None
        mapped = np.memmap(self._file, np.uint8, "c", tensor.start, (tensor.size,))
        return torch.from_numpy(mapped).view(tensor.dtype).reshape(tensor.shape).to(tensor.device)
