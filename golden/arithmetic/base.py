"""The arithmetic interface: the operations that definitions are written in.

A definition is a plain function ``definition(xp: Arithmetic[N], *tensors: N, **options)``. Its tensors are numbers
(`Number`); everything beyond their operators is a method of ``xp``. Integer tensors (codes, indices) and masks arrive
as native arrays of the arithmetic (`Indices`): ``xp: Arithmetic[N, Idx]``.

Composite operations (`standardize`, `attend`, ...) have a default in elementary ones; an arithmetic overrides one
where it knows a sharper bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Protocol, Self, SupportsInt, overload

import torch
from typing_extensions import TypeVar


class Number(Protocol):
    """A tensor of numbers in any arithmetic, with the operators that definitions may use."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @overload
    def reshape(self, shape: tuple[int, ...], /) -> Self: ...
    @overload
    def reshape(self, *shape: int) -> Self: ...
    def __getitem__(self, key: Any, /) -> Self: ...  # whatever torch and numpy take
    def __neg__(self) -> Self: ...
    def __add__(self, other: Self | float, /) -> Self: ...
    def __radd__(self, other: float, /) -> Self: ...
    def __sub__(self, other: Self | float, /) -> Self: ...
    def __rsub__(self, other: float, /) -> Self: ...
    def __mul__(self, other: Self | float, /) -> Self: ...
    def __rmul__(self, other: float, /) -> Self: ...
    def __truediv__(self, other: Self | float, /) -> Self: ...
    def __rtruediv__(self, other: float, /) -> Self: ...


class Indices(Protocol):
    """A native array of whole numbers or a mask, torch's or numpy's, with the operators that both have."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def reshape(self, *shape: int) -> Self: ...
    def swapaxes(self, first: int, second: int, /) -> Self: ...
    def any(self, axis: int, /) -> Self: ...
    def all(self, axis: int, /) -> Self: ...
    def sum(self) -> SupportsInt: ...
    def __len__(self) -> int: ...
    def __int__(self) -> int: ...
    def __abs__(self) -> Self: ...
    def __invert__(self) -> Self: ...
    def __getitem__(self, key: Any, /) -> Self: ...  # whatever torch and numpy take
    def __eq__(self, other: Self | int, /) -> Self: ...  # type: ignore[override]  # element for element
    def __ne__(self, other: Self | int, /) -> Self: ...  # type: ignore[override]  # element for element
    def __le__(self, other: Self | int, /) -> Self: ...
    def __lt__(self, other: Self | int, /) -> Self: ...
    def __ge__(self, other: Self | int, /) -> Self: ...
    def __and__(self, other: Self | int, /) -> Self: ...
    def __or__(self, other: Self, /) -> Self: ...
    def __add__(self, other: Self | int, /) -> Self: ...
    def __sub__(self, other: Self | int, /) -> Self: ...
    def __mul__(self, other: Self | int, /) -> Self: ...
    def __floordiv__(self, other: int, /) -> Self: ...
    def __mod__(self, other: int, /) -> Self: ...
    def __rshift__(self, other: int, /) -> Self: ...


N = TypeVar("N", bound=Number, default=Any)
"""The numbers of an arithmetic."""
Idx = TypeVar("Idx", bound=Indices, default=Any)
"""Its whole numbers and masks."""
Formula = Callable[[Callable[[float], float], float], float]
"""Of a square root and of pi; written for floats, and evaluated in each arithmetic's own scalars."""


Tensor = torch.Tensor


@dataclass(frozen=True)
class Order:
    """Where x is certainly less than y, more, the same, or unordered (one is NaN)."""

    less: Tensor
    more: Tensor
    same: Tensor
    unordered: Tensor

    @property
    def open(self) -> Tensor:
        """Where it is none of these for certain."""
        return ~(self.less | self.more | self.same | self.unordered)


class Decisions(Generic[N, Idx]):
    """Ends and order of numbers; an arithmetic has at least `enclosure`, `interval` and `hull` of its own."""

    def enclosure(self, x: N) -> tuple[Tensor, Tensor]:
        """The least and the largest float64 that numbers may be, equal where they are known; NaN is its own end."""
        raise NotImplementedError

    def interval(self, least: Tensor, most: Tensor) -> N:
        """Numbers between ends."""
        raise NotImplementedError

    def hull(self, x: N, y: N) -> N:
        """Numbers that may be those of x or those of y."""
        raise NotImplementedError

    def compare(self, x: N, y: N) -> Order:
        """The order of two numbers, element by element; by default that of their difference and zero."""
        apart: Any = x - y
        (low, high), (least, most) = self.enclosure(apart), self.enclosure(x)
        below, above = self.enclosure(y)
        less, more = (most < below) | (high < 0), (least > above) | (low > 0)
        same = ((low == 0) & (high == 0)) | ((least == most) & (below == above) & (least == below))
        unordered = (least.isnan() & most.isnan()) | (below.isnan() & above.isnan())
        return Order(less, more, same, unordered)

    def held(self, y: N, x: N) -> tuple[N, bool]:
        """y, which a function without poles gives of x, as a kernel holds it; whether here it overflows."""
        return y, False

    def open_beyond(self, x: N) -> N:
        """x, of which nothing is known where it is infinite or NaN: an overflow that is none in truth led to it."""
        return x

    def select(self, certain: Tensor, possible: Tensor, x: N, y: N) -> N:
        """x where ``certain``, y where not ``possible``, either between."""
        chosen = self.chosen(certain, x, y)
        unsure = possible & ~certain
        return self.chosen(unsure, self.hull(x, y), chosen) if bool(unsure.any()) else chosen

    def chosen(self: Any, mask: Tensor, x: N, y: N) -> N:
        """x where a mask of torch's holds, else y."""
        found: N = self.where(self.integers(mask).astype(bool) if self.native is not torch else mask, x, y)
        return found

    def larger_of(self: Any, x: N, y: N) -> N:
        """The larger of two numbers, no farther off than the one that it is; NaN where either is."""
        found: N = self.maximum(x, y)
        return found

    def smaller_of(self, x: N, y: N) -> N:
        return -self.larger_of(-x, -y)

    def step(self, function: Callable[[Tensor], Tensor], x: N) -> N:
        """A function that rises in steps (floor, ceil, trunc, round): where x lies about a step, what is between."""
        return self.interval(*map(function, self.enclosure(x)))

    def power(self: Any, x: N, y: N | float) -> N:
        """x^y; of whole small y by products."""
        if isinstance(y, (int, float)) and float(y).is_integer() and abs(y) <= 64:
            count = int(abs(y))
            product: Any = self.exact(torch.ones(tuple(map(int, x.shape)), dtype=torch.float64))
            for _ in range(count):
                product = product * x
            return 1.0 / product if y < 0 else product
        zero = self.compare(x, x * 0.0)
        safe = self.chosen(zero.same, x * 0.0 + 1.0, x)
        found: N = self.exp(self.apply("log", safe) * y)
        if not bool(zero.same.any()):
            return found
        rises = isinstance(y, (int, float)) and y > 0
        return self.chosen(zero.same, x if rises else 1.0 / x, found)

    def root(self: Any, x: N) -> N:
        """The square root of a sum of squares, which is zero at least, whatever its radius says."""
        found: N = self.function("sqrt", x)
        return found

    def special(self, function: Callable[..., Any], *numbers: N) -> N:
        """A function of Arb's numbers, element by element, that only Arb encloses."""
        raise NotImplementedError

    def settled(self: Any, x: N) -> N:
        """The number, of which nothing is open where it is infinite."""
        return x

    def prod(self: Any, x: N) -> N:
        """The product along the last axis, which is kept; in any order."""
        total: Any = self.exact(torch.ones((*map(int, x.shape[:-1]), 1), dtype=torch.float64))
        for place in range(x.shape[-1]):
            total = total * x[..., place : place + 1]
        found: N = total
        return found

    def largest_of(self: Any, x: N) -> N:
        """The largest along the last axis, which is kept; off by no more than may become the largest."""
        found: N = self.max(x)
        return found

    def variance(self: Any, x: N, correction: float = 0.0) -> N:
        """sum (x - mean)^2 / (n - correction) along the last axis, which is kept."""
        centred = x - self.mean(x)
        found: N = self.sum(centred * centred) / float(x.shape[-1] - correction)
        return found

    def ordered(self, x: N) -> N:
        """The numbers of the last axis in ascending order: the k-th smallest of the ends holds the k-th smallest."""
        least, most = self.enclosure(x)
        return self.interval(least.sort(-1).values, most.sort(-1).values)

    def cummax(self: Any, x: N) -> N:
        """The largest so far along the last axis."""
        parts = [x[..., :1]]
        for place in range(1, x.shape[-1]):
            parts.append(self.larger_of(parts[-1], x[..., place : place + 1]))
        found: N = self.concatenate(parts, -1)
        return found


class Arithmetic(Decisions[N, Idx], ABC):
    """Operations on one kind of number. Reductions run over ``axis`` and keep it, with size one.

    ``native`` is the module of this arithmetic's integer arrays, torch or numpy, where their functions agree.
    """

    native: ModuleType = torch

    def precision(self) -> AbstractContextManager[None]:
        """What an evaluation is run in: the working precision, where this arithmetic has one beside its numbers."""
        return nullcontext()

    @abstractmethod
    def exact(self, values: object) -> N:
        """Numbers from a tensor whose values are exact (floats as stored, or integers)."""

    def integers(self, values: object) -> Idx:
        """A native integer array of this arithmetic, for indices, codes and masks."""
        return self.native.as_tensor(values).to(torch.int64)

    @abstractmethod
    def constant(self, formula: Formula) -> N:
        """``formula(sqrt, pi)``, an exact number rather than its float64 neighbour."""

    @abstractmethod
    def function(self, name: str, x: N) -> N:
        """The elementary function of that name, as torch has it: NaN outside its domain, limits at the infinities.

        exp, exp2, expm1, log, log2, log1p, tanh, erf, sigmoid, softplus, sqrt, rsqrt, reciprocal, sin, cos; as an op's
        result, not as an intermediate: where a number lies beyond the format it is infinite.
        """

    def apply(self, name: str, x: N) -> N:
        """The same as an intermediate, of numbers in the function's domain."""
        return self.function(name, x)

    def exp(self, x: N) -> N:
        return self.apply("exp", x)

    def log(self, x: N) -> N:
        return self.apply("log", x)

    def erf(self, x: N, *, absolute: float = False) -> N:
        """``absolute``: its error counts relative to this number, for it is added to one of that size."""
        return self.apply("erf", x)

    def tanh(self, x: N, *, absolute: bool = False) -> N:
        return self.apply("tanh", x)

    def sigmoid(self, x: N) -> N:
        return self.apply("sigmoid", x)

    def rsqrt(self, x: N) -> N:
        return self.apply("rsqrt", x)

    def minimum(self, x: N, bound: float) -> N:
        return -self.maximum(-x, self.exact(torch.tensor(-bound, dtype=torch.float64)))

    @abstractmethod
    def maximum(self, x: N, y: N) -> N: ...
    @abstractmethod
    def where(self, mask: Idx, x: N, y: N | float) -> N: ...

    @abstractmethod
    def above(self, x: N, bound: float) -> Idx:
        """A mask of the numbers, exact ones, above ``bound``."""

    @abstractmethod
    def sum(self, x: N, axis: int = -1, *, rescaled: bool = False) -> N:
        """The sum; ``rescaled`` allows an online kernel's rescaling of the running sum at each new maximum."""

    def cumsum(self, x: N) -> N:
        """The running sums along the last axis, each one's terms added in any order; here in a logarithm of steps."""
        reach = 1
        while reach < x.shape[-1]:
            x = self.concatenate([x[..., :reach], x[..., reach:] + x[..., :-reach]], -1)
            reach *= 2
        return x

    def recurrence(self, decay: N, term: N) -> N:
        """h_t = decay_t h_(t-1) + term_t along the last axis, h zero at first; in sequence, or as a scan."""
        parts = [term[..., :1]]
        for t in range(1, term.shape[-1]):
            parts.append(decay[..., t : t + 1] * parts[-1] + term[..., t : t + 1])
        return self.concatenate(parts, -1)

    def solve_unit_lower(self, lower: N, right: N) -> N:
        """x [..., n, m] with x_t + sum_(s<t) lower_ts x_s = right_t; by substitution, or by inverses of blocks.

        ``lower`` [..., n, n], of which what lies below the diagonal counts; ``right`` [..., n, m].
        """
        found = right[..., :1, :]
        for t in range(1, right.shape[-2]):
            row = right[..., t : t + 1, :] - self.matmul(lower[..., t : t + 1, :t], found)
            found = self.concatenate([found, row], -2)
        return found

    def where_above(self, x: N, bound: float, y: N, z: N | float) -> N:
        """y where x > bound, else z; where a kernel's x may lie on the other side, either."""
        return self.where(self.above(x, bound), y, z)

    @abstractmethod
    def max(self, x: N) -> N:
        """The largest along the last axis; -inf where there is none."""

    @abstractmethod
    def matmul(self, a: N, b: N, plus: N | None = None) -> N:
        """a @ b + plus, each entry one accumulation; ``plus`` may be the accumulator's initial value."""

    def rearranged(self, change: Callable[[Sequence[Any]], Any], parts: Sequence[N]) -> N:
        """What ``change`` makes of native arrays: of those that the ``parts`` are, or of each kind that they hold."""
        return change(parts)

    def swap(self, x: N) -> N:
        """The last two axes exchanged."""
        return self.rearranged(lambda arrays: self.native.swapaxes(arrays[0], -1, -2), [x])

    def concatenate(self, parts: Sequence[N], axis: int = 0) -> N:
        return self.rearranged(lambda arrays: self.native.concatenate(arrays, axis), parts)

    def stack(self, parts: Sequence[N], axis: int = -1) -> N:
        return self.rearranged(lambda arrays: self.native.stack(arrays, axis), parts)

    @abstractmethod
    def topk_index(self, x: N, k: int) -> Idx:
        """The places of the k largest along the last axis, largest first, the earlier one on a tie."""

    def topk_admissible(self, x: N, index: Idx, *, ordered: bool = False) -> Idx:
        """Which places, of the k largest along the last axis that were chosen, no unchosen one certainly beats.

        ``ordered``: nor one that was chosen after it.
        """
        raise NotImplementedError("only an arithmetic of balls knows what may be the largest")

    def gather(self, x: N, index: Idx) -> N:
        """x[r, index[r, j]]: for each row of a matrix its own places."""
        return x[self.integers(range(len(index)))[:, None], index]

    def quantization_scale(self, span: N, largest: float) -> N:
        """span / largest, what one step between codes stands for; a kernel may give any scale to a span of zero."""
        return span / largest

    def at_least(self, x: N, bound: float) -> N:
        """The larger of x and a constant."""
        return self.maximum(x, self.exact(torch.tensor(bound, dtype=torch.float64)))

    @abstractmethod
    def power_of_two(self, x: N, *, above: bool) -> N:
        """The power of two at or above positive x, or at or below it, and no less than e8m0's least; zero of zero."""

    @abstractmethod
    def quantize(self, x: N, scale: N, format: str, zero: N | Idx | None = None, stored: N | None = None) -> N:
        """The codes that x / scale may be rounded to: to nearest even, plus ``zero``, saturated.

        ``format`` is that of the codes; with a zero-point the sum saturates, not the quotient. Where a number lies so
        near to a midpoint that it may be rounded to either side, the result holds both codes and what is between. A
        scale of zero gives the zero-point. ``stored``: the scale that a kernel gave, as evidence of how it divides.
        """

    def round(self, x: N, stage: str) -> N:
        """A place where a kernel may round on the way; exact arithmetics leave ``x`` as it is."""
        return x

    # Composite operations.
    def exp_shifted(self, x: N, shift: N) -> N:
        """exp(x - shift), zero where x is -inf and shift is finite."""
        return self.exp(x - shift)

    def softmax(self, x: N) -> N:
        """exp(x) / sum exp(x) along the last axis."""
        weights = self.exp_shifted(x, self.max(x))
        return weights / self.sum(weights, rescaled=True)

    def logsumexp(self, x: N) -> N:
        """log sum exp(x) along the last axis."""
        largest = self.max(x)
        return largest + self.log(self.sum(self.exp_shifted(x, largest), rescaled=True))

    def log_softmax(self, x: N) -> N:
        """x - log sum exp(x) along the last axis."""
        return x - self.logsumexp(x)

    def gate_mul(self, x: N, gate: N) -> N:
        """x * gate, with the limit zero where x is -inf and the gate has closed."""
        return x * gate

    def add_bias(self, x: N, bias: N) -> N:
        """x + bias, where a part of x may have been taken into the bias."""
        return x + bias

    def scaled_matmul(self, a: N, b: N, scale_a: N, scale_b: N) -> N:
        """(a scale_a) @ (b scale_b), the scales being applied before the product or after it."""
        return self.matmul(a * scale_a, b * scale_b)

    def gated_product(self, x: N, gate: N, y: N) -> N:
        """x gate y, in any order, or with x gate rounded first as "activated"; with the limit of `gate_mul`."""
        return self.round(self.gate_mul(x, gate), "activated") * y

    def quantized_matmul(self, x: N, codes: Idx, zero_points: Idx, scale: N) -> N:
        """x @ ((codes - zero_points) * scale), the weights marked as the stage "weights"."""
        return self.matmul(x, self.round(self.exact(codes - zero_points) * scale, "weights"))

    def sparse_matmul(self, values: N, place: Idx, b: N) -> N:
        """sum_j values[m, j] b[place[m, j], n]; rows of b that are not named do not enter."""
        return self.sum(values[:, :, None] * b[place], axis=1)[:, 0]

    def dequantize(self, codes: N, scale: float) -> N:
        """codes * scale, the scale being applied to the codes or to the result of what is linear in them."""
        return codes * scale

    def abs(self, x: N) -> N:
        """The magnitude."""
        return self.maximum(x, -x)

    def unspecified(self, rows: Idx | Callable[[], Idx], x: N) -> N:
        """``x``, where a contract says nothing of the places in ``rows``: a mask, or a function that makes it."""
        return x

    def spilled(self, places: Callable[[], Idx], x: N) -> N:
        """``x``, where what is masked or never read may reach the ``places``, if it is NaN or infinite."""
        return x

    def is_finite(self, x: N) -> Idx:
        """A mask of the numbers that are neither NaN nor infinite."""
        return self.above(x, -math.inf) & self.above(-x, -math.inf)

    def mean(self, x: N) -> N:
        """The mean along the last axis."""
        return self.sum(x) / x.shape[-1]

    def standardize(self, x: N, eps: float) -> tuple[N, N]:
        """x - mean and 1 / sqrt(variance + eps), along the last axis."""
        centred = x - self.mean(x)
        return centred, self.rsqrt(self.mean(centred * centred) + eps)

    def any_formula(self, *formulas: Callable[[], N]) -> N:
        """One number by several formulas, any of which a kernel may evaluate; the first is the exact one's."""
        return formulas[0]()

    def silu_slope(self, x: N) -> N:
        """The derivative of x s, s the sigmoid of x: s + x s (1 - s); zero at -inf and one at inf."""

        def tail(x: N) -> N:
            s = self.sigmoid(x)
            return self.gate_mul(x, s) * (1 - s)

        return self.sigmoid(x) + tail(self.minimum(x, 0.0)) - tail(self.minimum(-x, 0.0))

    def silu_gradient(self, a: N, b: N, x: N) -> N:
        """a b times `silu_slope` of x, whose own factors may be multiplied with a and b in any order.

        Or with a b rounded first, as "activated_gradient".
        """
        return self.product(a, b, self.silu_slope(x), "activated_gradient")

    def product(self, a: N, b: N, c: N, stage: str = "") -> N:
        """a b c, in any order, or with a b rounded first as ``stage``."""
        return self.round(a * b, stage) * c

    def blocks(self, rows: int, width: int) -> list[tuple[int, int]]:
        """Ranges of rows, each of ``width`` numbers, that are best evaluated at a time."""
        return [(0, rows)]

    def in_blocks(self, function: Callable[..., Any], *numbers: Any, whole: int = 0) -> Any:
        """``function(*numbers)``, independent along all axes but the last ``whole``, however much at a time is best."""
        return function(*numbers)

    def weighted(self, weights: N, values: N) -> N:
        """The product of matrices where each row of ``weights`` was divided by its sum: the product may be instead."""
        return self.matmul(weights, values)

    def scores(self, q: N, k: N, scale: N | float) -> N:
        """q k^T scale over the last two axes; q scale may be rounded as "query", each product as "scores"."""
        return self.round(self.matmul(self.round(q * scale, "query"), self.swap(k)), "scores")

    def softcap(self, scores: N, cap: float) -> N:
        """cap * tanh(scores / cap), each of the three rounded as "scores" where a kernel may."""
        capped = self.round(self.tanh(self.round(scores / cap, "scores"), absolute=True), "scores")
        return self.round(capped * cap, "scores")

    def delta_rule(self, q: N, k: N, v: N, factor: N | float, decays: N, decay: N, beta: N) -> N:
        """o_t = q_t S_t, S_t = decay_t S_(t-1) + k_t^T beta_t (v_t - decay_t k_t S_(t-1)), q times ``factor``.

        q, k [..., T, D], v [..., T, Dv]; ``decays`` [..., T, T] from one place to another, what lies ahead ignored;
        ``decay`` of one step and ``beta`` [..., T]. Here by the triangular system of a single chunk.
        """
        behind = self.integers(range(k.shape[-2]))
        ahead = behind[None, :] - behind[:, None]
        lower = self.where(ahead < 0, self.matmul(k * beta[..., None], self.swap(k)) * decays, 0.0)
        updates = self.solve_unit_lower(lower, v * beta[..., None])
        scores = self.where(ahead <= 0, self.matmul(q * factor, self.swap(k)) * decays, 0.0)
        return self.matmul(self.round(scores, "scores"), updates)

    def attend_backward(
        self, scores: N, visible: Idx, q: N, k: N, v: N, dout: N, scale: N | float, terms: int
    ) -> tuple[N, N, N]:
        """The gradients of q, k and v of attention, for rows q [..., R, D] and dout [..., R, Dv] of it.

        ``scores`` [..., R, Sk] are those of `scores`; those of k and v are part of sums over ``terms`` rows. What a row
        does not see adds nothing to its gradient, nor the row to that.
        """
        blind = ~visible.any(-1)[..., None]
        weights = self.softmax(self.where(visible | blind, scores, -math.inf))
        weights = self.where(visible, weights, 0.0)
        products = self.where(visible, self.matmul(dout, self.swap(v)), 0.0)
        gradient = self.where(visible, weights * (products - self.sum(weights * products)), 0.0) * scale
        transposed = self.swap(gradient)
        return self.matmul(gradient, k), self.matmul(transposed, q), self.matmul(self.swap(weights), dout)

    def merge(self, scores: N, visible: Idx, values: N) -> tuple[N, N]:
        """`attend` to partial results: values are outputs of softmax over parts, scores their log-sum-exps."""
        return self.attend(scores, visible, values, None)

    @abstractmethod
    def attend(self, scores: N, visible: Idx, values: N, sinks: N | None) -> tuple[N, N]:
        """Softmax of the visible scores [..., Sq, Sk] applied to values [..., Sk, Dv], and its log-sum-exp.

        ``sinks`` [..., 1, 1] is one more logit in the denominator. Values that no row sees, NaN and Inf among them,
        do not reach the output; a row that sees nothing gives zero and -inf.
        """
