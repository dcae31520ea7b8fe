"""Present chosen terms to the sum inside an op, so that the op's result is their sum.

A matrix product sums a_k b_k: a term is split into two powers of two if one operand's range can't hold it. A sum over
one tensor takes the numbers as they are (an all-reduce takes them as shards). A mean of 2^k numbers is the sum up to a
power of two: attention with q = 0 gives every key the same weight.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from assay.formats.format import Format
from assay.golden import registry
from assay.verify.fingerprint.subject import Subject, Unseen

Tensor = torch.Tensor

_COLUMNS = 16  # of a product: with fewer, libraries choose other code paths
_ROWS = 64  # of every call: with another number of rows the order of summation may differ


@dataclass(frozen=True)
class Reduction(ABC):
    """The sum inside a kernel, as its op's spec describes it."""

    subject: Subject
    fact: registry.Reduction

    @property
    @abstractmethod
    def operand(self) -> Format:
        """Return the format of the operands."""

    @abstractmethod
    def sums(self, terms: Tensor) -> Tensor:
        """Return the kernel's sums [R] of the rows of ``terms`` [R, n].

        Raise `Unseen` if the terms exceed the operands' range, or if the kernel fails.
        """

    @property
    def reach(self) -> int:
        """Return the range of terms: powers of two from 2^14 down to 2^(14 - reach)."""
        return 14 - self._least

    @property
    def _least(self) -> int:
        return exponent_of(self.operand.smallest_subnormal or self.operand.smallest_normal)


def exponent_of(value: float) -> int:
    """Return e with 2^e <= value < 2^(e + 1)."""
    return math.frexp(value)[1] - 1


class Product(Reduction):
    """A matrix product: the rows of one matrix times the columns, or rows, of another."""

    @property
    def operand(self) -> Format:
        return self.subject.format_of(self.fact.of[0])

    @property
    def _least(self) -> int:
        return max(2 * super()._least, -100)

    def sums(self, terms: Tensor) -> Tensor:
        left, right = self._split(terms)
        shared = _shared(terms, right)
        if shared is None:
            pairs = zip(_parts(left, _COLUMNS), _parts(right, _COLUMNS), strict=True)
            return torch.cat([self._product(rows, columns).diagonal()[: len(rows)] for rows, columns in pairs])
        columns = shared.expand(_COLUMNS, -1)
        return torch.cat([self._product(rows, columns)[: len(rows), 0] for rows in _parts(left, _ROWS)])

    def operands(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the kernel's sum of left[k] * right[k] for two vectors [n]."""
        return self._product(left[None], right[None])[0, 0]

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left [R, n] times the rows of right [C, n], zero-padded to [64, 16]."""
        a, b = _filled(left, _ROWS), _filled(right, _COLUMNS)
        first, second = (tensor for tensor in self.subject.plan.definition.tensors if tensor.name in self.fact.of)
        over = [tensor.dims.index(self.fact.over) for tensor in (first, second)]
        values = {first.name: a if over[0] else a.T, second.name: b if over[1] else b.T}
        sizes = {
            symbol: size for t in (first, second) for symbol, size in zip(t.dims, values[t.name].shape, strict=True)
        }
        return self.subject.call(sizes, values)[0]

    def _split(self, terms: Tensor) -> tuple[Tensor, Tensor]:
        """Split each term into two operands, the second a power of two (one if the first operand's range suffices)."""
        least = exponent_of(self.operand.smallest_subnormal or self.operand.smallest_normal)
        most = exponent_of(self.operand.largest) - 1
        exponent = torch.frexp(terms)[1].clamp(-1000, 1000) - 1
        held = exponent.clamp(least, most)
        right = torch.ldexp(torch.ones_like(terms), exponent - held)
        right = torch.where((terms == 0) | ~terms.isfinite(), 1.0, right)
        return terms / right, right


def _parts(rows: Tensor, count: int) -> list[Tensor]:
    return [rows[first : first + count] for first in range(0, len(rows), count)]


def _filled(rows: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)))


def _shared(terms: Tensor, right: Tensor) -> Tensor | None:
    """Return one vector of second operands that serves all rows, if there is one; zeros accept any factor."""
    used = terms != 0
    most = torch.where(used, right, 0.0).amax(0)
    most = torch.where(used.any(0), most, 1.0)
    return most if bool(((right == most) | ~used).all()) else None


class Terms(Reduction):
    """The sum, or the mean, along one axis of a tensor; each row of terms is one index of the last other axis."""

    @property
    def operand(self) -> Format:
        return self.subject.format_of(self.fact.of[0])

    def sums(self, terms: Tensor) -> Tensor:
        definition, count = self.subject.plan.definition, terms.shape[1]
        if self.fact.mean and count & (count - 1):
            raise Unseen("a mean is the sum times a power of two only of as many terms")
        dims = next(tensor.dims for tensor in definition.tensors if tensor.name in self.fact.of)
        lanes = [symbol for symbol in dims if symbol != self.fact.over][-1]
        sizes = {symbol: self._size(symbol) for symbol in definition.signature().symbols}
        sizes |= {self.fact.over: count, lanes: _ROWS}
        sizes |= {symbol: sizes[groups] for symbol, groups in definition.axes.groups.items()}
        shape = [sizes[symbol] if symbol in (self.fact.over, lanes) else 1 for symbol in dims]
        results = []
        for part in _parts(terms, _ROWS):
            rows = _filled(part, _ROWS)
            values = (rows if dims.index(lanes) < dims.index(self.fact.over) else rows.T).reshape(shape)
            result = self.subject.call(sizes, {self.fact.of[0]: values})[0]
            results.append(result.reshape(-1, _ROWS)[-1, : len(part)] * (count if self.fact.mean else 1))
        return torch.cat(results)

    def _size(self, symbol: str) -> int:
        """Return the size of a dimension that is not summed: 64 where allowed (heads), else the least; 16 if any is."""
        allowed = self.subject.plan.definition.sizes.allowed.get(symbol, (_COLUMNS,))
        return _ROWS if _ROWS in allowed else min(allowed)


def reduction_of(subject: Subject) -> Reduction:
    """Return the op's sum; raise `Unseen` if the op's result is not a sum."""
    fact = subject.plan.definition.reduction
    if fact is None or not fact.of:
        raise Unseen(f"no result of {subject.op} is a sum of chosen terms")
    if any(subject.options[name] != value for name, value in fact.under.items()):
        wanted = ", ".join(f"{name}={value!r}" for name, value in fact.under.items())
        raise Unseen(f"the result is the plain sum of chosen terms only with {wanted}; ask with these")
    return (Product if len(fact.of) == 2 else Terms)(subject, fact)
