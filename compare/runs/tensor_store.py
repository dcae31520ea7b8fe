"""Tensors of a recorded run in a folder: written once for equal contents, streamed in shards of safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from assay.compare.errors import RecordingError

_SHARD = 64 << 20
"""Bytes that are kept in memory before they are written."""
_INDEX = "tensors.json"


class TensorWriter:
    """Writes tensors to a folder, those of equal dtype and bytes once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shard_of: dict[str, int] = {}
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0
        self._shards = 0

    def add(self, tensor: Tensor) -> dict[str, Any]:
        """Write a tensor, and return its reference: the digest of its content, dtype and shape."""
        content = tensor.detach().to("cpu").contiguous()
        raw = content.reshape(-1).view(torch.uint8)
        dtype = str(content.dtype).removeprefix("torch.")
        digest = hashlib.blake2b(raw.numpy().data, digest_size=12, key=dtype.encode()).hexdigest()
        if digest not in self._shard_of:
            self._shard_of[digest] = self._shards
            # A copy: the caller's tensor may be written to before the shard is full.
            self._pending[digest] = raw.clone() if content.data_ptr() == tensor.data_ptr() else raw
            self._bytes += raw.numel()
            if self._bytes >= _SHARD:
                self._flush()
        return {"digest": digest, "dtype": dtype, "shape": list(content.shape)}

    def close(self) -> None:
        """Write what is left, and the index."""
        self._flush()
        (self._folder / _INDEX).write_text(json.dumps(self._shard_of), encoding="utf-8")

    def _flush(self) -> None:
        if self._pending:
            save_file(self._pending, self._folder / _shard_name(self._shards))
            self._shards += 1
            self._pending, self._bytes = {}, 0


class TensorReader:
    """Reads the tensors of a folder by their references."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._shard_of: dict[str, int] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RecordingError(f"{folder}: expected a recorded run, got no readable {_INDEX} ({error})") from None
        self._open: dict[int, Any] = {}

    def read(self, reference: Mapping[str, Any]) -> Tensor:
        """Return the tensor of a reference, on the CPU; of one with ``part`` or ``rows`` these of its last or first
        axis.

        Raises `RecordingError` for a damaged folder.
        """
        shard = self._shard_of.get(reference["digest"])
        try:
            if shard is None:
                raise KeyError(reference["digest"])
            if shard not in self._open:
                self._open[shard] = safe_open(self._folder / _shard_name(shard), framework="pt")
            raw = self._open[shard].get_tensor(reference["digest"])
        except Exception as error:
            raise RecordingError(f"{self._folder}: a recorded tensor can't be read ({error}); record again") from None
        values = raw.view(getattr(torch, reference["dtype"])).reshape(reference["shape"])
        if "part" in reference:
            values = values[..., slice(*reference["part"])]
        return values[slice(*reference["rows"])] if "rows" in reference else values


def _shard_name(shard: int) -> str:
    return f"tensors-{shard:05d}.safetensors"
