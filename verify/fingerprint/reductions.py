"""Presenting chosen terms to the sum inside an op, so that the op's result is that sum.

A product of matrices sums a_k b_k: a term is split into two powers of two where one operand's range doesn't hold it.
Attention with q = 0 gives every key the weight one, and so the sum of the values divided by their number, a power of
two; an all-reduce sums its shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from assay.precision.formats import Format
from assay.verify.fingerprint.subject import Subject, Unseen

Tensor = torch.Tensor

_COLUMNS = 16  # of a product: with fewer, libraries take other paths
_ROWS = 64  # of every call: with other numbers of them the order may be another


@dataclass(frozen=True)
class Reduction(ABC):
    """The sum inside a kernel. ``most`` terms can be summed at a time."""

    subject: Subject

    @property
    @abstractmethod
    def operand(self) -> Format:
        """The format of the operands."""

    @abstractmethod
    def sums(self, terms: Tensor) -> Tensor:
        """What the kernel makes of the sums of the rows of ``terms`` [R, n]: [R].

        Raises `Unseen` where the terms lie beyond the operands' range, or the kernel fails.
        """

    @property
    def reach(self) -> int:
        """Terms may span powers of two from 2^14 down to 2^(14 - reach)."""
        return 14 - self._least

    @property
    def _least(self) -> int:
        return _exponent(self.operand.smallest_subnormal or self.operand.smallest_normal)


def _exponent(value: float) -> int:
    return int(torch.frexp(torch.tensor(value, dtype=torch.float64))[1]) - 1


class Product(Reduction):
    """gemm, linear and gemm_fp8: rows of a times columns of b."""

    @property
    def operand(self) -> Format:
        return self.subject.format_of(self._names[0])

    @property
    def _names(self) -> tuple[str, str]:
        return ("x", "weight") if self.subject.op == "linear" else ("a", "b")

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
        """The sum of left[k] * right[k] for two vectors [n]."""
        return self._product(left[None], right[None])[0, 0]

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """left [R, n] times the rows of right [C, n], filled up with zeros to [64, 16]."""
        a, b = _filled(left, _ROWS), _filled(right, _COLUMNS)
        sizes = {"M": len(a), "N": len(b), "K": a.shape[1]}
        first, second = self._names
        values = {first: a, second: b if self.subject.op == "linear" else b.T}
        return self.subject.call(sizes, values)[0]

    def _split(self, terms: Tensor) -> tuple[Tensor, Tensor]:
        """Two operands for each term, the second a power of two; one where the first one's range allows it."""
        least = _exponent(self.operand.smallest_subnormal or self.operand.smallest_normal)
        most = _exponent(self.operand.largest) - 1
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
    """One vector of second operands that serves all rows, if there is one; zeros take any."""
    used = terms != 0
    most = torch.where(used, right, 0.0).amax(0)
    most = torch.where(used.any(0), most, 1.0)
    return most if bool(((right == most) | ~used).all()) else None


class Attention(Reduction):
    """The sum of the values under equal weights."""

    @property
    def operand(self) -> Format:
        return self.subject.format_of("v")

    def sums(self, terms: Tensor) -> Tensor:
        keys = terms.shape[1]
        if keys & (keys - 1):
            raise Unseen("attention's weights are powers of two only for as many keys")
        found = []
        for part in _parts(terms, _ROWS):
            v = _filled(part, _ROWS).T[None, None]
            sizes = {"B": 1, "H": 1, "Hkv": 1, "Sq": _COLUMNS, "Sk": keys, "D": _ROWS, "Dv": _ROWS}
            found.append(self.subject.call(sizes, {"v": v})[0][0, 0, -1, : len(part)] * keys)
        return torch.cat(found)


class AllReduce(Reduction):
    """The sum of the shards, each column one."""

    @property
    def operand(self) -> Format:
        return self.subject.format_of("shards")

    def sums(self, terms: Tensor) -> Tensor:
        sizes = {"R": terms.shape[1], "N": _ROWS}
        parts = [self.subject.call(sizes, {"shards": _filled(rows, _ROWS).T})[0] for rows in _parts(terms, _ROWS)]
        return torch.cat(parts)[: len(terms)]


def reduction_of(subject: Subject) -> Reduction:
    """The op's sum; raises `Unseen` for an op whose result isn't one."""
    kinds: dict[str, Callable[[Subject], Reduction]] = {
        "gemm": Product,
        "linear": Product,
        "gemm_fp8": Product,
        "attention": Attention,
        "all_reduce": AllReduce,
    }
    if subject.op not in kinds:
        raise Unseen(f"no result of {subject.op} is a sum of chosen terms")
    if subject.op == "attention" and subject.options["sinks"]:
        raise Unseen("a sink is one more weight; ask without it")
    if subject.op == "attention" and (subject.options["causal"] != "none" or subject.options["window"] is not None):
        raise Unseen("a mask hides terms; ask with causal='none' and without a window")
    return kinds[subject.op](subject)
