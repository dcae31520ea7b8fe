"""Signatures: which tensors an op takes and returns, with symbolic dimensions.

A signature is written as text, ``"a:float8_e4m3fn[M,K], scale[M,ceil(K/128)]=scale -> c[M,N]"``:

- ``name[dims]``: dimensions are symbols (``M``) or expressions over them (``K/2``, ``2*F``, ``ceil(K/128)``, ``1``);
- ``name:dtype[dims]``: a tensor whose dtype the op fixes (``fp8``: any 8-bit float, e4m3 unless another is examined);
  without it the tensor has the dtype under examination;
- ``name[dims]=role``: the meaning of its numbers, which decides how they are drawn: ``real`` (the default), ``scale``,
  ``weight`` (a share, between 0 and 1), ``angle`` (between -1 and 1), ``slope`` (positive, at most 1), ``code(n)``
  (integers below n), ``index(E)`` (integers below the symbol E), ``length(n*m)`` (integers up to n m, inclusive; m is
  the unit of lengths), ``offsets(T)`` (where each part of T begins, and T at the end: never descending), ``pair(n)``
  (neighbours are two indices below n, mostly ascending), ``label(V,i)`` (integers below the symbol V, and i for
  "none"), ``lse`` (log-sum-exps, -inf among them), ``bits`` (any bit pattern); ``real(n)``: numbers that will be
  rounded to codes up to n; for a result ``rounded``: codes that the op rounds numbers to;
- ``*name[dims]``: passed as a keyword.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any

from assay.golden.errors import ShapeError

_TENSOR = re.compile(
    r"\s*(?P<keyword>\*)?(?P<name>\w+)(:(?P<dtype>\w+))?\[(?P<dims>[^\]]*)\](=(?P<role>\w+)(\((?P<bound>[\w*]+)(,(?P<none>-?\d+))?\))?)?\s*"
)
_SYMBOL = re.compile(r"\b[A-Za-z]\w*\b(?!\()")


Inputs = Mapping[str, Callable[[Any], Any]]
"""Distributions of a tensor by name: float64 arrays (NumPy) of `assay.golden.inputs.distributions.Draws`, which has the
shape and the random bits; rounded to the tensor's dtype afterwards."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a signature; ``inputs`` are the op's own distributions of it, instead of those of its role."""

    name: str
    dims: tuple[str, ...]
    dtype: str | None = None
    role: str = "real"
    bound: str = ""
    keyword: bool = False
    none: int | None = None  # an integer beyond the bound that means "none"
    inputs: Inputs = field(default_factory=dict, compare=False)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape under ``sizes``; `ShapeError` if a quotient is not an integer."""
        return tuple(dimension(text, sizes) for text in self.dims)

    @property
    def leading(self) -> tuple[str, ...]:
        """The symbols of its first dimension."""
        return tuple(symbols_in(self.dims[0])) if self.dims else ()

    @property
    def is_integer(self) -> bool:
        """Whether its elements are codes, indices or lengths rather than real numbers."""
        return self.role in ("code", "index", "length", "offsets", "pair", "label", "bits")

    def most(self, sizes: Mapping[str, int]) -> int:
        """Return the largest integer that an element may be, if the role bounds it."""
        return dimension(self.bound, sizes) - (self.role not in ("length", "offsets"))

    def __str__(self) -> str:
        return f"{self.name}[{','.join(self.dims)}]"


@dataclass(frozen=True)
class Signature:
    """The tensors that an op takes and returns; ``steps``: multiples of symbols that options require."""

    tensors: tuple[TensorSpec, ...]
    returns: tuple[TensorSpec, ...]
    steps: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every symbolic dimension, in order of appearance."""
        names = [name for tensor in self.tensors for text in tensor.dims for name in _SYMBOL.findall(text)]
        return tuple(dict.fromkeys(names))

    def divisor(self, symbol: str) -> int:
        """Return the number that a symbol must be a multiple of, by `steps` and so that quotients of it are
        integers."""
        parts = [text.partition("/") for tensor in (*self.tensors, *self.returns) for text in tensor.dims]
        quotients = (int(below) for above, _, below in parts if above == symbol and below.isdigit())
        return math.lcm(self.steps.get(symbol, 1), *quotients)

    def with_inputs(self, inputs: Mapping[str, Inputs]) -> Signature:
        """Return the signature with the op's own distributions of its tensors."""
        return replace(self, tensors=tuple(replace(t, inputs=inputs.get(t.name, {})) for t in self.tensors))

    def bind(self, op: str, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Return the size of every symbol by the tensors' shapes; `ShapeError` if they contradict the signature."""
        if len(shapes) != len(self.tensors):
            names = ", ".join(map(str, self.tensors))
            raise ShapeError(f"{op}: expected {len(self.tensors)} tensors ({names}), got {len(shapes)}")
        sizes: dict[str, int] = {}
        for tensor, shape in zip(self.tensors, shapes, strict=True):
            if len(shape) != len(tensor.dims):
                raise ShapeError(f"{op}: expected {tensor}, got {tensor.name} of shape {tuple(shape)}")
            for text, size in zip(tensor.dims, shape, strict=True):
                if text.isidentifier() and sizes.setdefault(text, size) != size:
                    raise ShapeError(
                        f"{op}: {tensor.name} has {text}={size}, but an earlier tensor has {text}={sizes[text]}; "
                        f"expected {', '.join(map(str, self.tensors))}"
                    )
        for tensor, shape in zip(self.tensors, shapes, strict=True):
            for text, size in zip(tensor.dims, shape, strict=True):
                _solve(text, size, sizes)
                try:
                    expected = dimension(text, sizes)
                except ShapeError as error:
                    raise ShapeError(
                        f"{op}: {tensor.name} has shape {tuple(shape)}, expected {tensor}: {error}"
                    ) from None
                if expected != size:
                    raise ShapeError(
                        f"{op}: {tensor.name} has shape {tuple(shape)}, expected {tensor} = {tensor.shape(sizes)}"
                    )
        return sizes


@cache
def parse(text: str) -> Signature:
    """Return the `Signature` of a text; this module's docstring has the grammar."""
    left, _, right = text.partition("->")
    return Signature(_tensors(left), _tensors(right))


def _tensors(text: str) -> tuple[TensorSpec, ...]:
    tensors, position = [], 0
    while position < len(text.rstrip()):
        match = _TENSOR.match(text, position)
        if match is None:
            raise ValueError(f"signature: expected name[dims] at {text[position:]!r}")
        dims = tuple(part.strip() for part in match["dims"].split(",") if part.strip())
        tensors.append(
            TensorSpec(
                match["name"],
                dims,
                match["dtype"],
                match["role"] or "real",
                match["bound"] or "",
                bool(match["keyword"]),
                None if match["none"] is None else int(match["none"]),
            )
        )
        position = match.end() + 1
    return tuple(tensors)


def symbols_in(text: str) -> list[str]:
    """Return the symbols of a dimension or an expression of sizes, in order."""
    return list(dict.fromkeys(_SYMBOL.findall(text)))


def dimension(text: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a dimension's expression, e.g. ``ceil(K/128)``, as an exact integer."""
    if text in sizes:
        return sizes[text]
    exact = {name: Fraction(size) for name, size in sizes.items()}
    try:
        value = Fraction(eval(text, {"__builtins__": {}, "ceil": math.ceil}, exact))  # text: written by a spec's author
    except NameError as error:
        raise ShapeError(f"the size of {text} is not determined: {error}") from None
    if value.denominator != 1:
        known = ", ".join(f"{name}={size}" for name, size in sizes.items() if name in text)
        raise ShapeError(f"{text} must be a whole number, but {known}")
    return int(value)


def _solve(text: str, size: int, sizes: dict[str, int]) -> None:
    """Bind the last unknown of ``K/g`` = size: g = K / size (1 without groups); of ``K/2``, ``2*F`` and ``B+1``."""
    factor, _, multiple = text.partition("*")
    if factor.isdigit() and multiple.isidentifier() and size % max(int(factor), 1) == 0:
        sizes.setdefault(multiple, size // int(factor))
    symbol, _, more = text.partition("+")
    if more.isdigit() and symbol.isidentifier():
        sizes.setdefault(symbol, size - int(more))
    numerator, _, unknown = text.partition("/")
    if unknown.isdigit() and numerator.isidentifier():
        sizes.setdefault(numerator, size * int(unknown))
    if unknown.isidentifier() and unknown not in sizes and numerator in sizes:
        dividend = sizes[numerator]
        sizes[unknown] = max(1, dividend // size) if size else max(1, dividend)
