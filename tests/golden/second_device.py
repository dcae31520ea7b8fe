"""A stand-in for a GPU: tensors that don't mix with the CPU's, and whose results are the worst allowed.

Its numbers are in the CPU's memory. Sums and products run in another order than the CPU's, and each elementary function
is off by the ulps of a table, to alternate sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")  # the one kind of device that needs neither a driver nor another build of PyTorch
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
_TO_HOST = {"_local_scalar_dense", "equal", "is_same_size"}  # give Python's numbers
_TAKE_INDICES = {"index", "index_put", "index_put_"}  # of the CPU too, on CUDA as well


class OnDevice(torch.Tensor):
    """A tensor of the device; ``inner`` has its numbers."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        tensor: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=int(inner.storage_offset()),
            dtype=inner.dtype,
            device=DEVICE,
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} outside of the device's mode")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner})"


class _WithNumbers(TorchFunctionMode):
    """Inside, tensors that are made of Python's numbers have these on the device too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnDevice):
            return _made(torch.tensor, args[1], dtype=kwargs.get("dtype", args[0].dtype))
        if kwargs.get("device") == DEVICE and func in _MAKERS and not isinstance(args[0], torch.Tensor):
            return _made(func, *args, **kwargs)
        return func(*args, **kwargs)


class SecondDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, the device exists; ``ulps`` are its errors by function.

    ``operations`` counts what ran on it, ``names`` are the operations.
    """

    def __init__(self, ulps: Mapping[str, float] = {}) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ulps = ulps
        self.operations = 0
        self.names: set[str] = set()

    def __enter__(self) -> SecondDevice:
        self._function_mode = _WithNumbers().__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._function_mode.__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise entering the mode imports torch._dynamo, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
        if name == "to":
            return _moved(args[0], [*args[1:], *kwargs.values()])
        to = kwargs.get("device")
        if name == "lift_fresh" and isinstance(args[0], OnDevice):
            return args[0]
        if to is not None and torch.device(to).type == DEVICE.type:
            kwargs["device"] = "cpu"
        elif not here:
            return func(*args, **kwargs)
        elif to is None and name != "copy_":
            checked = [args[0]] if name in _TAKE_INDICES else leaves
            if any(not isinstance(leaf, OnDevice) and leaf.ndim for leaf in checked):
                raise RuntimeError(f"{name}: expected all tensors to be on the device, got one on the CPU")
        self.operations += 1
        self.names.add(name)
        plain, plain_kwargs = tree_map(lambda leaf: leaf.inner if isinstance(leaf, OnDevice) else leaf, (args, kwargs))
        result = self.computed(func, name, plain, plain_kwargs)
        if name in _TO_HOST or (name == "_to_copy" and to is not None and torch.device(to).type == "cpu"):
            return result
        if name == "copy_" and not isinstance(args[0], OnDevice):
            return args[0]
        known = {id(leaf.inner): leaf for leaf in here}
        return tree_map(lambda leaf: known[id(leaf)] if id(leaf) in known else _wrapped(leaf), result)

    def computed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation on the device's numbers."""
        if name in ("mm", "bmm", "matmul") and args[0].shape[-1] > 1:
            a, b = args
            half = a.shape[-1] // 2
            result = func(a[..., half:], b[..., half:, :]) + func(a[..., :half], b[..., :half, :])
        elif name == "sum" and len(args) > 1 and args[1]:
            result = func(args[0].flip(args[1]), *args[1:], **kwargs)
        elif name == "_softmax" and args[0].dtype == torch.float64 and args[0].numel():
            weights = self._off(torch.exp(args[0] - args[0].amax(args[1], keepdim=True)), "exp")
            return weights / weights.flip(args[1]).sum(args[1], keepdim=True)
        else:
            result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float64:
            return result
        moved = self._off(result, name.removesuffix("_"))
        return result.copy_(moved) if name.endswith("_") and moved is not result else moved

    def _off(self, result: torch.Tensor, name: str) -> torch.Tensor:
        """Return numbers off by a function's ulps, to alternate sides."""
        off = self.ulps.get(name, 0.0)
        if not off:
            return result
        side = torch.arange(result.numel()).reshape(result.shape) % 2 * 2 - 1
        spacing = torch.nextafter(result.abs(), torch.full_like(result, torch.inf)) - result.abs()
        return torch.where(result.isfinite() & (result != 0), result + side * off * spacing, result)


def _made(function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a tensor of Python's numbers, as `torch.tensor` makes one: without modes, and then shown to them."""
    with _disable_current_modes():
        inner = function(*args, **kwargs | {"device": "cpu"})
    return torch.ops.aten.lift_fresh.default(OnDevice(inner))


def _moved(x: torch.Tensor, options: list[Any]) -> torch.Tensor:
    """Return the result of `Tensor.to`, a composite of whose forms outer modes call either."""
    inner = x.inner if isinstance(x, OnDevice) else x
    inner = next((inner.to(option) for option in options if isinstance(option, torch.dtype)), inner)
    here = next((option == DEVICE for option in options if isinstance(option, torch.device)), isinstance(x, OnDevice))
    return OnDevice(inner) if here else inner


def _wrapped(leaf: Any) -> Any:
    return OnDevice(leaf) if isinstance(leaf, torch.Tensor) else leaf
