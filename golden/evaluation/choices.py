"""`admissible`: which answers are right where an op must choose, among codes near a midpoint or experts near a tie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from assay.golden.arithmetic import BallArithmetic
from assay.golden.errors import InputError, OptionError
from assay.golden.evaluation.binding import bind
from assay.golden.evaluation.golden import golden_of
from assay.golden.registry import Spec, spec
from assay.runtime.environment import standard_environment
from assay.runtime.errors import unknown

Tensor = torch.Tensor


@standard_environment()
def admissible(op: str, *tensors: Any, chosen: Any, **options: Any) -> Any:
    """Which of the ``chosen`` answers are right for the exact values of ``tensors``: a mask of their shape.

    ``chosen`` is a tensor for the first of the op's results that are choices (`choices_of`), and the mask then one
    tensor; or a mapping of results' names to tensors, and the masks a mapping too. What hangs on a choice is judged by
    the one given: the codes of ``quantize_int4`` by its zero-points. Where float64 cannot tell on which side of a
    midpoint a number lies, both codes are right.

    Raises `UnknownSpec`, `OptionError`, `ShapeError` or `InputError`.
    """
    definition = spec(op)
    names = choices_of(definition, {name: value for name, value in options.items() if not hasattr(value, "shape")})
    if not names:
        raise OptionError(f"{op}: has no result that is a choice; expected an op such as moe_route or quantize_fp8")
    given = chosen if isinstance(chosen, Mapping) else {names[0]: chosen}
    given = {name: torch.as_tensor(value).detach().cpu() for name, value in given.items()}
    xp, call = BallArithmetic(), bind(definition, tensors, options)
    shapes = {tensor.name: tensor.shape(call.sizes) for tensor in call.signature.returns}
    for name, value in given.items():
        if name not in shapes:
            raise OptionError(f"{op}: {unknown('result', name, shapes)}")
        if name not in (*names, *definition.outputs.chosen):
            raise OptionError(f"{op}: {name} is no choice; expected {' or '.join(names)}")
        if tuple(value.shape) != shapes[name]:
            raise InputError(f"{op}: chosen {name} has shape {tuple(value.shape)}, expected {shapes[name]}")
    if not any(name in given for name in names):
        raise OptionError(f"{op}: expected chosen {' or '.join(names)}, got {', '.join(given) or 'none'}")
    handed = {name: value for name, value in given.items() if name in definition.outputs.chosen}
    results = call.results(xp, {} if definition.outputs.accepts else handed)
    masks = {}
    for tensor, result in zip(call.signature.returns, results, strict=True):
        if tensor.name not in given or tensor.name not in names:
            continue
        golden, value = golden_of(result), given[tensor.name].double()
        if definition.outputs.accepts is not None:
            numbers = [xp.exact(value) for value in call.tensors.values()]
            index = given[tensor.name].to(torch.int64)
            masks[tensor.name] = definition.outputs.accepts(xp, *numbers, index, **call.options)
        else:
            inside = (value - golden.value).abs() <= golden.radius
            masks[tensor.name] = inside | golden.radius.isinf()  # nothing is said of rows that are not finite
    return masks if isinstance(chosen, Mapping) else masks[names[0]]


def choices_of(definition: Spec, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The results of an op that are choices: ids, codes and zero-points."""
    returns = definition.signature(definition.complete(options)).returns
    by_rounding = [tensor.name for tensor in returns if tensor.role == "rounded"]
    return definition.outputs.chosen[:1] if definition.outputs.accepts is not None else tuple(by_rounding)
