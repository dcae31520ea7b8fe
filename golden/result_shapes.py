"""Shapes of results that a signature leaves open: run the definition at a few sizes, and fit arithmetic of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from assay.golden.errors import DefinitionError
from assay.golden.signature import Signature

Shapes = Sequence[tuple[int, ...]]


def with_result_shapes(
    op: str, signature: Signature, attempts: Iterator[Mapping[str, int]], run: Callable[[Mapping[str, int]], Shapes]
) -> Signature:
    """Return the signature with dimensions of the results that have none.

    ``run(sizes)`` returns the shapes of the results at some sizes, and may raise anything for sizes that don't fit;
    ``attempts`` are sizes to begin with. Raises `DefinitionError` if no arithmetic of the sizes fits.
    """
    error, results = None, signature.returns
    for sizes in attempts:
        try:
            base = run(sizes)
        except Exception as raised:  # a reference may raise anything for these sizes
            error = raised
            continue
        if len(base) != len(results):
            names = ", ".join(tensor.name for tensor in results)
            raise DefinitionError(f"{op}: expected {len(results)} result(s) ({names}), got {len(base)}")
        samples = {symbol: list(_samples(symbol, sizes, signature, run, base)) for symbol in sizes}
        fitted = []
        for number, tensor in enumerate(results):
            dims = []
            for axis, size in enumerate(base[number] if not tensor.has_shape else ()):
                pairs = {name: [(n, shapes[number][axis]) for n, shapes in each] for name, each in samples.items()}
                text, unfitted = expression_of(size, pairs, sizes)
                if unfitted or not all(pairs.values()):
                    axes = f"{tensor.name}[{', '.join('?' * len(base[number]))}]"
                    raise DefinitionError(
                        f"{op}: the shape of {tensor.name} follows from no simple arithmetic of the sizes; "
                        f"expected its dimensions, {axes}"
                    )
                dims.append(text)
            fitted.append(replace(tensor, dims=tuple(dims), has_shape=True) if not tensor.has_shape else tensor)
        return replace(signature, returns=tuple(fitted))
    names = ", ".join(tensor.name for tensor in results if not tensor.has_shape)
    raise DefinitionError(
        f"{op}: the shape of {names} isn't known, as the function runs at no sizes that were tried ({error}); expected "
        f"its dimensions, e.g. {names.partition(',')[0]}[{signature.symbols[0] if signature.symbols else ''}]"
    ) from error


def _samples(
    symbol: str,
    sizes: Mapping[str, int],
    signature: Signature,
    run: Callable[[Mapping[str, int]], Shapes],
    base: Shapes,
) -> Iterator[tuple[int, Shapes]]:
    """Yield other sizes of a symbol, and the shapes of the results there, of as many dimensions."""
    size, step = sizes[symbol], signature.divisor(symbol)
    for other in dict.fromkeys((size + step, 2 * size, 3 * size, size + 2 * step, 7 * size + step, 12 * size)):
        try:
            shapes = run({**sizes, symbol: other})
        except Exception:  # it may go with another symbol
            continue
        if [len(shape) for shape in shapes] == [len(shape) for shape in base]:
            yield other, shapes


def expression_of(
    size: int, pairs: Mapping[str, list[tuple[int, int]]], sizes: Mapping[str, int]
) -> tuple[str, set[str]]:
    """Express a dimension by the one symbol, or the product or sum of several, that it changes with.

    ``size`` is the dimension at ``sizes``; ``pairs`` has, of each symbol, other sizes and the dimension there. Returns
    the expression, and the symbols to fix where none fits.
    """
    varying = [name for name, points in pairs.items() if any(value != size for _, value in points)]
    if not varying:
        return str(size), set()
    if len(varying) == 1:
        (name,) = varying
        points = [(sizes[name], size), *pairs[name]]
        for text, function in _forms(name, points[0]):
            if all(function(n) == value for n, value in points):
                return text, set()
        return str(size), set(varying)
    product, total = math.prod(sizes[name] for name in varying), sum(sizes[name] for name in varying)
    factor = size // product if product and size % product == 0 else 0
    if factor and all(v * sizes[name] == size * n for name in varying for n, v in pairs[name]):
        return "*".join(varying) if factor == 1 else f"{factor}*{'*'.join(varying)}", set()
    rest = size - total
    if all(v == size + n - sizes[name] for name in varying for n, v in pairs[name]):
        return "+".join(varying) + (f"{rest:+d}" if rest else ""), set()
    return str(size), {min(varying, key=lambda name: sizes[name])}


def _forms(name: str, point: tuple[int, int]) -> Iterator[tuple[str, Callable[[int], int | None]]]:
    """Yield expressions in one symbol that pass through a point: n, n + c, k n, k n + c, n / k, ceil of quotients."""
    n, value = point
    yield name, lambda x: x
    shift = value - n
    yield f"{name}{shift:+d}", lambda x: x + shift
    if value % n == 0:
        factor = value // n
        yield f"{factor}*{name}", lambda x: factor * x
    for factor in range(2, 5):
        rest = value - factor * n
        yield f"{factor}*{name}{rest:+d}", lambda x, factor=factor, rest=rest: factor * x + rest  # type: ignore[misc]
    for divisor in range(2, 17):
        if n % divisor == 0 and value == n // divisor:
            yield f"{name}/{divisor}", lambda x, d=divisor: x // d if x % d == 0 else None  # type: ignore[misc]
        for add in range(-divisor, divisor + 1):
            if value == -(-(n + add) // divisor):
                yield f"ceil(({name}{add:+d})/{divisor})", lambda x, d=divisor, add=add: -(-(x + add) // d)  # type: ignore[misc]
