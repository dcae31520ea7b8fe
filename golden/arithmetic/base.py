"""The arithmetic interface: the operations that definitions are written in.

A definition is a plain function ``definition(xp, *tensors, **options)``. Its tensors support ``+ - * /``, unary
minus, indexing, ``.shape`` and ``.reshape``; everything else is a method of ``xp``. Integer tensors (codes, indices)
and masks arrive as native integer and boolean arrays of the arithmetic.

Composite operations (`standardize`, `attend`, ...) have a default in elementary ones; an arithmetic overrides one
where it knows a sharper bound.
"""

from __future__ import annotations

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
    @abstractmethod
    def minimum(self, x: Array, bound: float) -> Array: ...
    @abstractmethod
    def maximum(self, x: Array, y: Array) -> Array: ...
    @abstractmethod
    def where(self, mask: Any, x: Array, y: Array | float) -> Array: ...

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

    def represented(self, codes: Array, scale: float) -> Array:
        """codes * scale, the scale being applied to the codes or to the result of what is linear in them."""
        return codes * scale

    def mean(self, x: Array) -> Array:
        """The mean along the last axis."""
        return self.sum(x) / x.shape[-1]

    def standardize(self, x: Array, eps: float) -> tuple[Array, Array]:
        """x - mean and 1 / sqrt(variance + eps), along the last axis."""
        centred = x - self.mean(x)
        return centred, self.rsqrt(self.mean(centred * centred) + eps)

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

    @abstractmethod
    def attend(self, scores: Array, visible: Any, values: Array, sinks: Array | None) -> tuple[Array, Array]:
        """Softmax of the visible scores [..., Sq, Sk] applied to values [..., Sk, Dv], and its log-sum-exp.

        ``sinks`` [..., 1, 1] is one more logit in the denominator. Values that no row sees, NaN and Inf among them,
        do not reach the output; a row that sees nothing gives zero and -inf.
        """
