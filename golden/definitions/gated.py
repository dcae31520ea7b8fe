"""GELU as a gate, and the logarithm of the sigmoid."""

from __future__ import annotations

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.activation import gate_of_gelu
from assay.golden.errors import ShapeError
from assay.golden.options import choice
from assay.golden.registry import Fault, define

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
        Fault("geglu_swapped", "gate and up are swapped",
              lambda xp, gate, up, *, approximate: geglu(xp, up, gate, approximate=approximate), "layout"),
        Fault("geglu_approximation", "the tanh approximation stands for erf, or the other way",
              lambda xp, gate, up, *, approximate: geglu(xp, gate, up, approximate=OTHER[approximate])),
        Fault("geglu_by_silu", "silu(gate) up stands for gelu(gate) up",
              lambda xp, gate, up, *, approximate: xp.gated_product(gate, xp.sigmoid(gate), up)),
        Fault("geglu_half_dropped", "the factor 1/2 is left out",
              lambda xp, gate, up, *, approximate: geglu(xp, gate, up, approximate=approximate) * 2.0),
        Fault("geglu_by_sigmoid", "gate sigmoid(1.702 gate) stands for GELU",
              lambda xp, gate, up, *, approximate: xp.gated_product(gate, xp.sigmoid(gate * 1.702), up)),
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
              lambda xp, x, *, approximate: geglu(xp, *reversed(_halves(xp, x)), approximate=approximate), "layout"),
        Fault("halves_interleaved", "gate and factor are taken for neighbours, not for halves",
              lambda xp, x, *, approximate: geglu(xp, x[:, 0::2], x[:, 1::2], approximate=approximate), "layout"),
        Fault("halves_approximation", "the tanh approximation stands for erf, or the other way",
              lambda xp, x, *, approximate: geglu(xp, *_halves(xp, x), approximate=OTHER[approximate])),
        Fault("halves_by_silu", "silu stands for gelu",
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
