"""The alterations of which most fault models consist."""

from collections.abc import Callable
from typing import Any

import torch

from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden.arithmetic import Arithmetic
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import real_tensors
from assay.verify.explanation.fault_models.fault_model import Tensors

Tensor = torch.Tensor
Inputs = Callable[[Tensors, Case], Tensors]
Results = Callable[[Any, tuple[Any, ...], Case], tuple[Any, ...]]
OfArray = Callable[[Any, Any], Any]

TF32 = (
    "torch.backends.cuda.matmul.allow_tf32 or torch.set_float32_matmul_precision('high'), input_precision='tf32' of "
    "tl.dot (contract triton-default)"
)
"""What makes products of float32 tensors be formed in TF32, in words."""


def option(**changed: Any) -> Callable[[dict[str, Any], Case], dict[str, Any]]:
    """Set options, whatever the caller chose."""
    return lambda options, case: options | changed


def has(name: str, *values: Any) -> Callable[[Case], bool]:
    """Match calls in which an option has one of these values; without ``values``, any but its default."""
    return lambda case: bool(
        case.options[name] in values if values else case.options[name] != case.definition.options[name].default
    )


def first_dtype(*names: str) -> Callable[[Case], bool]:
    """Match calls whose first tensor has one of these dtypes."""
    return lambda case: next(iter(case.dtypes.values())) in names


is_narrow = first_dtype("bfloat16", "float16")  # of the first tensor
is_wide = first_dtype("float32", "float16")


def out_dtype(*names: str) -> Callable[[Case], bool]:
    """Match calls whose first result has one of these dtypes."""
    return lambda case: case.result_dtypes[0] in names


def changed(name: str, alter: Callable[[Tensor], Tensor]) -> Inputs:
    """Alter one tensor before the right definition."""
    return lambda values, case: values | {name: alter(values[name])}


def in_case(name: str, alter: Callable[[Tensor, Case], Tensor]) -> Inputs:
    """Alter one tensor before the right definition, depending on the call."""
    return lambda values, case: values | {name: alter(values[name], case)}


def swapped(first: str, second: str) -> Inputs:
    """Swap two tensors of the same shape."""
    return lambda values, case: values | {first: values[second], second: values[first]}


def real_inputs(alter: Callable[[Tensor], Tensor]) -> Inputs:
    """Alter every tensor of ordinary numbers."""
    return lambda values, case: values | {t.name: alter(values[t.name]) for t in real_tensors(case.signature)}


def rounded(format: str) -> Callable[[Tensor], Tensor]:
    """Round numbers to a narrower format; the result is float64."""
    return lambda x: round_to(x.double(), format)


def every(alter: OfArray) -> Results:
    """Alter every result, except integers: ``alter(xp, x)``."""

    def results(xp: Any, result: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
        integers = (tensor.is_integer for tensor in case.signature.returns)
        return tuple(x if whole else alter(xp, x) for x, whole in zip(result, integers, strict=True))

    return results


def one(index: int, alter: OfArray) -> Results:
    """Alter one result, if it exists."""
    return lambda xp, result, case: tuple(alter(xp, x) if order == index else x for order, x in enumerate(result))


def zero_where(mask: Callable[[tuple[int, ...]], Tensor]) -> OfArray:
    """Set results to zero where ``mask(shape)`` holds."""

    def alter(xp: Any, x: Any) -> Any:
        if not len(x.shape):
            return x
        where = torch.where if isinstance(x, Tensor) else xp.where  # a reference's constants and copies are tensors
        return where(mask(tuple(x.shape)).expand(x.shape), x * 0.0, x)

    return alter


def last_row(shape: tuple[int, ...]) -> Tensor:
    """Return a mask of the last row, of more than one, along the first axis."""
    rows = torch.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    return (rows == shape[0] - 1) & (shape[0] > 1)


def columns_beyond(step: int, least: int = 1) -> Callable[[tuple[int, ...]], Tensor]:
    """Return a mask of the columns beyond the last multiple of ``step``, if there are at least ``least`` steps."""

    def mask(shape: tuple[int, ...]) -> Tensor:
        columns = torch.arange(shape[-1])
        return (columns >= shape[-1] // step * step) & (shape[-1] >= step * least)

    return mask


def whole(size: int, step: int) -> int:
    """Return the largest multiple of ``step`` up to the size; the size itself if that is zero."""
    return size // step * step or size


def cut(x: Any, axis: int, size: int) -> Any:
    """Return the first ``size`` elements along an axis."""
    return x[(slice(None),) * (axis % len(x.shape)) + (slice(0, size),)]


def padded(xp: Arithmetic, x: Any, step: int) -> Any:
    """Pad the columns with zeros to a multiple of ``step``."""
    missing = -x.shape[-1] % step
    return xp.concatenate([x, xp.exact(torch.zeros(*x.shape[:-1], missing))], -1) if missing else x


def head_groups(case: Case) -> tuple[int, int]:
    """Return the number of key/value heads, and of query heads for each of them."""
    return case.sizes["Hkv"], case.sizes["H"] // max(case.sizes["Hkv"], 1)


def values_beyond_head(index: int) -> Results:
    """Set the columns of one of attention's results to zero beyond the head size of q and k."""
    return one(index, lambda xp, x: zero_where(lambda shape: torch.arange(shape[-1]) >= xp.case.sizes["D"])(xp, x))


def operations(**altered: Callable[..., Any]) -> type:
    """Return a mixin of operations ``alter(xp, right, ...)``; ``right`` is the original operation."""
    mixin: Any = type("Altered", (), {})

    def operation(name: str, alter: Callable[..., Any]) -> Callable[..., Any]:
        return lambda xp, *given, **settings: alter(xp, getattr(super(mixin, xp), name), *given, **settings)

    for name, alter in altered.items():
        setattr(mixin, name, operation(name, alter))
    result: type = mixin
    return result


def narrowed(x: Tensor, format: str) -> Tensor:
    """Round numbers to a narrower format and keep their dtype: for float32 evaluations."""
    return round_to(x.double(), format).to(x.dtype)


def in_input_dtype(xp: Any, x: Tensor) -> Tensor:
    """Round numbers to the dtype of the call's first tensor: for float32 evaluations."""
    return narrowed(x, next(iter(xp.case.dtypes.values())))


def tail_dropped(step: int, *, of_fewer: bool = True) -> type:
    """Omit the terms of sums and products beyond the last multiple of ``step``.

    ``of_fewer``: sums of fewer than ``step`` terms are complete.
    """

    def kept(size: int) -> int:
        return whole(size, step) if of_fewer else size // step * step

    def matmul(xp: Any, right: Any, a: Any, b: Any, *rest: Any, **settings: Any) -> Any:
        inner = kept(a.shape[-1])
        return right(cut(a, -1, inner), cut(b, -2, inner), *rest, **settings)

    def total(xp: Any, right: Any, x: Any, axis: int = -1, **settings: Any) -> Any:
        return right(cut(x, axis, kept(x.shape[axis])), axis, **settings)

    return operations(sum=total, matmul=matmul)


def narrow_accumulator(format: str, block: int = 16) -> type:
    """Round the running sum of sums and products to ``format`` after each block: for float32 evaluations."""
    dtype = getattr(torch, format_named(format).name)

    class NarrowAccumulator:
        def sum(self: Any, x: Tensor, axis: int = -1, **settings: Any) -> Tensor:
            total = x.new_zeros(()).expand(x.narrow(axis, 0, min(1, x.shape[axis])).shape)
            if not x.shape[axis]:
                return x.sum(axis, keepdim=True)
            for part in torch.split(x, block, axis):
                total = (total + part.sum(axis, keepdim=True)).to(dtype).to(x.dtype)
            return total

        def cumsum(self: Any, x: Tensor) -> Tensor:
            carry, parts = x.new_zeros((*x.shape[:-1], 1)), [x[..., :0]]
            for part in torch.split(x, block, -1):
                parts.append(carry + part.cumsum(-1))
                carry = parts[-1][..., -1:].to(dtype).to(x.dtype)
            return torch.cat(parts, -1)

        def matmul(self: Any, a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
            total = a[..., :0] @ b[..., :0, :]
            for first in range(0, a.shape[-1], block):
                part = a[..., first : first + block] @ b[..., first : first + block, :]
                total = (total + part).to(dtype).to(a.dtype)
            return total if plus is None else total + plus

        def logsumexp(self: Any, x: Tensor) -> Tensor:
            return Arithmetic.logsumexp(self, x)

        def attend(self: Any, scores: Tensor, visible: Tensor, values: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
            weights, lse = self.attention_weights(scores, visible, sinks)
            return self.matmul(weights, torch.where(visible.any(-2)[..., None], values, 0.0)), lse

    return NarrowAccumulator
