"""Float32 as kernels compute in it: the arithmetic that suspects are evaluated in when they stand in for kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.arithmetic import Arithmetic, Real
from assay.golden.arithmetic.real import codes_of, torch_function

Tensor = torch.Tensor


class Single(Real):
    """Each operation rounded to ``dtype``; functions and sums as good as a contract with that format asks."""

    dtype = torch.float32

    def exact(self, values: Any) -> Tensor:
        return torch.as_tensor(values).to(self.dtype)

    def constant(self, formula: Callable[[Callable[[Any], Any], Any], Any]) -> Tensor:
        return torch.tensor(formula(math.sqrt, math.pi), dtype=self.dtype)

    def exp(self, x: Tensor) -> Tensor:
        return self._rounded(torch.exp, x)

    def log(self, x: Tensor) -> Tensor:
        return self._rounded(torch.log, x)

    def erf(self, x: Tensor, *, absolute: bool = False) -> Tensor:
        return self._rounded(torch.erf, x)

    def tanh(self, x: Tensor, *, absolute: bool = False) -> Tensor:
        return self._rounded(torch.tanh, x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._rounded(torch.sigmoid, x)

    def rsqrt(self, x: Tensor) -> Tensor:
        return self._rounded(lambda wide: 1 / torch.sqrt(wide), x)

    def function(self, name: str, x: Tensor) -> Tensor:
        return self._rounded(lambda wide: torch_function(name, wide), x)

    def above(self, x: Tensor, bound: float) -> Tensor:
        return x.double() > bound  # the largest float64 is no float32

    def exp_shifted(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.exp(x - shift)

    def logsumexp(self, x: Tensor) -> Tensor:
        return Arithmetic.logsumexp(self, x) if x.shape[-1] else self.max(x)  # in operations that suspects alter

    def quantize(
        self, x: Tensor, scale: Tensor, format: str, zero: Tensor | None = None, stored: Tensor | None = None
    ) -> Tensor:
        quotient = x / torch.where(scale == 0, 1.0, scale)
        return codes_of(quotient.double(), format, zero).to(self.dtype)

    def _rounded(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x.double()).to(self.dtype)


def unwritten(xp: Arithmetic, mask: Tensor, x: Any) -> Any:
    """``x`` where a kernel writes it; what fresh memory held where ``mask`` says that it doesn't."""
    if isinstance(xp, Single):
        return torch.where(mask, torch.empty_like(x.contiguous()), x)
    return xp.unspecified(mask.expand(x.shape), x)
