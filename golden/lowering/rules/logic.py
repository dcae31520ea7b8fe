"""Comparisons, three-valued masks, and selection by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from assay.golden.arithmetic.base import Order
from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.table import constant, promoted, rule

Tensor = torch.Tensor
Ternary = tuple[Tensor, Tensor]  # certain, possible


def _compared(names: str, certain: Callable[[Order], Tensor], excluded: Callable[[Order], Tensor]) -> None:
    @rule(names)
    def compare(evaluation: Evaluation, x: Any, y: Any) -> Tensor:
        a, b = (evaluation.number(v) if isinstance(v, Tensor) else constant(evaluation.xp, v) for v in (x, y))
        order = evaluation.xp.compare(a, b) if x is not y else _with_itself(evaluation, a)
        return mask(evaluation, certain(order), ~excluded(order))


def _with_itself(evaluation: Evaluation, number: Any) -> Order:
    """A number beside itself, of which PyTorch asks whether it is NaN: the same, however far it is off."""
    least, most = evaluation.xp.enclosure(number)
    nan, unknown = least.isnan() & most.isnan(), (least.isinf() | most.isinf()) & (least != most)
    never = torch.zeros_like(nan)
    return Order(never, never, ~nan & ~unknown, nan)


_compared("lt.Tensor lt.Scalar", lambda o: o.less, lambda o: o.more | o.same | o.unordered)
_compared("gt.Tensor gt.Scalar", lambda o: o.more, lambda o: o.less | o.same | o.unordered)
_compared("le.Tensor le.Scalar", lambda o: o.less | o.same, lambda o: o.more | o.unordered)
_compared("ge.Tensor ge.Scalar", lambda o: o.more | o.same, lambda o: o.less | o.unordered)
_compared("eq.Tensor eq.Scalar", lambda o: o.same, lambda o: o.less | o.more | o.unordered)
_compared("ne.Tensor ne.Scalar", lambda o: o.less | o.more | o.unordered, lambda o: o.same)


def mask(evaluation: Evaluation, certain: Tensor, possible: Tensor) -> Tensor:
    """A mask; a plain one where nothing is open."""
    if torch.equal(certain, possible):
        return certain
    return evaluation.made(evaluation.xp.interval(certain.double(), possible.double()), torch.bool)


def truth(evaluation: Evaluation, x: Any) -> Ternary:
    """Where a tensor, or a scalar, is certainly and possibly true, or other than zero."""
    if not isinstance(x, Tensor):
        found = torch.tensor(bool(x))
        return found, found
    if type(x) is Tensor and not x.is_floating_point():
        return x.bool(), x.bool()
    least, most = evaluation.xp.enclosure(evaluation.number(x))
    certain = (least > 0) | (most < 0) | least.isnan()
    return certain, ~((least == 0) & (most == 0))


@rule("logical_not bitwise_not")
def _not(evaluation: Evaluation, x: Tensor) -> Tensor:
    certain, possible = truth(evaluation, x)
    return mask(evaluation, ~possible, ~certain)


@rule("logical_and bitwise_and.Tensor bitwise_and.Scalar __and__.Tensor")
def _and(evaluation: Evaluation, x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = truth(evaluation, x), truth(evaluation, y)
    return mask(evaluation, a & c, b & d)


@rule("logical_or bitwise_or.Tensor bitwise_or.Scalar __or__.Tensor")
def _or(evaluation: Evaluation, x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = truth(evaluation, x), truth(evaluation, y)
    return mask(evaluation, a | c, b | d)


@rule("logical_xor bitwise_xor.Tensor")
def _xor(evaluation: Evaluation, x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = truth(evaluation, x), truth(evaluation, y)
    return mask(evaluation, (a & ~d) | (~b & c), (b & ~c) | (~a & d))


def _over(names: str, any_of: bool) -> None:
    @rule(names)
    def quantified(evaluation: Evaluation, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        ends = []
        for end in truth(evaluation, x):
            function: Any = torch.any if any_of else torch.all
            ends.append(function(end) if dim is None else function(end, dim, keepdim))
        return mask(evaluation, ends[0], ends[1])


_over("any any.dim any.dims", True)
_over("all all.dim all.dims", False)


def _of_kind(name: str, is_it: Callable[[Tensor], Tensor]) -> None:
    """A mask of what a number is; one of which nothing is known may be of any kind."""

    @rule(name)
    def kind(evaluation: Evaluation, x: Tensor) -> Tensor:
        least, most = evaluation.xp.enclosure(evaluation.number(x))
        unknown = (least.isinf() | most.isinf()) & (least != most)
        certain = is_it(least) & is_it(most) & ~unknown
        return mask(evaluation, certain, certain | unknown)


for _name in ("isnan", "isinf", "isposinf", "isneginf"):  # isfinite is made of comparisons
    _of_kind(_name, getattr(torch, _name))


@rule("equal")
def _equal(evaluation: Evaluation, x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape:
        return False
    with evaluation:
        return bool((x == y).all().item())


@rule("allclose")
def _allclose(
    evaluation: Evaluation, x: Tensor, y: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    with evaluation:
        return bool(torch.isclose(x, y, rtol, atol, equal_nan).all().item())


@rule("signbit")
def _signbit(evaluation: Evaluation, x: Tensor) -> Tensor:
    least, most = evaluation.xp.enclosure(evaluation.number(x))
    return mask(evaluation, (most < 0) | (torch.signbit(least) & (least == most)), (least < 0) | torch.signbit(least))


@rule("where.self where.ScalarOther where.ScalarSelf where.Scalar")
def _where(evaluation: Evaluation, condition: Tensor, x: Any, y: Any) -> Tensor:
    dtype = promoted((x, y), floating=False)
    a, b = (evaluation.number(v) if isinstance(v, Tensor) else constant(evaluation.xp, v) for v in (x, y))
    certain, possible = truth(evaluation, condition)
    return evaluation.made(evaluation.xp.select(certain, possible, a, b), dtype)


@rule("masked_fill.Scalar masked_fill.Tensor")
def _masked_fill(evaluation: Evaluation, x: Tensor, places: Tensor, value: Any) -> Tensor:
    number = evaluation.number(value) if isinstance(value, Tensor) else constant(evaluation.xp, value)
    certain, possible = truth(evaluation, places)
    return evaluation.made(evaluation.xp.select(certain, possible, number, evaluation.number(x)), x.dtype)


@rule("nan_to_num")
def _nan_to_num(
    evaluation: Evaluation,
    x: Tensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:
    info, xp = torch.finfo(x.dtype), evaluation.xp
    number = evaluation.number(x)
    least, most = xp.enclosure(number)
    known = (least == most) | least.isnan()
    for places, value in (
        (known & least.isnan(), nan or 0.0),
        (known & (least == torch.inf), info.max if posinf is None else posinf),
        (known & (most == -torch.inf), info.min if neginf is None else neginf),
    ):
        if bool(places.any()):
            number = xp.chosen(places, constant(xp, value), number)
    return evaluation.made(number, x.dtype)
