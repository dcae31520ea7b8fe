"""The arithmetic interface: the operations that definitions are written in.

A definition is a plain function ``definition(xp, *tensors, **options)``. Its tensors support ``+ - * /``, unary
minus, indexing, ``.shape`` and ``.reshape``; everything else is a method of ``xp``. Integer tensors (codes, indices)
and masks arrive as native integer and boolean arrays of the arithmetic.

Composite operations (`standardize`, `attend`, ...) have a default in elementary ones; an arithmetic overrides one
where it knows a sharper bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

Array = Any


class Arithmetic(ABC):
    """Operations on one kind of number. Reductions run over ``axis`` and keep it, with size one.

    ``native`` is the module of this arithmetic's integer arrays, torch or numpy, where their functions agree.
    """

    native: Any = torch

    @abstractmethod
    def exact(self, values: Any) -> Array:
        """Numbers from a tensor whose values are exact (floats as stored, or integers)."""

    @abstractmethod
    def integers(self, values: Any) -> Array:
        """A native integer array of this arithmetic, for indices, codes and masks."""

    @abstractmethod
    def constant(self, formula: Callable[[Callable[[Any], Any], Any], Any]) -> Array:
        """``formula(sqrt, pi)``, an exact number rather than its float64 neighbour."""

    # Elementwise.
    @abstractmethod
    def exp(self, x: Array) -> Array: ...
    @abstractmethod
    def log(self, x: Array) -> Array: ...
    @abstractmethod
    def erf(self, x: Array, *, absolute: bool = False) -> Array: ...
    @abstractmethod
    def tanh(self, x: Array, *, absolute: bool = False) -> Array: ...
    @abstractmethod
    def sigmoid(self, x: Array) -> Array: ...
    @abstractmethod
    def rsqrt(self, x: Array) -> Array: ...

    def function(self, name: str, x: Array) -> Array:
        """The elementary function of that name, as torch has it: NaN outside its domain, limits at the infinities.

        exp, exp2, expm1, log, log2, log1p, tanh, erf, sigmoid, softplus, sqrt, rsqrt, reciprocal, sin, cos; as an op's
        result, not as an intermediate: where a number lies beyond the format it is infinite.
        """
        return getattr(self, name)(x)

    @abstractmethod
    def minimum(self, x: Array, bound: float) -> Array: ...
    @abstractmethod
    def maximum(self, x: Array, y: Array) -> Array: ...
    @abstractmethod
    def where(self, mask: Any, x: Array, y: Array | float) -> Array: ...

    @abstractmethod
    def above(self, x: Array, bound: float) -> Any:
        """A mask of the numbers, exact ones, above ``bound``."""

    # Reductions and products.
    @abstractmethod
    def sum(self, x: Array, axis: int = -1, *, rescaled: bool = False) -> Array:
        """The sum; ``rescaled`` allows an online kernel's rescaling of the running sum at each new maximum."""

    @abstractmethod
    def max(self, x: Array) -> Array:
        """The largest along the last axis; -inf where there is none."""

    @abstractmethod
    def matmul(self, a: Array, b: Array, plus: Array | None = None) -> Array:
        """a @ b + plus, each entry one accumulation; ``plus`` may be the accumulator's initial value."""

    # Shape.
    @abstractmethod
    def swap(self, x: Array) -> Array:
        """The last two axes exchanged."""

    @abstractmethod
    def concatenate(self, parts: Sequence[Array], axis: int = 0) -> Array: ...
    @abstractmethod
    def stack(self, parts: Sequence[Array], axis: int = -1) -> Array: ...

    @abstractmethod
    def top(self, x: Array, k: int) -> Array:
        """The places of the k largest along the last axis, largest first, the earlier one on a tie."""

    @abstractmethod
    def take(self, x: Array, index: Any) -> Array:
        """x[..., index[..., j]]: along the last axis, for each row its own places."""

    # Quantisation.
    def quantization_scale(self, span: Array, largest: float) -> Array:
        """span / largest, what one step between codes stands for; a kernel may give any scale to a span of zero."""
        return span / largest

    @abstractmethod
    def quantize(
        self, x: Array, scale: Array, format: str, zero: Array | None = None, stored: Array | None = None
    ) -> Array:
        """The codes that x / scale may be rounded to: to nearest even, plus ``zero``, saturated.

        ``format`` is that of the codes; with a zero-point the sum saturates, not the quotient. Where a number lies so
        near to a midpoint that it may be rounded to either side, the result holds both codes and what is between. A
        scale of zero gives the zero-point. ``stored``: the scale that a kernel gave, as evidence of how it divides.
        """

    def round(self, x: Array, stage: str) -> Array:
        """A place where a kernel may round on the way; exact arithmetics leave ``x`` as it is."""
        return x

    # Composite operations.
    def exp_shifted(self, x: Array, shift: Array) -> Array:
        """exp(x - shift), zero where x is -inf and shift is finite."""
        return self.exp(x - shift)

    def softmax(self, x: Array) -> Array:
        """exp(x) / sum exp(x) along the last axis."""
        weights = self.exp_shifted(x, self.max(x))
        return weights / self.sum(weights, rescaled=True)

    def logsumexp(self, x: Array) -> Array:
        """log sum exp(x) along the last axis."""
        largest = self.max(x)
        return largest + self.log(self.sum(self.exp_shifted(x, largest), rescaled=True))

    def log_softmax(self, x: Array) -> Array:
        """x - log sum exp(x) along the last axis."""
        return x - self.logsumexp(x)

    def gated(self, x: Array, gate: Array) -> Array:
        """x * gate, with the limit zero where x is -inf and the gate has closed."""
        return x * gate

    def offset(self, x: Array, bias: Array) -> Array:
        """x + bias, where a part of x may have been taken into the bias."""
        return x + bias

    def scaled_matmul(self, a: Array, b: Array, scale_a: Array, scale_b: Array) -> Array:
        """(a scale_a) @ (b scale_b), the scales being applied before the product or after it."""
        return self.matmul(a * scale_a, b * scale_b)

    def gated_product(self, x: Array, gate: Array, y: Array) -> Array:
        """x gate y, in any order, with the limit of `gated`."""
        return self.gated(x, gate) * y

    def quantized_matmul(self, x: Array, codes: Any, zero_points: Any, scale: Array) -> Array:
        """x @ ((codes - zero_points) * scale), the weights marked as the stage "weights"."""
        return self.matmul(x, self.round(self.exact(codes - zero_points) * scale, "weights"))

    def sparse_matmul(self, values: Array, place: Any, b: Array) -> Array:
        """sum_j values[m, j] b[place[m, j], n]; rows of b that are not named do not enter."""
        return self.sum(values[:, :, None] * b[place], axis=1)[:, 0]

    def represented(self, codes: Array, scale: float) -> Array:
        """codes * scale, the scale being applied to the codes or to the result of what is linear in them."""
        return codes * scale

    def abs(self, x: Array) -> Array:
        """The magnitude."""
        return self.maximum(x, -x)

    def unspecified(self, rows: Any, x: Array) -> Array:
        """``x``, where a contract says nothing of the places in ``rows``: a mask, or a function that makes it."""
        return x

    def mean(self, x: Array) -> Array:
        """The mean along the last axis."""
        return self.sum(x) / x.shape[-1]

    def standardize(self, x: Array, eps: float) -> tuple[Array, Array]:
        """x - mean and 1 / sqrt(variance + eps), along the last axis."""
        centred = x - self.mean(x)
        return centred, self.rsqrt(self.mean(centred * centred) + eps)

    def either(self, *formulas: Callable[[], Array]) -> Array:
        """One number by several formulas, any of which a kernel may evaluate; the first is the exact one's."""
        return formulas[0]()

    def silu_slope(self, x: Array) -> Array:
        """The derivative of x s, s the sigmoid of x: s + x s (1 - s); zero at -inf and one at inf."""

        def tail(x: Array) -> Array:
            s = self.sigmoid(x)
            return self.gated(x, s) * (1 - s)

        return self.sigmoid(x) + tail(self.minimum(x, 0.0)) - tail(self.minimum(-x, 0.0))

    def silu_gradient(self, a: Array, b: Array, x: Array) -> Array:
        """a b times `silu_slope` of x, whose own factors may be multiplied with a and b in any order."""
        return self.product(a, b, self.silu_slope(x))

    def product(self, a: Array, b: Array, c: Array, stage: str = "") -> Array:
        """a b c, in any order, or with a b rounded first as ``stage``."""
        return self.round(a * b, stage) * c

    def blocks(self, rows: int, width: int) -> list[tuple[int, int]]:
        """Ranges of rows, each of ``width`` numbers, that are best evaluated at a time."""
        return [(0, rows)]

    def scores(self, q: Array, k: Array, scale: Array | float) -> Array:
        """q k^T scale over the last two axes."""
        return self.matmul(q * scale, self.swap(k))

    def softcap(self, scores: Array, cap: float) -> Array:
        """cap * tanh(scores / cap)."""
        return self.tanh(scores / cap, absolute=True) * cap

    def attend_backward(
        self, scores: Array, visible: Any, q: Array, k: Array, v: Array, dout: Array, scale: Array | float, terms: int
    ) -> tuple[Array, Array, Array]:
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

    def merge(self, scores: Array, visible: Any, values: Array) -> tuple[Array, Array]:
        """`attend` to partial results: values are outputs of softmax over parts, scores their log-sum-exps."""
        return self.attend(scores, visible, values, None)

    @abstractmethod
    def attend(self, scores: Array, visible: Any, values: Array, sinks: Array | None) -> tuple[Array, Array]:
        """Softmax of the visible scores [..., Sq, Sk] applied to values [..., Sk, Dv], and its log-sum-exp.

        ``sinks`` [..., 1, 1] is one more logit in the denominator. Values that no row sees, NaN and Inf among them,
        do not reach the output; a row that sees nothing gives zero and -inf.
        """
