"""Signatures: which tensors an op takes and returns, with symbolic dimensions.

A signature is written as text, ``"a:float8_e4m3fn[M,K], scale[M,ceil(K/128)]=scale -> c[M,N]"``:

- ``name[dims]``: dimensions are symbols (``M``) or arithmetic of them (``K/2``, ``2*F``, ``2*L+1``, ``ceil(K/128)``,
  ``1``);
- ``name:dtype[dims]``: a tensor whose dtype the op fixes, by its full or short name (``bf16``, ``f32``, ``i64``;
  ``fp8``: any 8-bit float, e4m3 unless another is examined); without it the tensor has the dtype under examination;
- ``name[dims]=role``: the meaning of its numbers, which decides how they are drawn: ``real`` (the default), ``scale``,
  ``weight`` (a share, between 0 and 1), ``angle`` (between -1 and 1), ``slope`` (positive, at most 1), ``code(n)``
  (integers below n), ``index(E)`` (integers below the symbol E), ``length(n*m)`` (integers up to n m, inclusive; m is
  the unit of lengths), ``offsets(T)`` (where each part of T begins, and T at the end: never descending), ``pair(n)``
  (neighbours are two indices below n, mostly ascending), ``label(V,i)`` (integers below the symbol V, and i for
  "none"), ``lse`` (log-sum-exps, -inf among them), ``bits`` (any bits, of int64 the low half); ``real(n)``:
  numbers that will be rounded to codes up to n; for a result ``rounded``: codes that the op rounds numbers to;
- domains of real numbers are roles too: ``in(a, b)`` (between the ends, which don't belong to it; ``in[a, b]`` and
  ``in[a, b)`` have theirs; ``inf`` is no number of a domain), ``simplex`` (along the last axis not negative, of sum
  one), ``sorted`` (ascending along the last axis), ``spd`` (symmetric positive definite matrices);
- ``*name[dims]``: passed as a keyword;
- ``E=4*G`` among the inputs: a relation of sizes, which stands for E wherever it is a dimension or a bound;
- a result ``name`` without dimensions: whatever shape a reference gives it.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any

from assay.formats.errors import UnknownFormat
from assay.formats.format import ALIASES, FORMATS, format_named
from assay.golden.errors import ShapeError
from assay.runtime.errors import did_you_mean
from assay.runtime.reading import Reader, ReadingError

INTEGERS = ("bool", "int16", "int32", "int64")
"""Dtypes of indices, counts and masks, which are no formats of numbers."""
_SHORT_INTEGERS = {"i16": "int16", "i32": "int32", "i64": "int64"}
_ANY_FP8 = "fp8"
_SYMBOL = re.compile(r"\b[A-Za-z]\w*\b(?!\()")
DOMAINS = ("in", "simplex", "sorted", "spd")
"""Roles of real numbers that only numbers of a domain may have."""
_AXES_OF_DOMAIN = {"simplex": 1, "sorted": 1, "spd": 2}


@dataclass(frozen=True)
class Interval:
    """The real numbers between two ends, each of which may belong to it (``closed``: the lower, the upper)."""

    low: float
    high: float
    closed: tuple[bool, bool] = (False, False)

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.closed[0] else value > self.low
        return math.isfinite(value) and above and (value <= self.high if self.closed[1] else value < self.high)

    def __str__(self) -> str:
        return f"{'(['[self.closed[0]]}{self.low:g}, {self.high:g}{')]'[self.closed[1]]}"


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
    interval: Interval | None = None  # of the role "in"
    has_shape: bool = True  # False of a result without dimensions
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

    @property
    def text(self) -> str:
        """The tensor in the grammar of signatures."""
        dtype = f":{self.dtype}" if self.dtype else ""
        dims = f"[{','.join(self.dims)}]" if self.has_shape else ""
        bound = ",".join(filter(None, (self.bound, "" if self.none is None else str(self.none))))
        role = "" if self.role == "real" and not bound else f"={self.role}{self.interval or (bound and f'({bound})')}"
        return f"{'*' * self.keyword}{self.name}{dtype}{dims}{role}"

    def __str__(self) -> str:
        return f"{self.name}[{','.join(self.dims)}]"


@dataclass(frozen=True)
class Signature:
    """The tensors that an op takes and returns; ``steps``: multiples of symbols that options require."""

    tensors: tuple[TensorSpec, ...]
    returns: tuple[TensorSpec, ...]
    steps: Mapping[str, int] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        inputs, results = (", ".join(tensor.text for tensor in part) for part in (self.tensors, self.returns))
        return f"{inputs} -> {results}"

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every symbolic dimension, in order of appearance."""
        names = [name for tensor in self.tensors for text in tensor.dims for name in _SYMBOL.findall(text)]
        return tuple(dict.fromkeys(names))

    def divisor(self, symbol: str) -> int:
        """Return the number that a symbol must be a multiple of, by `steps` and so that quotients of it are
        integers."""
        texts = [text for tensor in (*self.tensors, *self.returns) for text in tensor.dims if "ceil" not in text]
        pattern = re.compile(rf"(?<![\w*/]){re.escape(symbol)}/(\d+)")
        quotients = (int(below) for text in texts for below in pattern.findall(text))
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
    """Return the `Signature` of a text; this module's docstring has the grammar.

    Raises `SignatureError` of one line, with the character at which the text isn't in the grammar.
    """
    reader = _Reader(text)
    tensors, relations = [], {}
    while not reader.is_at("->") and not reader.is_at(r"\Z"):
        relation = reader.relation()
        if relation is None:
            tensors.append(reader.tensor(is_result=False))
        elif relation[0] in relations:
            raise reader.error(f"one relation for {relation[0]}")
        else:
            relations[relation[0]] = relation[1]
        if reader.is_at(","):
            reader.take(",")
        elif not reader.is_at(r"\Z"):
            reader.take("->", ", or ->", keep=True)
    results = []
    if reader.is_at("->"):
        reader.take("->")
        while not reader.is_at(r"\Z"):
            results.append(reader.tensor(is_result=True))
            if not reader.is_at(r"\Z"):
                reader.take(",", ", between results")
    return Signature(tuple(_related(t, relations) for t in tensors), tuple(_related(t, relations) for t in results))


def check_sizes_of_results(text: str) -> None:
    """Raise `SignatureError` if a result has a symbol that no input has, so that no call determines it."""
    signature, begin = parse(text), text.index("->")
    for symbol in dict.fromkeys(
        name for tensor in signature.returns for dim in tensor.dims for name in symbols_in(dim)
    ):
        if symbol not in signature.symbols:
            at = re.compile(rf"[\[,(*/+-]\s*({re.escape(symbol)})\b").search(text, begin)
            sizes = ", ".join(signature.symbols)
            raise _Reader(text).error(f"a size of an input ({sizes})", at.start(1) if at else begin)


def _related(tensor: TensorSpec, relations: Mapping[str, str]) -> TensorSpec:
    """Return the tensor with the expressions of related sizes in place of their symbols."""

    def replaced(text: str) -> str:
        for _ in relations:  # one may name another
            if text in relations:
                text = relations[text]
            text = _SYMBOL.sub(lambda match: f"({relations[match[0]]})" if match[0] in relations else match[0], text)
        return text

    if not relations:
        return tensor
    return replace(tensor, dims=tuple(map(replaced, tensor.dims)), bound=replaced(tensor.bound))


class SignatureError(ReadingError):
    """A text that isn't in the grammar of signatures."""


def format_or_integer(name: str) -> str:
    """Return the full name of a dtype."""
    name = _SHORT_INTEGERS.get(name, name)
    return name if name in INTEGERS else format_named(name).name


class _Reader(Reader):
    """Reads a signature."""

    failure = SignatureError

    def __init__(self, text: str) -> None:
        super().__init__(text, "signature")

    def relation(self) -> tuple[str, str] | None:
        """Read ``E=4*G``; None where a tensor comes next."""
        if not self.is_at(r"[A-Za-z]\w*\s*="):
            return None
        symbol = self.take(r"\w+")
        self.take("=")
        expression = self._expression(f"a size for {symbol}, as in {symbol}=4*G")
        if symbol in symbols_in(expression):
            raise self.error(f"{symbol} by other sizes", self.at - len(expression))
        return symbol, expression

    def tensor(self, *, is_result: bool) -> TensorSpec:
        """Read a tensor."""
        keyword = self.is_at(r"\*") and bool(self.take(r"\*"))
        name = self.take(r"[A-Za-z_]\w*", "the name of a tensor")
        dtype = self._dtype() if self.is_at(":") and self.take(":") else None
        if has_shape := self.is_at(r"\["):
            self.take(r"\[")
        elif not is_result:
            raise self.error(f"[ and the dimensions of {name}")
        dims: list[str] = []
        while has_shape and not self.is_at(r"\]"):
            dims.append(self._expression(f"a dimension of {name}"))
            if not self.is_at(r"\]"):
                self.take(",", f", or ] after the dimensions of {name}")
        if has_shape:
            self.take(r"\]")
        made = TensorSpec(name, tuple(dims), dtype, keyword=keyword, has_shape=has_shape)
        return self._with_role(made) if self.is_at("=") and self.take("=") else made

    def _dtype(self) -> str:
        """Read a dtype, by any of its names."""
        self.skip_blanks()
        at = self.at
        name = self.take(r"\w+", "a dtype")
        try:
            return name if name == _ANY_FP8 else format_or_integer(name)
        except UnknownFormat:
            names = (*FORMATS, *ALIASES, *INTEGERS, *_SHORT_INTEGERS, _ANY_FP8)
            raise self.error("a dtype", at, did_you_mean(name, names)) from None

    def _with_role(self, tensor: TensorSpec) -> TensorSpec:
        self.skip_blanks()
        at = self.at
        role = self.take(r"[A-Za-z]\w*", f"a role of {tensor.name}, e.g. index(V), in(0, inf) or sorted")
        if role not in ROLES:
            raise self.error(f"a role of {tensor.name} ({', '.join(ROLES)})", at)
        if role == "in":
            interval = self._interval()
            if tensor.dtype is not None and tensor.dtype.startswith(("int", "uint", "bool")):
                raise self.error("real numbers for an interval; integers have code(n) or index(V)", at)
            return replace(tensor, role=role, interval=interval)
        if len(tensor.dims) < _AXES_OF_DOMAIN.get(role, 0):
            raise self.error(f"a role for {len(tensor.dims)} dimensions ({role} needs {_AXES_OF_DOMAIN[role]})", at)
        if role == "spd" and tensor.dims[-1] != tensor.dims[-2]:
            raise self.error(f"a role for matrices that aren't square ({tensor.name} is {tensor.dims[-2:]})", at)
        bound, none = "", None
        if role not in DOMAINS and self.is_at(r"\("):
            self.take(r"\(")
            bound = self._expression(f"the bound of {role}")
            if self.is_at(",") and self.take(","):
                none = int(self.take(r"-?\d+", "the number that means none"))
            self.take(r"\)", f") after the bound of {role}")
        return replace(tensor, role=role, bound=bound, none=none)

    def _interval(self) -> Interval:
        closed = self.take(r"[(\[]", "( or [ and the ends of an interval, e.g. in(0, inf)") == "["
        at = self.at
        low = self._end("the lower end")
        self.take(",", ", between the ends of an interval")
        high = self._end("the upper end")
        interval = Interval(low, high, (closed, self.take(r"[)\]]", ") or ] after the ends of an interval") == "]"))
        if not low < high and not (low == high and all(interval.closed)):
            raise self.error("a lower end below the upper one", at)
        return interval

    def _end(self, what: str) -> float:
        return float(
            self.take(r"[-+]?(inf\b|(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)", f"{what} of an interval, a number or inf")
        )

    def _expression(self, expected: str) -> str:
        """Read arithmetic of sizes up to a comma or bracket that ends it."""
        self.skip_blanks()
        first, depth = self.at, 0
        end = first
        while end < len(self.text) and (depth or self.text[end] not in ",]):") and not self.text.startswith("->", end):
            depth += (self.text[end] == "(") - (self.text[end] == ")")
            end += 1
        text = self.text[first:end].rstrip()
        if not text:
            raise self.error(expected)
        try:
            _checked(ast.parse(text, mode="eval").body)
        except SyntaxError as error:
            raise self.error(expected, first + max((error.offset or 1) - 1, 0)) from None
        except (ValueError, RecursionError, MemoryError):
            raise self.error(expected, first) from None
        except _NotArithmetic as error:
            raise self.error(
                f"{expected}, of symbols, whole numbers, + - * / and ceil()", first + error.args[0]
            ) from None
        self.at = first + len(text)
        return text.replace(" ", "")


ROLES = (
    "real", "scale", "weight", "angle", "slope", "code", "index", "length", "offsets", "pair", "label", "lse", "bits",
    "rounded", *DOMAINS,
)  # fmt: skip
"""The roles that a tensor may have."""


class _NotArithmetic(Exception):
    """A part of an expression, whose position in it is the argument, is no arithmetic of sizes."""


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"ceil": math.ceil, "floor": math.floor, "min": min, "max": max}


def _checked(node: ast.expr) -> None:
    """Raise `_NotArithmetic` unless the expression is arithmetic of sizes."""
    match node:
        case ast.Constant(value=int()) | ast.Name():
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            _checked(left)
            _checked(right)
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _checked(operand)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS and arguments:
            for argument in arguments:
                _checked(argument)
            return
    raise _NotArithmetic(node.col_offset)


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Fraction:
    match node:
        case ast.Constant(value=value):
            return Fraction(value)  # type: ignore[arg-type]
        case ast.Name(id=name):
            return Fraction(sizes[name])
        case ast.BinOp(left=left, op=op, right=right):
            return Fraction(_OPERATORS[type(op)](_value(left, sizes), _value(right, sizes)))
        case ast.UnaryOp(operand=operand):
            return -_value(operand, sizes)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return Fraction(_FUNCTIONS[name](*(_value(argument, sizes) for argument in arguments)))
    raise _NotArithmetic(node.col_offset)


def symbols_in(text: str) -> list[str]:
    """Return the symbols of a dimension or an expression of sizes, in order."""
    return list(dict.fromkeys(_SYMBOL.findall(text)))


def dimension(text: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a dimension's expression, e.g. ``ceil(K/128)``, as an exact integer."""
    if text in sizes:
        return sizes[text]
    try:
        value = _value(_parsed(text), sizes)
    except KeyError as error:
        raise ShapeError(f"the size of {text} is not determined: {error.args[0]} is unknown") from None
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
    _solve_linear(text, size, sizes)


def _solve_linear(text: str, size: int, sizes: dict[str, int]) -> None:
    """Bind the only unknown symbol of an expression that is linear in it."""
    unknown = [symbol for symbol in symbols_in(text) if symbol not in sizes]
    if len(unknown) != 1:
        return
    one, two, three = (_value(_parsed(text), {**sizes, unknown[0]: number}) for number in (1, 2, 3))
    if two - one == three - two != 0:
        solution = 1 + (size - one) / (two - one)
        if solution.denominator == 1 and solution >= 0:
            sizes[unknown[0]] = int(solution)
