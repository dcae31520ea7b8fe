"""Cases at production sizes, which are far larger than those of the other cases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from assay.golden.errors import ShapeError
from assay.golden.inputs.distributions import TILED
from assay.golden.inputs.recipe import check_sizes
from assay.golden.inputs.values import dtype_of
from assay.golden.registry import Spec
from assay.runtime.errors import unknown
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, with_values
from assay.verify.errors import SettingError

PROTOCOL = "at"  # of such a case: see `assay.verify.harness.runner`
_MOST = 2**31  # elements of a tensor: 8 GiB in float32
_SMALLER = (9, 33, 130, 520)  # sizes at which the fault may show too: one block of a usual size and a bit more


def checked_shapes(
    given: Any,
    definition: Spec,
    option_sets: Iterable[Mapping[str, Any]],
    shapes: Mapping[str, Sequence[int]],
    ties: Mapping[str, str],
) -> tuple[dict[str, int], ...]:
    """Return the checked ``at`` of settings, one mapping or several, with a size for every symbol of any option set.

    A symbol that is left out gets the largest of its sizes in ``shapes``, or the size of the symbol that it is tied to.
    Raises `SettingError`.
    """
    several = [given] if isinstance(given, Mapping) else given
    if not isinstance(several, Sequence) or not all(isinstance(sizes, Mapping) for sizes in several):
        raise SettingError(f"at={given!r}; expected sizes, e.g. {{'R': 8192, 'N': 4096}}, or a list of such")
    sets = [definition.complete(options) for options in option_sets]
    symbols = list(dict.fromkeys(symbol for options in sets for symbol in definition.signature(options).symbols))
    known = {symbol: max(sizes) for symbol, sizes in shapes.items()}
    results = []
    for sizes in several:
        for symbol in sizes:
            if symbol not in symbols:
                raise SettingError(f"at: {unknown('dimension', symbol, symbols)}")
        complete = {symbol: size for symbol in symbols if (size := sizes.get(symbol, known.get(symbol))) is not None}
        complete |= {
            symbol: complete[other] for symbol, other in ties.items() if symbol not in complete and other in complete
        }
        missing = [symbol for symbol in symbols if symbol not in complete]
        if missing:
            raise SettingError(
                f"at: no size for {', '.join(missing)}; {definition.name} has {', '.join(symbols)}, "
                "and only what shapes= restricts may be left out"
            )
        for options in sets:
            _check(definition, options, complete)
        results.append(complete)
    return tuple(results)


def read_sizes(text: str, flag: str) -> dict[str, int]:
    """Return the sizes of a command-line value such as ``R=8192,N=4096``. Raises `SettingError`."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {symbol.strip(): int(size) for symbol, size in pairs}
    except ValueError:
        raise SettingError(f"{flag} {text!r}; expected sizes, e.g. R=8192,N=4096") from None


def _check(definition: Spec, options: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    signature = definition.signature(options)
    of_signature = {symbol: sizes[symbol] for symbol in signature.symbols}
    try:
        check_sizes(definition, signature, options, of_signature)
    except ShapeError as error:
        raise SettingError(f"at: {error}") from None
    for symbol, size in of_signature.items():
        if size < 1:
            raise SettingError(f"at: {symbol}={size}; expected 1 or more")
    for tensor in (*signature.tensors, *signature.returns):
        if math.prod(tensor.shape(of_signature)) > _MOST:
            raise SettingError(
                f"at: {tensor} would have {math.prod(tensor.shape(of_signature)):,} elements; at most 2^31 may be"
            )


def at_cases(sampler: Sampler, at: Iterable[Mapping[str, int]]) -> Iterator[Case]:
    """Yield a case of ordinary numbers for each of these shapes and each set of the listed options."""
    for sizes in at:
        for options in sampler.option_sets():
            yield at_case(sampler, sizes, options)


def at_case(sampler: Sampler, sizes: Mapping[str, int], options: Mapping[str, Any]) -> Case:
    """Return a case of ordinary numbers at a production size, under complete options."""
    signature = sampler.definition.signature(options)
    return Case(
        spec=sampler.definition.qualified_name,
        sizes={symbol: sizes[symbol] for symbol in signature.symbols},
        dtypes={tensor.name: dtype_of(tensor, sampler.dtype) for tensor in signature.tensors},
        options=options,
        values={tensor.name: TILED for tensor in signature.tensors},
        seed=sampler.seed,
        memory="nan",
        protocol=PROTOCOL,
        out_dtype=sampler.out_dtype,
    )


def smaller_cases(case: Case, sampler: Sampler) -> Iterator[Case]:
    """Yield the same call at a few sizes that can be shrunk and explained, also with poison that reveals unwritten
    elements."""
    for most in _SMALLER:
        sizes = {symbol: min(case.sizes[symbol], most) for symbol in sampler.free_symbols(case)}
        if sampler.fits(sizes := {**case.sizes, **sizes}):
            for memory in ("plain", "nan"):
                yield with_values(case, "normal", sizes=sizes, protocol="once", memory=memory)
