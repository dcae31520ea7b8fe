"""Elementary functions, activations, gates, rotation: torch's own, other ways to the same numbers, and faulty ones."""

import math

import torch
from torch import Tensor

from .entry import ALL, honest, planter
from .numerics import (
    LN_2,
    LOG2_E,
    Stage,
    in_float32,
    keep,
    load,
    round_bits,
    store_via_12_bits,
    to_bfloat16,
)

NARROW = ALL[:2]
TANH_SCALE = math.sqrt(2.0 / math.pi)


class Own:
    """torch's own function, in the input's dtype, of a contiguous copy."""

    def __init__(self, function: Stage) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x.contiguous())


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


OWN = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sigmoid", "sqrt", "reciprocal", "sin", "cos", "softplus",
)  # fmt: skip
"""torch's functions that keep the contract in every dtype; its erf and rsqrt do so in float32 only."""
OTHERS: dict[str, Stage] = {
    "exp_by_exp2": lambda x: torch.exp2(x * LOG2_E),
    "exp2_by_exp": lambda x: torch.exp(x * LN_2),
    "log2_by_log": lambda x: torch.log(x) / LN_2,
    "expm1_by_log": expm1_by_log,
    "log1p_by_log": log1p_by_log,
    "tanh_by_expm1": tanh_by_expm1,
    "sigmoid_divided": lambda x: 1.0 / (1.0 + torch.exp(-x)),
    "softplus_split": lambda x: x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs())),
    "rsqrt_divided": lambda x: 1.0 / torch.sqrt(x),
    "sin_by_float64": lambda x: torch.sin(x.double()).float(),
    "cos_by_float64": lambda x: torch.cos(x.double()).float(),
}


def zero_at_minus_infinity(y: Tensor, x: Tensor) -> Tensor:
    """The limit at -inf, where the formula says -inf * 0."""
    return torch.where(x == -math.inf, 0.0, y)


def sigmoid(values: Tensor) -> Tensor:
    """Sigmoid by exp(-|x|), which can't overflow, so that small results stay subnormal instead of zero."""
    small = torch.exp(-values.abs())
    return torch.where(values >= 0, 1.0, small) / (1.0 + small)


def silu_values(values: Tensor) -> Tensor:
    """x * sigmoid(x) in float32, zero at -inf."""
    return zero_at_minus_infinity(values * sigmoid(values), values)


silu = in_float32(silu_values)


@in_float32
def silu_divided(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)); exp overflows below -88.7, where the result then is zero."""
    return zero_at_minus_infinity(x / (1.0 + torch.exp(-x)), x)


@in_float32
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Both forms as most kernels have them: x / 2 (1 + erf(x / sqrt 2)) and x / 2 (1 + tanh(...))."""
    if approximate == "tanh":
        y = 0.5 * x * (1.0 + torch.tanh(TANH_SCALE * (x + 0.044715 * x * x * x)))
    else:
        y = 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))
    return zero_at_minus_infinity(y, x)


@in_float32
def gelu_uncancelled(x: Tensor, *, approximate: str = "none") -> Tensor:
    """erfc, which doesn't cancel for negative x, and 1 + tanh(z) written as 2 * sigmoid(2 z)."""
    if approximate == "tanh":
        y = x * sigmoid(2.0 * TANH_SCALE * (x + 0.044715 * x * x * x))
    else:
        y = 0.5 * x * torch.erfc(x * -math.sqrt(0.5))
    return zero_at_minus_infinity(y, x)


def swiglu(gate: Tensor, up: Tensor, *, limit: float | None = None, activation: Stage = keep) -> Tensor:
    """silu(gate) * up, both clamped first where a limit is given."""
    g, u = load(gate), load(up)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (activation(silu_values(g)) * u).to(gate.dtype)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of each head."""
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


@in_float32
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Each pair of columns turned by its angle; the pairs are neighbours where interleaved, else half a head apart."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else halves(x)
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    turned = first * c - second * s, second * c + first * s
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def slope(gate: Tensor) -> Tensor:
    """silu' as s (1 + x (1 - s)), and its limits."""
    s = sigmoid(gate)
    return torch.where(gate.isinf(), s, s * (1.0 + gate * (1.0 - s)))


@in_float32
def swiglu_backward(
    gate: Tensor, up: Tensor, dy: Tensor, *, derivative: Stage = slope, activation: Stage = keep
) -> tuple[Tensor, Tensor]:
    """dy up silu'(gate), dy silu(gate)."""
    return dy * up * derivative(gate), dy * activation(silu_values(gate))


@in_float32
def swiglu_backward_liger(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dy silu' up, with silu' = silu (1 - s) + s."""
    s = sigmoid(gate)
    slope_of_product = torch.where(gate.isinf(), s, gate * s * (1.0 - s) + s)
    return dy * slope_of_product * up, dy * silu_values(gate)


@in_float32
def swiglu_backward_torch(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dy up s) (1 + x (1 - s)), in which a subnormal first product is multiplied up again."""
    s = sigmoid(gate)
    first = dy * up * s
    return torch.where(gate.isinf(), first, first * (1.0 + gate * (1.0 - s))), dy * silu_values(gate)


GELU = {"approximate": ["none", "tanh"]}
HONEST = (
    *(entry for name in OWN for entry in honest(name, ("", Own(getattr(torch, name, torch.nn.functional.softplus))))),
    *(entry for name in ("erf", "rsqrt") for entry in honest(name, ("", in_float32(getattr(torch, name))))),
    *(
        entry
        for name, function in OTHERS.items()
        for entry in honest(name.partition("_")[0], (f"_{name.partition('_')[2]}", in_float32(function), NARROW))
    ),
    *honest("gelu", ("", gelu), ("_uncancelled", gelu_uncancelled, NARROW), options=GELU),
    *honest("silu", ("", silu), ("_divided", silu_divided)),
    *honest("swiglu", ("", swiglu), options={"limit": [None, 7.0]}),
    *honest("rope", ("", rope), options={"interleaved": [False, True]}),
    *honest(
        "swiglu_backward",
        ("", swiglu_backward),
        ("_torch", swiglu_backward_torch, NARROW),
        ("_liger", swiglu_backward_liger, NARROW),
    ),
)
plant = planter(HONEST)


def erf_of_handbook(x: Tensor) -> Tensor:
    """Abramowitz & Stegun 7.1.26, good to 1.5e-7 of one."""
    t = 1.0 / (1.0 + 0.3275911 * x.abs())
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return torch.copysign(1.0 - series * torch.exp(-x * x), x)


def rsqrt_one_step(x: Tensor) -> Tensor:
    """An estimate of 8 bits and one step of Newton's."""
    estimate = round_bits(torch.rsqrt(x), 8)
    return estimate * (1.5 - 0.5 * x * estimate * estimate)


def reduced(function: Stage) -> Stage:
    """The argument less a multiple of 2 pi, all in float32."""
    return lambda x: function(x - torch.round(x * (0.5 / math.pi)) * (2.0 * math.pi))


def swiglu_rounds_activation(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    return swiglu(gate, up, limit=limit, activation=to_bfloat16)


def rope_angle_of_place(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Interleaved pairs take the angle of index i instead of i / 2."""
    if interleaved:
        index = (2 * torch.arange(cos.shape[1])).clamp(max=max(cos.shape[1] - 1, 0))
        cos, sin = cos[:, index], sin[:, index]
    return rope(x, cos, sin, interleaved=interleaved)


def slope_nan_at_infinity(gate: Tensor) -> Tensor:
    """0 times infinity at either end."""
    s = sigmoid(gate)
    return s * (1.0 + gate * (1.0 - s))


def slope_of_rounded_sigmoid(gate: Tensor) -> Tensor:
    s = to_bfloat16(sigmoid(gate))
    return torch.where(gate.isinf(), s, s * (1.0 + gate * (1.0 - s)))


def slope_with_a_plus(gate: Tensor) -> Tensor:
    s = sigmoid(gate)
    return torch.where(gate.isinf(), s, s * (1.0 + gate * (1.0 + s)))


def tanh_by_sigmoid(x: Tensor) -> Tensor:
    """2 sigmoid(2x) - 1, which cancels near zero."""
    return 2.0 * torch.sigmoid(2.0 * x) - 1.0


def erf_by_tanh(x: Tensor) -> Tensor:
    return torch.tanh(2.0 / math.sqrt(math.pi) * (x + 0.08943 * x * x * x))


def reciprocal_twelve_bits(x: Tensor) -> Tensor:
    """As good as the hardware's estimate."""
    return round_bits(1.0 / x, 12)


def cos_by_sin(x: Tensor) -> Tensor:
    return torch.sin(x + 0.5 * math.pi)


FORMULAS: tuple[tuple[str, str, Stage], ...] = (
    ("exp_folded_in_float16", "exp-float32", lambda x: torch.exp2(x * float(torch.tensor(LOG2_E).half()))),
    ("exp2_short_constant", "exp2-bfloat16", lambda x: torch.exp(x * 0.69140625)),  # ln 2 rounded to bfloat16
    ("expm1_two_terms", "expm1-float32", lambda x: torch.where(x.abs() < 0.0625, x + 0.5 * x * x, torch.expm1(x))),
    ("log_guarded", "log-float32", lambda x: torch.log(x + 1e-8)),
    ("log_by_rounded_log2", "log-float32", lambda x: round_bits(torch.log2(x), 16) * LN_2),
    ("log2_short_constant", "log2-float32", lambda x: torch.log(x) * 1.4427),
    ("log1p_clamped", "log1p-float32", lambda x: torch.log1p(x.clamp(min=-1.0 + 2.0**-20))),
    ("tanh_eleven_bits", "tanh-float32", lambda x: round_bits(torch.tanh(x), 11)),  # as the hardware's approximation
    ("tanh_by_sigmoid", "tanh-float32", tanh_by_sigmoid),
    ("tanh_by_sigmoid", "tanh-bfloat16", tanh_by_sigmoid),
    ("erf_of_handbook", "erf-float32", erf_of_handbook),
    ("erf_by_tanh", "erf-float32", erf_by_tanh),
    ("erf_by_tanh", "erf-float16", erf_by_tanh),
    ("sqrt_by_rsqrt", "sqrt-float32", lambda x: x * torch.rsqrt(x)),  # NaN of zero
    ("rsqrt_guarded", "rsqrt-float32", lambda x: torch.rsqrt(x + 1e-6)),
    ("rsqrt_one_step", "rsqrt-float32", rsqrt_one_step),
    ("rsqrt_of_rounded_root", "rsqrt-bfloat16", lambda x: 1.0 / to_bfloat16(torch.sqrt(x))),
    ("reciprocal_twelve_bits", "reciprocal-float32", reciprocal_twelve_bits),
    ("reciprocal_twelve_bits", "reciprocal-float16", reciprocal_twelve_bits),
    ("reciprocal_guarded", "reciprocal-float32", lambda x: 1.0 / (x + 1e-12)),
    ("sin_reduced_in_float32", "sin-float32", reduced(torch.sin)),
    ("sin_small", "sin-float32", lambda x: torch.where(x.abs() < 2.0**-6, x, torch.sin(x))),
    ("cos_reduced_in_float32", "cos-float32", reduced(torch.cos)),
    ("cos_by_sin", "cos-float32", cos_by_sin),
    ("cos_by_sin", "cos-bfloat16", cos_by_sin),
)
"""Faults of elementary functions, with their twins."""

FAULTY = (
    *(plant(name, twin, in_float32(function)) for name, twin, function in FORMULAS),
    plant("silu_rounds_via_12_bits", "silu-bfloat16", store=store_via_12_bits),
    plant("swiglu_rounds_activation", "swiglu-bfloat16", swiglu_rounds_activation),
    plant("swiglu_backward_nan_at_infinity", "swiglu_backward-float32", derivative=slope_nan_at_infinity),
    plant("swiglu_backward_rounded_sigmoid", "swiglu_backward-bfloat16", derivative=slope_of_rounded_sigmoid),
    plant("swiglu_backward_with_a_plus", "swiglu_backward-float16", derivative=slope_with_a_plus),
    plant("swiglu_backward_rounds_activation", "swiglu_backward-bfloat16", activation=to_bfloat16),
    plant("rope_angle_of_place", "rope-float16", rope_angle_of_place),
)
