"""Linear recurrences along a sequence: the selective scan of state-space models, and linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.attention import score_scale
from assay.golden.definitions.heads import SIZES, by_head, by_place, decays, places_ahead, touched
from assay.golden.options import flag, number
from assay.golden.registry import Fault, Reduction, define
from assay.golden.signature import Inputs

CHUNK = 16
SCAN_SIZES = {"S": (1, 2, 4, 8, 16), "L": (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 100)}
INPUTS: dict[str, Inputs] = {
    "delta": {
        "plain": lambda draws: 2.0**-6 + 0.25 * draws.uniform(),
        "small": lambda draws: 2.0**-10 * (0.5 + draws.uniform()),
        "large": lambda draws: 1.0 + 2.0 * draws.uniform(),
        "powers": lambda draws: 2.0**-3 * (draws.uniform() >= 0),
    },
    "a": {
        "plain": lambda draws: -0.5 - 4.0 * draws.uniform(),
        "slow": lambda draws: -(2.0**-8) * draws.uniform(),
        "steep": lambda draws: -16.0 - 16.0 * draws.uniform(),
        "none": lambda draws: np.zeros(draws.shape),
    },
}


def _chunks_apart(xp: Any, u: Any, delta: Any, a: Any, b: Any, c: Any, skip: Any, **options: Any) -> Any:
    """Every 16 places the state begins at zero."""
    parts = [u[:, :, :0]]
    for first in range(0, u.shape[2], CHUNK):
        u_, delta_, b_, c_ = (x[:, :, first : first + CHUNK] for x in (u, delta, b, c))
        parts.append(selective_scan(xp, u_, delta_, a, b_, c_, skip, **options))
    return xp.concatenate(parts, -1)


def _step_left_out(xp: Any, u: Any, delta: Any, a: Any, b: Any, c: Any, skip: Any, *, softplus: bool) -> Any:
    """The input b u is not multiplied by the step."""
    step = xp.function("softplus", delta) if softplus else delta
    return _scanned(xp, xp.exp(exponent(step, a)), b[:, None] * u[:, :, None], c, u, skip)


def _decay_late(xp: Any, u: Any, delta: Any, a: Any, b: Any, c: Any, skip: Any, *, softplus: bool) -> Any:
    """Each state decays by the step before."""
    step = xp.function("softplus", delta) if softplus else delta
    before = xp.concatenate([step[:, :, :1], step[:, :, :-1]], -1) if step.shape[2] else step
    term = xp.product(step[:, :, None], u[:, :, None], b[:, None])
    return _scanned(xp, xp.exp(exponent(before, a)), term, c, u, skip)


def exponent(step: N, a: N) -> N:
    """Of each decay [B,D,S,L]."""
    return step[:, :, None] * a[:, :, None]


def _scanned(xp: Arithmetic[N], decay: N, term: N, c: N, u: N, skip: N) -> N:
    state = xp.recurrence(decay, term)
    return xp.sum(state * c[:, None], axis=2)[:, :, 0] + u * skip[:, None]


@define(
    "selective_scan",
    "u[B,D,L], delta[B,D,L], a:float32[D,S], b[B,S,L], c[B,S,L], skip:float32[D] -> y[B,D,L]",
    options={"softplus": flag()},
    rows="B",
    independent=("D",),
    may_be_zero=(),
    sizes=SCAN_SIZES,
    long_sizes={"L": (2049, 257)},
    work="8*B*D*S*L",
    sequential_steps="B*ceil(D/16)*L",
    inputs=INPUTS,
    reduction=Reduction("S"),
    grid=("B", "D"),
    faults=(
        Fault("scan_chunks_apart", "every 16 places the state begins at zero: it is not carried over", _chunks_apart,
              "tail", needs="more than 16 places"),
        Fault("scan_step_left_out", "the input is not multiplied by the step", _step_left_out),
        Fault("scan_decay_late", "each state decays by the step before", _decay_late, needs="more than one place"),
        Fault("scan_skip_dropped", "the skip connection is left out",
              lambda xp, u, delta, a, b, c, skip, **options: selective_scan(
               xp, u, delta, a, b, c, skip * 0.0, **options)),
        Fault("scan_softplus", "the step's softplus is left out, or applied where there is none",
              lambda xp, *tensors, softplus: selective_scan(xp, *tensors, softplus=not softplus)),
        Fault("scan_b_and_c_swapped", "b and c are swapped",
              lambda xp, u, delta, a, b, c, skip, **options: selective_scan(
               xp, u, delta, a, c, b, skip, **options), "layout"),
    ),
    exempt=("tail_of_sum_dropped",),
)  # fmt: skip
def selective_scan(xp: Arithmetic[N], u: N, delta: N, a: N, b: N, c: N, skip: N, *, softplus: bool) -> N:
    """y_t = sum_s c_st h_st + skip u_t with h_st = exp(delta_t a_s) h_s(t-1) + delta_t b_st u_t, channel by channel.

    Gu & Dao, *Mamba*, 2023; ``softplus``: delta is softplus of what is given.
    """
    step = xp.function("softplus", delta) if softplus else delta
    term = xp.product(step[:, :, None], u[:, :, None], b[:, None])
    return _scanned(xp, xp.exp(exponent(step, a)), term, c, u, skip)


def _linear_signature(options: Mapping[str, Any]) -> str:
    gate = ", gate:float32[B,T,H]" if options["gated"] else ""
    return f"q[B,T,H,D], k[B,T,H,D], v[B,T,H,Dv]{gate} -> o[B,T,H,Dv]"


def _linear_chunks(xp: Any, q: Any, k: Any, v: Any, *gate: Any, **options: Any) -> Any:
    parts = [v[:, :0]]
    for first in range(0, q.shape[1], CHUNK):
        parts.append(linear_attention(xp, *(x[:, first : first + CHUNK] for x in (q, k, v, *gate)), **options))
    return xp.concatenate(parts, 1)


def _without_itself(xp: Any, q: Any, k: Any, v: Any, *gate: Any, scale: Any, gated: bool) -> Any:
    """Each place sees those before it alone."""
    return _attended(xp, q, k, v, gate, scale, 1)


def _gate_late(xp: Any, q: Any, k: Any, v: Any, *gate: Any, scale: Any, gated: bool) -> Any:
    """The state decays by the gate of the place before."""
    late = tuple(xp.concatenate([x[:, :1], x[:, :-1]], 1) if x.shape[1] else x for x in gate)
    return _attended(xp, q, k, v, late, scale, 0)


@define(
    "linear_attention",
    _linear_signature,
    options={"scale": number(None, usual=(None, 0.3)), "gated": flag()},
    stages={"scores": "input", "state": "input"},
    rows="B",
    independent=("H",),
    columns="Dv",
    may_be_zero=(),
    sizes=SIZES,
    long_sizes={"T": (193,)},
    work="2*B*H*T*(T+D)*Dv",
    inputs={
        "gate": {
            "plain": lambda draws: -(2.0**-4) * draws.uniform(),
            "steep": lambda draws: -1.0 - 4.0 * draws.uniform(),
            "slow": lambda draws: -(2.0**-10) * draws.uniform(),
            "none": lambda draws: np.zeros(draws.shape),
        }
    },
    reduction=Reduction("D"),
    grid=("B", "H"),
    faults=(
        "inputs_in_tf32",
        Fault("linear_chunks_apart", "every 16 places the state begins at zero: it is not carried over",
              _linear_chunks, "tail", needs="more than 16 places"),
        Fault("linear_without_itself", "a place sees those before it, not itself", _without_itself, "mask"),
        Fault("linear_gate_late", "the state decays by the gate of the place before", _gate_late,
              needs="a gate, and more than one place"),
        Fault("linear_gate_ignored", "the gate is ignored",
              lambda xp, q, k, v, *gate, scale, gated: _attended(xp, q, k, v, (), scale, 0), needs="a gate"),
        Fault("linear_scale_dropped", "the scale is left out",
              lambda xp, *tensors, scale, gated: linear_attention(xp, *tensors, scale=1.0, gated=gated), "scale"),
    ),
    exempt=("tail_of_sum_dropped",),
)  # fmt: skip
def linear_attention(xp: Arithmetic[N], q: N, k: N, v: N, *gate: N, scale: float | None, gated: bool) -> N:
    """o_t = scale q_t S_t with S_t = exp(gate_t) S_(t-1) + k_t^T v_t, head by head; no decay where not ``gated``.

    Katharopoulos et al., *Transformers are RNNs*, 2020; by recurrence, or chunk by chunk with scores between the places
    of one (Yang et al., *Gated linear attention*, 2024). Stages: "scores", of a chunk, times their decays; "state", as
    a product takes it. ``scale`` is 1 / sqrt(D) where none is given.
    """
    return _attended(xp, q, k, v, gate, scale, 0)


def _attended(xp: Arithmetic[N], q: N, k: N, v: N, gate: tuple[N, ...], scale: float | None, behind: int) -> N:
    """Each place over those at least so far behind it."""
    batch, length, heads, width = q.shape
    factor = score_scale(xp, width, scale)
    q, k, v = (by_head(xp, x) for x in (q, k, v))
    seen = places_ahead(xp, length) <= -behind
    gates = by_head(xp, gate[0]) if gate else None

    def by_scores() -> N:
        scores = xp.scores(q, k, factor)
        if gates is not None:
            scores = scores * decays(xp, gates, seen)
        return xp.matmul(xp.round(xp.where(seen, scores, 0.0), "scores"), v)

    def by_states() -> N:
        terms = k[..., :, :, None] * v[..., :, None, :]  # [B, H, T, D, Dv]
        flat = terms.reshape(batch, heads, length, width * v.shape[-1])
        decay = xp.exact(xp.native.ones((batch, heads, 1, length)))
        if gates is not None:
            decay = xp.exp(gates)[:, :, None]
        state = xp.swap(xp.recurrence(decay, xp.swap(flat))).reshape(batch, heads, length, width, v.shape[-1])
        queries = (q * factor)[..., None, :]
        stored, plain = xp.matmul(queries, xp.round(state, "state")), xp.matmul(queries, state)
        return by_scores() + (stored - plain)[..., 0, :]

    out = by_scores() if behind else xp.any_formula(by_scores, by_states)
    others = [k] if gates is None else [k, gates[..., None]]
    return by_place(xp, xp.unspecified(lambda: touched(xp, v, *others), out))
