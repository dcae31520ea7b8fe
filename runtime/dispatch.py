"""A torch dispatch mode that intercepts allocations, also those inside operators of other libraries."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TORCHS_OWN = ("aten", "prim", "prims", "inductor", "profiler", "c10d", "higher_order")

_aten = torch.ops.aten
ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.empty_permuted.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


class AllocationMode(TorchDispatchMode):
    """A mode that calls `called` for each of torch's own operators, also inside operators of other libraries."""

    def __init__(self) -> None:
        super().__init__()
        if "torch._dynamo" in sys.modules:
            AllocationMode.__torch_dispatch__ = _not_compiled  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch 2.13 would import its compiler to exclude the mode, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keys, kwargs = _operator_keys(func, args), kwargs or {}
        if keys is not None:  # torch disables the mode inside an operator, where the allocations happen
            with self:
                return func.redispatch(keys, *args, **kwargs)
        return self.called(func, args, kwargs, func(*args, **kwargs))

    def called(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Return the call's result or its replacement."""
        return result


_not_compiled = torch._disable_dynamo(AllocationMode.__torch_dispatch__)  # type: ignore[attr-defined]


def _operator_keys(func: Any, args: Any) -> Any:
    """Return the dispatch keys of an operator's kernel for its tensors' device; None for torch's own operators."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in _TORCHS_OWN:
        return None
    tensors = [arg for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]
    key = torch._C._dispatch_key_for_device(tensors[0].device.type if tensors else "cpu")
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), key):
        return None
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))
