"""Cases for the goldens: every op, every option, from plain numbers to adversarial ones.

Shapes, numbers and options come from what the op says of itself, so that a new op needs nothing here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from assay.golden import spec
from assay.golden.inputs.values import draw as distributed
from assay.golden.options import Option
from assay.golden.signature import Signature, TensorSpec

Array = Any
Rng = np.random.Generator

OPTIONS: dict[str, tuple[Any, ...]] = {
    "eps": (1e-5, 1e-6, 2.0**-20, 1.0),
    "group": (128, 1, 3),
    "groups": (1, 2, 3),
    "ignore_index": (-100, 1),
    "k_scale": (1.0, 0.25, 0.3, -3.0),
    "label_smoothing": (0.0, 0.1, 1.0),
    "limit": (None, 0.75, 7.0),
    "offset": (0.0, 1.0, 0.1),
    "scale": (None, 0.1, 1.0, 0.0, -0.5),
    "softcap": (None, 0.5, 30.0),
    "top_k": (1, 2, 3),
    "v_scale": (1.0, 0.5, 0.7, 0.0),
    "window": (None, (0, 0), (1, 0), (2, 3), (9, 9)),
}
"""Values of options, by name, that are drawn beside the usual ones."""

_SIZES: dict[str, tuple[int, ...]] = {
    "B": (1, 2), "D": (1, 2, 3, 8), "Dv": (1, 3, 4), "E": (3, 4), "F": (1, 3), "Hkv": (1, 2), "K": (1, 2, 3, 7, 130),
    "M": (1, 2, 3), "N": (1, 2, 3, 8, 17), "P": (1, 2, 5), "R": (1, 2, 3), "S": (1, 3), "Sk": (1, 2, 4, 7),
    "Sq": (1, 2, 4, 7), "T": (1, 2, 5), "V": (1, 2, 5), "Tk": (1, 3, 7), "Tq": (1, 2, 5), "g": (8,), "k": (1, 2, 3),
    "max_pages": (1, 2, 3), "page": (1, 2, 3),
}  # fmt: skip

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _sign(rng: Rng, shape: tuple[int, ...]) -> Array:
    return rng.choice([-1.0, 1.0], shape)


def _alternating(rng: Rng, shape: tuple[int, ...]) -> Array:
    place = np.arange(math.prod(shape)).reshape(shape)
    return (1.0 - 2.0 * (place % 2)) * (1 + rng.random(shape) * 2.0**-7)


REAL: dict[str, Callable[[Rng, tuple[int, ...], torch.finfo], Array]] = {
    "normal": lambda rng, shape, info: rng.standard_normal(shape),
    "wide": lambda rng, shape, info: 40 * rng.standard_normal(shape),
    "large_mean": lambda rng, shape, info: rng.standard_normal(shape) + rng.choice([-3000.0, 100.0]),
    "cancelling": lambda rng, shape, info: _alternating(rng, shape),
    "ties": lambda rng, shape, info: rng.integers(-1, 2, shape).astype(float),
    "powers": lambda rng, shape, info: _sign(rng, shape) * 2.0 ** rng.integers(-6, 6, shape),
    "lognormal": lambda rng, shape, info: _sign(rng, shape) * 2.0 ** (20 * rng.standard_normal(shape)),
    "constant": lambda rng, shape, info: np.full(shape, rng.standard_normal() * 100),
    "zeros": lambda rng, shape, info: np.zeros(shape),
    "steep": lambda rng, shape, info: rng.choice([-760.0, -745.2, -709.9, -104.0, -88.8, 0.0, 17.3, 89.0], shape),
    "huge": lambda rng, shape, info: _sign(rng, shape) * (0.25 + rng.random(shape)) * min(info.max, 2.0**128),
    "small": lambda rng, shape, info: rng.standard_normal(shape) * max(info.tiny, 2.0**-126) * 4,
    "subnormal": lambda rng, shape, info: rng.integers(-9, 10, shape) * max(info.smallest_normal * info.eps, 2.0**-149),
    "peaked": lambda rng, shape, info: rng.standard_normal(shape) + 900.0 * (rng.random(shape) < 0.2),
}
"""What real numbers look like, by kind."""


def _log_sums(rng: Rng, shape: tuple[int, ...]) -> Array:
    """Some of nothing."""
    return np.where(rng.random(shape) < 0.3, -np.inf, 3 * rng.standard_normal(shape))


def _ragged(rng: Rng, total: int, parts: int) -> Array:
    """Where each part begins, and the end."""
    return np.sort(np.concatenate([[0], rng.integers(0, total + 1, parts - 1), [total]]))


def _pairs(rng: Rng, shape: tuple[int, ...], below: int) -> Array:
    """Neighbours ascend."""
    drawn = rng.permuted(np.broadcast_to(np.arange(below), (math.prod(shape) // 2, below)), axis=1)[:, :2]
    return np.sort(drawn, axis=1).reshape(shape)


def _midpoints(rng: Rng, shape: tuple[int, ...], largest: int, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of half a step between codes, the largest code among them, times a power of two or any number."""
    codes = rng.integers(-2 * largest, 2 * largest + 1, shape) / 2
    codes = np.where(rng.random(shape) < 0.3, rng.choice([-largest, largest], shape), codes)
    unit = rng.choice([1.0, 0.125, 2.0**9, 3.0, 1.7])
    most = torch.finfo(dtype).max
    return torch.from_numpy(np.asarray(codes * unit)).clamp(-most, most).to(dtype)


ROLES: dict[str, tuple[Callable[[Rng, tuple[int, ...]], Array], ...]] = {
    "scale": (lambda rng, shape: rng.random(shape) + 0.01, lambda rng, shape: 2.0 ** rng.integers(-9, 3, shape)),
    "weight": (lambda rng, shape: rng.random(shape), lambda rng, shape: np.ones(shape)),
    "angle": (lambda rng, shape: 2 * rng.random(shape) - 1, lambda rng, shape: rng.choice([0.0, 1.0, -0.5], shape)),
    "lse": (_log_sums, lambda rng, shape: rng.standard_normal(shape) * 200),
    "slope": (lambda rng, shape: 2.0 ** -rng.integers(0, 9, shape), lambda rng, shape: 1 - rng.random(shape)),
}


@dataclass(frozen=True)
class Case:
    """One call of `evaluate`."""

    op: str
    tensors: tuple[torch.Tensor, ...]
    options: Mapping[str, Any]

    def __repr__(self) -> str:
        parts = [f"{tensor.tolist()} ({tensor.dtype}, {tuple(tensor.shape)})" for tensor in self.tensors]
        return f"{self.op}({', '.join(parts)}, **{self.options})"


def real(rng: Rng, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Numbers of a kind, rounded to ``dtype`` and held within its range."""
    info = torch.finfo(dtype)
    values = torch.from_numpy(np.asarray(REAL[kind](rng, shape, info), dtype=np.float64))
    return values.clamp(-info.max, info.max).to(torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)


def values_of(name: str, option: Option) -> list[Any]:
    """What is drawn for an option: its usual values, or else its default, and those of `OPTIONS` that it accepts."""
    further = (value for value in OPTIONS.get(name, ()) if option.accepts(value))
    return list(dict.fromkeys((*(option.usual or (option.default,)), *further)))


@st.composite
def cases(draw: st.DrawFn, op: str, *, without: tuple[str, ...] = ()) -> Case:
    """A case of ``op``: its options, sizes, formats and numbers, none of the kinds ``without``."""
    definition = spec(op)
    options = {name: draw(st.sampled_from(values_of(name, option))) for name, option in definition.options.items()}
    signature = definition.signature(options)
    sizes = draw(_sizes(signature, definition.sizes.multiples, definition.sizes.may_be_zero, options.get("top_k", 1)))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = [kind for kind in sorted(REAL) if kind not in without]
    values = {
        tensor.name: draw(_values(tensor, tensor.shape(sizes), dtype, rng, sizes, kinds))
        for tensor in signature.tensors
    }
    keywords = {tensor.name: values.pop(tensor.name) for tensor in signature.tensors if tensor.keyword}
    return Case(op, tuple(values.values()), options | keywords)


@st.composite
def _sizes(
    draw: st.DrawFn, signature: Signature, multiples: Mapping[str, str], empty: tuple[str, ...], at_least: int
) -> dict[str, int]:
    """A size for every symbol: what is divided by a number is a multiple of it; one symbol may be zero."""
    sizes: dict[str, int] = {}
    nothing = draw(st.sampled_from(("", "", "", *empty)))
    for symbol in sorted(signature.symbols, key=lambda name: name in multiples):
        unit = signature.divisor(symbol)
        if symbol in multiples:
            partner = multiples[symbol]
            unit = math.lcm(unit, int(partner) if partner.isdigit() else sizes.get(partner, 1))
            size = unit * draw(st.sampled_from((1, 2)))
        else:
            size = -(-draw(st.sampled_from(_SIZES.get(symbol, (1, 2, 3)))) // unit) * unit
        sizes[symbol] = 0 if symbol == nothing else max(size, at_least) if symbol == "E" else size
    return sizes


@st.composite
def _values(
    draw: st.DrawFn,
    tensor: TensorSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rng: Rng,
    sizes: Mapping[str, int],
    kinds: list[str],
) -> torch.Tensor:
    given = {"fp8": "float8_e4m3fn"}.get(tensor.dtype or "", tensor.dtype)
    target = getattr(torch, given) if given else dtype
    if tensor.inputs:  # an op's own distributions
        kind, name = draw(st.sampled_from(sorted(tensor.inputs))), str(target).removeprefix("torch.")
        return distributed(tensor, sizes, name, kind, int(rng.integers(2**24)))
    if not target.is_floating_point:
        if tensor.role == "offsets":
            return torch.from_numpy(_ragged(rng, tensor.most(sizes), shape[0] - 1)).to(target)
        if tensor.role == "label":
            labels = rng.integers(0, tensor.most(sizes) + 1, shape)
            return torch.from_numpy(
                np.where(rng.random(shape) < draw(st.sampled_from((0, 0.3, 1))), tensor.none, labels)
            )
        if tensor.role == "pair":
            return torch.from_numpy(_pairs(rng, shape, tensor.most(sizes) + 1)).to(target)
        below = {"bits": 256 if target == torch.uint8 else 2**32}.get(tensor.role)
        below = tensor.most(sizes) + 1 if tensor.role in ("index", "length", "code") else below
        drawn = rng.integers(0, below, shape) if below else rng.integers(-128, 128, shape)
        return torch.from_numpy(drawn if target != torch.int32 else drawn.astype(np.uint32).view(np.int32)).to(target)
    if tensor.role == "real" and tensor.bound and draw(st.booleans()):
        return _midpoints(rng, shape, int(tensor.bound), target)
    if tensor.role == "real":
        return real(rng, shape, target, draw(st.sampled_from(kinds)))
    made = draw(st.sampled_from(ROLES[tensor.role]))(rng, shape)
    return torch.from_numpy(np.asarray(made, dtype=np.float64)).to(target)
