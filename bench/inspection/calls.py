"""The calls that a kernel is inspected in: an entry's op at the sizes of models, under each of its options."""

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

_ORDINARY = 1024
_MOST = 1 << 26  # elements of a tensor, where nobody asks for more


@dataclass(frozen=True)
class Request:
    """What a user says of the calls: sizes by symbol (several such), and the layouts of tensors by name."""

    sizes: tuple[Mapping[str, int], ...] = ()
    layouts: Mapping[str, str] | None = None


def calls(settings: Settings, request: Request, *, within: bool = False) -> Iterator[Case]:
    """The calls of a kernel; ``within`` keeps to the sizes that its entry lists, which may be those of tests.

    Of the options each is varied alone, the others being the first listed. Raises `SettingError`.
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
    """The operations of products that the op needs at a case's sizes, where a table says it."""
    text = configs.table("inspect")["own_products"].get(case.definition.name)
    return 2.0 * dimension(text, case.sizes) if text else None


def own_bytes(case: Case) -> float:
    """The bytes of all inputs and results, each once."""
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
    """The first value of each listed option, and each other value in its place."""
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
    """A size for each symbol: the wanted one, as near as the op and its entry allow."""
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
    """Whether listed sizes are but the first few of all, which tests keep to because they take their time."""
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
    """Raises `SettingError` where something asked for is no dimension or tensor of the op, or no layout."""
    definition = settings.definition
    for options in _option_sets(settings):
        signature = definition.signature(options)
        for symbol in (symbol for sizes in request.sizes for symbol in sizes):
            if symbol not in signature.symbols:
                raise SettingError(f"--at: {unknown('dimension', symbol, signature.symbols)} of {definition.name}")
        names = [tensor.name for tensor in signature.tensors]
        for name, layout in (request.layouts or {}).items():
            if name not in names:
                raise SettingError(f"--layout: {unknown('tensor', name, names)} of {definition.name}")
            if layout not in LAYOUTS[:4]:
                raise SettingError(f"--layout {name}={layout}: expected one of {', '.join(LAYOUTS[:4])}")


__all__ = ["Request", "calls", "check_request", "own_bytes", "own_products"]
