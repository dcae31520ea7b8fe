"""The changes of one operation of a definition that experiments try, each with what it is in a user's words.

A change is written in the operations of `assay.golden.arithmetic.base`, so that it has a radius under a contract as the
right definition has. The table is by the name of the operation; `changes_of` yields the plainest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from assay.verify.explanation.experiments.tracing import Change, Step, Traced
from assay.verify.explanation.fault_models.mutators import narrow_accumulator, narrowed

Tensor = torch.Tensor
_TILES = (8, 16, 32, 64, 128)
Words = str


@dataclass(frozen=True)
class Mutation:
    """A change of a step: its name, its words after "the definition gives if", and how unlikely it is (0: plain)."""

    name: str
    words: str
    change: Change
    cost: int = 0


_Found = Iterator[tuple[str, str, Change, int]]


def changes_of(step: Step) -> Iterator[Mutation]:
    """Yield the changes of a step."""
    for name, words, change, cost in _by_operation(step):
        yield Mutation(name, words, change, cost)


_ROUNDED = frozenset(
    ["add", "sub", "mul", "div", "exp", "apply", "function", "sqrt", "rsqrt", "tanh", "sigmoid", "log"]
)


_SUMS = frozenset(["sum", "matmul"])


def roundings_of(step: Step) -> Iterator[Mutation]:
    """Yield the roundings of a step's result to a narrower format, and of a sum on its way: of float32 evaluations."""
    if step.operation in _SUMS:
        yield from _narrow_sums(step)
    if step.operation not in _ROUNDED | _SUMS:
        return
    for format in ("bfloat16", "float16", "float8_e4m3fn"):

        def rounded(t: Any, f: Any, *o: Any, format: str = format, **k: Any) -> Any:
            return t.rearranged(lambda arrays: narrowed(arrays[0], format), [f(*o, **k)])

        yield Mutation(f"rounded_to_{format}", f"{step.subject} is rounded to {format}", rounded, 2)


def _narrow_sums(step: Step) -> Iterator[Mutation]:
    """Yield running sums that are kept in a narrow format, rounded after so many terms or after each size's number."""
    blocks: list[tuple[str, int | str]] = [("each term", 1), *((f"each {block} terms", block) for block in _TILES)]
    blocks += [(f"each {symbol} terms", symbol) for symbol in step.symbols]
    for format in ("bfloat16", "float16"):
        for words, block in blocks:

            def narrow(t: Any, f: Any, *o: Any, format: str = format, block: int | str = block, **k: Any) -> Any:
                size = max(block if isinstance(block, int) else t.xp.case.sizes[block], 1)
                kept = getattr(narrow_accumulator(format, size), step.operation)
                settings = {name: value for name, value in k.items() if name != "rescaled"}
                numbers = [part.number if _is_number(part) else part for part in o]
                return t.rearranged(lambda _: kept(None, *numbers, **settings), [o[0]])

            name = f"kept_in_{format}_by_{block}"
            yield Mutation(name, f"the sum in {step} is rounded to {format} after {words}", narrow, 3)


def _by_operation(step: Step) -> _Found:
    operation = _name(step)
    yield from _BINARY.get(operation, _none)(step)
    if operation in _FUNCTIONS:
        yield from _functions(step, operation)
    if operation in ("add", "sub", "mul", "div", "maximum", "minimum", "at_least", "add_bias", "gate_mul"):
        yield from _scalars(step)


def _none(step: Step) -> _Found:
    return iter(())


def _name(step: Step) -> str:
    is_function = step.operation in ("apply", "function") and step.operands and isinstance(step.operands[0], str)
    return str(step.operands[0]) if is_function else step.operation


def _is_number(value: Any) -> bool:
    return isinstance(value, Traced)


def _ones(t: Any, like: Any) -> Any:
    return t.exact(torch.ones(tuple(like.shape), dtype=torch.float64)) if _is_number(like) else 1.0


def _zeros(t: Any, like: Any) -> Any:
    return t.exact(torch.zeros(tuple(like.shape), dtype=torch.float64)) if _is_number(like) else 0.0


def _filled(t: Any, x: Any, other: Any) -> Any:
    """Return x in the shape that it has together with another operand."""
    if not _is_number(other):
        return x
    shape = tuple(np.broadcast_shapes(tuple(getattr(x, "shape", ())), tuple(other.shape)))
    if not _is_number(x):
        return t.exact(torch.full(shape, float(x), dtype=torch.float64))
    return x if tuple(x.shape) == shape else t.rearranged(lambda arrays: t.native.broadcast_to(arrays[0], shape), [x])


def _sums(step: Step) -> _Found:
    a, b = step.operand(0), step.operand(1)
    yield "left_out", f"{b} is left out", lambda t, f, x, y: _filled(t, x, y), 0
    yield "first_left_out", f"{a} is left out", lambda t, f, x, y: _filled(t, y, x), 0
    yield "subtracted", f"{b} is subtracted, not added", lambda t, f, x, y: x - y, 0
    yield "doubled", f"{b} is added twice", lambda t, f, x, y: f(f(x, y), y), 1
    yield "first_doubled", f"{a} is added twice", lambda t, f, x, y: f(f(x, y), x), 1
    yield "multiplied", f"{b} multiplies, and is not added", lambda t, f, x, y: x * y, 2
    yield from _orders(step)


def _differences(step: Step) -> _Found:
    a, b = step.operand(0), step.operand(1)
    yield "left_out", f"{b} is not subtracted", lambda t, f, x, y: _filled(t, x, y), 0
    yield "added", f"{b} is added, not subtracted", lambda t, f, x, y: x + y, 0
    yield "swapped", f"{a} is subtracted from {b}", lambda t, f, x, y: y - x, 0
    yield "first_left_out", f"{a} is left out", lambda t, f, x, y: _filled(t, -y, x) if _is_number(y) else -y, 1
    yield "first_left_out_positive", f"{b} is taken in place of the difference", (
        lambda t, f, x, y: _filled(t, y, x)), 1  # fmt: skip
    yield "doubled", f"{b} is subtracted twice", lambda t, f, x, y: f(f(x, y), y), 1
    yield from _orders(step)


def _products(step: Step) -> _Found:
    a, b = step.operand(0), step.operand(1)
    if a == b:
        yield "not_squared", f"{a} is not squared", lambda t, f, x, y: x, 0
        yield "magnitude", f"the magnitude of {a} is taken, not the square", lambda t, f, x, y: t.abs(x), 1
        yield "cubed", f"{a} is taken to the third power", lambda t, f, x, y: f(f(x, y), y), 2
        return
    yield "left_out", f"{b} is left out", lambda t, f, x, y: _filled(t, x, y), 0
    yield "first_left_out", f"{a} is left out", lambda t, f, x, y: _filled(t, y, x), 0
    yield "squared", f"{b} is multiplied twice", lambda t, f, x, y: f(f(x, y), y), 0
    yield "first_squared", f"{a} is multiplied twice", lambda t, f, x, y: f(f(x, y), x), 0
    yield "divided", f"{b} divides, and does not multiply", lambda t, f, x, y: x / y, 0
    yield "negated", "the product has the other sign", lambda t, f, x, y: -f(x, y), 1
    yield "added", f"{b} is added, and does not multiply", lambda t, f, x, y: x + y, 2
    yield "plus_one", f"{b} is taken as 1 + {b.strip('`')}", lambda t, f, x, y: f(x, y + 1.0), 1
    yield "first_plus_one", f"{a} is taken as 1 + {a.strip('`')}", lambda t, f, x, y: f(x + 1.0, y), 1
    yield from _orders(step)


def _quotients(step: Step) -> _Found:
    a, b = step.operand(0), step.operand(1)
    yield "left_out", f"nothing is divided by {b}", lambda t, f, x, y: _filled(t, x, y), 0
    yield "multiplied", f"{b} multiplies, and does not divide", lambda t, f, x, y: x * y, 0
    yield "squared", f"it is divided by {b} twice", lambda t, f, x, y: f(f(x, y), y), 1
    yield (
        "first_left_out",
        f"1 is divided by {b}",
        lambda t, f, x, y: _filled(t, 1.0 / y, x) if _is_number(y) else 1.0 / y,
        1,
    )
    yield "swapped", f"{b} is divided by {a}", lambda t, f, x, y: y / x, 1
    yield from _orders(step)


def _scalars(step: Step) -> _Found:
    """Yield other numbers in place of a constant."""
    for index, value in enumerate(step.operands[:2]):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue

        def change(t: Any, f: Any, *given: Any, index: int = index, other: Any = None, **k: Any) -> Any:
            number = other(float(given[index]), t)
            if number is None or not math.isfinite(number):
                return f(*given, **k)
            return f(*given[:index], number, *given[index + 1 :], **k)

        for words, other, cost in _constants(float(value), step):
            label = words.replace("{}", step.operand(index))
            yield f"constant_{words}", label, partial(change, index=index, other=other), cost


def _constants(value: float, step: Step) -> Iterator[tuple[str, Callable[..., float | None], int]]:
    """Yield the words and the values of other numbers; {} is the constant as it is written."""
    simple: tuple[tuple[str, Callable[[float], float]], ...] = (
        ("{} + 1 is taken for {}", lambda c: c + 1),
        ("{} - 1 is taken for {}", lambda c: c - 1),
        ("{} is doubled", lambda c: 2 * c),
        ("{} is halved", lambda c: c / 2),
        ("{} is squared", lambda c: c * c),
        ("the square root of {} is taken", lambda c: math.sqrt(c) if c > 0 else math.nan),
        ("the reciprocal of {} is taken", lambda c: 1 / c if c else math.nan),
        ("{} has the other sign", lambda c: -c),
        ("{} is ten times as large", lambda c: 10 * c),
        ("{} is a tenth of itself", lambda c: c / 10),
        ("{} is multiplied by log2 e", lambda c: c * math.log2(math.e)),
        ("{} is multiplied by ln 2", lambda c: c * math.log(2)),
        ("{} is 4 times as large", lambda c: 4 * c),
        ("{} is a quarter of itself", lambda c: c / 4),
    )
    for words, function in simple:
        yield words, lambda c, t, function=function: function(c), 1
    for number, name in ((1.0, "1"), (0.0, "0"), (2.0, "2"), (1e-5, "1e-5"), (1e-6, "1e-6"), (1e-8, "1e-8"),
                         (1e-12, "1e-12"), (1e-3, "1e-3"), (0.5, "1/2")):  # fmt: skip
        if number != value:
            yield f"{name} is taken for {{}}", lambda c, t, number=number: number, 1
    for tile in _TILES:

        def rounded(c: float, t: Any, tile: int = tile) -> float | None:
            return float(-(-int(c) // tile) * tile) if c.is_integer() and c > 0 else None

        if value.is_integer() and value > 0:
            yield f"{{}} is rounded up to a multiple of {tile}", rounded, 1
    if value.is_integer() and value > 0:
        yield (
            "{} is rounded up to a power of two",
            lambda c, t: float(1 << (int(c) - 1).bit_length()) if c > 0 else None,
            1,
        )
    for symbol, words, function in _OF_SIZES:
        del symbol
        for name in step.symbols:

            def sized(
                c: float, t: Any, name: str = name, function: Callable[[float], float] = function
            ) -> float | None:
                size = t.case.sizes.get(name, 0)
                return function(float(size)) if size > 0 else None

            yield f"{words.format(name)} is taken for {{}}", sized, 2


_OF_SIZES: tuple[tuple[str, str, Callable[[float], float]], ...] = (
    ("n", "{}", lambda n: n),
    ("1/n", "1/{}", lambda n: 1 / n),
    ("sqrt", "sqrt({})", math.sqrt),
    ("rsqrt", "1/sqrt({})", lambda n: 1 / math.sqrt(n)),
)


def _orders(step: Step) -> _Found:
    """Yield the same operation made before the function, the root or the reduction that gives an operand."""
    for index in (0, 1):
        operand, other = step.operand(index), step.operand(1 - index)
        inner = _origin(step.operands[index])
        if inner is None:
            continue
        name = inner[0]
        if name in ("sqrt", "root", "rsqrt", "exp", "log", "tanh", "sigmoid", "erf", "sum", "mean", "max", "matmul",
                    "add",
                    "sub", "mul", "div", "silu", "gate_mul", "softplus", "maximum", "minimum", "round"):  # fmt: skip
            yield f"earlier_{index}", f"{other} is applied before {operand} is formed, to its first operand", (
                partial(_earlier, index=index)), 2  # fmt: skip
            if name in ("add", "sub", "mul", "div", "matmul", "maximum"):
                yield f"earlier_second_{index}", f"{other} is applied to the second operand of {operand} alone", (
                    partial(_earlier, index=index, which=1)), 2  # fmt: skip


def _origin(value: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the operation and the operands that gave a number; of a function its own name."""
    if not _is_number(value) or value.origin is None:
        return None
    name, operands = value.origin
    if name in ("apply", "function"):
        return str(operands[0]), operands[1:]
    return name, operands


def _again(t: Any, origin: tuple[str, tuple[Any, ...]], operands: tuple[Any, ...]) -> Any:
    name = origin[0]
    if name in ("add", "sub", "mul", "div"):
        return t.right(name, *operands)
    if name in ("sqrt", "rsqrt", "exp", "log", "tanh", "sigmoid", "erf", "softplus", "exp2", "log1p", "expm1", "log2"):
        return t.right("apply", name, *operands)
    return t.right(name, *operands)


def _earlier(t: Any, f: Any, x: Any, y: Any, index: int, which: int = 0, **k: Any) -> Any:
    given = (x, y)
    origin = _origin(given[index])
    if origin is None or len(origin[1]) <= which:
        return f(x, y)
    operands = list(origin[1])
    inner = operands[which]
    operands[which] = f(inner, given[1]) if index == 0 else f(given[0], inner)
    return _again(t, origin, tuple(operands))


def _roots(step: Step) -> _Found:
    """Yield eps elsewhere, where the argument of a root is a sum with a constant."""
    origin = _origin(step.operands[-1])
    if origin is None or origin[0] not in ("add", "at_least", "maximum"):
        return

    def parts(x: Any) -> tuple[Any, Any]:
        _, (a, b) = _origin(x)  # type: ignore[misc]
        return (a, b) if not isinstance(a, (int, float)) else (b, a)

    def root(t: Any, x: Any) -> Any:
        return t.right("apply", "sqrt", x)

    inverse = _name(step) == "rsqrt"

    def given(t: Any, x: Any) -> Any:
        return 1.0 / x if inverse else x

    eps = "eps" if any(isinstance(value, float) for value in origin[1]) else "the second term"
    yield "eps_outside", f"{eps} is added outside of the square root", (
        lambda t, f, *o, **k: given(t, root(t, parts(o[-1])[0]) + parts(o[-1])[1])), 0  # fmt: skip
    yield "eps_as_maximum", f"{eps} is a lower bound under the root, not a term of the sum", (
        lambda t, f, *o, **k: f(*o[:-1], _at_least(t, *parts(o[-1])))), 0  # fmt: skip
    yield "eps_as_maximum_outside", f"{eps} is a lower bound of the root, not a term under it", (
        lambda t, f, *o, **k: given(t, _at_least(t, root(t, parts(o[-1])[0]), parts(o[-1])[1]))), 0  # fmt: skip
    yield "eps_squared", f"{eps} is squared", (
        lambda t, f, *o, **k: f(*o[:-1], parts(o[-1])[0] + parts(o[-1])[1] * parts(o[-1])[1])), 0  # fmt: skip


def _at_least(t: Any, x: Any, bound: Any) -> Any:
    return t.right(
        "maximum",
        x,
        bound if _is_number(bound) else t.exact(torch.full(tuple(x.shape), float(bound), dtype=torch.float64)),
    )


_COEFFICIENTS = math.sqrt(2 / math.pi) * math.sqrt(2)


def _clipped(t: Any, x: Any) -> Any:
    zero, one = _zeros(t, x), _ones(t, x)
    return -t.right("maximum", -t.right("maximum", x, zero), -one)


_FUNCTIONS: dict[str, tuple[tuple[str, Callable[[Any, Any], Any]], ...]] = {
    "exp": (
        ("2^x is taken for e^x", lambda t, x: t.right("apply", "exp2", x)),
        ("e^x - 1 is taken for e^x", lambda t, x: t.right("apply", "expm1", x)),
        ("1 + x is taken for e^x", lambda t, x: x + 1.0),
        ("the argument of e^x is cut at zero from above", lambda t, x: t.right("exp", -_at_least(t, -x, 0.0))),
        ("the argument of e^x is cut at zero from below", lambda t, x: t.right("exp", _at_least(t, x, 0.0))),
    ),
    "exp2": (("e^x is taken for 2^x", lambda t, x: t.right("apply", "exp", x)),),
    "expm1": (("e^x is taken for e^x - 1", lambda t, x: t.right("apply", "exp", x)),),
    "log": (
        ("the logarithm to base 2 is taken for the natural one", lambda t, x: t.right("apply", "log2", x)),
        ("x - 1 is taken for log x", lambda t, x: x - 1.0),
        ("log(1 + x) is taken for log x", lambda t, x: t.right("apply", "log1p", x)),
        ("the logarithm to base 10 is taken for the natural one",
         lambda t, x: t.right("apply", "log", x) * (1 / math.log(10))),
    ),
    "log2": (("the natural logarithm is taken for that to base 2", lambda t, x: t.right("apply", "log", x)),),
    "log1p": (
        ("x is taken for log(1 + x)", lambda t, x: x * 1.0),
        ("log x is taken for log(1 + x)", lambda t, x: t.right("apply", "log", x)),
    ),
    "tanh": (
        ("a logistic function is taken for tanh", lambda t, x: t.right("apply", "sigmoid", x)),
        ("x, cut to between -1 and 1, is taken for tanh", lambda t, x: _clipped(t, (x + 1.0) * 0.5) * 2.0 - 1.0),
        ("erf is taken for tanh", lambda t, x: t.right("apply", "erf", x)),
        ("x / (1 + |x|) is taken for tanh", lambda t, x: x / (t.abs(x) + 1.0)),
    ),
    "sigmoid": (
        ("tanh is taken for the logistic function", lambda t, x: t.right("apply", "tanh", x)),
        ("x/6 + 1/2, cut to between 0 and 1, is taken for the logistic function",
         lambda t, x: _clipped(t, x * (1 / 6) + 0.5)),
        ("x/5 + 1/2, cut to between 0 and 1, is taken for the logistic function",
         lambda t, x: _clipped(t, x * 0.2 + 0.5)),
        ("x/4 + 1/2, cut to between 0 and 1, is taken for the logistic function",
         lambda t, x: _clipped(t, x * 0.25 + 0.5)),
        ("the logistic function of 1.702 x is taken", lambda t, x: t.right("apply", "sigmoid", x * 1.702)),
        ("the normal distribution function is taken for the logistic one",
         lambda t, x: (t.right("apply", "erf", x * math.sqrt(0.5)) + 1.0) * 0.5),
    ),
    "erf": (
        ("erf is approximated by tanh, as in the tanh form of GELU",
         lambda t, x: t.right("apply", "tanh", (x + x * x * x * (2 * 0.044715)) * (2 / math.sqrt(math.pi)))),
        ("erf is approximated by a logistic function of 1.702 x, as in quick GELU",
         lambda t, x: t.right("apply", "sigmoid", x * (1.702 * math.sqrt(2))) * 2.0 - 1.0),
        ("tanh is taken for erf", lambda t, x: t.right("apply", "tanh", x)),
        ("erf is taken of x, not of x / sqrt(2)", lambda t, x: t.right("apply", "erf", x * math.sqrt(2))),
    ),
    "sqrt": (("the reciprocal of the square root is taken", lambda t, x: t.right("apply", "rsqrt", x)),),
    "root": (("the reciprocal of the square root is taken", lambda t, x: t.right("apply", "rsqrt", x)),),
    "rsqrt": (
        ("the square root itself is taken, not its reciprocal", lambda t, x: t.right("apply", "sqrt", x)),
        ("the reciprocal is taken without the square root", lambda t, x: 1.0 / x),
    ),
    "softplus": (
        ("max(x, 0) is taken for softplus", lambda t, x: t.right("maximum", x, _zeros(t, x))),
        ("e^x is taken for softplus", lambda t, x: t.right("apply", "exp", x)),
    ),
    "sin": (("the cosine is taken for the sine", lambda t, x: t.right("apply", "cos", x)),),
    "cos": (("the sine is taken for the cosine", lambda t, x: t.right("apply", "sin", x)),),
    "reciprocal": (),
    "abs": (),
    "silu_slope": (("the logistic function is taken for the slope of SiLU",
                    lambda t, x: t.right("apply", "sigmoid", x)),),
}  # fmt: skip


def _functions(step: Step, name: str) -> _Found:
    yield "function_left_out", f"{name} is left out", (
        lambda t, f, *o, **k: o[-1] * 1.0), 0  # fmt: skip
    for number, (words, function) in enumerate(_FUNCTIONS[name]):
        yield f"function_{number}", words, lambda t, f, *o, function=function, **k: function(t, o[-1]), 0
    yield (
        "argument_negated",
        f"{name} is taken of the negative of its argument",
        lambda t, f, *o, **k: f(*o[:-1], -o[-1], **k),
        1,
    )
    yield (
        "argument_doubled",
        f"{name} is taken of twice its argument",
        lambda t, f, *o, **k: f(*o[:-1], o[-1] * 2.0, **k),
        2,
    )
    yield (
        "argument_halved",
        f"{name} is taken of half its argument",
        lambda t, f, *o, **k: f(*o[:-1], o[-1] * 0.5, **k),
        2,
    )
    yield "function_twice", f"{name} is applied twice", lambda t, f, *o, **k: f(*o[:-1], f(*o, **k), **k), 2
    yield "result_negated", f"{name} has the other sign", lambda t, f, *o, **k: -f(*o, **k), 2
    if name in ("sqrt", "rsqrt", "root"):
        yield from _roots(step)


def _cut(x: Any, axis: int, first: int, last: int) -> Any:
    return x[(slice(None),) * (axis % len(x.shape)) + (slice(first, last),)]


def _shortened(x: Any, axis: int, how: str) -> Any:
    size = x.shape[axis]
    if how == "last":
        return _cut(x, axis, 0, max(size - 1, 0))
    if how == "first":
        return _cut(x, axis, 1, size)
    tile = int(how.removesuffix("+"))
    return _cut(x, axis, 0, size // tile * tile or (size if how.endswith("+") else 0))


_ENDS = (
    ("last", "the last term{} is left out"),
    ("first", "the first term{} is left out"),
    *((str(tile), f"the terms{{}} beyond the last whole block of {tile} are left out") for tile in _TILES),
    *((f"{tile}+", f"the terms{{}} beyond the last whole block of {tile}, if there is one, are left out")
      for tile in _TILES),
)  # fmt: skip


def _axis(rest: tuple[Any, ...], keywords: Mapping[str, Any]) -> int:
    return int(rest[0] if rest else keywords.get("axis", -1))


def _totals(step: Step) -> _Found:
    of = f" of the {'mean' if step.operation == 'mean' else 'sum'}"
    for how, words in _ENDS:

        def ended(t: Any, f: Any, x: Any, *rest: Any, how: str = how, **k: Any) -> Any:
            short = _shortened(x, _axis(rest, k), how)
            if step.operation == "mean":  # divided by the right number
                return f(short) * (short.shape[-1] / max(x.shape[-1], 1)) if short.shape[-1] else _zeros(t, f(x))
            return f(short, *rest, **k)

        yield f"without_{how}", words.format(of), ended, 1
    if step.operation == "sum":

        def mean(t: Any, f: Any, x: Any, *rest: Any, **k: Any) -> Any:
            return f(x, *rest, **k) / float(max(x.shape[_axis(rest, k)], 1))

        yield "mean", "the mean is taken, not the sum", mean, 0
        for words, power in (("one less than their number", -1), ("their number plus one", 1)):
            yield f"mean_{power}", f"the sum is divided by {words}", (
                lambda t, f, x, *rest, power=power, **k: f(x, *rest, **k)
                / float(max(x.shape[_axis(rest, k)] + power, 1))), 2  # fmt: skip
    else:
        yield "sum", "the sum is taken, not the mean", lambda t, f, x, **k: f(x, **k) * float(max(x.shape[-1], 1)), 0
        yield "one_less", "the mean is divided by n - 1, not by n", (
            lambda t, f, x, **k: f(x, **k) * (x.shape[-1] / max(x.shape[-1] - 1, 1))), 0  # fmt: skip
    yield "maximum", "the largest is taken, not the sum", (
        lambda t, f, x, *rest, **k: t.right("max", x) if _axis(rest, k) in (-1, len(x.shape) - 1)
        else f(x, *rest, **k)), 2  # fmt: skip
    yield "left_out", "there is no sum: each term is taken for it", lambda t, f, x, *rest, **k: x, 2
    yield "other_axis", "it runs along the axis before", _other_axis, 1
    origin = _origin(step.operands[0])
    if origin is not None and origin[0] == "mul" and origin[1][0] is origin[1][1]:
        yield "square_of_total", "the total is squared, not its terms", (
            lambda t, f, x, *rest, **k: _squared(f(_origin(x)[1][0], *rest, **k))), 1  # type: ignore[index]  # fmt: skip


def _squared(x: Any) -> Any:
    return x * x


def _other_axis(t: Any, f: Any, x: Any, *rest: Any, **k: Any) -> Any:
    axis = _axis(rest, k) % len(x.shape)
    other = axis - 1
    if other < 0 or len(x.shape) < 2:
        return f(x, *rest, **k)
    swapped = t.rearranged(lambda arrays: t.native.swapaxes(arrays[0], axis, other), [x])
    result = f(swapped, *rest, **k)
    if x.shape[axis] == x.shape[other]:
        return t.rearranged(lambda arrays: t.native.swapaxes(arrays[0], axis, other), [result]) * 1.0
    return f(x, *rest, **k)


def _maxima(step: Step) -> _Found:
    yield "at_least_zero", "the maximum is at least zero", lambda t, f, x: t.right("maximum", f(x), _zeros(t, f(x))), 0
    yield "minimum", "the smallest is taken, not the largest", lambda t, f, x: -f(-x), 1
    yield "left_out", "zero is taken for the maximum", lambda t, f, x: _zeros(t, f(x)), 1
    for how, words in _ENDS:
        yield f"without_{how}", words.format(" of the maximum"), (
            lambda t, f, x, how=how: f(_shortened(x, -1, how)) if _shortened(x, -1, how).shape[-1]
            else f(x)), 1  # fmt: skip


def _matrices(step: Step) -> _Found:
    a, b = step.operand(0), step.operand(1)
    if len(step.operands) > 2 or step.keywords.get("plus") is not None:
        plus = step.operand(2)
        yield "plus_left_out", f"{plus} is left out", lambda t, f, x, y, plus=None, **k: f(x, y, **k), 0
        yield "plus_subtracted", f"{plus} is subtracted", lambda t, f, x, y, plus=None, **k: f(x, y, plus=-plus, **k), 0
        yield (
            "plus_doubled",
            f"{plus} is added twice",
            lambda t, f, x, y, plus=None, **k: f(x, y, plus=plus * 2.0, **k),
            1,
        )
    for how, words in _ENDS:

        def ended(t: Any, f: Any, x: Any, y: Any, *rest: Any, how: str = how, **k: Any) -> Any:
            return f(_shortened(x, -1, how), _shortened(y, -2, how), *rest, **k)

        yield (
            f"without_{how}",
            words.format(" of each product"),
            ended,
            0,
        )
    for number, (name, index) in enumerate(((a, 0), (b, 1))):

        def transposed(t: Any, f: Any, *given: Any, index: int = index, **k: Any) -> Any:
            x = given[index]
            if x.shape[-1] != x.shape[-2]:
                return f(*given, **k)
            return f(*given[:index], t.swap(x), *given[index + 1 :], **k)

        yield f"transposed_{number}", f"{name} is transposed", transposed, 1
        yield f"ones_{number}", f"ones are taken for {name}", (
            lambda t, f, *given, index=index, **k: f(
             *given[:index], _ones(t, given[index]), *given[index + 1 :], **k)), 2  # fmt: skip


def _masks(step: Step) -> _Found:
    position = 1 if step.operation == "attend" else 0

    def with_mask(change: Callable[[Tensor], Tensor]) -> Change:
        def altered(t: Any, f: Any, *given: Any, **k: Any) -> Any:
            mask = given[position]
            return f(*given[:position], change(torch.as_tensor(mask)), *given[position + 1 :], **k)

        return altered

    yield "unmasked", "the mask is left out", with_mask(torch.ones_like), 0
    if step.operation == "where":
        yield "masked", "the mask is taken to be false everywhere", with_mask(torch.zeros_like), 0
    yield "inverted", "the mask is inverted", with_mask(torch.logical_not), 1
    for axis in (-1, -2):
        for by in (1, -1):
            which = ("a row", "a column")[axis == -1]
            yield f"mask_shifted_{axis}_{by}", f"the mask is {which} too {'far' if by > 0 else 'near'}", (
                with_mask(partial(_shifted, by=by, axis=axis))), 1  # fmt: skip
    yield "mask_transposed", "the mask is transposed", (
        with_mask(lambda m: m.swapaxes(-1, -2) if m.ndim > 1 and m.shape[-1] == m.shape[-2] else m)), 2  # fmt: skip
    if step.operation == "where" and isinstance(step.operands[2], (int, float)) and math.isinf(step.operands[2]):
        for value in (0.0, -1e4, -1e9):
            yield f"finite_{value}", f"{value:g} is taken for the infinity", (
                lambda t, f, m, x, y, value=value, **k: f(m, x, value, **k)), 1  # fmt: skip


def _shifted(mask: Tensor, by: int, axis: int) -> Tensor:
    """Return a mask whose end is one further along an axis; the first and last keep their own."""
    if mask.ndim < -axis or mask.shape[axis] < 2:
        return mask
    size = mask.shape[axis]
    index = (torch.arange(size) - by).clamp(0, size - 1)
    return mask.index_select(axis % mask.ndim, index)


def _bounds(step: Step) -> _Found:
    yield "bound_left_out", f"{step.operand(1)} is no bound", lambda t, f, x, y: _filled(t, x, y), 0
    yield "only_bound", f"{step.operand(1)} is taken everywhere", lambda t, f, x, y: _filled(t, y, x), 1
    yield "other_bound", "the smaller is taken, not the larger, or the reverse", (
        lambda t, f, x, y: -f(-x, -y)), 1  # fmt: skip
    yield "sum", "the sum is taken, not the larger", lambda t, f, x, y: x + y, 1


def _running(step: Step) -> _Found:
    def reverse(t: Any, x: Any) -> Any:
        return t.rearranged(lambda arrays: t.native.flip(arrays[0], (-1,)), [x])

    yield "exclusive", "each running sum leaves out its own element", lambda t, f, x: f(x) - x, 0
    yield "reversed", "the running sum starts at the end", lambda t, f, x: reverse(t, f(reverse(t, x))), 0
    yield "total", "the total is taken for the running sum", lambda t, f, x: _filled(t, t.right("sum", x), x), 1
    yield "left_out", "there is no running sum", lambda t, f, x: x, 1
    for tile in _TILES:

        def chunks(t: Any, f: Any, x: Any, tile: int = tile) -> Any:
            return (
                t.concatenate([f(x[..., at : at + tile]) for at in range(0, x.shape[-1], tile)], -1)
                if x.shape[-1]
                else f(x)
            )

        yield f"restarted_{tile}", f"the running sum starts again after each {tile}", chunks, 1


def _recurrences(step: Step) -> _Found:
    yield "undecayed", "nothing decays", lambda t, f, d, x: f(_ones(t, d), x), 0
    yield "no_memory", "nothing is kept from step to step", lambda t, f, d, x: x, 1
    yield "late_decay", "the decay of the step before is taken", lambda t, f, d, x: f(_rolled(t, d, 1), x), 1
    yield "early_decay", "the decay of the next step is taken", lambda t, f, d, x: f(_rolled(t, d, -1), x), 1
    yield "late_term", "the term of the step before is taken", lambda t, f, d, x: f(d, _rolled(t, x, 1)), 1
    for tile in _TILES:

        def chunks(t: Any, f: Any, d: Any, x: Any, tile: int = tile) -> Any:
            starts = range(0, x.shape[-1], tile)
            parts = [f(d[..., at : at + tile], x[..., at : at + tile]) for at in starts]
            return t.concatenate(parts, -1) if parts else f(d, x)

        yield f"restarted_{tile}", f"the state is lost after each {tile} steps", chunks, 1


def _rolled(t: Any, x: Any, by: int, axis: int = -1) -> Any:
    return t.rearranged(lambda arrays: t.native.roll(arrays[0], by, axis), [x])


def _indices(step: Step) -> _Found:
    """Yield other integers in place of the index of a lookup."""
    position = 1

    def with_index(change: Callable[[Tensor, int], Tensor]) -> Change:
        def altered(t: Any, f: Any, x: Any, key: Any) -> Any:
            parts = key if isinstance(key, tuple) else (key,)
            axis, changed = 0, []
            for part in parts:
                whole = isinstance(part, torch.Tensor) and part.dtype == torch.int64
                changed.append(change(part, x.shape[axis]) if whole and axis < len(x.shape) else part)
                axis += part is not None
            return f(x, tuple(changed) if isinstance(key, tuple) else changed[0])

        return altered

    del position
    yield "index_later", "the next index is taken", with_index(lambda i, n: (i + 1).clamp(max=n - 1)), 0
    yield (
        "index_later_around",
        "the next index is taken, the first after the last",
        with_index(lambda i, n: (i + 1) % max(n, 1)),
        1,
    )
    yield "index_earlier", "the index before is taken", with_index(lambda i, n: (i - 1).clamp(min=0)), 0
    yield "index_first", "index 0 is taken everywhere", with_index(lambda i, n: i * 0), 0
    yield "index_position", "the position is taken for the index", (
        with_index(lambda i, n: (torch.arange(i.numel()).reshape(i.shape)) % max(n, 1))), 1  # fmt: skip
    yield "index_reversed", "indices count from the end", with_index(lambda i, n: n - 1 - i), 1


def _concatenations(step: Step) -> _Found:
    yield "parts_reversed", "the parts are in reverse order", lambda t, f, parts, *r, **k: f(parts[::-1], *r, **k), 1


def _swaps(step: Step) -> _Found:
    yield "not_transposed", "it is not transposed", lambda t, f, x: x if x.shape[-1] == x.shape[-2] else f(x), 0


def _quantizations(step: Step) -> _Found:
    yield "scale_doubled", "the scale is doubled", lambda t, f, x, s, *r, **k: f(x, s * 2.0, *r, **k), 1
    yield "scale_inverted", "it is multiplied by the scale", lambda t, f, x, s, *r, **k: f(x, 1.0 / s, *r, **k), 1
    yield "zero_left_out", "the zero-point is left out", (
        lambda t, f, x, s, format, zero=None, **k: f(
         x, s, format, zero * 0 if zero is not None else None, **k)), 0  # fmt: skip


def _spans(step: Step) -> _Found:
    for words, change in (("one more than {}", lambda c: c + 1), ("one less than {}", lambda c: c - 1),
                          ("twice {}", lambda c: 2 * c), ("half {}", lambda c: c / 2)):  # fmt: skip
        yield f"span_{words}", f"the scale is the span over {words.format(step.operand(1))}", (
            lambda t, f, s, n, change=change, **k: f(s, change(n), **k)), 0  # fmt: skip


def _constants_of(step: Step) -> _Found:
    for words, change, cost in _constants(math.nan, step):

        def altered(t: Any, f: Any, formula: Any, change: Any = change) -> Any:
            number = change(float(formula(math.sqrt, math.pi)), t)
            return (
                f(formula)
                if number is None or not math.isfinite(number)
                else t.exact(torch.tensor(number, dtype=torch.float64))
            )

        yield f"constant_{words}", words.replace("{}", str(step)), altered, cost


def _scores(step: Step) -> _Found:
    yield "scale_left_out", f"{step.operand(2)} is left out", lambda t, f, q, k, s: f(q, k, 1.0), 0
    yield "scale_squared", f"{step.operand(2)} is applied twice", lambda t, f, q, k, s: f(q, k, s * s), 0
    for symbol in step.symbols:
        for _, words, function in _OF_SIZES[3:]:
            yield f"scale_{words}_{symbol}", f"{words.format(symbol)} is the scale", (
                lambda t, f, q, k, s, symbol=symbol, function=function: f(
                 q, k, function(max(t.case.sizes[symbol], 1)))), 1  # fmt: skip


def _softmaxes(step: Step) -> _Found:
    yield "axis_before", "softmax runs along the axis before", lambda t, f, x: (
        t.swap(f(t.swap(x))) if len(x.shape) > 1 else f(x)), 0  # fmt: skip
    yield (
        "not_normalised",
        "the exponentials are not divided by their sum",
        lambda t, f, x: t.right("exp_shifted", x, t.right("max", x)),
        0,
    )
    for how, words in _ENDS:
        words = words.format(" of the normaliser")
        yield f"without_{how}", words, (
            lambda t, f, x, how=how: _partly_normalised(t, f, x, how)), 1  # fmt: skip


def _partly_normalised(t: Any, f: Any, x: Any, how: str) -> Any:
    short = _shortened(x, -1, how)
    if not short.shape[-1]:
        return f(x)
    return t.right("exp_shifted", x, t.right("logsumexp", short))


_BINARY: dict[str, Callable[[Step], _Found]] = {
    "add": _sums, "add_bias": _sums, "sub": _differences, "mul": _products, "gate_mul": _products, "div": _quotients,
    "sum": _totals, "mean": _totals, "max": _maxima, "matmul": _matrices, "weighted": _matrices, "where": _masks,
    "attend": _masks, "maximum": _bounds, "at_least": _bounds, "minimum": _bounds, "cumsum": _running,
    "recurrence": _recurrences, "index": _indices, "concatenate": _concatenations, "stack": _concatenations,
    "swap": _swaps, "quantize": _quantizations, "quantization_scale": _spans, "constant": _constants_of,
    "scores": _scores, "softmax": _softmaxes, "larger_of": _bounds, "smaller_of": _bounds,
}  # fmt: skip
