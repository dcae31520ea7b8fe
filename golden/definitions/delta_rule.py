"""The gated delta rule: linear attention whose state gives up what it holds of a key before it writes that anew."""

from __future__ import annotations

from typing import Any

import numpy as np

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.attention import score_scale
from assay.golden.definitions.heads import SIZES, by_head, by_place, decays, places_ahead, touched
from assay.golden.definitions.norm_family import l2norm
from assay.golden.inputs.distributions import Draws
from assay.golden.inputs.random_bits import normal
from assay.golden.options import flag, number
from assay.golden.registry import Fault, Reduction, define

_CHUNK = 16
_EPS = 1e-6
_SHORT = 2.0**-3  # of keys of 64 normal numbers, whose length is then about one


def _one_of_eight(draws: Draws) -> Any:
    """Keys that are unit vectors, each eighth place the same."""
    return (draws.position() == draws.position(1) % 8).astype(np.float64)


def _chunks_apart(xp: Any, *tensors: Any, **options: Any) -> Any:
    """Every 16 places the state begins at zero."""
    parts = [tensors[2][:, :0]]
    for first in range(0, tensors[0].shape[1], _CHUNK):
        parts.append(gated_delta_rule(xp, *(x[:, first : first + _CHUNK] for x in tensors), **options))
    return xp.concatenate(parts, 1)


def _before(xp: Any, x: Any) -> Any:
    """What the place before has, along the last axis; the first its own."""
    return xp.concatenate([x[..., :1], x[..., :-1]], -1) if x.shape[-1] else x


def _gate_late(xp: Any, q: Any, k: Any, v: Any, gate: Any, beta: Any, **options: Any) -> Any:
    late = xp.concatenate([gate[:, :1], gate[:, :-1]], 1) if gate.shape[1] else gate
    return gated_delta_rule(xp, q, k, v, late, beta, **options)


class _Parts:
    """The triangular system of the whole sequence, taken apart for faults to alter."""

    def __init__(self, xp: Any, tensors: Any, scale: float | None, normalized: bool) -> None:
        q, k, v, gate, beta = _by_head(xp, tensors, normalized)
        self.xp, self.beta, self.right = xp, beta[..., None], v * beta[..., None]
        self.ahead = places_ahead(xp, k.shape[-2])
        self.between = decays(xp, gate, self.ahead <= 0)
        self.late = decays(xp, _before(xp, gate), self.ahead <= 0)
        self.pairs, self.values = xp.matmul(k, xp.swap(k)), v
        self.reads = xp.scores(q, k, score_scale(xp, k.shape[-1], scale))

    def read(self, updates: Any, behind: int = 0) -> Any:
        """The outputs, from updates at least so far behind."""
        weights = self.xp.where(self.ahead <= -behind, self.reads * self.between, 0.0)
        return by_place(self.xp, self.xp.matmul(weights, updates))

    def lower(self, weights: Any) -> Any:
        return self.xp.where(self.ahead < 0, self.pairs * weights, 0.0)

    def solved(self, lower: Any) -> Any:
        return self.xp.solve_unit_lower(lower, self.right)


def _not_corrected(xp: Any, *tensors: Any, **options: Any) -> Any:
    parts = _Parts(xp, tensors, **options)
    return parts.read(parts.right)


def _beta_on_values_alone(xp: Any, *tensors: Any, **options: Any) -> Any:
    parts = _Parts(xp, tensors, **options)
    return parts.read(parts.solved(parts.lower(parts.between)))


def _state_not_decayed(xp: Any, *tensors: Any, **options: Any) -> Any:
    """v - k S, S the state before its decay: from one place to another its decays are those up to the one before."""
    parts = _Parts(xp, tensors, **options)
    own = by_head(xp, tensors[3])
    return parts.read(parts.solved(parts.lower(parts.beta * parts.between / xp.exp(own)[..., None])))


def _first_order(xp: Any, *tensors: Any, **options: Any) -> Any:
    """I - L in place of (I + L)^-1."""
    parts = _Parts(xp, tensors, **options)
    return parts.read(parts.right - xp.matmul(parts.lower(parts.beta * parts.between), parts.right))


def _read_before_written(xp: Any, *tensors: Any, **options: Any) -> Any:
    parts = _Parts(xp, tensors, **options)
    return parts.read(parts.solved(parts.lower(parts.beta * parts.between)), 1)


@define(
    "gated_delta_rule",
    "q[B,T,H,D], k[B,T,H,D], v[B,T,H,Dv], gate:float32[B,T,H], beta[B,T,H] -> o[B,T,H,Dv]",
    options={"scale": number(None, usual=(None, 0.3)), "normalized": flag()},
    stages={"normalized": "input", "scores": "input", "inverse": "input", "updates": "input", "state": "input"},
    rows="B",
    independent=("H",),
    columns="Dv",
    may_be_zero=(),
    sizes=SIZES,
    work="2*B*H*T*(T+D)*(Dv+T)",
    inputs={
        "k": {
            "plain": lambda draws: _SHORT * draws.normal(),
            "one_of_eight": _one_of_eight,
            "repeated": lambda draws: _SHORT * normal(draws.bits("repeated", ignore=[1])),
            "small": lambda draws: 2.0**-10 * draws.normal(),
        },
        "gate": {
            "plain": lambda draws: -(2.0**-4) * draws.uniform(),
            "steep": lambda draws: -1.0 - 4.0 * draws.uniform(),
            "slow": lambda draws: -(2.0**-10) * draws.uniform(),
            "none": lambda draws: np.zeros(draws.shape),
        },
        "beta": {
            "plain": lambda draws: draws.uniform(),
            "one": lambda draws: np.ones(draws.shape),
            "small": lambda draws: 2.0**-6 * draws.uniform(),
        },
    },
    reduction=Reduction("D"),
    grid=("B", "H"),
    faults=(
        "inputs_in_tf32",
        Fault("delta_chunks_apart", "every 16 places the state begins at zero: it is not carried over", _chunks_apart,
              "tail", needs="more than 16 places"),
        Fault("delta_not_corrected", "what the state holds of a key is not taken from its value", _not_corrected,
              needs="keys that have something in common"),
        Fault("delta_gate_ignored", "the state does not decay",
              lambda xp, q, k, v, gate, beta, **options: gated_delta_rule(xp, q, k, v, gate * 0.0, beta, **options),
              needs="a gate, and more than one place"),
        Fault("delta_gate_late", "the state decays by the gate of the place before", _gate_late,
              needs="gates that differ, and more than one place"),
        Fault("delta_state_not_decayed", "a value is corrected by the state before its decay", _state_not_decayed,
              needs="a gate, and more than one place"),
        Fault("delta_beta_ignored", "values and corrections are not multiplied by beta",
              lambda xp, q, k, v, gate, beta, **options: gated_delta_rule(
               xp, q, k, v, gate, beta * 0.0 + 1.0, **options)),
        Fault("delta_beta_on_values_alone", "beta multiplies the value, but not its correction",
              _beta_on_values_alone, needs="keys that have something in common"),
        Fault("delta_first_order", "I - L stands for the inverse of I + L", _first_order,
              needs="keys that have something in common, and more than two places"),
        Fault("delta_read_before_written", "a place sees those before it, not itself", _read_before_written, "mask"),
        Fault("delta_scale_dropped", "the scale is left out",
              lambda xp, *tensors, scale, normalized: gated_delta_rule(xp, *tensors, scale=1.0, normalized=normalized),
              "scale"),
        Fault("delta_normalization", "queries and keys are not normalised where they are to be, or the other way",
              lambda xp, *tensors, scale, normalized: gated_delta_rule(
               xp, *tensors, scale=scale, normalized=not normalized)),
    ),
    exempt=("tail_of_sum_dropped",),
)  # fmt: skip
def gated_delta_rule(
    xp: Arithmetic[N], q: N, k: N, v: N, gate: N, beta: N, *, scale: float | None, normalized: bool
) -> N:
    """o_t = scale q_t S_t, S_t = exp(gate_t) S_(t-1) + beta_t k_t^T (v_t - exp(gate_t) k_t S_(t-1)), head by head.

    Yang, Kautz & Hatamizadeh, *Gated delta networks*, 2024; by recurrence, or chunk by chunk through the inverse of a
    triangular matrix. ``normalized``: q and k are first divided by sqrt(sum x^2 + 1e-6). Keys longer than
    sqrt(2 / beta) make the state grow at each step. ``scale`` is 1 / sqrt(D) where none is given.

    Stages: "normalized" queries and keys; "scores", of a chunk, times their decays; "inverse", of a chunk's matrix;
    "state", as it was before a chunk, where a product takes it; "updates": keys and values times beta or decays,
    queries times decays, what the inverse makes of them, and what is written.
    """
    tensors = _by_head(xp, (q, k, v, gate, beta), normalized)
    q, k, v, gate, beta = tensors
    between = decays(xp, gate, places_ahead(xp, k.shape[-2]) <= 0)
    out = xp.delta_rule(q, k, v, score_scale(xp, k.shape[-1], scale), between, xp.exp(gate), beta)
    return by_place(xp, xp.unspecified(lambda: touched(xp, v, k, gate[..., None], beta[..., None]), out))


def _by_head(xp: Arithmetic[N], tensors: tuple[N, ...], normalized: bool) -> list[N]:
    q, k, *rest = (by_head(xp, x) for x in tensors)
    if normalized:
        q, k = (xp.round(l2norm(xp, x, eps=_EPS, clamp="sum"), "normalized") for x in (q, k))
    return [q, k, *rest]
