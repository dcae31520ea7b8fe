"""Which ops fault models of any kind of kernel are of, by facts of their specs: one of one's own is among them."""

import math
from collections.abc import Iterator

from assay.golden.registry import Spec
from assay.golden.signature import Signature, TensorSpec

_VECTOR, _TILE = 8, 16


def listed(op: Spec) -> bool:
    """Any op, and any reference."""
    return op.public or op.needs_dtypes


def quantizes(op: Spec) -> bool:
    """Ops some of whose results are codes that they round to."""
    return listed(op) and any(tensor.role == "rounded" for tensor in op.signature().returns)


def gives_numbers(op: Spec) -> bool:
    """All others: their results are numbers."""
    return listed(op) and not quantizes(op)


def takes_numbers(op: Spec) -> bool:
    """Of these, ops whose first tensor is in the dtype under examination, not in codes."""
    return gives_numbers(op) and op.tensors[0].dtype is None


def sums(op: Spec) -> bool:
    """Ops with a sum inside, and references, which may have some."""
    return gives_numbers(op) and (op.reduction is not None or op.needs_dtypes)


def sums_tails(op: Spec) -> bool:
    """Ops whose sums may have a last part that fills no tile."""
    units = [_unit(op, result, op.reduction.over) for result in op.signatures if op.reduction]
    return sums(op) and (op.needs_dtypes or any(unit % _TILE for unit in units))


def sums_nothing(op: Spec) -> bool:
    """Ops that may have nothing to sum."""
    return sums(op) and op.reduction is not None and op.reduction.over in op.sizes.may_be_zero


def keeps_intermediates(op: Spec) -> bool:
    """Ops with numbers on the way, beside the running sum of a product."""
    plain_sum = op.reduction is not None and op.reduction.of and not op.reduction.mean
    return takes_numbers(op) and not op.axes.elementwise and not plain_sum


def stores_freely(op: Spec) -> bool:
    """Ops whose first result is in a dtype to choose, or a narrow one."""
    return gives_numbers(op) and op.signature().returns[0].dtype != "float32"


def has_columns(op: Spec) -> bool:
    """Ops with a result of any number of columns."""
    return gives_numbers(op) and any(True for _ in _columns(op))


def has_ragged_columns(op: Spec) -> bool:
    """Ops with a result whose columns may fill no vector of 8."""
    return gives_numbers(op) and any(_unit(op, result, tensor.dims[-1]) % _VECTOR for result, tensor in _columns(op))


def has_odd_rows(op: Spec) -> bool:
    """Ops of numbers with a result of several rows, of an odd number of columns."""
    odd = (_unit(op, result, tensor.dims[-1]) % 2 for result, tensor in _columns(op) if len(tensor.dims) > 1)
    return takes_numbers(op) and any(odd)


def _columns(op: Spec) -> Iterator[tuple[Signature, TensorSpec]]:
    """The results whose last axis is as long as one likes, under any of the op's options."""
    for result in op.signatures:
        yield from ((result, tensor) for tensor in result.returns if tensor.dims and tensor.dims[-1].isidentifier())


def _unit(op: Spec, signature: Signature, symbol: str) -> int:
    """What every size of a symbol is a multiple of."""
    if symbol in op.sizes.allowed:
        return math.gcd(*op.sizes.allowed[symbol])
    partner = op.sizes.multiples.get(symbol, "1")
    unit = int(partner) if partner.isdigit() else math.gcd(*op.sizes.allowed.get(partner, (1,)))
    return math.lcm(signature.divisor(symbol), unit)
