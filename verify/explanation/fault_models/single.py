"""Float32 arithmetic of kernels, in which fault models are evaluated as kernels."""

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.arithmetic import Arithmetic, Real
from assay.golden.arithmetic.real import codes_of, torch_function

Tensor = torch.Tensor


class Single(Real):
    """Each operation rounded to ``dtype``; functions and sums as accurate as a contract with that format requires."""

    dtype = torch.float32

    def exact(self, values: Any) -> Tensor:
        return torch.as_tensor(values).to(self.dtype)

    def constant(self, formula: Callable[[Callable[[Any], Any], Any], Any]) -> Tensor:
        return torch.tensor(formula(math.sqrt, math.pi), dtype=self.dtype)

    def function(self, name: str, x: Tensor) -> Tensor:
        return torch_function(name, x.double()).to(self.dtype)

    def above(self, x: Tensor, bound: float) -> Tensor:
        return x.double() > bound  # float32 can't hold the largest float64

    def logsumexp(self, x: Tensor) -> Tensor:
        return Arithmetic.logsumexp(self, x) if x.shape[-1] else self.max(x)  # by operations that fault models alter

    def quantize(
        self, x: Tensor, scale: Tensor, format: str, zero: Tensor | None = None, stored: Tensor | None = None
    ) -> Tensor:
        quotient = x / torch.where(scale == 0, 1.0, scale)
        return codes_of(quotient.double(), format, zero).to(self.dtype)


def unwritten(xp: Arithmetic, mask: Tensor, x: Any) -> Any:
    """Return ``x``, but the contents of fresh memory where ``mask`` holds."""
    if isinstance(xp, Single):
        return torch.where(mask, torch.empty_like(x.contiguous()), x)
    return xp.unspecified(mask.expand(x.shape), x)
