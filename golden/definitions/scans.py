"""Linear recurrences along a sequence: selective scan (Mamba), linear attention, gated delta rule; the scan's
gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.attention import score_scale
from assay.golden.definitions.norms import l2norm
from assay.golden.inputs.distributions import Draws
from assay.golden.inputs.random_bits import integers, normal
from assay.golden.options import flag, number
from assay.golden.registry import Fault, Reduction, altered, define, spec
from assay.golden.signature import Inputs

HEAD_SIZES = {"H": (1, 2, 3, 8, 32), "D": (8, 16, 32, 64, 80, 128, 256), "Dv": (8, 16, 24, 64, 80, 128, 256)}


def by_head(xp: Arithmetic[N], x: N) -> N:
    """[B, T, H, ...] as [B, H, T, ...]."""
    return xp.stack([x[:, :, head] for head in range(x.shape[2])], 1)


def by_position(xp: Arithmetic[N], x: N) -> N:
    """[B, H, T, ...] as [B, T, H, ...]."""
    return xp.stack([x[:, head] for head in range(x.shape[1])], 2)


def positions_ahead(xp: Arithmetic[N, Idx], length: int) -> Idx:
    """Return key position minus query position, [query, key]."""
    position = xp.integers(range(length))
    ahead: Idx = position[None, :] - position[:, None]
    return ahead


def decays(xp: Arithmetic[N, Idx], gates: N, seen: Idx) -> N:
    """Return exp of the sum of ``gates`` [..., T] after position s up to t, [..., t, s]; one where not ``seen``."""
    sums = xp.cumsum(gates)
    return xp.exp(xp.where(seen, sums[..., :, None] - sums[..., None, :], 0.0))


def touched(xp: Arithmetic[N], values: N, *others: N) -> Any:
    """Columns of ``values``, heads of ``others`` [B, H, T, .] with NaN or an infinity, which may reach others."""
    columns = (~xp.is_finite(values)).any(2)[:, :, None, :]
    for x in others:
        columns = columns | (~xp.is_finite(x)).any(-1).any(-1)[..., None, None]
    return columns


def _of_any_magnitude(draws: Draws) -> Any:
    """Numbers of either sign, of every binade from 2^-24 to 2^9: of the large ones the exponential overflows, alone or
    after a few positions."""
    return draws.sign() * np.exp2(integers(draws.bits("exponent"), 34) - 24.0) * (1 + draws.uniform())


CHUNK = 16
SCAN_SIZES = {"S": (1, 2, 4, 8, 16, 32, 64, 128)}  # a state is held in registers, as a power of two
INPUTS: dict[str, Inputs] = {
    "delta": {
        "plain": lambda draws: 2.0**-6 + 0.25 * draws.uniform(),
        "small": lambda draws: 2.0**-10 * (0.5 + draws.uniform()),
        "large": lambda draws: 1.0 + 2.0 * draws.uniform(),
        "powers": lambda draws: 2.0**-3 * (draws.uniform() >= 0),
        "signed": lambda draws: 0.5 * draws.normal(),
        "deep": lambda draws: -4.0 - 16.0 * draws.uniform(),  # of which softplus leaves little
        "late": lambda draws: 4.0 + 8.0 * draws.uniform(),  # which it changes little
        "zeros": lambda draws: np.zeros(draws.shape),
        "far": _of_any_magnitude,
    },
    "a": {
        "plain": lambda draws: -0.5 - 4.0 * draws.uniform(),
        "slow": lambda draws: -(2.0**-8) * draws.uniform(),
        "steep": lambda draws: -16.0 - 16.0 * draws.uniform(),
        "none": lambda draws: np.zeros(draws.shape),
        "signed": lambda draws: 0.5 * draws.normal(),
        "far": _of_any_magnitude,
    },
}


_GATES: Inputs = {
    "plain": lambda draws: -(2.0**-4) * draws.uniform(),
    "steep": lambda draws: -1.0 - 4.0 * draws.uniform(),
    "slow": lambda draws: -(2.0**-10) * draws.uniform(),
    "none": lambda draws: np.zeros(draws.shape),
    "signed": lambda draws: 2.0**-3 * draws.normal(),
}


def _independent_chunks(op: str, axis: int) -> Callable[..., Any]:
    """Return ``op`` with a state that begins at zero every 16 positions along ``axis``."""

    def definition(xp: Any, *tensors: Any, **options: Any) -> Any:
        parts = []
        for first in range(0, tensors[0].shape[axis], CHUNK):
            part = (*(slice(None),) * axis, slice(first, first + CHUNK))
            cut = (x[part] if len(x.shape) > axis else x for x in tensors)  # parameters have fewer dimensions
            parts.append(spec(op).definition(xp, *cut, **options))
        return xp.concatenate(parts, axis)

    return definition


def _late(xp: Any, value: Any) -> Any:
    """Shift gates by one position; the first keeps its own."""
    return xp.concatenate([value[:, :1], value[:, :-1]], 1)


def _step_left_out(xp: Any, u: Any, delta: Any, a: Any, b: Any, c: Any, skip: Any, *, softplus: bool) -> Any:
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


_SCAN: dict[str, Any] = {
    "options": {"softplus": flag()},
    "may_be_zero": (),
    "sizes": SCAN_SIZES,
    "sequential_steps": "B*ceil(D/16)*L",
    "inputs": INPUTS,
    "grid": ("B", "D"),
    "exempt": ("tail_of_sum_dropped",),
}


@define(
    "selective_scan",
    "u[B,D,L], delta[B,D,L], a:float32[D,S], b[B,S,L], c[B,S,L], skip:float32[D] -> y[B,D,L]",
    rows="B",
    independent=("D",),
    work="(8*B*D*S+512)*L",
    reduction=Reduction("L"),
    **_SCAN,
    faults=(
        Fault("scan_chunks_apart", "every 16 positions the state begins at zero: it is not carried over",
              _independent_chunks("selective_scan", 2), "tail", needs="more than 16 positions"),
        Fault("scan_step_left_out", "the input is not multiplied by the step", _step_left_out),
        Fault("scan_decay_late", "each state decays by the step before", _decay_late, needs="more than one position"),
        Fault("scan_skip_dropped", "the skip connection is missing",
              altered("selective_scan", skip=lambda skip: skip * 0.0)),
        Fault("scan_softplus", "the step's softplus is missing, or applied where there is none",
              altered("selective_scan", softplus=lambda softplus: not softplus)),
        Fault("scan_b_and_c_swapped", "b and c are swapped", altered("selective_scan", b=lambda c: c, c=lambda b: b),
              "layout"),
    ),
)  # fmt: skip
def selective_scan(xp: Arithmetic[N], u: N, delta: N, a: N, b: N, c: N, skip: N, *, softplus: bool) -> N:
    """y_t = sum_s c_st h_st + skip u_t with h_st = exp(delta_t a_s) h_s(t-1) + delta_t b_st u_t, channel by channel.

    Gu & Dao, *Mamba*, 2023; ``softplus``: the step is softplus(delta).
    """
    step = xp.function("softplus", delta) if softplus else delta
    term = xp.product(step[:, :, None], u[:, :, None], b[:, None])
    return _scanned(xp, xp.exp(exponent(step, a)), term, c, u, skip)


@define(
    "linear_attention",
    lambda options: (
        "q[B,T,H,D], k[B,T,H,D], v[B,T,H,Dv]"
        + (", gate:float32[B,T,H]" if options["gated"] else "")
        + " -> o[B,T,H,Dv]"
    ),
    options={"scale": number(None, usual=(None, 0.3)), "gated": flag()},
    stages={"scores": "input", "state": "input"},
    rows="B",
    independent=("H",),
    columns="Dv",
    may_be_zero=(),
    sizes=HEAD_SIZES,
    work="2*B*H*T*(T+D)*(Dv+16)",
    inputs={"gate": _GATES},
    reduction=Reduction("T"),
    grid=("B", "H"),
    faults=(
        "inputs_in_tf32",
        Fault("linear_chunks_apart", "every 16 positions the state begins at zero: it is not carried over",
              _independent_chunks("linear_attention", 1), "tail", needs="more than 16 positions"),
        Fault("linear_without_itself", "a position sees those before it, not itself",
              lambda xp, q, k, v, *gate, scale, **_: _attended(xp, q, k, v, gate, scale, 1), "mask"),
        Fault("linear_gate_late", "the state decays by the gate of the position before",
              altered("linear_attention", gate=_late), needs="a gate, and more than one position"),
        Fault("linear_gate_ignored", "the gate is ignored",
              lambda xp, q, k, v, *gate, scale, gated: _attended(xp, q, k, v, (), scale, 0), needs="a gate"),
        Fault("linear_scale_dropped", "the scale is missing", altered("linear_attention", scale=1.0), "scale"),
    ),
    exempt=("tail_of_sum_dropped",),
)  # fmt: skip
def linear_attention(xp: Arithmetic[N], q: N, k: N, v: N, *gate: N, scale: float | None, gated: bool) -> N:
    """o_t = scale q_t S_t with S_t = exp(gate_t) S_(t-1) + k_t^T v_t, head by head; no decay where not ``gated``.

    Katharopoulos et al., *Transformers are RNNs*, 2020; by recurrence, or chunk by chunk with scores between the
    positions of one (Yang et al., *Gated linear attention*, 2024). Stages: "scores", of a chunk, times their decays;
    "state", as a product takes it. ``scale`` is 1 / sqrt(D) where left out.
    """
    return _attended(xp, q, k, v, gate, scale, 0)


def _attended(xp: Arithmetic[N], q: N, k: N, v: N, gate: tuple[N, ...], scale: float | None, behind: int) -> N:
    """Each position over those at least so far behind it."""
    batch, length, heads, width = q.shape
    factor = score_scale(xp, width, scale)
    q, k, v = (by_head(xp, x) for x in (q, k, v))
    seen = positions_ahead(xp, length) <= -behind
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
    return by_position(xp, xp.unspecified(lambda: touched(xp, v, *others), out))


def _late_chunks(xp: Any, decay: Any, term: Any) -> Any:
    """Every 16 positions the gradient of the state begins at zero."""
    count = term.shape[-1]
    parts = [_backwards(xp, decay[..., i : i + CHUNK], term[..., i : i + CHUNK]) for i in range(0, count, CHUNK)]
    return xp.concatenate(parts, -1)


def _own_decay(xp: Any, decay: Any, term: Any) -> Any:
    """The gradient that comes from the position behind decays by the position's own step."""
    first = xp.exact(xp.native.ones(decay[..., :1].shape))
    return _backwards(xp, xp.concatenate([first, decay[..., :-1]], -1) if decay.shape[-1] else decay, term)


def _of_constant_decay(xp: Any, u: Any, delta: Any, skip: Any, dy: Any, du: Any, softplus: bool) -> Any:
    """Return the step's gradient through its product with the input alone."""
    step = xp.function("softplus", delta) if softplus else delta
    ddelta = (du - dy * skip[:, None]) / step * u
    return ddelta * xp.sigmoid(delta) if softplus else ddelta


def _of_last_batch(again: Any, u: Any, delta: Any, b: Any, c: Any, dy: Any) -> Any:
    return again(u=u[-1:], delta=delta[-1:], b=b[-1:], c=c[-1:], dy=dy[-1:])


@define(
    "selective_scan_backward",
    "u[B,D,L], delta[B,D,L], a:float32[D,S], b[B,S,L], c[B,S,L], skip:float32[D], dy[B,D,L] "
    "-> du[B,D,L], ddelta[B,D,L], da:float32[D,S], db[B,S,L], dc[B,S,L], dskip:float32[D]",
    reduced=("B", "D"),
    work="(40*B*D*S+512)*L",
    reduction=Reduction("L"),
    **_SCAN,
    gradient_of="selective_scan",
    faults=(
        Fault("scan_gradient_chunks_apart", "every 16 positions the gradient of the state begins at zero",
              lambda xp, *tensors, softplus: _gradients(xp, *tensors, softplus=softplus, carried=_late_chunks), "tail",
              needs="more than 16 positions"),
        Fault("scan_gradient_own_decay", "the gradient from behind decays by the position's own step, not by the next",
              lambda xp, *tensors, softplus: _gradients(xp, *tensors, softplus=softplus, carried=_own_decay),
              needs="more than one position"),
        Fault("scan_gradient_without_decay", "the gradient of the step leaves out that the decay hangs on it",
              altered("selective_scan_backward", ddelta=_of_constant_decay), needs="more than one position"),
        Fault("scan_gradient_slope", "the slope of softplus is missing, or taken where there is none",
              altered("selective_scan_backward", ddelta=lambda xp, delta, ddelta, softplus: (
               ddelta / xp.sigmoid(delta) if softplus else ddelta * xp.sigmoid(delta)))),
        Fault("scan_gradient_of_last_batch", "the gradients of a and skip are the last batch's alone",
              altered("selective_scan_backward", da=_of_last_batch, dskip=_of_last_batch), "state",
              needs="more than one batch"),
        Fault("scan_gradient_skip_dropped", "du lacks the gradient of the skip connection",
              altered("selective_scan_backward", skip=lambda skip: skip * 0.0)),
    ),
)  # fmt: skip
def selective_scan_backward(
    xp: Arithmetic[N], u: N, delta: N, a: N, b: N, c: N, skip: N, dy: N, *, softplus: bool
) -> tuple[N, N, N, N, N, N]:
    """With h_t the states, d_t the steps and r_t = exp(d_t a): the gradient of h_t is g_t = c_t dy_t + r_(t+1) g_(t+1).

    du = skip dy + d sum_s b g; dd_t = sum_s g_t (a r_t h_(t-1) + b_t u_t), times softplus' slope if asked for; da is
    the sum over batches and positions of g_t d_t r_t h_(t-1), db that over channels of g d u, dc of dy h; dskip = sum
    dy u. The formulas: r_t h_(t-1) as written, or h_t - d_t b_t u_t (Mamba's kernel); sums over s of products, or
    products with a sum. Results that infinities and NaN may reach are unspecified: channels of u, delta, a, skip and
    dy, batches of b and c.
    """
    return _gradients(xp, u, delta, a, b, c, skip, dy, softplus=softplus, carried=_backwards)


def _backwards(xp: Arithmetic[N], decay: N, term: N) -> N:
    """The recurrence from the last position to the first [..., L], each decaying by the position behind it."""
    length = term.shape[-1]
    if not length:
        return term
    backward = xp.integers(range(length - 1, -1, -1))
    first = xp.exact(xp.native.ones(decay[..., :1].shape))
    late = xp.concatenate([first, decay[..., backward][..., :-1]], -1)
    return xp.recurrence(late, term[..., backward])[..., backward]


def _gradients(
    xp: Arithmetic[N], u: N, delta: N, a: N, b: N, c: N, skip: N, dy: N, *, softplus: bool, carried: Any
) -> tuple[N, N, N, N, N, N]:
    step = xp.function("softplus", delta) if softplus else delta
    wide_u, wide_step, wide_dy, wide_b = u[:, :, None], step[:, :, None], dy[:, :, None], b[:, None]  # [B,D,S,L]
    decay = xp.exp(exponent(step, a))
    term = xp.product(wide_step, wide_u, wide_b)
    state = xp.recurrence(decay, term)
    nothing = xp.exact(xp.native.zeros(state[..., :1].shape))
    decayed = xp.any_formula(
        lambda: xp.concatenate([nothing, decay[..., 1:] * state[..., :-1]], -1), lambda: state - term
    )
    g = carried(xp, decay, c[:, None] * wide_dy)

    by_input = xp.sum(g * wide_b, axis=2)[:, :, 0]
    du = xp.any_formula(lambda: step * by_input, lambda: xp.sum(xp.product(g, wide_b, wide_step), axis=2)[:, :, 0])
    du = du + dy * skip[:, None]
    rates = a[:, :, None]
    dstep = xp.any_formula(
        lambda: by_input * u + xp.sum(xp.product(g, rates, decayed), axis=2)[:, :, 0],
        lambda: xp.sum(g * (rates * decayed + wide_b * wide_u), axis=2)[:, :, 0],
    )
    ddelta = dstep * xp.sigmoid(delta) if softplus else dstep
    da, dskip = _over_batches(xp, xp.product(g, wide_step, decayed)), _over_batches(xp, dy * u)
    db = xp.sum(xp.product(g, wide_step, wide_u), axis=1)[:, 0]
    dc = xp.sum(state * wide_dy, axis=1)[:, 0]

    def channels() -> Any:
        mask = _strange(xp, u) | _strange(xp, delta) | _strange(xp, dy) | _strange(xp, a) | ~xp.is_finite(skip)
        return mask | (_strange(xp, b) | _strange(xp, c)).any(-1)[:, None]

    du, ddelta = (xp.unspecified(lambda: channels()[..., None], x) for x in (du, ddelta))
    db, dc = (xp.unspecified(lambda: channels().any(-1)[:, None, None], x) for x in (db, dc))
    da = xp.unspecified(lambda: channels().any(0)[:, None], da)
    return du, ddelta, da, db, dc, xp.unspecified(lambda: channels().any(0), dskip)


def _over_batches(xp: Arithmetic[N], x: N) -> N:
    """The sum over batches and positions of x[B, ..., L]."""
    return xp.sum(xp.concatenate([x[batch] for batch in range(x.shape[0])], -1))[..., 0]


def _strange(xp: Arithmetic[N], x: N) -> Any:
    """Where x[..., L] has an infinity or NaN at some position."""
    mask: Any = ~xp.is_finite(x)
    return mask.any(-1)


_EPS = 1e-6
_SHORT = 2.0**-3  # of keys of 64 normal numbers, whose length is then about one


def _one_of_eight(draws: Draws) -> Any:
    """Return keys that are unit vectors, the same at every eighth position."""
    return (draws.position() == draws.position(1) % 8).astype(np.float64)


def _by_system(updates: Callable[..., Any], behind: int = 0) -> Callable[..., Any]:
    """Return the rule by the triangular system of a whole sequence, with wrong ``updates``.

    ``updates(xp, lower, right, beta, between, gate)``: of the right side and the matrix, ``lower`` of its weights.
    Positions see updates at least ``behind`` positions before them.
    """

    def definition(xp: Any, *tensors: Any, scale: float | None, normalized: bool) -> Any:
        q, k, v, gate, beta = _by_head(xp, tensors, normalized)
        beta, ahead, pairs = beta[..., None], positions_ahead(xp, k.shape[-2]), xp.matmul(k, xp.swap(k))
        between = decays(xp, gate, ahead <= 0)

        def lower(weights: Any) -> Any:
            return xp.where(ahead < 0, pairs * weights, 0.0)

        reads = xp.scores(q, k, score_scale(xp, k.shape[-1], scale))
        weights = xp.where(ahead <= -behind, reads * between, 0.0)
        changed = updates(xp=xp, lower=lower, right=v * beta, beta=beta, between=between, gate=gate)
        return by_position(xp, xp.matmul(weights, changed))

    return definition


@define(
    "gated_delta_rule",
    "q[B,T,H,D], k[B,T,H,D], v[B,T,H,Dv], gate:float32[B,T,H], beta[B,T,H] -> o[B,T,H,Dv]",
    options={"scale": number(None, usual=(None, 0.3)), "normalized": flag()},
    stages={"normalized": "input", "scores": "input", "inverse": "input", "updates": "input", "state": "input"},
    rows="B",
    independent=("H",),
    columns="Dv",
    may_be_zero=(),
    sizes=HEAD_SIZES,
    work="2*B*H*T*(T+D)*(Dv+T+16)",
    inputs={
        "k": {
            "plain": lambda draws: _SHORT * draws.normal(),
            "one_of_eight": _one_of_eight,
            "repeated": lambda draws: _SHORT * normal(draws.bits("repeated", ignore=[1])),
            "small": lambda draws: 2.0**-10 * draws.normal(),
            "long": lambda draws: draws.normal(),
            "zeros": lambda draws: np.zeros(draws.shape),
        },
        "gate": _GATES,
        "beta": {
            "plain": lambda draws: draws.uniform(),
            "one": lambda draws: np.ones(draws.shape),
            "small": lambda draws: 2.0**-6 * draws.uniform(),
            "zeros": lambda draws: np.zeros(draws.shape),
            "double": lambda draws: 2.0 * draws.uniform(),  # eigenvalues of either sign
            "signed": lambda draws: draws.normal(),
        },
    },
    reduction=Reduction("T"),
    grid=("B", "H"),
    faults=(
        "inputs_in_tf32",
        Fault("delta_chunks_apart", "every 16 positions the state begins at zero: it is not carried over",
              _independent_chunks("gated_delta_rule", 1), "tail", needs="more than 16 positions"),
        Fault("delta_not_corrected", "the state's value for a key is not subtracted",
              _by_system(lambda xp, lower, right, **_: right), needs="keys that have something in common"),
        Fault("delta_gate_ignored", "the state does not decay",
              altered("gated_delta_rule", gate=lambda gate: gate * 0.0), needs="a gate, and more than one position"),
        Fault("delta_gate_late", "the state decays by the gate of the position before",
              altered("gated_delta_rule", gate=_late), needs="gates that differ, and more than one position"),
        Fault("delta_state_not_decayed", "a value is corrected by the state before its decay",
              _by_system(lambda xp, lower, right, beta, between, gate: (
               xp.solve_unit_lower(lower(beta * between / xp.exp(gate)[..., None]), right))),
              needs="a gate, and more than one position"),
        Fault("delta_beta_ignored", "values and corrections are not multiplied by beta",
              altered("gated_delta_rule", beta=lambda beta: beta * 0.0 + 1.0)),
        Fault("delta_beta_on_values_alone", "beta multiplies the value, but not its correction",
              _by_system(lambda xp, lower, right, between, **_: xp.solve_unit_lower(lower(between), right)),
              needs="keys that have something in common"),
        Fault("delta_first_order", "I - L replaces the inverse of I + L",
              _by_system(lambda xp, lower, right, beta, between, **_: right - xp.matmul(lower(beta * between), right)),
              needs="keys that have something in common, and more than two positions"),
        Fault("delta_read_before_written", "a position sees those before it, not itself",
              _by_system(lambda xp, lower, right, beta, between, **_: (
               xp.solve_unit_lower(lower(beta * between), right)), behind=1), "mask"),
        Fault("delta_scale_dropped", "the scale is missing", altered("gated_delta_rule", scale=1.0), "scale"),
        Fault("delta_normalization", "queries and keys are not normalised where they are to be, or vice versa",
              altered("gated_delta_rule", normalized=lambda normalized: not normalized)),
    ),
    exempt=("tail_of_sum_dropped",),
)  # fmt: skip
def gated_delta_rule(
    xp: Arithmetic[N], q: N, k: N, v: N, gate: N, beta: N, *, scale: float | None, normalized: bool
) -> N:
    """o_t = scale q_t S_t, S_t = exp(gate_t) S_(t-1) + beta_t k_t^T (v_t - exp(gate_t) k_t S_(t-1)), head by head.

    Yang, Kautz & Hatamizadeh, *Gated delta networks*, 2024; by recurrence, or chunk by chunk through the inverse of a
    triangular matrix. ``normalized``: q and k are first divided by sqrt(sum x^2 + 1e-6). Keys longer than
    sqrt(2 / beta) make the state grow at each step. ``scale`` is 1 / sqrt(D) where left out.

    Stages: "normalized" queries and keys; "scores", of a chunk, times their decays; "inverse", of a chunk's matrix;
    "state", as it was before a chunk, where a product takes it; "updates": keys and values times beta or decays,
    queries times decays, what the inverse makes of them, and what is written.
    """
    tensors = _by_head(xp, (q, k, v, gate, beta), normalized)
    q, k, v, gate, beta = tensors
    between = decays(xp, gate, positions_ahead(xp, k.shape[-2]) <= 0)
    out = xp.delta_rule(q, k, v, score_scale(xp, k.shape[-1], scale), between, xp.exp(gate), beta)
    return by_position(xp, xp.unspecified(lambda: touched(xp, v, k, gate[..., None], beta[..., None]), out))


def _by_head(xp: Arithmetic[N], tensors: tuple[N, ...], normalized: bool) -> list[N]:
    q, k, *rest = (by_head(xp, x) for x in tensors)
    if normalized:
        q, k = (xp.round(l2norm(xp, x, eps=_EPS, clamp="sum"), "normalized") for x in (q, k))
    return [q, k, *rest]
