"""Why a region is beyond: which changed definition, number format or number gives what the run gave.

Each candidate is evaluated in float64 on the inputs that the run had. It is a cause if it leaves at most a tenth of the
error, or what the run's own dtypes explain, on the tokens that are wrong.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from assay.compare.explanation.changed import (
    Change,
    Results,
    argument_name,
    elsewhere,
    rounded,
    rounded_throughout,
    scaled_to,
    with_inputs,
    with_rounded_inputs,
)
from assay.compare.explanation.changes import changes_of
from assay.compare.judging import Evidence
from assay.compare.runs.run import Slot

_FORMATS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_SECONDS = 10.0  # of processor time for a region's cause
_LEFT = 0.1  # share of the error that a cause may leave
_NOISE = 3.0  # times PyTorch's own error, where that is more


def cause_of(evidence: Evidence) -> str:
    """Return in words what explains a region that is beyond; empty if no candidate does."""
    if all(bool((given[wrong] == 0).all()) for given, wrong in zip(evidence.given, evidence.wrong, strict=True)):
        return "the result is missing: zero"
    begun = time.process_time()
    with torch.no_grad():
        best: tuple[float, str] = (1.0, "")
        for words, results in _evaluated(_candidates(evidence)):
            if time.process_time() - begun > _SECONDS:
                break
            left = _left(evidence, results)
            if left < 0.5 * best[0]:  # a later candidate must be clearly better
                best = left, words
        # What no change of the definition gives may be a constant factor, or what stands elsewhere.
        return best[1] or _relation(evidence) or suspicion_of(evidence) or _format_by_size(evidence)


def suspicion_of(evidence: Evidence) -> str:
    """Return the changed definition that the errors of a region within its bounds lean to; empty if they lean to none.

    Of a candidate whose results differ from the golden by d, p = <e, d> / <d, d> of the errors e is 1 where it is what
    the run computes, and near 0 where e is rounding. Tokens are independent samples: z = sum t / sqrt(sum (t - p
    |d|^2)^2) with t = <e, d> of each. Errors of an honest rounding lean to roundings like it: a number format must
    explain nearly all.
    """
    with torch.no_grad():
        for words, results in _evaluated(changes_of(evidence)):
            leans = [_lean(evidence, results, begin) for begin in _BEGINS]
            leant = any(abs(share - 1) < _NEAR and sigmas > _SIGMAS for share, sigmas in leans)
            if leant and (not _ROUNDS.search(words) or _explains(evidence, results)):
                return words
    return ""


def _evaluated(changes: Iterator[Change]) -> Iterator[Change]:
    """Yield changes up to one that these shapes don't admit."""
    with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):
        yield from changes


_ROUNDS = re.compile("rounded")


def _explains(evidence: Evidence, results: Results) -> bool:
    """Return whether results leave less than a fifth of the errors' squares."""
    rest = sum(float((g.double() - r).pow(2).sum()) for g, r in zip(evidence.given, results, strict=True))
    return rest < 0.2 * sum(float(error.pow(2).sum()) for error in evidence.errors)


_NEAR, _SIGMAS, _LEAST_TOKENS = 0.25, 7.0, 8
"""How near 1 the errors' projection must be, of how many standard errors, and from how many tokens."""


_BEGINS = (0.0, 1 / 3, 1 / 2, 2 / 3)
"""Shares of the tokens that are left out: later steps may be other code than a prefill."""


def _lean(evidence: Evidence, results: Results, begin: float) -> tuple[float, float]:
    products, squares = torch.zeros(0), torch.zeros(0)
    for result, golden, error in zip(results, evidence.golden, evidence.errors, strict=True):
        kept = slice(int(begin * len(golden)), None)
        d, error = (result - golden)[kept], error[kept]
        products = torch.cat([products, (error * d).sum(-1)])
        squares = torch.cat([squares, d.pow(2).sum(-1)])
    total = float(squares.sum())
    if not total > 0 or not math.isfinite(total):
        return 0.0, 0.0
    if total**2 < _LEAST_TOKENS * float(squares.pow(2).sum()):  # one token alone says nothing of how errors scatter
        return 0.0, 0.0
    share = float(products.sum()) / total
    spread = float((products - share * squares).pow(2).sum().sqrt())
    return share, float(products.sum()) / spread if spread else math.inf


def _left(evidence: Evidence, results: Results) -> float:
    """Return the error that a candidate leaves, over what a cause may leave: below 1 it is one."""
    worst = 0.0
    for given, result, error, typical, wrong in zip(
        evidence.given, results, evidence.errors, evidence.typical, evidence.wrong, strict=True
    ):
        if not bool(wrong.any()):
            continue
        rest = given.double() - result
        allowed = torch.maximum(_LEFT * error[wrong].pow(2).mean().sqrt(), _NOISE * typical.pow(2).mean().sqrt())
        floor = given.double().abs().mean() * torch.finfo(given.dtype).eps
        worst = max(worst, float(rest[wrong].pow(2).mean().sqrt() / torch.maximum(allowed, floor)))
        if bool((~wrong).any()):  # and it may not spoil what is right
            spoilt = rest[~wrong].pow(2).mean().sqrt() / torch.maximum(allowed, floor)
            worst = max(worst, min(float(spoilt), 2.0))
    return worst if worst == worst else math.inf


def _candidates(evidence: Evidence) -> Iterator[Change]:
    plan, given = evidence.plan, evidence.given[0].dtype
    yield from changes_of(evidence)
    slots = [
        index
        for index, what in enumerate(plan.inputs)
        if isinstance(what, Slot) and len(plan.inputs) > 1 and evidence.inputs[0][index].is_floating_point()
    ]
    names = {index: argument_name(evidence, index) for index in slots}
    for format in _FORMATS:
        name = str(format).removeprefix("torch.")
        if given.itemsize <= format.itemsize and format.itemsize == 2:
            if given == format and plan.definition in _WITH_FLOAT32:
                yield f"computed in {name} throughout, not in float32", rounded_throughout(evidence, format)
            continue
        yield f"operands and result rounded to {name}", with_rounded_inputs(evidence, format, result=True)
        yield f"operands rounded to {name}", with_rounded_inputs(evidence, format, result=False)
        yield f"result rounded to {name}", [rounded(golden, format) for golden in evidence.golden]
        roundings = {"": partial(rounded, format=format)}
        if format.itemsize == 1:
            roundings[" with a scale for each tensor"] = partial(scaled_to, format=format)
            roundings[" with a scale for each token"] = partial(scaled_to, format=format, axes=(-1,))
        for words, change in roundings.items():
            for index in slots:
                yield f"{names[index]} rounded to {name}{words}", with_inputs(evidence, {index: change})
            cached = [index for index in slots if names[index] in ("k", "v")]
            if len(cached) == 2:
                changed = with_inputs(evidence, dict.fromkeys(cached, change))
                yield f"keys and values of the cache in {name}{words}", changed
    for index in slots:
        yield f"{names[index]} taken as zero", with_inputs(evidence, {index: torch.zeros_like})
        yield f"{names[index]} counted twice", with_inputs(evidence, {index: partial(torch.mul, other=2)})
    yield from elsewhere(evidence)


_WITH_FLOAT32 = ("rmsnorm", "gated_rmsnorm", "log_softmax", "router_logits")
"""Definitions that compute in float32 whatever the tensors are in."""


def _format_by_size(evidence: Evidence) -> str:
    """Return the format in which PyTorch's errors are as large as the run's, in words; empty if none is.

    Roundings at other places give other errors of the same size: this says how precise the run was, not what it did.
    """
    found: tuple[float, str] = (math.log(3.0), "")
    size = float(torch.cat([error.reshape(-1) for error in evidence.errors]).pow(2).mean().sqrt())
    for format in (torch.bfloat16, torch.float16):
        if evidence.given[0].dtype.itemsize <= format.itemsize or not size:
            continue
        for keeps, part in ((False, ""), (True, " but for its float32")):
            results = rounded_throughout(evidence, format, keeps_float32=keeps)
            errors = [result - golden for result, golden in zip(results, evidence.golden, strict=True)]
            usual = float(torch.cat([error.reshape(-1) for error in errors]).pow(2).mean().sqrt())
            apart = abs(math.log(usual / size)) if usual else math.inf
            if apart < found[0]:
                name = str(format).removeprefix("torch.")
                found = apart, f"errors as large as of {name}{part}: operands or parts are rounded to it"
    return found[1]


def _relation(evidence: Evidence) -> str:
    """Return a simple relation between what was given and the golden, in words; empty if there is none."""
    for given, golden, wrong, typical in zip(
        evidence.given, evidence.golden, evidence.wrong, evidence.typical, strict=True
    ):
        if not bool(wrong.any()):
            continue
        y, g = given.double()[wrong], golden[wrong]
        size = g.pow(2).mean().sqrt()
        noise = torch.maximum(3 * typical.pow(2).mean().sqrt(), 4 * torch.finfo(given.dtype).eps * size)

        def fits(candidate: Tensor, y: Tensor = y, g: Tensor = g, noise: Tensor = noise) -> bool:
            rest = (y - candidate).pow(2).mean().sqrt()
            return bool(rest <= torch.maximum(noise, _LEFT * (y - g).pow(2).mean().sqrt()))

        factor = float((y * g).sum() / g.pow(2).sum()) if float(g.pow(2).sum()) else 0.0
        if factor and fits(g * factor):
            return f"the result times {factor:.6g}"
        for shift in (1, -1):
            if len(golden) > 1 and fits(golden.roll(shift, 0)[wrong]):
                words = f"each token has the result of the {'one before' if shift > 0 else 'next one'}"
                return f"positions: {words}" if evidence.plan.kind == "rotary" else words
        width = golden.shape[1]
        for parts in (2, 4, 8, 16, 32):
            if width % parts == 0 and (order := _order(given.double(), golden, parts)) is not None:
                return f"{parts} parts of {width // parts} features stand in the order {order}"
    return ""


def _order(given: Tensor, golden: Tensor, parts: int) -> list[int] | None:
    """Return which part of the golden each part of what was given is, if another order than theirs."""
    mine, right = (x.reshape(len(x), parts, -1) for x in (given, golden))
    distance = (mine[:, :, None] - right[:, None]).pow(2).sum((0, 3))
    order = distance.argmin(1).tolist()
    left, size = distance.min(1).values, mine.pow(2).sum((0, 2))
    return order if order != list(range(parts)) and bool((left < 1e-2 * size).all()) else None
