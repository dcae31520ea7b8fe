"""Tensors, and lists of them, as bytes that may come from anybody: to read them runs no code of the sender's."""

from __future__ import annotations

import json
from typing import Any

import torch

_HEAD = 8  # bytes that say how long the JSON text is which describes what follows


def pack(value: Any) -> bytes:
    """``value``: tensors, numbers, texts, None, and lists, tuples and dicts of these. Raises `TypeError` for others."""
    contents: list[bytes] = []
    head = json.dumps(_described(value, contents)).encode()
    return b"".join([len(head).to_bytes(_HEAD, "little"), head, *contents])


def unpack(data: bytes) -> Any:
    """What was packed: tensors on the CPU, without graph, of the same bits; tuples have become lists."""
    view = memoryview(bytearray(data))  # tensors may be written to
    size = int.from_bytes(view[:_HEAD], "little")
    return _restored(json.loads(bytes(view[_HEAD : _HEAD + size])), view, [_HEAD + size])


def _described(value: Any, contents: list[bytes]) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # also a lone number's stride is 1 now
        contents.append(flat.view(torch.uint8).numpy().tobytes())
        return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape), len(contents[-1])]}
    if isinstance(value, (list, tuple)):
        return [_described(part, contents) for part in value]
    if isinstance(value, dict):
        return {"dict": {name: _described(part, contents) for name, part in value.items()}}
    return value


def _restored(value: Any, view: memoryview, place: list[int]) -> Any:
    if isinstance(value, list):
        return [_restored(part, view, place) for part in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {name: _restored(part, view, place) for name, part in value["dict"].items()}
    name, shape, size = value["tensor"]
    dtype = getattr(torch, name)
    place[0] += size
    part = view[place[0] - size : place[0]]
    # cloned, since bytes within a message need not lie where the dtype's numbers may
    flat = torch.frombuffer(part, dtype=torch.uint8).clone().view(dtype) if size else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
