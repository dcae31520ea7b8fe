"""A region's definition evaluated with something changed: an option, an input, a number format, another tensor.

All is evaluated in float64 on the inputs that the run had, and returned by output, [tokens, features].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assay.compare import definitions
from assay.compare.judging import Evidence, in_float64
from assay.compare.runs.run import Slot

Results = list[Tensor]
Change = tuple[str, Results]
"""A changed definition: what it is, in words, and its results."""


def argument_name(evidence: Evidence, index: int) -> str:
    """Return the name of a definition's argument; of any number of terms the one name."""
    names = arguments_of(evidence.plan.definition)
    return names[min(index, len(names) - 1)]


def arguments_of(definition: str) -> Sequence[str]:
    """Return the names of a definition's positional arguments."""
    code = getattr(definitions, definition).__code__
    return code.co_varnames[: code.co_argcount] or ("term",)


def doubles(evidence: Evidence) -> list[Tensor]:
    """Return the inputs of a region's one call in float64."""
    return [each.double() if each.is_floating_point() else each for each in evidence.inputs[0]]


def with_options(evidence: Evidence, **options: Any) -> Results:
    """Return the results under other options."""
    return _joined(evidence, evidence.inputs, options)


def with_inputs(evidence: Evidence, changes: Mapping[int, Callable[[Tensor], Tensor]], **options: Any) -> Results:
    """Return the results of changed inputs, by their index."""
    calls = [
        [changes[index](each.double()) if index in changes else each for index, each in enumerate(tensors)]
        for tensors in evidence.inputs
    ]
    return _joined(evidence, calls, options)


def _joined(evidence: Evidence, calls: list[list[Tensor]], options: Mapping[str, Any]) -> Results:
    parts = [in_float64(evidence.plan, tensors, {**evidence.plan.options, **options}) for tensors in calls]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def exchanged(evidence: Evidence, one: int, other: int) -> Results:
    """Return the results of two inputs in each other's stead."""
    calls = [list(call) for call in evidence.inputs]
    for call in calls:
        call[one], call[other] = call[other], call[one]
    return _joined(evidence, calls, {})


def fitted(evidence: Evidence, option: str) -> float | None:
    """Return the value of a number among the options that fits the errors best, by three steps of Newton's method."""
    value = evidence.plan.options[option]
    for _ in range(3):
        step = 1e-3 * value
        here, there = with_options(evidence, **{option: value}), with_options(evidence, **{option: value + step})
        slope = torch.cat([(two - one).reshape(-1) for one, two in zip(here, there, strict=True)])
        error = torch.cat([(g.double() - one).reshape(-1) for g, one in zip(evidence.given, here, strict=True)])
        size = float(slope.pow(2).sum())
        value += step * float((slope * error).sum()) / size if size else 0.0
        if not size or not 0 < value < float("inf"):
            return None
    return float(value)


def rounded(x: Tensor, format: torch.dtype) -> Tensor:
    """Return numbers rounded to a format, in float64; those beyond an 8-bit format are its largest."""
    limit = torch.finfo(format).max
    return x.clamp(-limit, limit).to(format).double() if format.itemsize == 1 else x.to(format).double()


def scaled_to(x: Tensor, format: torch.dtype, axes: tuple[int, ...] = ()) -> Tensor:
    """Return numbers rounded to an 8-bit format with a scale from the largest along ``axes``, or of the tensor."""
    largest = x.abs().amax(axes, keepdim=True) if axes else x.abs().max()
    scale = (largest / torch.finfo(format).max).clamp(min=1e-30)
    return rounded(x / scale, format) * scale


def with_rounded_inputs(evidence: Evidence, format: torch.dtype, *, result: bool) -> Results:
    """Return the results of all inputs rounded to a format; ``result``: rounded to it too."""
    floats = [index for index, each in enumerate(evidence.inputs[0]) if each.is_floating_point()]
    results = with_inputs(evidence, dict.fromkeys(floats, partial(rounded, format=format)))
    return [rounded(each, format) for each in results] if result else results


def rounded_throughout(evidence: Evidence, format: torch.dtype, *, keeps_float32: bool = False) -> Results:
    """Return PyTorch's results in a format, every operation's rounded to it.

    ``keeps_float32``: but for the float32 that the definition asks for.
    """
    kept = definitions.wide
    if not keeps_float32:
        definitions.wide = lambda x: x
    try:
        name = evidence.plan.definition
        function = getattr(definitions, "stepwise_attention" if name == "attention" else name)
        calls = [[x.to(format) if x.is_floating_point() else x for x in call] for call in evidence.inputs]
        parts = [tree_leaves(function(*call, **evidence.plan.options)) for call in calls]
    finally:
        definitions.wide = kept
    return [torch.cat([each.double().reshape(len(each), -1) for each in some]) for some in zip(*parts, strict=True)]


def elsewhere(evidence: Evidence) -> Iterator[Change]:
    """Yield a region's definition with another of the layer's tensors in place of an input."""
    for index, what in enumerate(evidence.plan.inputs):
        if not isinstance(what, Slot) or len(evidence.inputs) != 1 or not evidence.inputs[0][index].is_floating_point():
            continue
        for label, values in evidence.others().items():
            if values.shape == evidence.inputs[0][index].shape:
                calls = [[values.double() if order == index else x for order, x in enumerate(evidence.inputs[0])]]
                prefix = "residual: " if evidence.plan.kind == "residual" else ""
                yield f"{prefix}{label} in place of {what}", _joined(evidence, calls, {})
