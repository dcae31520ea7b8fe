"""Results as a flat list with their nesting, arguments that are other numbers in the same memory for each call, and
memory that holds what shows where nothing is written.

A part of the text that `host` is; see there.
"""

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from assay.judge.solution.host_bytes import ADDRESS, COPY, DETACH, NEW, NUMPY, STRIDED, TENSOR, UINT8, VIEW, leaves

_roll, _flat, _as, _inference = torch.roll, torch.Tensor.flatten, torch.Tensor.view_as, torch.no_grad
_EMPTY = (
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
)  # fmt: skip


def parts(result: Any, names: tuple[str, ...] = ()) -> tuple[list[Any], str]:
    """What stands in lists, tuples and dicts, in order and without None, and how it is nested: ``(*,(*,*))``.

    A dict with these ``names`` has their order. One thing in a list is that thing.
    """
    if isinstance(result, dict):
        known = set(names) == set(result)
        result = [result[name] for name in names] if known else list(result.values())
    if not isinstance(result, list | tuple):
        return ([], "") if result is None else ([result], "*")
    inner = [parts(part) for part in result]
    flat = [leaf for results, _ in inner for leaf in results]
    nested = [words for _, words in inner if words]
    return flat, nested[0] if len(nested) == 1 else f"({','.join(nested)})" if nested else ""


def roll_into(target: Any, base: Any, indices: list[int], shift: int) -> None:
    """Put the numbers of ``base`` into the memory of ``target``, behind torch's counters; the tensors at these places
    are rolled by ``shift`` in the order of their memory."""
    for index, (now, old) in enumerate(zip(leaves(target), leaves(base), strict=True)):
        by = shift % old.numel() if index in indices and old.numel() else 0
        if now.device.type != "cpu":
            with _inference():
                COPY(now, _as(_roll(_flat(old), by), old) if by else old)
        elif old.numel():
            to, of = (NUMPY(VIEW(STRIDED(DETACH(x), (x.numel(),), (1,)), UINT8)) for x in (now, old))
            cut = by * old.element_size()
            to[:cut] = of[len(of) - cut :]
            to[cut:] = of[: len(of) - cut]


def litter(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Free tensors like the results that are full of NaN: what is never written then shows, where memory is reused."""
    dirt = [NEW(shape, dtype=dtype) for shape, dtype in shapes if dtype.is_floating_point for _ in range(2)]
    for tensor in dirt:
        tensor.fill_(float("nan"))


class Filled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, uninitialised tensors of floating-point numbers hold one value."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value
        if "torch._dynamo" in sys.modules:
            Filled.__torch_dispatch__ = _not_compiled  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a mode is kept from being compiled by importing the compiler: seconds, where nobody else did

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.is_floating_point() and result.device.type != "meta":
            result.fill_(self.value)
        return result


_not_compiled = torch._disable_dynamo(Filled.__torch_dispatch__)  # type: ignore[attr-defined]


def loose(results: Any, registered: dict[str, Any]) -> dict[str, Any]:
    """The plain tensors of floating-point numbers that a module, and what it holds, has as attributes, by path."""
    known = {ADDRESS(value) for value in registered.values()}
    result: dict[str, Any] = {}

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, TENSOR):
            plain = type(value) in (TENSOR, torch.nn.Parameter) and value.layout == torch.strided
            if plain and value.is_floating_point() and value.numel() and ADDRESS(value) not in known:
                result.setdefault(path, value)
        elif depth and isinstance(value, dict):
            for name, part in value.items():
                walk(part, f"{path}.{name}", depth - 1)
        elif depth and isinstance(value, list | tuple):
            for number, part in enumerate(value):
                walk(part, f"{path}.{number}", depth - 1)

    for prefix, module in results.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                walk(value, f"{prefix}.{name}".lstrip("."), 2)
    return {name: value for name, value in result.items() if name not in registered}
