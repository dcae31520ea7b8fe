"""Tensors as bytes, within a solution's process, by functions of torch taken hold of before the solution is imported.

A part of the text that `host` is; see there.
"""

import json
from typing import Any

import torch

TENSOR, NEW, DETACH, CLONE = torch.Tensor, torch.empty, torch.Tensor.detach, torch.Tensor.clone
CONTIGUOUS, STRIDED, VIEW = torch.Tensor.contiguous, torch.Tensor.as_strided, torch.Tensor.view
NUMPY, CPU, COPY, TO = torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.copy_, torch.Tensor.to
UINT8, SUBCLASS, ADDRESS = torch.uint8, torch.Tensor.as_subclass, torch.Tensor.data_ptr
_dumps = json.dumps


def leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, TENSOR):
        return [tree]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    return []


def mapped(tree: Any, function: Any) -> Any:
    if isinstance(tree, TENSOR):
        return function(tree)
    if isinstance(tree, list | tuple):
        made = [mapped(part, function) for part in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    if isinstance(tree, dict):
        return {name: mapped(part, function) for name, part in tree.items()}
    return tree


def content_of(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor of numbers."""
    plain = CONTIGUOUS(CPU(DETACH(SUBCLASS(tensor, TENSOR))))
    flat = STRIDED(plain, (plain.numel(),), (1,))
    return plain, NUMPY(VIEW(flat, UINT8)).tobytes()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last address of what a tensor's elements may lie in."""
    if tensor.numel() == 0:
        return (0, 0)
    span = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return (ADDRESS(tensor), ADDRESS(tensor) + span * tensor.element_size())


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = _memory(a), _memory(b)
    return a.device == b.device and first[0] < second[1] and second[0] < first[1]


class Answer:
    """An answer's text, and the tensors behind it."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []

    def tensor(self, value: torch.Tensor) -> dict[str, Any]:
        plain, content = content_of(value)
        self.contents.append(content)
        return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape), len(content)]}

    def packed(self, value: Any) -> bytes:
        head = _dumps(value).encode()
        return b"".join([len(head).to_bytes(8, "little"), head, *self.contents])


def is_wrapped(value: Any) -> bool:
    """Whether a tensor of another class has numbers of its own below it."""
    return isinstance(value, TENSOR) and type(value).__torch_dispatch__ is TENSOR.__torch_dispatch__


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and content_of(a)[1] == content_of(b)[1]
