"""Honest elementary functions: torch's own where they keep their contract, and other ways to the same numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .entry import Entry, family
from .numerics import Store, load, nearest

Function = Callable[[Tensor], Tensor]

DTYPES = ("float32", "bfloat16", "float16")
LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)


@dataclass(frozen=True)
class Through32:
    """A function evaluated in float32, whatever the dtype; one that can be pickled."""

    function: Function
    store: Store = nearest

    def __call__(self, x: Tensor) -> Tensor:
        return self.store(self.function(load(x)), x.dtype)


@dataclass(frozen=True)
class Own:
    """torch's own function, in the input's dtype, of a contiguous copy."""

    function: Function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x.contiguous())


def exp_by_exp2(x: Tensor) -> Tensor:
    """exp with log2 e folded in; the infinities are not multiplied."""
    return torch.exp2(x * LOG2_E)


def exp2_by_exp(x: Tensor) -> Tensor:
    """2^x as exp(x ln 2)."""
    return torch.exp(x * LN_2)


def log2_by_log(x: Tensor) -> Tensor:
    """ln x / ln 2."""
    return torch.log(x) / LN_2


def expm1_by_log(x: Tensor) -> Tensor:
    """(u - 1) x / log u for u = exp x, in which u's error cancels (Kahan); beyond that u - 1, or x itself."""
    u = torch.exp(x)
    ratio = (u - 1.0) * x / torch.log(u)
    return torch.where(u == 1.0, x, torch.where(x.abs() < 1.0, ratio, u - 1.0))


def log1p_by_log(x: Tensor) -> Tensor:
    """log(u) x / (u - 1) for u = 1 + x, in which u's error cancels (Kahan); x where u is one."""
    u = 1.0 + x
    return torch.where(u == 1.0, x, torch.where(x.abs() < 1.0, torch.log(u) * (x / (u - 1.0)), torch.log1p(x)))


def tanh_by_expm1(x: Tensor) -> Tensor:
    """-t / (t + 2) for t = expm1(-2 |x|), with x's sign."""
    t = torch.expm1(-2.0 * x.abs())
    return torch.copysign(-t / (t + 2.0), x)


def sigmoid_divided(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), zero where exp overflows."""
    return 1.0 / (1.0 + torch.exp(-x))


def softplus_split(x: Tensor) -> Tensor:
    """max(x, 0) + log1p(exp(-|x|))."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def rsqrt_divided(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return 1.0 / torch.sqrt(x)


def wide(function: Function) -> Function:
    """A function by float64, rounded once."""

    def evaluate(x: Tensor) -> Tensor:
        return function(x.double()).to(torch.float32)

    return evaluate


OWN: dict[str, Function] = {
    name: getattr(torch, name)
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sigmoid", "sqrt", "reciprocal", "sin", "cos",
    )
} | {"softplus": torch.nn.functional.softplus}  # fmt: skip
"""torch's functions that keep the contract in every dtype; its erf and rsqrt do so in float32 only."""

OTHERS: dict[str, tuple[str, Function]] = {
    "exp_by_exp2": ("exp", exp_by_exp2),
    "exp2_by_exp": ("exp2", exp2_by_exp),
    "log2_by_log": ("log2", log2_by_log),
    "expm1_by_log": ("expm1", expm1_by_log),
    "log1p_by_log": ("log1p", log1p_by_log),
    "tanh_by_expm1": ("tanh", tanh_by_expm1),
    "sigmoid_divided": ("sigmoid", sigmoid_divided),
    "softplus_split": ("softplus", softplus_split),
    "rsqrt_divided": ("rsqrt", rsqrt_divided),
    "sin_by_float64": ("sin", wide(torch.sin)),
    "cos_by_float64": ("cos", wide(torch.cos)),
}

UNARY: tuple[Entry, ...] = (
    *(entry for name, function in OWN.items() for entry in family(name, name, Own(function), DTYPES)),
    *(entry for name in ("erf", "rsqrt") for entry in family(name, name, Through32(getattr(torch, name)), DTYPES)),
    *(
        entry
        for name, (spec, function) in OTHERS.items()
        for entry in family(name, spec, Through32(function), ("float32", "bfloat16"))
    ),
)
