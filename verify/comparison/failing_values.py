"""The numbers of a small failing case: what went in, and what came out beside what is right."""

from __future__ import annotations

import math

import torch

from assay.verify.cases.case import Case, all_contents
from assay.verify.comparison.result import Result
from assay.verify.findings import MOST, Comparison, Numbers, Sample

AROUND = 12
"""Of an output with more than `MOST` elements so many about the failing one are shown."""


def sample_of(case: Case, result: Result | None) -> Sample:
    """The numbers of a failing case; ``result`` is what trying it showed, where that is known."""
    small = [tensor.name for tensor in case.signature.tensors if math.prod(case.shape(tensor)) <= MOST]
    values = all_contents(case) if small else {}
    inputs = tuple(Numbers(name, tuple(values[name].shape), _numbers(values[name])) for name in small)
    return Sample(inputs, _comparison(result) if result is not None else None)


def _comparison(result: Result) -> Comparison | None:
    failure, ratio = result.failure, result.ratio
    if failure is None or ratio is None or not result.tolerances or ratio.shape != result.tolerances[-1].golden.shape:
        return None
    index = [tensor.name for tensor in result.case.signature.returns].index(failure.output)
    got, golden = result.outputs[index].detach().cpu(), result.tolerances[-1].golden
    flat = int(torch.arange(ratio.numel()).reshape(ratio.shape)[failure.index])
    length = ratio.numel() if ratio.numel() <= MOST else AROUND
    first = max(0, min(flat - length // 2, ratio.numel() - length))
    shown = slice(first, first + length)
    return Comparison(
        failure.output,
        tuple(ratio.shape),
        first,
        _numbers(got.reshape(-1)[shown]),
        _numbers(golden.reshape(-1)[shown]),
        tuple(None if math.isnan(value) else value for value in _numbers(ratio.reshape(-1)[shown])),
    )


def _numbers(tensor: torch.Tensor) -> tuple[float, ...]:
    return tuple(tensor.double().reshape(-1).tolist())
