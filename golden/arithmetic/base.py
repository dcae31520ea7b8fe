"""The arithmetic interface: the operations that definitions are written in.

A definition is a plain function ``definition(xp: Arithmetic[N], *tensors: N, **options)``. Its tensors are numbers
(`Number`); everything beyond their operators is a method of ``xp``. Integer tensors (codes, indices) and masks arrive
as native arrays of the arithmetic (`Indices`): ``xp: Arithmetic[N, Idx]``.

Composite operations (`standardize`, `attend`, ...) have a default in elementary ones; an arithmetic overrides those for
which it has a sharper bound.
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
    """A native array of integers or a mask, torch's or numpy's, with the operators that both have."""

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
"""The integers and masks of an arithmetic."""
Formula = Callable[[Callable[[float], float], float], float]
"""A function of a square root and of pi; written for floats, evaluated in the scalars of each arithmetic."""


Tensor = torch.Tensor


@dataclass(frozen=True)
class Order:
    """Masks of where x is certainly less than y, more, the same, or unordered (one is NaN)."""

    less: Tensor
    more: Tensor
    same: Tensor
    unordered: Tensor

    @property
    def open(self) -> Tensor:
        """Return a mask of where none of these is certain."""
        return ~(self.less | self.more | self.same | self.unordered)


class Arithmetic(Generic[N, Idx], ABC):
    """Operations on one kind of number. Reductions run over ``axis`` and keep it, with size one.

    ``native`` is the module of this arithmetic's integer arrays, torch or numpy, where their functions agree.
    """

    native: ModuleType = torch

    def precision(self) -> AbstractContextManager[None]:
        """Return the context to evaluate in: the working precision, if this arithmetic has a global one."""
        return nullcontext()

    @abstractmethod
    def exact(self, values: object) -> N:
        """Return numbers from a tensor whose values are exact (floats as stored, or integers)."""

    def integers(self, values: object) -> Idx:
        """Return a native integer array of this arithmetic, for indices, codes and masks."""
        return self.native.as_tensor(values).to(torch.int64)

    @abstractmethod
    def constant(self, formula: Formula) -> N:
        """Return ``formula(sqrt, pi)``, exact rather than rounded to float64."""

    @abstractmethod
    def function(self, name: str, x: N) -> N:
        """Return an elementary function, named as in torch: NaN outside its domain, limits at the infinities.

        exp, exp2, expm1, log, log2, log1p, tanh, erf, sigmoid, softplus, sqrt, rsqrt, reciprocal, sin, cos; as the
        result of an op, not as an intermediate: infinite where a number is beyond the format.
        """

    def apply(self, name: str, x: N) -> N:
        """Return the same as an intermediate, of numbers in the function's domain."""
        return self.function(name, x)

    def exp(self, x: N) -> N:
        return self.apply("exp", x)

    def log(self, x: N) -> N:
        return self.apply("log", x)

    def erf(self, x: N, *, absolute: float = False) -> N:
        """Return erf x; ``absolute``: its error is relative to this number, to which the result is added."""
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
        """Return a mask of the numbers, exact ones, above ``bound``."""

    @abstractmethod
    def sum(self, x: N, axis: int = -1, *, rescaled: bool = False) -> N:
        """Return the sum; ``rescaled`` allows an online kernel's rescaling of the running sum at each new maximum."""

    def cumsum(self, x: N) -> N:
        """Return the running sums along the last axis, each one's terms added in any order; here in log2 n steps."""
        reach = 1
        while reach < x.shape[-1]:
            x = self.concatenate([x[..., :reach], x[..., reach:] + x[..., :-reach]], -1)
            reach *= 2
        return x

    def recurrence(self, decay: N, term: N) -> N:
        """Return h_t = decay_t h_(t-1) + term_t along the last axis, h_0 = term_0; in sequence, or as a scan."""
        parts = [term[..., :1]]
        for t in range(1, term.shape[-1]):
            parts.append(decay[..., t : t + 1] * parts[-1] + term[..., t : t + 1])
        return self.concatenate(parts, -1)

    def solve_unit_lower(self, lower: N, right: N) -> N:
        """Return x [..., n, m] with x_t + sum_(s<t) lower_ts x_s = right_t; by substitution, or by inverses of blocks.

        ``lower`` [..., n, n], of which only the part below the diagonal is read; ``right`` [..., n, m].
        """
        x = right[..., :1, :]
        for t in range(1, right.shape[-2]):
            row = right[..., t : t + 1, :] - self.matmul(lower[..., t : t + 1, :t], x)
            x = self.concatenate([x, row], -2)
        return x

    def where_above(self, x: N, bound: float, y: N, z: N | float) -> N:
        """Return y where x > bound, else z; either if a kernel's x may be on the other side."""
        return self.where(self.above(x, bound), y, z)

    @abstractmethod
    def max(self, x: N) -> N:
        """Return the largest along the last axis; -inf if the axis is empty."""

    @abstractmethod
    def matmul(self, a: N, b: N, plus: N | None = None) -> N:
        """Return a @ b + plus, each element one accumulation; ``plus`` may be the accumulator's initial value."""

    def rearranged(self, change: Callable[[Sequence[Any]], Any], parts: Sequence[N]) -> N:
        """Apply ``change`` to the native arrays that the ``parts`` consist of, one kind of array at a time."""
        return change(parts)

    def swap(self, x: N) -> N:
        """Exchange the last two axes."""
        return self.rearranged(lambda arrays: self.native.swapaxes(arrays[0], -1, -2), [x])

    def concatenate(self, parts: Sequence[N], axis: int = 0) -> N:
        return self.rearranged(lambda arrays: self.native.concatenate(arrays, axis), parts)

    def stack(self, parts: Sequence[N], axis: int = -1) -> N:
        return self.rearranged(lambda arrays: self.native.stack(arrays, axis), parts)

    @abstractmethod
    def topk_index(self, x: N, k: int) -> Idx:
        """Return the indices of the k largest along the last axis, largest first, the earlier one on a tie."""

    def topk_admissible(self, x: N, index: Idx, *, ordered: bool = False) -> Idx:
        """Return a mask of the chosen indices that no unchosen number certainly exceeds.

        ``ordered``: nor one that was chosen after it.
        """
        raise NotImplementedError("only an arithmetic of balls knows what may be the largest")

    def gather(self, x: N, index: Idx) -> N:
        """Return x[r, index[r, j]]."""
        return x[self.integers(range(len(index)))[:, None], index]

    def quantization_scale(self, span: N, largest: float) -> N:
        """Return span / largest, the value of one step between codes; a span of zero allows any scale."""
        return span / largest

    def at_least(self, x: N, bound: float) -> N:
        """Return the larger of x and a constant."""
        return self.maximum(x, self.exact(torch.tensor(bound, dtype=torch.float64)))

    @abstractmethod
    def power_of_two(self, x: N, *, above: bool) -> N:
        """Return the power of two at or above positive x, or at or below it, at least e8m0's least; zero for zero."""

    @abstractmethod
    def quantize(self, x: N, scale: N, format: str, zero: N | Idx | None = None, stored: N | None = None) -> N:
        """Return the codes that x / scale may be rounded to: to nearest even, plus ``zero``, saturated.

        ``format`` is that of the codes; with a zero-point the sum saturates, not the quotient. If a number may be
        rounded to either side of a midpoint, the result encloses both codes. A scale of zero gives the zero-point.
        ``stored``: the scale that a kernel returned, which shows how it divides.
        """

    def round(self, x: N, stage: str) -> N:
        """Mark a rounding point of kernels; exact arithmetics return ``x`` unchanged."""
        return x

    # Composite operations.
    def exp_shifted(self, x: N, shift: N) -> N:
        """Return exp(x - shift), zero where x is -inf and shift is finite."""
        return self.exp(x - shift)

    def softmax(self, x: N) -> N:
        """Return exp(x) / sum exp(x) along the last axis."""
        weights = self.exp_shifted(x, self.max(x))
        return weights / self.sum(weights, rescaled=True)

    def logsumexp(self, x: N) -> N:
        """Return log sum exp(x) along the last axis."""
        largest = self.max(x)
        return largest + self.log(self.sum(self.exp_shifted(x, largest), rescaled=True))

    def log_softmax(self, x: N) -> N:
        """Return x - log sum exp(x) along the last axis."""
        return x - self.logsumexp(x)

    def gate_mul(self, x: N, gate: N) -> N:
        """Return x * gate, with the limit zero where x is -inf and the gate is zero."""
        return x * gate

    def add_bias(self, x: N, bias: N) -> N:
        """Return x + bias, where a part of x may have been folded into the bias."""
        return x + bias

    def scaled_matmul(self, a: N, b: N, scale_a: N, scale_b: N) -> N:
        """Return (a scale_a) @ (b scale_b), with the scales applied before the product or after it."""
        return self.matmul(a * scale_a, b * scale_b)

    def gated_product(self, x: N, gate: N, y: N) -> N:
        """Return x gate y, in any order, or with x gate rounded first as "activated"; with the limit of `gate_mul`."""
        return self.round(self.gate_mul(x, gate), "activated") * y

    def quantized_matmul(self, x: N, codes: Idx, zero_points: Idx, scale: N) -> N:
        """Return x @ ((codes - zero_points) * scale), with the weights marked as the stage "weights"."""
        return self.matmul(x, self.round(self.exact(codes - zero_points) * scale, "weights"))

    def sparse_matmul(self, values: N, index: Idx, b: N) -> N:
        """Return sum_j values[m, j] b[index[m, j], n]; the other rows of b are not read."""
        return self.sum(values[:, :, None] * b[index], axis=1)[:, 0]

    def dequantize(self, codes: N, scale: float) -> N:
        """Return codes * scale, with the scale applied to the codes or to a result that is linear in them."""
        return codes * scale

    def abs(self, x: N) -> N:
        """Return the magnitude."""
        return self.maximum(x, -x)

    def unspecified(self, rows: Idx | Callable[[], Idx], x: N) -> N:
        """Return ``x``, unspecified by a contract where the mask ``rows`` (or the function that returns it) holds."""
        return x

    def spilled(self, mask: Callable[[], Idx], x: N) -> N:
        """Return ``x``; ``mask`` returns the elements that masked or unread NaN and infinities may reach."""
        return x

    def is_finite(self, x: N) -> Idx:
        """Return a mask of the numbers that are neither NaN nor infinite."""
        return self.above(x, -math.inf) & self.above(-x, -math.inf)

    def mean(self, x: N) -> N:
        """Return the mean along the last axis."""
        return self.sum(x) / x.shape[-1]

    def standardize(self, x: N, eps: float) -> tuple[N, N]:
        """Return x - mean and 1 / sqrt(variance + eps), along the last axis."""
        centred = x - self.mean(x)
        return centred, self.rsqrt(self.mean(centred * centred) + eps)

    def any_formula(self, *formulas: Callable[[], N]) -> N:
        """Return a number that kernels compute by any of several formulas; exact arithmetics evaluate the first."""
        return formulas[0]()

    def silu_slope(self, x: N) -> N:
        """Return the derivative of x s, s the sigmoid of x: s + x s (1 - s); zero at -inf and one at inf."""

        def tail(x: N) -> N:
            s = self.sigmoid(x)
            return self.gate_mul(x, s) * (1 - s)

        return self.sigmoid(x) + tail(self.minimum(x, 0.0)) - tail(self.minimum(-x, 0.0))

    def silu_gradient(self, a: N, b: N, x: N) -> N:
        """Return a b times `silu_slope` of x, whose own factors may be multiplied with a and b in any order.

        Or with a b rounded first, as "activated_gradient".
        """
        return self.product(a, b, self.silu_slope(x), "activated_gradient")

    def product(self, a: N, b: N, c: N, stage: str = "") -> N:
        """Return a b c, in any order, or with a b rounded first as ``stage``."""
        return self.round(a * b, stage) * c

    def blocks(self, rows: int, width: int) -> list[tuple[int, int]]:
        """Return ranges of rows, each of ``width`` numbers, to evaluate one after another."""
        return [(0, rows)]

    def in_blocks(self, function: Callable[..., Any], *numbers: Any, whole: int = 0) -> Any:
        """Return ``function(*numbers)``, independent along all axes but the last ``whole``, in blocks if that is
        faster."""
        return function(*numbers)

    def weighted(self, weights: N, values: N) -> N:
        """Return weights @ values; kernels may divide the product instead of the ``weights`` by each row's sum."""
        return self.matmul(weights, values)

    def scores(self, q: N, k: N, scale: N | float) -> N:
        """Return q k^T scale over the last two axes; q scale may be rounded as "query", each product as "scores"."""
        return self.round(self.matmul(self.round(q * scale, "query"), self.swap(k)), "scores")

    def softcap(self, scores: N, cap: float) -> N:
        """Return cap * tanh(scores / cap), each of the three operations rounded as "scores"."""
        capped = self.round(self.tanh(self.round(scores / cap, "scores"), absolute=True), "scores")
        return self.round(capped * cap, "scores")

    def delta_rule(self, q: N, k: N, v: N, factor: N | float, decays: N, decay: N, beta: N) -> N:
        """Return o_t = q_t S_t, S_t = decay_t S_(t-1) + k_t^T beta_t (v_t - decay_t k_t S_(t-1)), q times ``factor``.

        q, k [..., T, D], v [..., T, Dv]; ``decays`` [..., T, T] from position s to t, ignored for s > t;
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
        """Return the gradients of q, k and v of attention, for some rows q [..., R, D] and dout [..., R, Dv].

        ``scores`` [..., R, Sk] are those of `scores`; the gradients of k and v are part of sums over ``terms`` rows. A
        masked key adds nothing to a row's gradient, nor the row to the key's.
        """
        blind = ~visible.any(-1)[..., None]
        weights = self.softmax(self.where(visible | blind, scores, -math.inf))
        weights = self.where(visible, weights, 0.0)
        products = self.where(visible, self.matmul(dout, self.swap(v)), 0.0)
        gradient = self.where(visible, weights * (products - self.sum(weights * products)), 0.0) * scale
        transposed = self.swap(gradient)
        return self.matmul(gradient, k), self.matmul(transposed, q), self.matmul(self.swap(weights), dout)

    def merge(self, scores: N, visible: Idx, values: N) -> tuple[N, N]:
        """Return `attend` of partial results: values are outputs of attention to parts, scores their log-sum-exps."""
        return self.attend(scores, visible, values, None)

    @abstractmethod
    def attend(self, scores: N, visible: Idx, values: N, sinks: N | None) -> tuple[N, N]:
        """Return softmax of the visible scores [..., Sq, Sk] times values [..., Sk, Dv], and its log-sum-exp.

        ``sinks`` [..., 1, 1] is one more logit in the denominator. Values that no row sees, even NaN and Inf, do not
        reach the output; a row without visible keys gives zero and -inf.
        """

    # Ends and order. Masks here are torch's. Where radii leave an order open, three-valued logic has a mask of what is
    # certain and one of what is possible, and as a number 0, 1, or the interval between.
    def enclosure(self, x: N) -> tuple[Tensor, Tensor]:
        """Return the least and the largest float64 that numbers may be, equal if exactly known; NaN is its own end."""
        raise NotImplementedError

    def interval(self, least: Tensor, most: Tensor) -> N:
        """Return numbers between ends."""
        raise NotImplementedError

    def hull(self, x: N, y: N) -> N:
        """Return numbers that may be those of x or those of y."""
        raise NotImplementedError

    def compare(self, x: N, y: N) -> Order:
        """Return the order of two numbers for each element; by default that of their difference and zero."""
        (low, high), (least, most) = self.enclosure(x - y), self.enclosure(x)
        below, above = self.enclosure(y)
        less, more = (most < below) | (high < 0), (least > above) | (low > 0)
        same = ((low == 0) & (high == 0)) | ((least == most) & (below == above) & (least == below))
        unordered = (least.isnan() & most.isnan()) | (below.isnan() & above.isnan())
        return Order(less, more, same, unordered)

    def held(self, y: N, x: N) -> tuple[N, bool]:
        """Return y = f(x), f without poles, as a kernel stores it, and whether it overflows."""
        return y, False

    def open_beyond(self, x: N) -> N:
        """Return x, unknown where infinite or NaN: it may be an overflow that the exact number doesn't have."""
        return x

    def select(self, certain: Tensor, possible: Tensor, x: N, y: N) -> N:
        """Return x where ``certain``, y where not ``possible``, else the hull of both."""
        chosen = self.chosen(certain, x, y)
        unsure = possible & ~certain
        return self.chosen(unsure, self.hull(x, y), chosen) if bool(unsure.any()) else chosen

    def chosen(self, mask: Tensor, x: N, y: N) -> N:
        """Return x where a torch mask holds, else y."""
        native: Any = mask if self.native is torch else self.integers(mask)
        return self.where(native if self.native is torch else native.astype(bool), x, y)

    def larger_of(self, x: N, y: N) -> N:
        """Return the larger of two numbers; NaN where either is."""
        return self.maximum(x, y)

    def smaller_of(self, x: N, y: N) -> N:
        return -self.larger_of(-x, -y)

    def step(self, function: Callable[[Tensor], Tensor], x: N) -> N:
        """Return a step function (floor, ceil, trunc, round); where x encloses a step, the interval of its values."""
        return self.interval(*map(function, self.enclosure(x)))

    def power(self, x: N, y: N | float) -> N:
        """Return x^y, by products if y is a small integer."""
        if isinstance(y, (int, float)) and float(y).is_integer() and abs(y) <= 64:
            count = int(abs(y))
            product = self.exact(torch.ones(tuple(map(int, x.shape)), dtype=torch.float64))
            for _ in range(count):
                product = product * x
            return 1.0 / product if y < 0 else product
        zero = self.compare(x, x * 0.0)
        safe = self.chosen(zero.same, x * 0.0 + 1.0, x)
        power = self.exp(self.apply("log", safe) * y)
        if not bool(zero.same.any()):
            return power
        rises = isinstance(y, (int, float)) and y > 0
        return self.chosen(zero.same, x if rises else 1.0 / x, power)

    def root(self, x: N) -> N:
        """Return the square root of a sum of squares, which is not negative, whatever its radius."""
        return self.function("sqrt", x)

    def special(self, function: Callable[..., Any], *numbers: N) -> N:
        """Return an elementwise function of Arb's numbers that only Arb encloses."""
        raise NotImplementedError

    def settled(self, x: N) -> N:
        """Return the number with radius zero where it is infinite."""
        return x

    def prod(self, x: N) -> N:
        """Return the product along the last axis, which keeps size one; in any order."""
        total = self.exact(torch.ones((*map(int, x.shape[:-1]), 1), dtype=torch.float64))
        for column in range(x.shape[-1]):
            total = total * x[..., column : column + 1]
        return total

    def largest_of(self, x: N) -> N:
        """Return the largest along the last axis, which keeps size one, with the error of all that may be largest."""
        return self.max(x)

    def variance(self, x: N, correction: float = 0.0) -> N:
        """Return sum (x - mean)^2 / (n - correction) along the last axis, which keeps size one."""
        centred = x - self.mean(x)
        return self.sum(centred * centred) / float(x.shape[-1] - correction)

    def ordered(self, x: N) -> N:
        """Sort the last axis in ascending order: the k-th smallest ends enclose the k-th smallest number."""
        least, most = self.enclosure(x)
        return self.interval(least.sort(-1).values, most.sort(-1).values)

    def cummax(self, x: N) -> N:
        """Return the running maximum along the last axis."""
        parts = [x[..., :1]]
        for column in range(1, x.shape[-1]):
            parts.append(self.larger_of(parts[-1], x[..., column : column + 1]))
        return self.concatenate(parts, -1)
