"""The gradient of the selective scan: the recurrence the other way along the sequence."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.scan import CHUNK, INPUTS, SCAN_SIZES, exponent
from assay.golden.options import flag
from assay.golden.registry import Fault, Reduction, define


def _chunks_apart(xp: Any, decay: Any, term: Any) -> Any:
    """Every 16 places the gradient of the state begins at zero."""
    count = term.shape[-1]
    parts = [_backwards(xp, decay[..., i : i + CHUNK], term[..., i : i + CHUNK]) for i in range(0, count, CHUNK)]
    return xp.concatenate(parts, -1)


def _own_decay(xp: Any, decay: Any, term: Any) -> Any:
    """The gradient that comes from the place behind decays by the place's own step."""
    first = xp.exact(xp.native.ones(decay[..., :1].shape))
    return _backwards(xp, xp.concatenate([first, decay[..., :-1]], -1) if decay.shape[-1] else decay, term)


def _without_decay(xp: Any, u: Any, delta: Any, a: Any, b: Any, c: Any, skip: Any, dy: Any, **options: Any) -> Any:
    """The decay counts as a constant: the step's gradient is that of its product with the input."""
    du, _, *others = selective_scan_backward(xp, u, delta, a, b, c, skip, dy, **options)
    step = xp.function("softplus", delta) if options["softplus"] else delta
    ddelta = (du - dy * skip[:, None]) / step * u
    return du, ddelta * xp.sigmoid(delta) if options["softplus"] else ddelta, *others


def _last_batch(xp: Any, u: Any, delta: Any, a: Any, b: Any, c: Any, skip: Any, dy: Any, **options: Any) -> Any:
    """The gradients of a and skip are those of the last batch alone."""
    found = selective_scan_backward(xp, u, delta, a, b, c, skip, dy, **options)
    u, delta, b, c, dy = (x[-1:] for x in (u, delta, b, c, dy))
    last = selective_scan_backward(xp, u, delta, a, b, c, skip, dy, **options)
    return *found[:2], last[2], *found[3:5], last[5]


@define(
    "selective_scan_backward",
    "u[B,D,L], delta[B,D,L], a:float32[D,S], b[B,S,L], c[B,S,L], skip:float32[D], dy[B,D,L] "
    "-> du[B,D,L], ddelta[B,D,L], da:float32[D,S], db[B,S,L], dc[B,S,L], dskip:float32[D]",
    options={"softplus": flag()},
    reduced=("B", "D"),
    may_be_zero=(),
    sizes=SCAN_SIZES,
    long_sizes={"L": (257,)},
    work="40*B*D*S*L",
    sequential_steps="B*ceil(D/16)*L",
    inputs=INPUTS,
    reduction=Reduction("L"),
    grid=("B", "D"),
    gradient_of="selective_scan",
    faults=(
        Fault("scan_gradient_chunks_apart", "every 16 places the gradient of the state begins at zero",
              lambda xp, *tensors, softplus: _gradients(xp, *tensors, softplus=softplus, carried=_chunks_apart), "tail",
              needs="more than 16 places"),
        Fault("scan_gradient_own_decay", "the gradient from behind decays by the place's own step, not by the next",
              lambda xp, *tensors, softplus: _gradients(xp, *tensors, softplus=softplus, carried=_own_decay),
              needs="more than one place"),
        Fault("scan_gradient_without_decay", "the gradient of the step leaves out that the decay hangs on it",
              _without_decay, needs="more than one place"),
        Fault("scan_gradient_slope", "the slope of softplus is left out, or taken where there is none",
              lambda xp, *tensors, softplus: (
               (found := selective_scan_backward(xp, *tensors, softplus=softplus))[0],
               found[1] / xp.sigmoid(tensors[1]) if softplus else found[1] * xp.sigmoid(tensors[1]), *found[2:])),
        Fault("scan_gradient_of_last_batch", "the gradients of a and skip are the last batch's alone", _last_batch,
              "state", needs="more than one batch"),
        Fault("scan_gradient_skip_dropped", "du lacks what comes over the skip connection",
              lambda xp, u, delta, a, b, c, skip, dy, **options: selective_scan_backward(
               xp, u, delta, a, b, c, skip * 0.0, dy, **options)),
    ),
    exempt=("tail_of_sum_dropped",),
)  # fmt: skip
def selective_scan_backward(
    xp: Arithmetic[N], u: N, delta: N, a: N, b: N, c: N, skip: N, dy: N, *, softplus: bool
) -> tuple[N, N, N, N, N, N]:
    """With h_t the states, d_t the steps and r_t = exp(d_t a): the gradient of h_t is g_t = c_t dy_t + r_(t+1) g_(t+1).

    du = skip dy + d sum_s b g; dd_t = sum_s g_t (a r_t h_(t-1) + b_t u_t), times softplus' slope where asked; da is the
    sum over batches and places of g_t d_t r_t h_(t-1), db that over channels of g d u, dc of dy h; dskip = sum dy u.
    The formulas: r_t h_(t-1) as written, or h_t - d_t b_t u_t (Mamba's kernel); sums over s of products, or products
    with a sum. Nothing is said of what infinities and NaN reach: channels of u, delta, a, skip and dy, batches of
    b and c.
    """
    return _gradients(xp, u, delta, a, b, c, skip, dy, softplus=softplus, carried=_backwards)


def _backwards(xp: Arithmetic[N], decay: N, term: N) -> N:
    """The recurrence from the last place to the first [..., L], each decaying by the place behind it."""
    length = term.shape[-1]
    if not length:
        return term
    turned = xp.integers(range(length - 1, -1, -1))
    first = xp.exact(xp.native.ones(decay[..., :1].shape))
    late = xp.concatenate([first, decay[..., turned][..., :-1]], -1)
    return xp.recurrence(late, term[..., turned])[..., turned]


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
        found = _strange(xp, u) | _strange(xp, delta) | _strange(xp, dy) | _strange(xp, a) | ~xp.is_finite(skip)
        return found | (_strange(xp, b) | _strange(xp, c)).any(-1)[:, None]

    du, ddelta = (xp.unspecified(lambda: channels()[..., None], x) for x in (du, ddelta))
    db, dc = (xp.unspecified(lambda: channels().any(-1)[:, None, None], x) for x in (db, dc))
    da = xp.unspecified(lambda: channels().any(0)[:, None], da)
    return du, ddelta, da, db, dc, xp.unspecified(lambda: channels().any(0), dskip)


def _over_batches(xp: Arithmetic[N], x: N) -> N:
    """The sum over batches and places of x[B, ..., L]."""
    return xp.sum(xp.concatenate([x[batch] for batch in range(x.shape[0])], -1))[..., 0]


def _strange(xp: Arithmetic[N], x: N) -> Any:
    """Where x[..., L] has an infinity or NaN at some place."""
    found: Any = ~xp.is_finite(x)
    return found.any(-1)
