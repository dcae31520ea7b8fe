"""The table of lowering rules: an ATen operation -> what it is in terms of an arithmetic.

A rule of `elementwise` is a function of the arithmetic and of numbers (tensors come as numbers, scalars as they are);
its dtype is what PyTorch's type promotion gives. A rule of `rule` gets the evaluation and the arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Rule = Callable[..., Any]

RULES: dict[Any, Rule] = {}
"""By ATen overload."""


def overloads(names: str) -> list[Any]:
    """The overloads that ``names`` (``"add.Tensor"``, or ``"exp"`` for the default one) stand for."""
    found = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        owner = getattr(torch.ops.aten, packet, None)
        if owner is not None and hasattr(owner, overload or "default"):
            found.append(getattr(owner, overload or "default"))
    return found


def rule(names: str) -> Callable[[Rule], Rule]:
    """Decorator: ``function(evaluation, *args, **kwargs)`` computes these operations."""

    def register(function: Rule) -> Rule:
        for overload in overloads(names):
            RULES[overload] = function
        return function

    return register


def elementwise(names: str, *, floating: bool = False) -> Callable[[Rule], Rule]:
    """Decorator: ``function(xp, *numbers, **options)``, element by element.

    ``floating``: the result of integers is a floating-point number.
    """

    def register(function: Rule) -> Rule:
        def computed(evaluation: Any, *args: Any, **kwargs: Any) -> Any:
            dtype = promoted(args, floating)
            numbers = [evaluation.number(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            xp = evaluation.xp
            result = xp.in_blocks(lambda *parts: function(xp, *parts, **kwargs), *numbers)
            evaluation.computed(names, numbers, result)
            return evaluation.made(result, dtype)

        for overload in overloads(names):
            RULES[overload] = computed
        return function

    return register


def promoted(args: Any, floating: bool) -> torch.dtype:
    """The dtype that PyTorch gives the result of an elementwise operation."""
    operands = [arg for arg in args if isinstance(arg, (torch.Tensor, bool, int, float))]
    dtype = result_type(operands)
    return torch.get_default_dtype() if floating and not dtype.is_floating_point else dtype


def result_type(operands: list[Any]) -> torch.dtype:
    """PyTorch's promotion: by category, tensors of dimensions first, then those of none, then scalars."""
    groups: list[torch.dtype | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            place, dtype = int(operand.ndim == 0), operand.dtype
        else:
            kinds = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
            place, dtype = 2, kinds[type(operand)]
        known = groups[place]
        groups[place] = dtype if known is None else torch.promote_types(known, dtype)
    result: torch.dtype | None = None
    for group in groups:
        if group is not None and (result is None or _category(group) > _category(result)):
            result = group
    assert result is not None
    return result


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def constant(xp: Any, value: Any) -> Any:
    """A scalar as a number that is compared with or stored: one that float32 lacks is rounded by a kernel."""
    if not isinstance(value, (bool, int, float)):
        return value
    number = torch.tensor(float(value), dtype=torch.float64)
    if bool(number == number.float()) or not bool(number.isfinite()):
        return xp.exact(number)
    return xp.exact(torch.zeros((), dtype=torch.float64)) + float(value)
