"""Mixture of experts: routing, the experts, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.activations import swiglu, swiglu_backward
from assay.golden.definitions.softmax import infinite
from assay.golden.errors import ShapeError
from assay.golden.options import choice, count, flag
from assay.golden.registry import Fault, Reduction, altered, define

SIZES = {"k": (1, 2, 3, 6, 8, 10)}  # experts of a token, up to the most that models have
ROUTING = {"top_k": count(2, usual=(2, 1)), "renormalize": flag(True), "scoring": choice("softmax", "sigmoid")}


def _admissible(xp: Arithmetic[N, Idx], logits: N, chosen: Idx, *, top_k: int, renormalize: bool, scoring: str) -> Idx:
    """Which chosen experts no unchosen one, or one after it, certainly beats: a mask [T, k]; repeated ids are wrong."""
    return xp.topk_admissible(routing_scores(xp, logits, scoring), chosen, ordered=True)


def routing_scores(xp: Arithmetic[N], logits: N, scoring: str) -> N:
    """The scores of experts, of logits [T,E]."""
    return xp.sigmoid(logits) if scoring == "sigmoid" else xp.softmax(logits)


def check_choices(op: str, experts: int, top_k: int) -> None:
    """Raise `ShapeError` where more experts are to be chosen than there are."""
    if experts < top_k:
        raise ShapeError(f"{op}: top_k={top_k} of only {experts} experts")


@define(
    "moe_route",
    lambda options: f"logits[T,E] -> weights:float32[T,{options['top_k']}], ids:int32[T,{options['top_k']}]=index(E)",
    options=ROUTING,
    rows="T",
    min_sizes={"E": "top_k"},
    default_sizes={"E": (2, 4, 8, 17, 60, 64, 128, 256, 384)},
    chosen=("ids",),
    accepts=_admissible,
)
def moe_route(
    xp: Arithmetic[N, Idx], logits: N, *, top_k: int, renormalize: bool, scoring: str, ids: Idx | None = None
) -> tuple[N, Idx]:
    """Return the scores of the top k experts (or of ``ids``), largest first, normalised to sum one if asked for."""
    check_choices("moe_route", logits.shape[-1], top_k)
    scores = routing_scores(xp, logits, scoring)
    if ids is None:
        ids = xp.topk_index(logits, top_k)  # scores grow with logits, but round to ties
    weights = xp.gather(scores, ids)
    return (weights / xp.sum(weights) if renormalize else weights), ids


@define(
    "moe",
    "x[T,D], w_gate_up[E,2*F,D], w_down[E,D,F], weights:float32[T,k]=weight, ids:int32[T,k]=index(E) -> y[T,D]",
    stages={"gate_up": None, "activated": None, "hidden": "input", "expert": None, "weighted": None},
    rows="T",
    work="T*k*(D+16)*F+E*(D*F+4096)",
    sequential_steps="E+ceil(T*k/16)",
    gathered=("E",),
    sizes=SIZES,
    reduction=Reduction("D+F"),
    faults=("inputs_in_tf32",),
)
def moe(xp: Arithmetic[N, Idx], x: N, w_gate_up: N, w_down: N, weights: N, ids: Idx) -> N:
    """sum_k weight_k down_k(silu(gate_k x) * up_k x); an expert may come twice, and counts twice."""
    experts = w_gate_up.shape[0]
    y = mixture(
        *(xp, x, weights, ids, experts),
        lambda expert, rows: xp.matmul(rows, xp.swap(w_gate_up[expert])),
        lambda expert, rows: xp.matmul(rows, xp.swap(w_down[expert])),
    )

    def unchosen() -> Idx:
        """Where the weights of an expert are NaN or infinite that a token didn't choose."""
        others: Any = (ids[..., None] != xp.integers(range(experts))).all(1)
        first: Any = ~xp.is_finite(w_gate_up).all(-1).all(-1)
        last: Any = ~xp.is_finite(w_down).all(-1)
        mask: Idx = (others[..., None] & (first[:, None] | last)).any(1)
        return mask

    return xp.spilled(unchosen, y)


def mixture(
    xp: Arithmetic[N, Idx],
    x: N,
    weights: N,
    ids: Idx,
    experts: int,
    gate_up: Callable[[int, N], N],
    down: Callable[[int, N], N],
) -> N:
    """Return the mixture [T,D] of ``experts`` experts, with these two products of rows."""
    tokens, choices = ids.shape
    flat = ids.reshape(tokens * choices)
    order, outputs = [], []
    for expert in range(experts):
        pairs = xp.native.argwhere(flat == expert)[:, 0]
        projected = xp.round(gate_up(expert, x[pairs // max(choices, 1)]), "gate_up")
        inner = projected.shape[-1] // 2
        hidden = xp.round(swiglu(xp, projected[:, :inner], projected[:, inner:], limit=None), "hidden")
        outputs.append(xp.round(down(expert, hidden), "expert"))
        order.append(pairs)
    back = xp.native.argsort(xp.native.concatenate(order))
    mixed = xp.concatenate(outputs)[back].reshape(tokens, choices, x.shape[-1])
    return xp.sum(xp.round(mixed * weights[:, :, None], "weighted"), axis=1)[:, 0]


@dataclass(frozen=True)
class Expert(Generic[N]):
    """An expert's products of rows: with gate and up, with down, and with the transposes of both.

    ``gate_up_back`` rounds the gradients of gate and up itself, as "gate_up_gradient".
    """

    gate_up: Callable[[N], N]
    down: Callable[[N], N]
    gate_up_back: Callable[[N], N]
    down_back: Callable[[N], N]


@dataclass(frozen=True)
class PairGradients(Generic[N]):
    """Of an expert's n pairs: shares of dx [n,D], the gradients of gate and up [n,2F], silu(gate) * up [n,F], and what
    their weights' gradients are [n,1]."""

    share: N
    dgate_up: N
    hidden: N
    dweight: N


# Wrong gradients of silu(gate) * up.
FLAT_SLOPE = altered("swiglu_backward", dgate=lambda xp, gate, up, dy: xp.product(dy, up, xp.sigmoid(gate)))
SWAPPED = altered("swiglu_backward", dgate=lambda dup: dup, dup=lambda dgate: dgate)


def of_first_choice(again: Any, weights: Any, ids: Any) -> Any:
    """Return the gradient that a token's first choice alone makes."""
    return again(weights=weights[:, :1], ids=ids[:, :1])


def _without_last_token(again: Any, x: Any, weights: Any, ids: Any, dy: Any) -> Any:
    kept = slice(0, max(len(ids) - 1, 0))
    return again(x=x[kept], weights=weights[kept], ids=ids[kept], dy=dy[kept])


@define(
    "moe_backward",
    "x[T,D], w_gate_up[E,2*F,D], w_down[E,D,F], weights:float32[T,k]=weight, ids:int32[T,k]=index(E), dy[T,D] "
    "-> dx[T,D], dw_gate_up[E,2*F,D], dw_down[E,D,F], dweights:float32[T,k]",
    stages={
        "gate_up": None, "activated": None, "hidden": "input", "expert": None, "weighted_gradient": None,
        "hidden_gradient": None, "activated_gradient": None, "gate_up_gradient": "input",
        "weighted_hidden": "input", "share": None,
    },
    reduced=("T",),
    may_be_zero=("T",),
    work="3*(T*k*(D+16)*F+E*(D*F+4096))",
    sequential_steps="E+ceil(T*k/16)",
    sizes=SIZES,
    gradient_of="moe",
    reduction=Reduction("D+F"),
    faults=(
        "inputs_in_tf32",
        Fault("moe_gradient_without_weights", "the gradient of an expert's output is not multiplied by its weight",
              altered("moe_backward", weights=lambda xp, ids: xp.exact(xp.native.full(ids.shape, 1)),
               dweights=lambda again: again()), "routing"),
        Fault("moe_slope_flat", "of the gate's slope only the first term is taken: sigmoid(gate)",
              lambda xp, *tensors: _gradients(xp, FLAT_SLOPE, *tensors)),
        Fault("moe_gradient_halves_swapped", "the gradients of gate and up are swapped",
              lambda xp, *tensors: _gradients(xp, SWAPPED, *tensors), "layout"),
        Fault("moe_gradient_of_first_choice", "dx is that of a token's first choice alone",
              altered("moe_backward", dx=of_first_choice), "routing", needs="k of two or more"),
        Fault("moe_last_token_left_out", "the last token adds nothing to the gradients of experts",
              altered("moe_backward", dw_gate_up=_without_last_token, dw_down=_without_last_token), "tail"),
        Fault("moe_weight_gradient_weighted", "dweights are multiplied by the weights",
              altered("moe_backward", dweights=lambda weights, dweights: dweights * weights), "routing"),
    ),
)  # fmt: skip
def moe_backward(
    xp: Arithmetic[N, Idx], x: N, w_gate_up: N, w_down: N, weights: N, ids: Idx, dy: N
) -> tuple[N, N, N, N]:
    """With h = silu(gate) * up of a pair of token and expert, and g = down^T dy: weight g goes back through h.

    dw_down is the sum over an expert's pairs of dy (weight h)^T, or (weight dy) h^T; a weight's gradient is h . g, or
    dy . (down h). Stages: those of `moe`; "weighted_gradient", weight dy; "hidden_gradient", the gradient of h;
    "weighted_hidden", weight h; "gate_up_gradient", the gradients of gate and up as products take them; "share", a
    choice's part of dx. Nothing is said of what an infinity reaches.
    """
    return _gradients(xp, swiglu_backward, x, w_gate_up, w_down, weights, ids, dy)


def _gradients(
    xp: Arithmetic[N, Idx], slope: Any, x: N, w_gate_up: N, w_down: N, weights: N, ids: Idx, dy: N
) -> tuple[N, N, N, N]:
    """``slope``: `swiglu_backward`, or a faulty kernel's replacement."""
    experts = w_gate_up.shape[0]
    of_gate_up, of_down = [], []

    def of_expert(expert: int, x: N, weight: N, dy: N) -> PairGradients[N]:
        up, down = w_gate_up[expert], w_down[expert]
        pairs = of_pairs(
            *(xp, slope, x, weight, dy),
            Expert(
                gate_up=lambda rows: xp.matmul(rows, xp.swap(up)),
                down=lambda rows: xp.matmul(rows, xp.swap(down)),
                gate_up_back=lambda rows: xp.matmul(xp.round(rows, "gate_up_gradient"), up),
                down_back=lambda rows: xp.matmul(rows, down),
            ),
        )
        of_gate_up.append(xp.matmul(xp.swap(xp.round(pairs.dgate_up, "gate_up_gradient")), x))
        of_down.append(
            xp.any_formula(
                lambda: xp.matmul(xp.swap(dy), xp.round(pairs.hidden * weight, "weighted_hidden")),
                lambda: xp.matmul(xp.swap(xp.round(dy * weight, "weighted_gradient")), pairs.hidden),
            )
        )
        return pairs

    dx, dweights = of_tokens(xp, of_expert, x, weights, ids, dy, experts)

    def touched() -> Idx:
        return infinite_pairs(xp, x, weights, ids, dy, w_gate_up, w_down)

    def experts_touched() -> Idx:
        named: Any = ids[..., None] == xp.integers(range(experts))
        mask: Idx = (named & touched()[..., None]).any(0).any(0)[:, None, None]
        return mask

    dx = xp.unspecified(lambda: touched().any(-1)[:, None], dx)
    dw_gate_up = xp.unspecified(experts_touched, xp.stack(of_gate_up, 0))
    dw_down = xp.unspecified(experts_touched, xp.stack(of_down, 0))
    return dx, dw_gate_up, dw_down, xp.unspecified(touched, dweights)


def infinite_pairs(xp: Arithmetic[N, Idx], x: N, weights: N, ids: Idx, dy: N, *tables: N) -> Idx:
    """Which pairs [T,k] have an infinity in their token, weight, gradient or in what ``tables`` [E,.,.] say of their
    expert."""
    broken: Any = infinite(xp, tables[0]).any(-1).any(-1)
    for table in tables[1:]:
        broken = broken | infinite(xp, table).any(-1).any(-1)
    mask: Idx = infinite(xp, x, dy).any(-1)[:, None] | infinite(xp, weights) | broken[ids]
    return mask


def of_tokens(
    xp: Arithmetic[N, Idx],
    of_expert: Callable[[int, N, N, N], PairGradients[N]],
    x: N,
    weights: N,
    ids: Idx,
    dy: N,
    experts: int,
) -> tuple[N, N]:
    """dx[T,D] and dweights[T,k], from what each expert's pairs make of their tokens, weights [n,1] and dy."""
    tokens, choices = ids.shape
    flat, each = ids.reshape(tokens * choices), weights.reshape(tokens * choices, 1)
    order, of_experts = [], []
    for expert in range(experts):
        pairs = xp.native.argwhere(flat == expert)[:, 0]
        token = pairs // max(choices, 1)
        of_experts.append(of_expert(expert, x[token], each[pairs], dy[token]))
        order.append(pairs)
    back = xp.native.argsort(xp.native.concatenate(order))
    shares = xp.concatenate([pairs.share for pairs in of_experts])[back].reshape(tokens, choices, x.shape[-1])
    dweights = xp.concatenate([pairs.dweight for pairs in of_experts])[back].reshape(tokens, choices)
    return xp.sum(shares, axis=1)[:, 0], dweights


def of_pairs(xp: Arithmetic[N, Idx], slope: Any, x: N, weight: N, dy: N, expert: Expert[N]) -> PairGradients[N]:
    """The gradients by dy[n,D] of an expert's tokens x[n,D] and of their weights [n,1]."""
    projected = xp.round(expert.gate_up(x), "gate_up")
    inner = projected.shape[-1] // 2
    gate, up = projected[:, :inner], projected[:, inner:]
    hidden = xp.round(swiglu(xp, gate, up, limit=None), "hidden")
    back = expert.down_back(dy)
    dhidden = xp.any_formula(
        lambda: back * weight, lambda: expert.down_back(xp.round(dy * weight, "weighted_gradient"))
    )
    dgate_up = xp.concatenate(slope(xp, gate, up, xp.round(dhidden, "hidden_gradient")), -1)
    dweight = xp.any_formula(
        lambda: xp.sum(xp.round(back, "hidden_gradient") * hidden),
        lambda: xp.sum(dy * xp.round(expert.down(hidden), "expert")),
    )
    return PairGradients(xp.round(expert.gate_up_back(dgate_up), "share"), dgate_up, hidden, dweight)


def _without_mean(xp: Any, logits: Any, dweights: Any, top_k: int, renormalize: bool, scoring: str) -> Any:
    weights, ids = _chosen(xp, logits, top_k, renormalize, scoring)
    dscores = weights * dweights
    return _to_experts(
        xp, dscores * _slope(xp, logits, ids) if scoring == "sigmoid" else dscores, ids, logits.shape[-1]
    )


@define(
    "moe_route_backward",
    lambda options: f"logits[T,E], dweights:float32[T,{options['top_k']}] -> dlogits[T,E]",
    options=ROUTING,
    rows="T",
    min_sizes={"E": "top_k"},
    default_sizes={"E": (2, 4, 8, 17, 60, 64, 128, 256, 384)},
    gradient_of="moe_route",
    faults=(
        Fault("route_gradient_without_mean", "the weights' common mean is not subtracted",
              altered("moe_route_backward", dlogits=_without_mean), "routing", needs="scores that are normalised"),
        Fault("route_gradient_other_scoring", "the gradient is that of the other scoring",
              altered("moe_route_backward", scoring=lambda scoring: "softmax" if scoring == "sigmoid" else "sigmoid"),
              "routing"),
        Fault("route_gradient_renormalised", "weights count as renormalised, or vice versa",
              altered("moe_route_backward", renormalize=lambda renormalize: not renormalize), "routing"),
        Fault("route_gradient_order", "the gradients of a token's weights are taken in the reverse order",
              altered("moe_route_backward", dweights=lambda value: value[:, list(range(value.shape[1]))[::-1]]),
              "routing", needs="top_k of two or more"),
    ),
)  # fmt: skip
def moe_route_backward(
    xp: Arithmetic[N, Idx], logits: N, dweights: N, *, top_k: int, renormalize: bool, scoring: str
) -> N:
    """With weights w of the chosen experts, in falling order, and scores s of all: w (dw - sum w dw) where softmax
    scores are renormalised, and s dw - s sum w dw where they aren't; of sigmoids w (dw - sum w dw) (1 - s), or
    w dw (1 - s). An expert that is not chosen counts with dw = 0. Nothing is said of rows in which a number isn't
    finite: zero times it stands at experts that aren't chosen, or nothing at all.
    """
    check_choices("moe_route_backward", logits.shape[-1], top_k)
    weights, ids = _chosen(xp, logits, top_k, renormalize, scoring)
    dscores = weights * dweights
    if renormalize:
        dscores = weights * (dweights - xp.sum(dscores))
    if scoring == "sigmoid":
        dscores = dscores * _slope(xp, logits, ids)
    dlogits = _to_experts(xp, dscores, ids, logits.shape[-1])
    if scoring == "softmax" and not renormalize:
        dlogits = dlogits - xp.softmax(logits) * xp.sum(dscores)

    def touched() -> Idx:
        mask: Idx = ((~xp.is_finite(logits)).any(-1) | (~xp.is_finite(dweights)).any(-1))[:, None]
        return mask

    return xp.unspecified(touched, dlogits)


def _chosen(xp: Arithmetic[N, Idx], logits: N, top_k: int, renormalize: bool, scoring: str) -> tuple[N, Idx]:
    """Weights and ids [T,k], as `moe_route` gives them."""
    ids = xp.topk_index(logits, top_k)
    weights = xp.gather(routing_scores(xp, logits, scoring), ids)
    return (weights / xp.sum(weights) if renormalize else weights), ids


def _slope(xp: Arithmetic[N, Idx], logits: N, ids: Idx) -> N:
    """1 - s of the chosen experts' sigmoids."""
    chosen = xp.gather(logits, ids)
    return xp.any_formula(lambda: xp.sigmoid(-chosen), lambda: 1.0 - xp.sigmoid(chosen))


def _to_experts(xp: Arithmetic[N, Idx], dscores: N, ids: Idx, experts: int) -> N:
    """[T,E] of [T,k], zero at experts that are not chosen."""
    named: Any = ids[:, None, :] == xp.integers(range(experts))[None, :, None]
    return xp.sum(xp.where(named, dscores[:, None, :], 0.0))[..., 0]
