"""Sequences of calls: which calls a protocol makes before the judged one.

Kernels keep state from call to call: results in a ring of buffers, buffers that grow, answers by shape or address. So
each result is held, and must stay as it was; equal calls must give equal bits; and the last call is judged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

from assay.golden.errors import ShapeError
from assay.golden.inputs.recipe import check_sizes
from assay.golden.inputs.values import dtype_of
from assay.golden.registry import Spec
from assay.verify.cases.case import Case, EarlierCall
from assay.verify.cases.sampler import Sampler

_SAME, _REFILLED = EarlierCall(), EarlierCall(data=1)
_OTHER = EarlierCall(data=1, memory="other")
MANY = 40
"""Calls that come first in the protocol "after_many", as a benchmark makes them."""
_FIXED: dict[str, tuple[EarlierCall, ...]] = {
    "repeat": (_SAME,),
    "after_other": (_OTHER,),
    "after_refill": (_REFILLED,),
    "after_many": (_REFILLED,) * MANY,
}
SEQUENCES = tuple(_FIXED)
"""The protocols that make calls before the judged one, from the shortest."""
_SEED_OF_OTHERS = 7_777_777  # added to a case's seed, for other data
_DTYPES = ("float32", "bfloat16", "float16")
_ELEMENTS, _WORK = 2**12, 2**17  # of calls of other sizes, which nothing but their effect on others is looked at


def earlier_calls(case: Case) -> tuple[EarlierCall, ...]:
    """Return the calls before the judged one: the case's own, or those that its protocol always makes."""
    return case.before or _FIXED[case.protocol] if case.protocol in SEQUENCES else ()


def with_sequence(case: Case, sampler: Sampler, *, other_dtypes: bool) -> Case:
    """Return a case of the protocol "after_many" with a drawn sequence, others as they are.

    One call of another dtype (``other_dtypes``) comes first; then calls of other data, memory, sizes and options, each
    with a call of one kind after it; then more of that kind, as in a benchmark.
    """
    if case.protocol != "after_many" or case.before:
        return case
    chance = random.Random(case.seed)
    others = [EarlierCall(data=2, memory="other"), EarlierCall(data=2), EarlierCall(memory="other"), _SAME]
    others += _of_other_sizes(case, sampler, chance)
    for options in sampler.option_sets():
        if options != case.options and _admits(sampler.definition, options, case.sizes):
            changed = {name: value for name, value in options.items() if value != case.options[name]}
            others.append(EarlierCall(2, "other", options=changed))
            break
    chance.shuffle(others)
    dtype = _other_dtype(case) if other_dtypes else ""
    first = [EarlierCall(2, "other", dtype=dtype)] if dtype else []  # a cache by shape keeps what comes first
    calls = [*first, _REFILLED, *(call for other in others for call in (other, _REFILLED))]
    return replace(case, before=(*calls, *(_REFILLED,) * (MANY - len(calls))))


def _admits(definition: Spec, options: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    """Return whether a call under these options may have these sizes."""
    signature = definition.signature(options)
    try:
        check_sizes(definition, signature, options, sizes)
    except ShapeError:
        return False
    return all(size % definition.step(signature, symbol, sizes) == 0 for symbol, size in sizes.items())


def _of_other_sizes(case: Case, sampler: Sampler, chance: random.Random) -> Iterator[EarlierCall]:
    """Yield a call with fewer elements, and one with more."""
    limited = sampler.for_interpreter().limited(_ELEMENTS, _WORK, 32)

    def elements(drawn: Case) -> int:
        return prod(drawn.shape(drawn.signature.tensors[0]))

    drawn = [limited.case(chance.choice, style=style, options=case.options) for style in ("small", "tile") * 3]
    drawn = sorted((other for other in drawn if all(other.sizes.values())), key=elements)
    fewer = [other for other in drawn if elements(other) < elements(case)]
    more = [other for other in drawn if elements(other) > elements(case)]
    for other in (*fewer[-1:], *more[:1]):
        yield EarlierCall(2, "other", sizes=dict(other.sizes))


def _other_dtype(case: Case) -> str:
    """Return another dtype for the tensors whose dtype the op leaves open, if all have one of `_DTYPES`; else empty."""
    opened = {case.dtypes[tensor.name] for tensor in case.signature.tensors if tensor.dtype is None}
    if len(opened) != 1 or case.out_dtype is not None or not opened <= {*_DTYPES}:
        return ""
    return next(dtype for dtype in _DTYPES if dtype not in opened)


def call_of(case: Case, call: EarlierCall) -> Case:
    """Return the case that an earlier call makes."""
    if not call.data and not (call.sizes or call.options or call.dtype):
        return case
    made = replace(
        case,
        sizes={**case.sizes, **call.sizes},
        options={**case.options, **call.options},
        seed=case.seed + call.data * _SEED_OF_OTHERS,
        edits=(),
        origin={} if call.sizes else case.origin,
    )
    opened = {t.name: case.dtypes[t.name] for t in case.signature.tensors if t.dtype in (None, "fp8")}
    given = call.dtype or opened or "float8_e4m3fn"  # of tensors whose dtype the op fixes only fp8's may vary
    return replace(made, dtypes={tensor.name: dtype_of(tensor, given) for tensor in made.signature.tensors})


def shorter(case: Case) -> Iterator[Case]:
    """Yield the case with fewer earlier calls: without a half, without smaller parts, then with plainer ones."""
    calls = case.before if case.protocol in SEQUENCES else ()
    size = len(calls) // 2
    while size > 1:
        for first in range(0, len(calls), size):
            yield replace(case, before=(*calls[:first], *calls[first + size :]))
        size //= 2
    if len(calls) > 1:
        for index, call in enumerate(calls):
            if index == 0 or calls[index - 1] != call:  # of equal calls in a row one is enough
                yield replace(case, before=(*calls[:index], *calls[index + 1 :]))
    for index, call in enumerate(calls):
        for plainer in (_SAME, _REFILLED, _OTHER):
            if _rank(plainer) < _rank(call):
                yield replace(case, before=(*calls[:index], plainer, *calls[index + 1 :]))


def _rank(call: EarlierCall) -> tuple[bool, bool, bool, bool, int]:
    return bool(call.dtype), bool(call.options), bool(call.sizes), call.memory != "same", call.data


def sequence_in_words(calls: Sequence[EarlierCall]) -> str:
    """Return the calls in order, equal ones in a row together, and the judged one last."""
    parts = []
    for call, same in groupby(calls, _words):
        count = len(list(same))
        parts.append(call if count == 1 else f"{count} times {call}")
    return "; ".join([*parts, "the judged call"])


def _words(call: EarlierCall) -> str:
    data = {0: "the same data", 1: "other data"}.get(call.data, "further data")
    where = "" if call.memory == "same" else " in other memory"
    changes = [f"{name}={value}" for name, value in (*call.sizes.items(), *call.options.items())]
    changes += [f"in {call.dtype}"] if call.dtype else []
    return f"{data}{where}{' with ' if changes else ''}{', '.join(changes)}"
