"""The calls with which a kernel is inspected: its op at models' sizes, under each of its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay import configs
from assay.golden.signature import Signature, dimension
from assay.runtime.errors import unknown
from assay.verify.cases.at_shape import at_cases
from assay.verify.cases.case import Case
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import Sampler
from assay.verify.errors import SettingError
from assay.verify.settings import Settings

_ORDINARY = 1024  # a dimension for which the table has no size
_MOST = 1 << 26  # elements of a tensor, unless the user states sizes: cases are built in the memory of this machine


@dataclass(frozen=True)
class Request:
    """Sizes (each a choice by symbol) and layouts of tensors that a user requests."""

    sizes: tuple[Mapping[str, int], ...] = ()
    layouts: Mapping[str, str] | None = None


def calls(settings: Settings, request: Request, *, within: bool = False) -> Iterator[Case]:
    """Yield the calls of a kernel; ``within``: only at sizes that its entry lists, which may be those of tests.

    Options are varied one at a time from the first listed values. Raises `SettingError`.
    """
    check_request(settings, request)
    definition = settings.definition
    sampler = Sampler(
        definition, settings.dtype or "float8_e4m3fn", settings.options, settings.sizes, ties=settings.ties
    )
    table = configs.table("inspect")
    for options in _option_sets(settings):
        signature = definition.signature(options)
        for own in request.sizes or table.get(definition.name, [{}]):
            sizes = _sizes(
                sampler, signature, options, {**table["usual"], **own}, set(own) if request.sizes else set(), within
            )
            alone = replace(sampler, options={name: (value,) for name, value in options.items()})
            for case in at_cases(alone, [sizes]):
                yield replace(case, layouts=dict(request.layouts or {}), memory="plain", protocol="once")


def own_products(case: Case) -> float | None:
    """Return the operations of products that the op needs at a case's sizes, None if the table has no formula."""
    text = configs.table("inspect")["own_products"].get(case.definition.name)
    return 2.0 * dimension(text, case.sizes) if text else None


def own_bytes(case: Case) -> float:
    """Return the bytes of all inputs and results, each counted once."""
    import torch

    total = 0.0
    kinds = {
        **case.dtypes,
        **{t.name: dtype for t, dtype in zip(case.signature.returns, case.result_dtypes, strict=True)},
    }
    for tensor in (*case.signature.tensors, *case.signature.returns):
        count = 1
        for size in case.shape(tensor):
            count *= size
        total += count * getattr(torch, kinds[tensor.name], torch.float32).itemsize
    return total


def _option_sets(settings: Settings) -> list[dict[str, Any]]:
    """Return the first value of each listed option, then each other value in its place."""
    first = {name: values[0] for name, values in settings.options.items()}
    results = [first]
    results += [{**first, name: value} for name, values in settings.options.items() for value in values[1:]]
    return [settings.definition.complete(options) for options in results]


def _sizes(
    sampler: Sampler,
    signature: Signature,
    options: Mapping[str, Any],
    wanted: Mapping[str, int],
    said: set[str],
    within: bool,
) -> dict[str, int]:
    """Return a size for each symbol: the wanted one, or the nearest that the op and its entry allow."""
    definition = sampler.definition
    sizes: dict[str, int] = {}
    for symbol in sorted(signature.symbols, key=lambda name: name in definition.sizes.multiples):
        size = wanted.get(symbol, _ORDINARY)
        given = sampler.shapes.get(symbol) or definition.sizes.allowed.get(symbol, ())
        if given and symbol not in said and (within or not _is_free(given)):
            size = min(given, key=lambda other: (abs(other - size), other))
        step = definition.step(signature, symbol, sizes)
        sizes[symbol] = max(-(-size // step) * step, int(options.get(definition.sizes.minimum.get(symbol, ""), 0) or 0))
    sizes = sampler.tied_sizes(sizes)
    for symbol in signature.symbols if not said else ():
        while _largest(signature, sizes) > _MOST and sizes[symbol] > _ORDINARY:
            sizes[symbol] //= 2
    return {symbol: sizes[symbol] for symbol in signature.symbols}


def _is_free(given: Sequence[int]) -> bool:
    """Return whether listed sizes are just the first few integers, which tests use to save time."""
    return len(given) > 2 and given[0] <= 2 and given[1] - given[0] == 1


def _largest(signature: Signature, sizes: Mapping[str, int]) -> int:
    result = 0
    for tensor in (*signature.tensors, *signature.returns):
        count = 1
        for size in tensor.shape(sizes):
            count *= size
        result = max(result, count)
    return result


def check_request(settings: Settings, request: Request) -> None:
    """Raise `SettingError` for a requested dimension, tensor or layout that doesn't exist."""
    definition = settings.definition
    for options in _option_sets(settings):
        signature = definition.signature(options)
        for symbol in (symbol for sizes in request.sizes for symbol in sizes):
            if symbol not in signature.symbols:
                raise SettingError(f"--at: {unknown('dimension', symbol, signature.symbols)} of {definition.name}")
        names = [tensor.name for tensor in signature.tensors]
        for name, layout in (request.layouts or {}).items():
            if name not in names:
                raise SettingError(f"--tensor-layout: {unknown('tensor', name, names)} of {definition.name}")
            if layout not in LAYOUTS[:4]:
                raise SettingError(f"--tensor-layout {name}={layout}: expected one of {', '.join(LAYOUTS[:4])}")


__all__ = ["Request", "calls", "check_request", "own_bytes", "own_products"]
