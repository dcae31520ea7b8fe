"""Plain float64 torch tensors: the reference for speed, and the midpoint of every ball."""

from __future__ import annotations

import math

import torch

from assay.formats.format import format_named
from assay.formats.rounding import Mode, round_to
from assay.golden.arithmetic.base import Arithmetic, Formula

Tensor = torch.Tensor
LEAST_E8M0 = 2.0**-127
ONLY_ON_CPU = ("lgamma", "digamma")
"""Functions without a maximum error on CUDA: of lgamma for some negative numbers; digamma is PyTorch's own."""


class Real(Arithmetic[Tensor, Tensor]):
    """float64 torch tensors, with IEEE special values."""

    def exact(self, values: object) -> Tensor:
        return torch.as_tensor(values).to(torch.float64)

    def constant(self, formula: Formula) -> Tensor:
        return torch.tensor(formula(math.sqrt, math.pi), dtype=torch.float64)

    def function(self, name: str, x: Tensor) -> Tensor:
        return torch_function(name, x)

    def minimum(self, x: Tensor, bound: float) -> Tensor:
        return x.clamp(max=bound)

    def maximum(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(x, y)

    def where(self, mask: Tensor, x: Tensor, y: Tensor | float) -> Tensor:
        return torch.where(mask, x, y)

    def above(self, x: Tensor, bound: float) -> Tensor:
        return x > bound

    def sum(self, x: Tensor, axis: int = -1, *, rescaled: bool = False) -> Tensor:
        return x.sum(axis, keepdim=True)

    def cumsum(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)

    def max(self, x: Tensor) -> Tensor:
        if x.shape[-1] == 0:
            return x.new_full((*x.shape[:-1], 1), -math.inf)
        return x.amax(-1, keepdim=True)

    def matmul(self, a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
        return a @ b if plus is None else a @ b + plus

    def power_of_two(self, x: Tensor, *, above: bool) -> Tensor:
        return power_of_two(x, above=above)

    def quantize(
        self, x: Tensor, scale: Tensor, format: str, zero: Tensor | None = None, stored: Tensor | None = None
    ) -> Tensor:
        return codes_of(x / torch.where(scale == 0, 1.0, scale), format, zero)

    def enclosure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def interval(self, least: Tensor, most: Tensor) -> Tensor:
        return least

    def hull(self, x: Tensor, y: Tensor) -> Tensor:
        return x

    def topk_index(self, x: Tensor, k: int) -> Tensor:
        return torch.argsort(x, dim=-1, descending=True, stable=True)[..., :k]

    def logsumexp(self, x: Tensor) -> Tensor:
        return torch.logsumexp(x, -1, keepdim=True) if x.shape[-1] else self.max(x)

    def gate_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.where(x == -math.inf, 0.0, x * gate)

    def attend(self, scores: Tensor, visible: Tensor, values: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = self.attention_weights(scores, visible, sinks)
        return weighted_values(weights, visible, values), lse

    def attend_backward(
        self,
        scores: Tensor,
        visible: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        scale: Tensor | float,
        terms: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.where(visible, self.attention_weights(scores, visible, None)[0], 0.0)
        products = torch.where(visible, dout @ v.transpose(-1, -2), 0.0)
        gradient = weights * (products - (weights * products).sum(-1, keepdim=True)) * scale
        gradient = torch.where(visible, gradient, 0.0)
        return (
            visible_product(gradient, visible, k),
            visible_product(gradient.transpose(-1, -2), visible.T, q),
            visible_product(weights.transpose(-1, -2), visible.T, dout),
        )

    def attention_weights(self, scores: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the normalised weights, zero for masked keys, and the log-sum-exp [..., Sq, 1]."""
        scores = torch.where(visible, scores, -math.inf)
        largest = self.max(scores)
        if sinks is not None:
            largest = torch.maximum(largest, sinks)
        shift = torch.where(largest == -math.inf, 0.0, largest)
        weights = torch.exp(scores - shift)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks - shift)
        lse = shift + torch.log(total)
        return weights / torch.where(total == 0, 1.0, total), lse


def torch_function(name: str, x: Tensor) -> Tensor:
    """Return torch's float64 function of that name; a root is taken before its reciprocal.

    On another device those without a published bound there are computed on the CPU.
    """
    if name in ONLY_ON_CPU and x.device.type != "cpu":
        return torch_function(name, x.cpu()).to(x.device)
    if name == "rsqrt":
        return 1 / torch.sqrt(x)
    if name == "softplus":
        return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return getattr(torch, name)(x)


def two_to(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, exactly: a device's pow needn't be; zero or infinite beyond its range."""
    half = exponent.to(torch.int64) // 2

    def normal(exponent: Tensor) -> Tensor:
        return ((exponent.clamp(-1022, 1024) + 1023) << 52).view(torch.float64)

    return normal(half) * normal(exponent - half)


def power_of_two(x: Tensor, *, above: bool) -> Tensor:
    """Return the powers of `Arithmetic.power_of_two`; NaN and infinities are unchanged."""
    significand, exponent = torch.frexp(x)
    exact = significand == 0.5
    power = two_to(torch.where(exact | ~torch.tensor(above), exponent - 1, exponent))
    return torch.where((x > 0) & x.isfinite(), power.clamp(min=LEAST_E8M0), x)


def codes_of(quotient: Tensor, format: str, zero: Tensor | None = None, mode: Mode = "nearest") -> Tensor:
    """Return quotients rounded to codes, saturated after a zero-point is added; NaN is unchanged."""
    finite = torch.where(quotient.isnan(), 0.0, quotient)
    if zero is None:
        codes = round_to(finite, format, mode, "saturate")
    else:  # its four bits leave room in an int8
        target = format_named(format)
        codes = (round_to(finite, "int8", mode, "saturate") + zero).clamp(target.lowest, target.largest)
    return torch.where(quotient.isnan(), math.nan, codes)


def visible_product(a: Tensor, visible: Tensor, b: Tensor) -> Tensor:
    """Return a @ b without the elements that a row does not see, even NaN and Inf; a is zero there."""
    if bool(torch.isfinite(b).all()):
        return a @ b
    rows = [
        torch.where(seen[:, None], a[..., row, :, None] * b, 0.0).sum(-2, keepdim=True)
        for row, seen in enumerate(visible)
    ]
    return torch.cat(rows, -2) if rows else a @ b


def weighted_values(weights: Tensor, visible: Tensor, values: Tensor) -> Tensor:
    """Return weights @ values without the elements that a row does not see, even NaN and Inf; NaN where a weight is
    NaN.
    """
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return weights @ values
    seen = visible.to(torch.float64)
    total = weights @ torch.where(finite, values, 0.0)
    plus, minus, nan = (
        (seen @ kind.to(torch.float64)) > 0 for kind in (values == math.inf, values == -math.inf, values.isnan())
    )
    nan = nan | total.isnan()
    total = torch.where(plus, math.inf, total)
    total = torch.where(minus, torch.where(plus, math.nan, -math.inf), total)
    return torch.where(nan, math.nan, total)
