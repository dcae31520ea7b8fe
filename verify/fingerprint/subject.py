"""The kernel under the probes: calls with chosen numbers, and chosen terms presented to the sum inside an op.

A matrix product sums a_k b_k: a term is split into two powers of two if one operand's range can't hold it. A sum over
one tensor takes the numbers as they are (an all-reduce takes them as shards). A mean of 2^k numbers is the sum up to a
power of two: attention with q = 0 gives every key the same weight.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from assay.formats.format import Format, format_named
from assay.golden import registry
from assay.golden.errors import ShapeError
from assay.golden.inputs.values import stored
from assay.verify.cases.case import Case, Inputs
from assay.verify.cases.layouts import with_layout
from assay.verify.examination.plan import Plan
from assay.verify.findings import Failure

Tensor = torch.Tensor

_BY_PRECISION = {8: "bfloat16", 11: "float16", 24: "float32", 53: "float64"}
_COLUMNS = 16  # of a product: with fewer, libraries choose other code paths
_ROWS = 64  # of every call: with another number of rows the order of summation may differ


class Unseen(Exception):
    """Raised if a probe can't be made with this kernel, or shows nothing; the message says why."""


def in_bits(bits: int, *, is_operand: bool = False) -> str:
    """Return a precision in words, with the format that has it; 11 bits in operands are tf32's."""
    name = "tf32" if is_operand and bits == 11 else _BY_PRECISION.get(bits)
    return f"{bits} bits" + (f" ({name})" if name else "")


def exponent_of(value: float) -> int:
    """Return e with 2^e <= value < 2^(e + 1)."""
    return math.frexp(value)[1] - 1


@dataclass(frozen=True)
class Subject:
    """A kernel as an implementation of a spec, with one value for each option."""

    plan: Plan

    @property
    def op(self) -> str:
        return self.plan.definition.name

    @property
    def options(self) -> dict[str, Any]:
        """Return all options, including defaults."""
        return self.plan.sampler.option_sets()[0]

    def case(self, sizes: Mapping[str, int]) -> Case:
        """Return a case of these sizes, 1 for other symbols; the probe supplies the values."""
        sampler = self.plan.sampler
        dtypes = sampler.case(lambda values: values[0], style="small").dtypes
        whole = Case(self.op, dict(sizes), dtypes, self.options, out_dtype=sampler.out_dtype)
        missing = [symbol for symbol in whole.signature.symbols if symbol not in sizes]
        return whole if not missing else self.case({**sizes, **dict.fromkeys(missing, 1)})

    def format_of(self, name: str) -> Format:
        """Return the format in which a tensor is stored."""
        return format_named(self.case({}).dtypes[name])

    @property
    def out(self) -> Format:
        """Return the format of the first result."""
        return format_named(self.case({}).result_dtypes[0])

    def call(self, sizes: Mapping[str, int], values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the float64 results for float64 ``values`` by tensor; other tensors are ones (scales) or zeros.

        Raise `Unseen` if the kernel fails, or if the tensor's format can't represent a value.
        """
        case = self.case(sizes)
        guarded = {}
        for tensor in case.signature.tensors:
            shape, dtype = case.shape(tensor), case.dtypes[tensor.name]
            fill = 1.0 if tensor.role in ("scale", "weight") else 0.0
            wanted = values.get(tensor.name, torch.full(shape, fill, dtype=torch.float64))
            held = stored(wanted.double(), dtype)
            same = (held.double() == wanted) | wanted.isnan()
            if not bool(same.all()):
                raise Unseen(f"{dtype} has no {float(wanted[~same][0]):g}, which the probe needs in {tensor.name}")
            guarded[tensor.name] = with_layout(held, "contiguous", self.plan.harness.device)
        return self.run(case, Inputs(guarded, tuple(t.name for t in case.signature.tensors if t.keyword)))

    def run(self, case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return the float64 results of a call with tensors in memory; raise `Unseen` if the kernel fails."""
        try:
            outputs = self.plan.harness.call(case, inputs)
        except ShapeError as error:
            raise Unseen(str(error)) from None
        if isinstance(outputs, Failure):
            raise Unseen(f"the kernel fails on a probe ({outputs.kind}: {outputs.message})")
        return tuple(output.detach().cpu().double() for output in outputs)


@dataclass(frozen=True)
class Reduction:
    """The sum, or the mean, along one axis of a tensor; each row of terms is one index of the last other axis."""

    subject: Subject
    fact: registry.Reduction

    @property
    def operand(self) -> Format:
        """Return the format of the operands."""
        return self.subject.format_of(self.fact.of[0])

    @property
    def reach(self) -> int:
        """Return the range of terms: powers of two from 2^14 down to 2^(14 - reach)."""
        return 14 - self._least

    @property
    def _least(self) -> int:
        return exponent_of(self.operand.smallest_subnormal or self.operand.smallest_normal)

    def sums(self, terms: Tensor) -> Tensor:
        """Return the kernel's sums [R] of the rows of ``terms`` [R, n].

        Raise `Unseen` if the terms exceed the operands' range, or if the kernel fails.
        """
        definition, count = self.subject.plan.definition, terms.shape[1]
        if self.fact.mean and count & (count - 1):
            raise Unseen("a mean is the sum times a power of two only of as many terms")
        dims = next(tensor.dims for tensor in definition.tensors if tensor.name in self.fact.of)
        lanes = [symbol for symbol in dims if symbol != self.fact.over][-1]
        sizes = {}
        for symbol in definition.signature().symbols:  # 64 where allowed (heads), else the least; 16 if any is
            allowed = definition.sizes.allowed.get(symbol, (_COLUMNS,))
            sizes[symbol] = _ROWS if _ROWS in allowed else min(allowed)
        sizes |= {self.fact.over: count, lanes: _ROWS}
        sizes |= {symbol: sizes[groups] for symbol, groups in definition.axes.groups.items()}
        shape = [sizes[symbol] if symbol in (self.fact.over, lanes) else 1 for symbol in dims]
        results = []
        for part in torch.split(terms, _ROWS):
            rows = _filled(part, _ROWS)
            values = (rows if dims.index(lanes) < dims.index(self.fact.over) else rows.T).reshape(shape)
            result = self.subject.call(sizes, {self.fact.of[0]: values})[0]
            results.append(result.reshape(-1, _ROWS)[-1, : len(part)] * (count if self.fact.mean else 1))
        return torch.cat(results)


class Product(Reduction):
    """A matrix product: the rows of one matrix times the columns, or rows, of another."""

    @property
    def _least(self) -> int:
        return max(2 * super()._least, -100)

    def sums(self, terms: Tensor) -> Tensor:
        left, right = self._split(terms)
        used = terms != 0  # zeros accept any factor
        most = torch.where(used.any(0), torch.where(used, right, 0.0).amax(0), 1.0)
        if bool(((right == most) | ~used).all()):  # one vector of second operands serves all rows
            columns = most.expand(_COLUMNS, -1)
            return torch.cat([self._product(rows, columns)[: len(rows), 0] for rows in torch.split(left, _ROWS)])
        pairs = zip(torch.split(left, _COLUMNS), torch.split(right, _COLUMNS), strict=True)
        return torch.cat([self._product(rows, columns).diagonal()[: len(rows)] for rows, columns in pairs])

    def operands(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the kernel's sum of left[k] * right[k] for two vectors [n]."""
        return self._product(left[None], right[None])[0, 0]

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left [R, n] times the rows of right [C, n], zero-padded to [64, 16]."""
        pair = [tensor for tensor in self.subject.plan.definition.tensors if tensor.name in self.fact.of]
        values, sizes = {}, dict[str, int]()
        for tensor, rows in zip(pair, (_filled(left, _ROWS), _filled(right, _COLUMNS)), strict=True):
            values[tensor.name] = rows if tensor.dims.index(self.fact.over) else rows.T
            sizes |= zip(tensor.dims, values[tensor.name].shape, strict=True)
        return self.subject.call(sizes, values)[0]

    def _split(self, terms: Tensor) -> tuple[Tensor, Tensor]:
        """Split each term into two operands, the second a power of two (one if the first operand's range suffices)."""
        least, most = super()._least, exponent_of(self.operand.largest) - 1
        exponent = torch.frexp(terms)[1].clamp(-1000, 1000) - 1
        right = torch.ldexp(torch.ones_like(terms), exponent - exponent.clamp(least, most))
        right = torch.where((terms == 0) | ~terms.isfinite(), 1.0, right)
        return terms / right, right


def _filled(rows: Tensor, count: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)))


def reduction_of(subject: Subject) -> Reduction:
    """Return the op's sum; raise `Unseen` if the op's result is not a sum."""
    fact = subject.plan.definition.reduction
    if fact is None or not fact.of:
        raise Unseen(f"no result of {subject.op} is a sum of chosen terms")
    if any(subject.options[name] != value for name, value in fact.under.items()):
        wanted = ", ".join(f"{name}={value!r}" for name, value in fact.under.items())
        raise Unseen(f"the result is the plain sum of chosen terms only with {wanted}; ask with these")
    return (Product if len(fact.of) == 2 else Reduction)(subject, fact)
