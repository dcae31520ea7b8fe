"""Tensors that are asked for again later: in memory up to so many bytes, the others in a temporary file."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch

KEPT = 256 << 20
"""Bytes that are held in memory."""


@dataclass(frozen=True, slots=True)
class _Filed:
    """A tensor that is in the file, from ``start`` on."""

    start: int
    size: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Shelf:
    """Tensors in the order in which they are put, each given back bit for bit, on the device that it was on.

    What exceeds ``limit`` bytes is written to a temporary file, which is mapped when it is asked for. The file has no
    name where the system allows that, so it is gone with the shelf, also where the process is killed.
    """

    def __init__(self, limit: int = KEPT) -> None:
        self._room = limit
        self._held: list[torch.Tensor | _Filed] = []
        self._file: IO[bytes] | None = None
        self._end = 0

    def put(self, tensor: torch.Tensor) -> None:
        """Add a copy of a tensor."""
        tensor, size = tensor.detach(), tensor.numel() * tensor.element_size()
        if size <= self._room:
            self._room -= size
            self._held.append(tensor.clone())
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the shelf
        self._file.seek(self._end)
        self._file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._file.flush()
        self._held.append(_Filed(self._end, size, tensor.shape, tensor.dtype, tensor.device))
        self._end += size

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, place: int) -> torch.Tensor:
        found = self._held[place]
        if isinstance(found, torch.Tensor):
            return found
        assert self._file is not None
        mapped = np.memmap(self._file, np.uint8, "c", found.start, (found.size,))
        return torch.from_numpy(mapped).view(found.dtype).reshape(found.shape).to(found.device)
