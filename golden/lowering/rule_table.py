"""The table of lowering rules: an ATen overload -> its computation in an arithmetic.

A rule of `elementwise` is a function of the arithmetic and of numbers (tensors become numbers, scalars stay); its
dtype follows PyTorch's type promotion. A rule of `rule` gets the lowering and the arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Rule = Callable[..., Any]

RULES: dict[Any, Rule] = {}
"""By ATen overload."""


def overloads(names: str) -> list[Any]:
    """Return the overloads that ``names`` (``"add.Tensor"``, or ``"exp"`` for the default one) stand for."""
    results = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        owner = getattr(torch.ops.aten, packet, None)  # PyTorch versions differ in the operations that they have
        if owner is not None and hasattr(owner, overload or "default"):
            results.append(getattr(owner, overload or "default"))
    return results


def rule(names: str) -> Callable[[Rule], Rule]:
    """Decorate a function ``(ctx, *args, **kwargs)`` that computes these operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(overloads(names), function))
        return function

    return register


def elementwise(names: str, *, floating: bool = False, deciding: bool = False) -> Callable[[Rule], Rule]:
    """Decorate a function ``(xp, *numbers, **options)`` that computes these operations element by element.

    ``floating``: the result of integers is floating-point. ``deciding``: the function has steps, and gets the lowering
    in place of ``xp``.
    """

    def register(function: Rule) -> Rule:
        def compute(overload: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
            dtype = promoted(args, floating)
            numbers = [ctx.number(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            if deciding:
                result = function(ctx, *numbers, **kwargs)
            else:
                result = ctx.xp.in_blocks(lambda *parts: function(ctx.xp, *parts, **kwargs), *numbers)
            if not dtype.is_floating_point:
                result = _with_known_integers(ctx, overload, args, kwargs, result)
            ctx.observe(names, numbers, result)
            return ctx.wrap(result, dtype)

        RULES.update({overload: partial(compute, overload) for overload in overloads(names)})
        return function

    return register


def _with_known_integers(ctx: Any, operation: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return the result with PyTorch's own integers where those of all operands are known: integers don't round."""
    known, operands = torch.tensor(True), []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            least, most = ctx.xp.enclosure(ctx.number(arg))
            same = least == most
            known, arg = known & same, torch.where(same, least, 1.0).to(arg.dtype)
        operands.append(arg)
    eager = operation(*operands, **kwargs)
    return ctx.xp.chosen(known.expand(eager.shape), ctx.xp.exact(eager), result)


def promoted(args: Any, floating: bool) -> torch.dtype:
    """Return the dtype that PyTorch gives the result of an elementwise operation."""
    dtype = result_type([arg for arg in args if isinstance(arg, (torch.Tensor, bool, int, float))])
    return torch.get_default_dtype() if floating and not dtype.is_floating_point else dtype


def result_type(operands: list[Any]) -> torch.dtype:
    """Promote by category: tensors with dimensions first, then those without, then scalars, as PyTorch does."""
    groups: list[torch.dtype | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            group, dtype = int(operand.ndim == 0), operand.dtype
        else:
            scalars = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
            group, dtype = 2, scalars[type(operand)]
        previous = groups[group]
        groups[group] = dtype if previous is None else torch.promote_types(previous, dtype)
    result: torch.dtype | None = None
    for candidate in groups:
        if candidate is not None and (result is None or _category(candidate) > _category(result)):
            result = candidate
    assert result is not None
    return result


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def constant(xp: Any, value: Any) -> Any:
    """Return a scalar as a number that is compared or stored; a kernel rounds one that float32 can't represent."""
    if not isinstance(value, (bool, int, float)):
        return value
    number = torch.tensor(float(value), dtype=torch.float64)
    if bool(number == number.float()) or not bool(number.isfinite()):
        return xp.exact(number)
    return xp.exact(torch.zeros((), dtype=torch.float64)) + float(value)
