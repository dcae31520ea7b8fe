"""Faulty elementary functions."""

import math

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_unary import LN_2, LOG2_E, UNARY, Function, Through32
from .numerics import round_bits

plant = planter(UNARY)


def exp2_short_constant(x: Tensor) -> Tensor:
    """exp(x ln 2) with ln 2 rounded to bfloat16."""
    return torch.exp(x * 0.69140625)


def expm1_two_terms(x: Tensor) -> Tensor:
    """Two terms of the series up to one sixteenth."""
    return torch.where(x.abs() < 0.0625, x + 0.5 * x * x, torch.expm1(x))


def log_guarded(x: Tensor) -> Tensor:
    """log(x + 1e-8)."""
    return torch.log(x + 1e-8)


def log2_short_constant(x: Tensor) -> Tensor:
    """log x * 1.4427."""
    return torch.log(x) * 1.4427


def log1p_clamped(x: Tensor) -> Tensor:
    """Arguments are held above -1."""
    return torch.log1p(x.clamp(min=-1.0 + 2.0**-20))


def tanh_eleven_bits(x: Tensor) -> Tensor:
    """As good as the hardware's approximation."""
    return round_bits(torch.tanh(x), 11)


def tanh_by_sigmoid(x: Tensor) -> Tensor:
    """2 sigmoid(2x) - 1, which cancels near zero."""
    return 2.0 * torch.sigmoid(2.0 * x) - 1.0


def erf_of_handbook(x: Tensor) -> Tensor:
    """Abramowitz & Stegun 7.1.26, good to 1.5e-7 of one."""
    t = 1.0 / (1.0 + 0.3275911 * x.abs())
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return torch.copysign(1.0 - series * torch.exp(-x * x), x)


def erf_by_tanh(x: Tensor) -> Tensor:
    """tanh of a cubic."""
    return torch.tanh(2.0 / math.sqrt(math.pi) * (x + 0.08943 * x * x * x))


def sqrt_by_rsqrt(x: Tensor) -> Tensor:
    """x / sqrt(x) as x rsqrt(x): NaN of zero."""
    return x * torch.rsqrt(x)


def rsqrt_guarded(x: Tensor) -> Tensor:
    """1 / sqrt(x + 1e-6)."""
    return torch.rsqrt(x + 1e-6)


def rsqrt_one_step(x: Tensor) -> Tensor:
    """An estimate of 8 bits and one step of Newton's."""
    estimate = round_bits(torch.rsqrt(x), 8)
    return estimate * (1.5 - 0.5 * x * estimate * estimate)


def rsqrt_of_rounded_root(x: Tensor) -> Tensor:
    """The root is rounded to bfloat16 before its reciprocal is taken."""
    return 1.0 / torch.sqrt(x).to(torch.bfloat16).to(torch.float32)


def reciprocal_twelve_bits(x: Tensor) -> Tensor:
    """As good as the hardware's estimate."""
    return round_bits(1.0 / x, 12)


def reciprocal_guarded(x: Tensor) -> Tensor:
    """1 / (x + 1e-12)."""
    return 1.0 / (x + 1e-12)


def reduced(function: Function) -> Function:
    """The argument less a multiple of 2 pi, all in float32."""

    def evaluate(x: Tensor) -> Tensor:
        return function(x - torch.round(x * (0.5 / math.pi)) * (2.0 * math.pi))

    return evaluate


def sin_small(x: Tensor) -> Tensor:
    """x itself up to 1/64."""
    return torch.where(x.abs() < 2.0**-6, x, torch.sin(x))


def cos_by_sin(x: Tensor) -> Tensor:
    """sin(x + pi / 2)."""
    return torch.sin(x + 0.5 * math.pi)


def exp_folded_in_float16(x: Tensor) -> Tensor:
    """log2 e rounded to float16."""
    return torch.exp2(x * float(torch.tensor(LOG2_E, dtype=torch.float16)))


def log_by_rounded_log2(x: Tensor) -> Tensor:
    """log2 rounded to 16 bits on the way."""
    return round_bits(torch.log2(x), 16) * LN_2


_FLOAT32: dict[str, tuple[str, Function]] = {
    "exp_folded_in_float16": ("exp", exp_folded_in_float16),
    "expm1_two_terms": ("expm1", expm1_two_terms),
    "log_guarded": ("log", log_guarded),
    "log_by_rounded_log2": ("log", log_by_rounded_log2),
    "log2_short_constant": ("log2", log2_short_constant),
    "log1p_clamped": ("log1p", log1p_clamped),
    "tanh_eleven_bits": ("tanh", tanh_eleven_bits),
    "tanh_by_sigmoid": ("tanh", tanh_by_sigmoid),
    "erf_of_handbook": ("erf", erf_of_handbook),
    "erf_by_tanh": ("erf", erf_by_tanh),
    "sqrt_by_rsqrt": ("sqrt", sqrt_by_rsqrt),
    "rsqrt_guarded": ("rsqrt", rsqrt_guarded),
    "rsqrt_one_step": ("rsqrt", rsqrt_one_step),
    "reciprocal_twelve_bits": ("reciprocal", reciprocal_twelve_bits),
    "reciprocal_guarded": ("reciprocal", reciprocal_guarded),
    "sin_reduced_in_float32": ("sin", reduced(torch.sin)),
    "sin_small": ("sin", sin_small),
    "cos_reduced_in_float32": ("cos", reduced(torch.cos)),
    "cos_by_sin": ("cos", cos_by_sin),
}
"""What is wrong in float32; what shows in bfloat16 and float16 too stands in the table below."""

_NARROW: dict[str, tuple[str, Function]] = {
    "exp2_short_constant": ("exp2-bfloat16", exp2_short_constant),
    "tanh_by_sigmoid": ("tanh-bfloat16", tanh_by_sigmoid),
    "erf_by_tanh": ("erf-float16", erf_by_tanh),
    "reciprocal_twelve_bits": ("reciprocal-float16", reciprocal_twelve_bits),
    "cos_by_sin": ("cos-bfloat16", cos_by_sin),
}

FAULTY_UNARY: tuple[Faulty, ...] = (
    *(plant(name, f"{spec}-float32", Through32(function)) for name, (spec, function) in _FLOAT32.items()),
    *(plant(name, twin, Through32(function)) for name, (twin, function) in _NARROW.items()),
    plant("rsqrt_of_rounded_root", "rsqrt-bfloat16", Through32(rsqrt_of_rounded_root)),
)
