"""Predicates on specs: which ops can have a fault that is not particular to one kind of kernel."""

import math
from collections.abc import Iterator

from assay.golden.registry import Spec
from assay.golden.signature import Signature, TensorSpec

_VECTOR, _TILE = 8, 16  # elements of a vector store, and of a tile


def listed(op: Spec) -> bool:
    """Match any public op and any reference."""
    return op.public or op.needs_dtypes


def quantizes(op: Spec) -> bool:
    """Match ops with results that are rounded to codes."""
    return listed(op) and any(tensor.role == "rounded" for tensor in op.signature().returns)


def gives_numbers(op: Spec) -> bool:
    """Match ops whose results are numbers, not codes."""
    return listed(op) and not quantizes(op)


def takes_numbers(op: Spec) -> bool:
    """Match ops with numbers as results whose first tensor has the dtype under examination."""
    return gives_numbers(op) and op.tensors[0].dtype is None


def sums(op: Spec) -> bool:
    """Match ops with a sum inside, and references, which may have one."""
    return gives_numbers(op) and (op.reduction is not None or op.needs_dtypes)


def sums_tails(op: Spec) -> bool:
    """Match ops whose sums may have a length that is not a multiple of the tile."""
    units = [_unit(op, result, op.reduction.over) for result in op.signatures if op.reduction]
    return sums(op) and (op.needs_dtypes or any(unit % _TILE for unit in units))


def sums_nothing(op: Spec) -> bool:
    """Match ops whose sums may be empty."""
    return sums(op) and op.reduction is not None and op.reduction.over in op.sizes.may_be_zero


def keeps_intermediates(op: Spec) -> bool:
    """Match ops with intermediates other than the running sum of a product."""
    plain_sum = op.reduction is not None and op.reduction.of and not op.reduction.mean
    return takes_numbers(op) and not op.axes.elementwise and not plain_sum


def stores_freely(op: Spec) -> bool:
    """Match ops whose first result has a dtype of the caller's choice, or a narrow one."""
    return gives_numbers(op) and op.signature().returns[0].dtype != "float32"


def has_columns(op: Spec) -> bool:
    """Match ops with a result of any number of columns."""
    return gives_numbers(op) and any(True for _ in _columns(op))


def has_ragged_columns(op: Spec) -> bool:
    """Match ops with a result whose columns may not be a multiple of a vector of 8."""
    return gives_numbers(op) and any(_unit(op, result, tensor.dims[-1]) % _VECTOR for result, tensor in _columns(op))


def has_odd_rows(op: Spec) -> bool:
    """Match ops of numbers with a result of several rows and an odd number of columns."""
    odd = (_unit(op, result, tensor.dims[-1]) % 2 for result, tensor in _columns(op) if len(tensor.dims) > 1)
    return takes_numbers(op) and any(odd)


def _columns(op: Spec) -> Iterator[tuple[Signature, TensorSpec]]:
    """Yield the results whose last axis may have any length, under any of the op's options."""
    for result in op.signatures:
        yield from ((result, tensor) for tensor in result.returns if tensor.dims and tensor.dims[-1].isidentifier())


def _unit(op: Spec, signature: Signature, symbol: str) -> int:
    """Return the common divisor of all sizes of a symbol."""
    if symbol in op.sizes.allowed:
        return math.gcd(*op.sizes.allowed[symbol])
    partner = op.sizes.multiples.get(symbol, "1")
    unit = int(partner) if partner.isdigit() else math.gcd(*op.sizes.allowed.get(partner, (1,)))
    return math.lcm(signature.divisor(symbol), unit)
