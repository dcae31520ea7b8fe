"""Faults of softmax, its logarithm, log-sum-exp, and its gradient."""

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.arithmetic import Arithmetic
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.mutators import (
    changed,
    cut,
    every,
    in_input_dtype,
    is_narrow,
    operations,
    padded,
    swapped,
)

Tensor = torch.Tensor

_SOFT = ("softmax", "log_softmax", "logsumexp")
_LOSS = ("cross_entropy", "cross_entropy_backward")


def _logsumexp(xp: Any, right: Any, x: Any) -> Any:
    """Compute log-sum-exp by operations that fault models alter."""
    return Arithmetic.logsumexp(xp, x)


class _SumNotRescaled:
    """An online softmax over tiles of 16 columns whose sums are not rescaled when the maximum rises."""

    def _sum_and_largest(self: Any, x: Any) -> tuple[Any, Any]:
        total = largest = None
        for first in range(0, x.shape[-1], 16):
            part = x[..., first : first + 16]
            largest = self.max(part) if largest is None else self.maximum(largest, self.max(part))
            added = self.sum(self.exp_shifted(part, largest))
            total = added if total is None else total + added
        return total, largest

    def softmax(self: Any, x: Any) -> Any:
        total, largest = self._sum_and_largest(x)
        return self.exp_shifted(x, largest) / total

    def logsumexp(self: Any, x: Any) -> Any:
        total, largest = self._sum_and_largest(x)
        return largest + self.log(total)


def _padding_counted(name: str, to: str, whole: str, width: Callable[[int], int]) -> FaultModel:
    """Return a fault that counts zero padding up to ``width`` columns in the maximum and in the sum."""
    return FaultModel(
        name,
        "mask",
        f"columns are padded with zeros to {to}, and counted",
        (*_SOFT, "cross_entropy"),
        needs=f"a number of columns that is no {whole}",
        arithmetic=operations(
            softmax=lambda xp, right, x: cut(right(padded(xp, x, width(x.shape[-1]))), -1, x.shape[-1]),
            logsumexp=lambda xp, right, x: right(padded(xp, x, width(x.shape[-1]))),
        ),
    )


FAULT_MODELS = (
    FaultModel("softmax_without_maximum", "rescale", "the maximum is not subtracted before the exponential",
        (*_SOFT, *_LOSS), needs="logits beyond 88",
        arithmetic=operations(exp_shifted=lambda xp, right, x, shift: xp.exp(x),
        logsumexp=lambda xp, right, x: xp.log(xp.sum(xp.exp(x)))), emulated=True),
    FaultModel("maximum_from_zero", "rescale", "the running maximum starts at zero instead of minus infinity",
        ("softmax", "logsumexp", "log_softmax"), needs="rows whose logits all lie below -88",
        arithmetic=operations(max=lambda xp, right, x: right(x).clamp(min=0), logsumexp=_logsumexp), emulated=True),
    FaultModel("maximum_in_input_dtype", "precision", "the maximum is subtracted in the input dtype", _SOFT,
        origin="JAX's published GPU softmax",
        arithmetic=operations(exp_shifted=lambda xp, right, x, shift: xp.exp(in_input_dtype(xp, x - shift)),
        logsumexp=_logsumexp), emulated=True, applies=is_narrow),
    FaultModel("softmax_sum_not_rescaled", "rescale", "the online softmax does not rescale its sum at a new maximum",
        _SOFT, needs="more than 16 columns", arithmetic=_SumNotRescaled),
    _padding_counted("softmax_padding_not_masked", "whole tiles of 16", "multiple of 16", lambda columns: 16),
    _padding_counted("softmax_padding_to_power_of_two", "a power of two", "power of two",
        lambda columns: 1 << max(columns - 1, 0).bit_length()),
    _padding_counted("softmax_padding_to_64", "whole tiles of 64", "multiple of 64", lambda columns: 64),
    _padding_counted("softmax_padding_to_128", "whole tiles of 128", "multiple of 128", lambda columns: 128),
    FaultModel("softmax_base_2", "formula", "exp2 is taken of logits that were not multiplied by log2 e", _SOFT,
        inputs=changed("x", lambda x: x.double() * math.log(2))),
    FaultModel("logarithm_in_base_2", "formula", "the logarithm is in base 2", ("log_softmax", "logsumexp"),
        origin="vllm#47079, #52796", results=every(lambda xp, x: x * (1 / math.log(2)))),
    FaultModel("log_of_softmax", "rescale", "the logarithm is taken of the softmax, which underflows",
        ("log_softmax", "cross_entropy"), needs="logits far below the maximum",
        arithmetic=operations(log_softmax=lambda xp, right, x: xp.log(xp.softmax(x))),
        emulated=True),
    FaultModel("softmax_mean_term_dropped", "formula", "the term sum y dy is left out", ("softmax_backward",),
        definition=lambda xp, y, dy: y * dy),
    FaultModel("softmax_factor_dropped", "formula", "the term sum y dy is not multiplied by y", ("softmax_backward",),
        definition=lambda xp, y, dy: y * dy - xp.sum(y * dy)),
    FaultModel("softmax_sum_of_dy", "formula", "the mean term is sum dy, not sum y dy", ("softmax_backward",),
        definition=lambda xp, y, dy: y * (dy - xp.sum(dy))),
    FaultModel("gradient_of_log_softmax", "formula", "the gradient is that of log_softmax", ("softmax_backward",),
        definition=lambda xp, y, dy: dy - y * xp.sum(dy)),
    FaultModel("softmax_operands_swapped", "layout", "y and dy are swapped", ("softmax_backward",),
        inputs=swapped("y", "dy")),
)  # fmt: skip
