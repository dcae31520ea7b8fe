"""Elementwise functions, gated activations, and their gradients.

At the infinities a function has its limit (softplus(-inf) = 0; sin has none and is NaN); outside of its domain it is
NaN, at a pole infinite: log(0) = -inf, and 1/x and 1/sqrt(x) keep the sign of zero, as in IEEE 754.
"""

from __future__ import annotations

from collections.abc import Callable

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.softmax import infinite
from assay.golden.errors import ShapeError
from assay.golden.options import choice, number
from assay.golden.registry import Fault, altered, define


@define("gelu", "x[R,N] -> y[R,N]", options={"approximate": choice("none", "tanh")}, rows="R", columns="N")
def gelu(xp: Arithmetic[N], x: N, *, approximate: str) -> N:
    """x times the normal distribution function, or its tanh approximation (Hendrycks & Gimpel, 2016)."""
    gate = gate_of_gelu(xp, x, approximate)  # of 0 to 2
    return xp.any_formula(lambda: xp.gate_mul(x * 0.5, gate), lambda: xp.gate_mul(x, gate) * 0.5)


def gate_of_gelu(xp: Arithmetic[N], x: N, approximate: str) -> N:
    """1 + erf(x / sqrt 2), or with tanh instead of erf."""
    if approximate == "tanh":
        cubed = x * x * x
        gate = xp.tanh((x + cubed * 0.044715) * xp.constant(lambda sqrt, pi: sqrt(2 / pi)), absolute=True)
    else:
        gate = xp.erf(x * xp.constant(lambda sqrt, pi: 1 / sqrt(2)), absolute=True)
    return gate + 1.0


@define(
    "silu",
    "x[R,N] -> y[R,N]",
    rows="R",
    columns="N",
    faults=(
        Fault("silu_with_beta", "x sigmoid(1.702 x) is computed", lambda xp, x: xp.gate_mul(x, xp.sigmoid(x * 1.702))),
        Fault("silu_factor_dropped", "sigmoid is computed: the factor x is missing", lambda xp, x: xp.sigmoid(x)),
        Fault("relu_for_silu", "max(x, 0) is computed", lambda xp, x: xp.maximum(x, x * 0.0)),
    ),
)
def silu(xp: Arithmetic[N], x: N) -> N:
    """x / (1 + exp(-x))."""
    return xp.gate_mul(x, xp.sigmoid(x))


@define(
    "swiglu",
    "gate[R,N], up[R,N] -> y[R,N]",
    options={"limit": number(None, positive=True, usual=(None, 1.5))},
    stages={"activated": None},
    rows="R",
    columns="N",
    faults=("saturating_store",),
)
def swiglu(xp: Arithmetic[N], gate: N, up: N, *, limit: float | None) -> N:
    """silu(gate) * up, with gate <= limit and |up| <= limit if there is a limit. Stage "activated": silu(gate)."""
    if limit is not None:
        gate, up = xp.minimum(gate, limit), -xp.minimum(-xp.minimum(up, limit), limit)
    return xp.gated_product(gate, xp.sigmoid(gate), up)


FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "erf", "sigmoid", "softplus", "sqrt", "rsqrt", "reciprocal",
    "sin", "cos",
)  # fmt: skip


def _elementary(name: str) -> Callable[[Arithmetic[N], N], N]:
    def definition(xp: Arithmetic[N], x: N) -> N:
        return xp.function(name, x)

    definition.__name__ = name
    return definition


_OVERFLOWING = ("exp", "exp2", "expm1")
_LIMITLESS = ("log", "log2", "log1p", "sqrt", "softplus", "rsqrt", "reciprocal", "sin", "cos")  # unlike exp and tanh
_NEVER_SUBNORMAL = ("cos", "sigmoid", "softplus", "log", "log2", "rsqrt", "sqrt")
for _name in FUNCTIONS:
    define(
        _name,
        "x[R,N] -> y[R,N]",
        rows="R",
        elementwise=True,
        faults=("saturating_store",) * (_name in _OVERFLOWING) + ("infinity_read_as_largest",) * (_name in _LIMITLESS),
        exempt=("flushed_subnormals",) * (_name in _NEVER_SUBNORMAL),
    )(_elementary(_name))


OTHER = {"none": "tanh", "tanh": "none"}


@define(
    "geglu",
    "gate[R,N], up[R,N] -> y[R,N]",
    options={"approximate": choice("none", "tanh")},
    stages={"activated": None},
    rows="R",
    columns="N",
    faults=(
        "saturating_store",
        Fault("geglu_swapped", "gate and up are swapped", altered("geglu", gate=lambda up: up, up=lambda gate: gate),
              "layout"),
        Fault("geglu_approximation", "the tanh approximation replaces erf, or vice versa",
              altered("geglu", approximate=lambda approximate: OTHER[approximate])),
        Fault("geglu_by_silu", "silu(gate) up replaces gelu(gate) up",
              lambda xp, gate, up, **_: xp.gated_product(gate, xp.sigmoid(gate), up)),
        Fault("geglu_half_dropped", "the factor 1/2 is missing", altered("geglu", y=lambda y: y * 2.0)),
        Fault("geglu_by_sigmoid", "gate sigmoid(1.702 gate) replaces GELU",
              lambda xp, gate, up, **_: xp.gated_product(gate, xp.sigmoid(gate * 1.702), up)),
    ),
)  # fmt: skip
def geglu(xp: Arithmetic[N], gate: N, up: N, *, approximate: str) -> N:
    """gelu(gate) * up (Shazeer, *GLU variants improve Transformer*, 2020). Stage "activated": gelu(gate)."""
    opened = gate_of_gelu(xp, gate, approximate)  # of 0 to 2
    return xp.any_formula(
        lambda: xp.gated_product(gate * 0.5, opened, up),
        lambda: xp.gated_product(gate, opened, up) * 0.5,  # gate (1 + erf) may overflow, as oneDNN's does
    )


def _halves(xp: Arithmetic[N], x: N) -> tuple[N, N]:
    """The columns of the gate, and those of what it gates."""
    width = x.shape[-1] // 2
    return x[:, :width], x[:, width:]


@define(
    "gelu_and_mul",
    "x[R,N] -> y[R,N/2]",
    options={"approximate": choice("tanh", "none")},
    stages={"activated": None},
    rows="R",
    faults=(
        "saturating_store",
        Fault("halves_swapped", "the first half of the columns is taken for the factor, the second for the gate",
              altered("gelu_and_mul", x=lambda xp, x: xp.concatenate(_halves(xp, x)[::-1], -1)), "layout"),
        Fault("halves_interleaved", "gate and factor are taken for neighbours, not for halves",
              altered("gelu_and_mul", x=lambda xp, x: xp.concatenate([x[:, 0::2], x[:, 1::2]], -1)), "layout"),
        Fault("halves_approximation", "the tanh approximation replaces erf, or vice versa",
              altered("gelu_and_mul", approximate=lambda approximate: OTHER[approximate])),
        Fault("halves_by_silu", "silu replaces gelu",
              lambda xp, x, *, approximate: xp.gated_product(
               _halves(xp, x)[0], xp.sigmoid(_halves(xp, x)[0]), _halves(xp, x)[1])),
    ),
)  # fmt: skip
def gelu_and_mul(xp: Arithmetic[N], x: N, *, approximate: str) -> N:
    """gelu of the first half of the columns, by its tanh approximation, times the second half."""
    if x.shape[-1] % 2:
        raise ShapeError(f"gelu_and_mul: expected an even number of columns, got N={x.shape[-1]}")
    return geglu(xp, *_halves(xp, x), approximate=approximate)


@define(
    "logsigmoid",
    "x[R,N] -> y[R,N]",
    rows="R",
    elementwise=True,
    faults=(
        "infinity_read_as_largest",
        Fault("log_of_sigmoid", "log(sigmoid(x)) is computed: zero above 17, minus infinity below -88",
              lambda xp, x: xp.log(xp.sigmoid(x)), "precision", needs="numbers beyond 17"),
        Fault("log_of_one_plus_exp", "min(x, 0) - log(1 + e^-|x|) is computed, without log1p: zero above 17",
              lambda xp, x: xp.minimum(x, 0.0) - xp.log(xp.exp(-xp.abs(x)) + 1.0), "precision",
              needs="numbers beyond 10"),
        Fault("log_of_growing_exponential", "-log(1 + e^-x) is computed, which overflows below -88",
              lambda xp, x: -xp.log(xp.exp(-x) + 1.0), "rescale", needs="numbers below -88", emulated=True),
        Fault("logsigmoid_sign", "softplus(x) is computed: the sign", lambda xp, x: xp.function("softplus", x)),
        Fault("logsigmoid_without_log", "sigmoid(x) is computed", lambda xp, x: xp.sigmoid(x)),
    ),
)  # fmt: skip
def logsigmoid(xp: Arithmetic[N], x: N) -> N:
    """log(1 / (1 + exp(-x))), which is -softplus(-x)."""
    return -xp.function("softplus", -x)


@define(
    "swiglu_backward",
    "gate[R,N], up[R,N], dy[R,N] -> dgate[R,N], dup[R,N]",
    rows="R",
    stages={"activated": None, "activated_gradient": None},
    independent=("N",),
    gradient_of="swiglu",
)
def swiglu_backward(xp: Arithmetic[N], gate: N, up: N, dy: N) -> tuple[N, N]:
    """dy up silu'(gate) and dy silu(gate).

    Stages: "activated", silu(gate) as it is multiplied with dy, and "activated_gradient", dy up.
    """
    return xp.silu_gradient(dy, up, gate), xp.gated_product(gate, xp.sigmoid(gate), dy)


def _gelu_slope(xp: Arithmetic[N], x: N, approximate: str) -> N:
    """The derivative of x (1 + erf(x / sqrt 2)) / 2, or of its tanh approximation."""
    opened = gate_of_gelu(xp, x, approximate)
    if approximate == "none":
        density = xp.exp(x * x * -0.5) * xp.constant(lambda sqrt, pi: 1 / sqrt(2 * pi))
        return opened * 0.5 + x * density
    rest = 2.0 - opened  # 1 - tanh
    inner = (x * x * 0.044715 * 3.0 + 1.0) * xp.constant(lambda sqrt, pi: sqrt(2 / pi))
    return opened * 0.5 + x * (opened * rest) * inner * 0.5


@define(
    "geglu_backward",
    "gate[R,N], up[R,N], dy[R,N] -> dgate[R,N], dup[R,N]",
    options={"approximate": choice("none", "tanh")},
    stages={"activated": None, "activated_gradient": None},
    rows="R",
    independent=("N",),
    gradient_of="geglu",
    faults=(
        Fault("geglu_gradients_swapped", "the gradients of gate and up are swapped",
              altered("geglu_backward", dgate=lambda dup: dup, dup=lambda dgate: dgate), "layout"),
        Fault("geglu_gradient_approximation", "the tanh approximation replaces erf, or vice versa",
              altered("geglu_backward", approximate=lambda approximate: OTHER[approximate])),
        Fault("geglu_slope_flat", "of the gate's slope only the first term is taken: Phi(gate)",
              altered("geglu_backward", dgate=lambda xp, gate, up, dy, approximate: (
               xp.product(dy, up, gate_of_gelu(xp, gate, approximate) * 0.5)))),
        Fault("geglu_gradient_without_up", "dgate is not multiplied by up",
              altered("geglu_backward", dgate=lambda xp, gate, dy, approximate: (
               dy * _gelu_slope(xp, gate, approximate)))),
    ),
)  # fmt: skip
def geglu_backward(xp: Arithmetic[N], gate: N, up: N, dy: N, *, approximate: str) -> tuple[N, N]:
    """dy up gelu'(gate) and dy gelu(gate).

    Stages: "activated", gelu(gate) as it is multiplied with dy, and "activated_gradient", dy up. Nothing is said where
    a tensor is infinite: x exp(-x^2 / 2) is infinity times zero there.
    """
    opened = gate_of_gelu(xp, gate, approximate)
    dup = xp.any_formula(
        lambda: xp.gated_product(gate * 0.5, opened, dy), lambda: xp.gated_product(gate, opened, dy) * 0.5
    )
    dgate = xp.product(dy, up, _gelu_slope(xp, gate, approximate), "activated_gradient")
    return xp.unspecified(lambda: infinite(xp, gate, up, dy), dgate), xp.unspecified(
        lambda: infinite(xp, gate, dy), dup
    )


@define(
    "logsigmoid_backward",
    "x[R,N], dy[R,N] -> dx[R,N]",
    rows="R",
    independent=("N",),
    gradient_of="logsigmoid",
    faults=(
        Fault("logsigmoid_gradient_side", "dy sigmoid(x) is computed: the sign of x",
              lambda xp, x, dy: dy * xp.sigmoid(x)),
        Fault("logsigmoid_gradient_sign", "the gradient has the other sign", lambda xp, x, dy: -(dy * xp.sigmoid(-x))),
        Fault("logsigmoid_slope_of_sigmoid", "dy s (1 - s) is computed, the gradient of the sigmoid",
              lambda xp, x, dy: dy * (xp.sigmoid(x) * xp.sigmoid(-x))),
    ),
)  # fmt: skip
def logsigmoid_backward(xp: Arithmetic[N], x: N, dy: N) -> N:
    """dy sigmoid(-x), or dy (1 - sigmoid(x))."""
    dx = xp.any_formula(lambda: dy * xp.sigmoid(-x), lambda: dy * (1.0 - xp.sigmoid(x)))
    return xp.unspecified(lambda: infinite(xp, x, dy), dx)
