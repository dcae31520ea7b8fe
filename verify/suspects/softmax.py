"""Faults of softmax, its logarithm, log-sum-exp, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.golden.arithmetic import Arithmetic
from assay.precision.rounding import round_to
from assay.verify.suspects.mechanisms import (
    changed,
    cut,
    every,
    is_narrow,
    padded,
    swapped,
)
from assay.verify.suspects.suspect import Suspect

Tensor = torch.Tensor

_SOFT = ("softmax", "log_softmax", "logsumexp")
_LOSS = ("cross_entropy", "cross_entropy_backward")


class _NoMaximum:
    def exp_shifted(self: Any, x: Any, shift: Any) -> Any:
        return self.exp(x)

    def logsumexp(self: Any, x: Any) -> Any:
        return self.log(self.sum(self.exp(x)))


class _MaximumFromZero:
    """The running maximum starts at zero rather than at minus infinity."""

    def max(self: Any, x: Any) -> Any:
        return super().max(x).clamp(min=0)  # type: ignore[misc]

    def logsumexp(self: Any, x: Any) -> Any:
        return Arithmetic.logsumexp(self, x)


class _MaximumInInputDtype:
    """x - max is rounded to the dtype of the inputs."""

    def exp_shifted(self: Any, x: Tensor, shift: Tensor) -> Tensor:
        dtype = next(iter(self.case.dtypes.values()))
        return self.exp(round_to((x - shift).double(), dtype).to(x.dtype))

    def logsumexp(self: Any, x: Tensor) -> Tensor:
        return Arithmetic.logsumexp(self, x)


class _LogOfSoftmax:
    def log_softmax(self: Any, x: Any) -> Any:
        return self.log(self.softmax(x))


class _SumNotRescaled:
    """Online: tiles of 16 columns, whose sums are not rescaled when the maximum rises."""

    def _total(self: Any, x: Any) -> tuple[Any, Any]:
        total = largest = None
        for first in range(0, x.shape[-1], 16):
            part = x[..., first : first + 16]
            largest = self.max(part) if largest is None else self.maximum(largest, self.max(part))
            added = self.sum(self.exp_shifted(part, largest))
            total = added if total is None else total + added
        return total, largest

    def softmax(self: Any, x: Any) -> Any:
        total, largest = self._total(x)
        return self.exp_shifted(x, largest) / total

    def logsumexp(self: Any, x: Any) -> Any:
        total, largest = self._total(x)
        return largest + self.log(total)


class _Padded:
    """Columns padded with zeros to whole tiles of 16, and the padding not masked."""

    def softmax(self: Any, x: Any) -> Any:
        return cut(super().softmax(padded(self, x, 16)), -1, x.shape[-1])  # type: ignore[misc]

    def logsumexp(self: Any, x: Any) -> Any:
        return super().logsumexp(padded(self, x, 16))  # type: ignore[misc]


def _without_mean_term(xp: Any, y: Any, dy: Any) -> Any:
    return y * dy


def _without_factor(xp: Any, y: Any, dy: Any) -> Any:
    return y * dy - xp.sum(y * dy)


def _sum_of_dy(xp: Any, y: Any, dy: Any) -> Any:
    return y * (dy - xp.sum(dy))


def _of_log_softmax(xp: Any, y: Any, dy: Any) -> Any:
    return dy - y * xp.sum(dy)


_LOG2E = 1 / math.log(2)

SUSPECTS = (
    Suspect("softmax_without_maximum", "rescale", "the maximum is not subtracted before the exponential",
            (*_SOFT, *_LOSS), needs="logits beyond 88", arithmetic=_NoMaximum, emulated=True),
    Suspect("maximum_from_zero", "rescale", "the running maximum starts at zero instead of minus infinity",
            ("softmax", "logsumexp", "log_softmax"), needs="rows whose logits all lie below -88",
            arithmetic=_MaximumFromZero, emulated=True),
    Suspect("maximum_in_input_dtype", "precision", "the maximum is subtracted in the input dtype", _SOFT,
            origin="JAX's published GPU softmax", arithmetic=_MaximumInInputDtype, emulated=True, applies=is_narrow),
    Suspect("softmax_sum_not_rescaled", "rescale", "the online softmax does not rescale its sum at a new maximum",
            _SOFT, needs="more than 16 columns", arithmetic=_SumNotRescaled),
    Suspect("softmax_padding_not_masked", "mask", "columns are padded with zeros to whole tiles of 16, and counted",
            (*_SOFT, "cross_entropy"), needs="a number of columns that is no multiple of 16", arithmetic=_Padded),
    Suspect("softmax_base_2", "formula", "exp2 is taken of logits that were not multiplied by log2 e", _SOFT,
            inputs=changed("x", lambda x: x.double() * math.log(2))),
    Suspect("logarithm_in_base_2", "formula", "the logarithm is in base 2", ("log_softmax", "logsumexp"),
            origin="vllm#47079, #52796", results=every(lambda xp, x: x * _LOG2E)),
    Suspect("log_of_softmax", "rescale", "the logarithm is taken of the softmax, which underflows",
            ("log_softmax", "cross_entropy"), needs="logits far below the maximum", arithmetic=_LogOfSoftmax,
            emulated=True),
    Suspect("softmax_mean_term_dropped", "formula", "the term sum y dy is left out", ("softmax_backward",),
            definition=_without_mean_term),
    Suspect("softmax_factor_dropped", "formula", "the term sum y dy is not multiplied by y", ("softmax_backward",),
            definition=_without_factor),
    Suspect("softmax_sum_of_dy", "formula", "the mean term is sum dy, not sum y dy", ("softmax_backward",),
            definition=_sum_of_dy),
    Suspect("gradient_of_log_softmax", "formula", "the gradient is that of log_softmax", ("softmax_backward",),
            definition=_of_log_softmax),
    Suspect("softmax_operands_swapped", "layout", "y and dy are swapped", ("softmax_backward",),
            inputs=swapped("y", "dy")),
)  # fmt: skip
