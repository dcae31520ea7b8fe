"""Cross-entropy, the Kullback-Leibler and Jensen-Shannon divergences of rows of logits, and their gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.errors import ShapeError
from assay.golden.options import Option, choice, number
from assay.golden.registry import Fault, Reduction, altered, define
from assay.golden.signature import Inputs

OPTIONS = {
    "ignore_index": Option(-100, lambda value: type(value) is int, "a whole number"),
    "label_smoothing": Option(
        0.0,
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1,
        "a number from 0 to 1",
        usual=(0.0, 0.1),
    ),
    "reduction": choice("mean", "sum", "none"),
    "softcap": number(None, positive=True, usual=(None, 4.0)),
    "z_loss": number(0.0, usual=(0.0, 0.01)),
}


def labelled(options: Mapping[str, Any]) -> str:
    """The tensors that a loss is taken of."""
    return f"logits[T,V], target:int64[T]=label(V,{options['ignore_index']})"


def loss_size(options: Mapping[str, Any]) -> str:
    """The dimension of the loss, none where it is reduced."""
    return _by_token(options) or ""


def _by_token(options: Mapping[str, Any]) -> str | None:
    """Return the rows of a loss: tokens, unless it is reduced."""
    return "T" if options["reduction"] == "none" else None


def _labels(xp: Arithmetic[N, Idx], op: str, logits: N, target: Idx, ignore_index: int) -> tuple[N, Idx, Idx, int]:
    """The logits and labels, zero where there is no label; which tokens have one; and how many do."""
    if logits.shape[1] == 0:
        raise ShapeError(f"{op}: expected logits of one class or more, got V=0")
    valid = target != ignore_index
    return xp.where(valid[:, None], logits, 0.0), xp.native.where(valid, target, 0), valid, int(valid.sum())


def _cap_faults(op: str, kind: str = "") -> tuple[Fault, ...]:
    """What kernels of the loss, and of its gradient, do wrong with caps and with the squared log-sum-exp."""
    return (
        Fault(f"logits_not_capped{kind}", "the logits' cap is missing", altered(op, softcap=None), "loss"),
        Fault(f"logits_clamped{kind}", "logits are clamped to the cap, not bent by a tanh",
              altered(op, softcap=None, logits=lambda xp, logits, softcap: (
               logits if softcap is None else -xp.minimum(-xp.minimum(logits, softcap), softcap))), "loss"),
        Fault(f"cap_not_divided{kind}", "the tanh takes the logits undivided by the cap",
              altered(op, logits=lambda logits, softcap: logits if softcap is None else logits * softcap), "loss"),
        Fault(f"z_loss_dropped{kind}", "z times the squared log-sum-exp is missing", altered(op, z_loss=0.0), "loss"),
        Fault(f"z_loss_halved{kind}", "z is taken half", altered(op, z_loss=lambda z_loss: z_loss / 2), "loss"),
    )  # fmt: skip


def _not_averaged(reduction: str) -> str:
    return "sum" if reduction in ("mean", "batchmean") else reduction


@define(
    "cross_entropy",
    lambda options: f"{labelled(options)} -> loss:float32[{loss_size(options)}]",
    options=OPTIONS,
    rows=_by_token,
    may_be_zero=("T",),
    reduction=Reduction("V"),
    faults=_cap_faults("cross_entropy"),
    exempt=("flushed_subnormals",),
)
def cross_entropy(
    xp: Arithmetic[N, Idx],
    logits: N,
    target: Idx,
    *,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> N:
    """-(1 - s) log p_label - s mean log p + z lse^2 per token, p = softmax(logits); zero if it is ``ignore_index``.

    With ``softcap`` c the logits are c tanh(logits / c); z is ``z_loss`` (Chowdhery et al., *PaLM*, 2022), lse the
    log-sum-exp. The mean is over the tokens that have a label: NaN where none has. Logits of ignored tokens never reach
    the loss.
    """
    stored_logits = logits
    logits, label, valid, count = _labels(xp, "cross_entropy", logits, target, ignore_index)
    if softcap is not None:
        logits = xp.softcap(logits, softcap)
    logs = xp.log_softmax(logits)
    loss = -logs[xp.integers(range(logits.shape[0])), label]
    if label_smoothing:
        smooth = xp.any_formula(lambda: -xp.mean(logs), lambda: xp.logsumexp(logits) - xp.mean(logits))
        loss = loss * _rest(xp, label_smoothing) + smooth[:, 0] * label_smoothing
    if z_loss:
        lse = xp.logsumexp(logits)[:, 0]
        loss = loss + lse * lse * z_loss
    loss = xp.spilled(lambda: ~valid & ~xp.is_finite(stored_logits).all(-1), xp.where(valid, loss, 0.0))
    if reduction == "none":
        return loss
    total = xp.sum(loss, axis=0)
    if reduction == "mean":
        total = total / count if count else xp.exact(np.full(1, math.nan))
    return total.reshape(())


def _rest(xp: Arithmetic[N], label_smoothing: float) -> N:
    return xp.exact(np.ones(1)) - label_smoothing


@define(
    "cross_entropy_backward",
    lambda options: f"{labelled(options)} -> dlogits[T,V]",
    options=OPTIONS,
    rows=lambda options: None if options["reduction"] == "mean" else "T",
    may_be_zero=("T",),
    gradient_of="cross_entropy",
    reduction=Reduction("V"),
    faults=(
        *_cap_faults("cross_entropy_backward", "_gradient"),
        Fault("softcap_slope_dropped", "the slope of the cap, 1 - tanh^2, is missing",
              altered("cross_entropy_backward", softcap=None, logits=lambda xp, logits, softcap: (
               logits if softcap is None else xp.softcap(logits, softcap))), "loss", needs="logits beyond the cap"),
    ),
)  # fmt: skip
def cross_entropy_backward(
    xp: Arithmetic[N, Idx],
    logits: N,
    target: Idx,
    *,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> N:
    """p (1 + 2 z lse) - (1 - s) onehot(label) - s / V, over the number of labels for the mean; zero if ignored.

    p = softmax(logits); of capped logits, times 1 - tanh(logits / softcap)^2. A contract says nothing of rows with a
    logit of +inf, which exp(x - lse) makes zeros and NaN, nor of ignored ones with any that is not finite: kernels that
    multiply by zero give NaN there.
    """
    stored_logits = logits
    logits, label, valid, count = _labels(xp, "cross_entropy_backward", logits, target, ignore_index)
    raw = logits
    if softcap is not None:
        logits = xp.softcap(logits, softcap)

    def unclear() -> Idx:
        return (xp.above(stored_logits, sys.float_info.max).any(-1) | (~valid & ~xp.is_finite(stored_logits).all(-1)))[
            :, None
        ]

    is_label = label[:, None] == xp.integers(range(logits.shape[1]))[None, :]
    divisor = max(count, 1) if reduction == "mean" else 1

    def difference(divide: Callable[[N], N]) -> N:
        rest = divide(_rest(xp, label_smoothing)) if label_smoothing else divide(xp.exact(np.ones(1)))
        shares = divide(xp.softmax(logits))
        if z_loss:
            shares = shares + shares * (xp.logsumexp(logits) * (2 * z_loss))
        away = xp.where(is_label, shares - rest, shares)
        if not label_smoothing:
            return away
        return away - divide(xp.exact(np.full(1, label_smoothing)) / logits.shape[1])

    def scaled(number: N) -> N:
        return number / divisor if divisor > 1 else number

    gradient = xp.any_formula(lambda: scaled(difference(lambda number: number)), lambda: difference(scaled))
    if softcap is not None:
        bent = xp.tanh(raw / softcap, absolute=True)
        gradient = gradient * (1.0 - bent * bent)
    return xp.unspecified(unclear, xp.where(valid[:, None], gradient, 0.0))


@define(
    "cross_entropy_gradient",
    lambda options: f"{labelled(options)}, dloss:float32[{loss_size(options)}]=weight -> dlogits[T,V]",
    options=OPTIONS,
    stages={"gradient": None},
    rows=lambda options: None if options["reduction"] == "mean" else "T",
    may_be_zero=("T",),
    gradient_of="cross_entropy",
    public=False,
)
def cross_entropy_gradient(
    xp: Arithmetic[N, Idx], logits: N, target: Idx, dloss: N, *, reduction: str, ignore_index: int, **options: Any
) -> N:
    """cross_entropy_backward times dloss, of each token where nothing is reduced.

    Formulas: the product as written; dloss divided first, for the mean; and dloss multiplied into the shares before
    the label's one is subtracted, as log-softmax followed by the likelihood does (PyTorch). Stage "gradient": what a
    forward pass has saved of it, for kernels that compute it there.
    """
    upstream = dloss[:, None] if reduction == "none" else dloss.reshape(1, 1)
    valid = target != ignore_index
    count = max(int(valid.sum()), 1) if reduction == "mean" else 1

    def gradient(kind: str) -> N:
        return cross_entropy_backward(xp, logits, target, reduction=kind, ignore_index=ignore_index, **options)

    def divided() -> N:
        return upstream / count if count > 1 else upstream

    def shares_first() -> N:
        label = xp.native.where(valid, target, 0)
        is_label = (label[:, None] == xp.integers(range(logits.shape[1]))[None, :]) & valid[:, None]
        early, one = gradient("sum"), divided()
        shares = xp.where(is_label, early + 1.0, early) * one
        return xp.where(is_label, shares - one, shares)

    return xp.any_formula(
        lambda: xp.round(gradient(reduction), "gradient") * upstream,
        lambda: xp.round(gradient("sum"), "gradient") * divided(),
        shares_first,
    )


def _logits(xp: Arithmetic[N], x: N, weight: N) -> N:
    return xp.round(xp.matmul(x, xp.swap(weight)), "logits")


def _tail_of_classes(xp: Any, x: Any, weight: Any, target: Any, **options: Any) -> Any:
    """The classes beyond the last whole block of 16 count as logits of zero."""
    whole = weight.shape[0] // 16 * 16
    logits = _logits(xp, x, weight)
    if 0 < whole < weight.shape[0]:
        logits = xp.concatenate([logits[:, :whole], logits[:, whole:] * 0.0], -1)
    return cross_entropy(xp, logits, target, **options)


@define(
    "linear_cross_entropy",
    lambda options: (
        f"x[T,D], weight[V,D], target:int64[T]=label(V,{options['ignore_index']}) "
        f"-> loss:float32[{loss_size(options)}]"
    ),
    options=OPTIONS,
    stages={"logits": "input"},
    rows=_by_token,
    may_be_zero=("T",),
    work="T*V*(D+16)",
    sequential_steps="ceil(T/16)*ceil(V/32)",
    reduction=Reduction("D"),
    faults=(
        "inputs_in_tf32",
        Fault("classes_beyond_block_zero", "classes beyond the last whole block of 16 count as logits of zero",
              _tail_of_classes, "tail", needs="more than 16 classes, no multiple of 16"),
        Fault("linear_mean_of_all_tokens", "the mean is over all tokens, ignored ones too",
              altered("linear_cross_entropy", loss=lambda again, loss, x, reduction: (
               again(reduction="sum") / max(x.shape[0], 1) if reduction == "mean" else loss)), "loss",
              needs="an ignored label"),
        Fault("linear_smoothing_dropped", "label smoothing is missing",
              altered("linear_cross_entropy", label_smoothing=0.0), "loss"),
        Fault("linear_cap_dropped", "the logits' cap is missing", altered("linear_cross_entropy", softcap=None),
              "loss"),
    ),
    exempt=("flushed_subnormals",),
)  # fmt: skip
def linear_cross_entropy(xp: Arithmetic[N, Idx], x: N, weight: N, target: Idx, **options: Any) -> N:
    """`cross_entropy` of the logits x weight^T. Stage "logits": as a product stores them before the loss."""
    return cross_entropy(xp, _logits(xp, x, weight), target, **options)


def _gradients(xp: Arithmetic[N, Idx], x: N, weight: N, dlogits: N) -> tuple[N, N]:
    dx, dweight = xp.matmul(dlogits, weight), xp.matmul(xp.swap(dlogits), x)

    def touched() -> Idx:
        rows: Idx = (~xp.is_finite(x)).any(-1)[:, None]
        return rows | (~xp.is_finite(weight)).any(-1).any(0)

    return xp.unspecified(touched, dx), xp.unspecified(lambda: touched().any(0)[None], dweight)


def _first_chunk(xp: Any, x: Any, weight: Any, target: Any, **options: Any) -> Any:
    """The weight's gradient is that of the last 16 tokens alone."""
    dx, _ = linear_cross_entropy_backward(xp, x, weight, target, **options)
    kept = max(x.shape[0] - 1, 0) // 16 * 16
    dlogits = cross_entropy_backward(xp, _logits(xp, x, weight), target, **options)
    return dx, xp.matmul(xp.swap(dlogits[kept:]), x[kept:])


@define(
    "linear_cross_entropy_backward",
    lambda options: (
        f"x[T,D], weight[V,D], target:int64[T]=label(V,{options['ignore_index']}) -> dx[T,D], dweight[V,D]"
    ),
    options=OPTIONS,
    stages={"logits": "input", "logit_gradient": "input"},
    may_be_zero=("T",),
    work="3*T*V*(D+16)",
    sequential_steps="ceil(T/16)*ceil(V/32)",
    reduction=Reduction("D"),
    gradient_of="linear_cross_entropy",
    faults=(
        "inputs_in_tf32",
        Fault("linear_gradient_not_averaged", "the gradient is not divided by the number of labels",
              altered("linear_cross_entropy_backward", reduction=_not_averaged), "loss", needs="more than one label"),
        Fault("weight_gradient_of_last_chunk", "dweight is that of the last chunk of 16 tokens alone", _first_chunk,
              "state", needs="more than 16 tokens"),
        Fault("linear_gradient_cap_dropped", "the logits' cap is missing",
              altered("linear_cross_entropy_backward", softcap=None), "loss"),
        Fault("linear_gradient_without_label", "the label's share is not subtracted",
              lambda xp, x, weight, target, **options: _gradients(
               xp, x, weight, xp.softmax(_logits(xp, x, weight)) / (
                max(int((target != options["ignore_index"]).sum()), 1) if options["reduction"] == "mean" else 1)),
              "loss"),
    ),
    exempt=("flushed_subnormals",),
)  # fmt: skip
def linear_cross_entropy_backward(xp: Arithmetic[N, Idx], x: N, weight: N, target: Idx, **options: Any) -> tuple[N, N]:
    """G weight and G^T x, G being `cross_entropy_backward` of the logits x weight^T.

    Stages: "logits", as a product stores them before the loss; "logit_gradient", G as the products take it.
    """
    dlogits = cross_entropy_backward(xp, _logits(xp, x, weight), target, **options)
    return _gradients(xp, x, weight, xp.round(dlogits, "logit_gradient"))


_LEAST = 2.0**-100  # where shares are smaller their mixture is known by its logarithm alone


def _reduced(xp: Arithmetic[N], loss: N, reduction: str) -> N:
    """Of each token, their sum, or that over their number."""
    if reduction == "none":
        return loss
    total = xp.sum(loss, axis=0)
    if reduction == "batchmean" and loss.shape[0] > 1:
        total = total / loss.shape[0]
    return total.reshape(())


def logarithms(xp: Arithmetic[N], op: str, temperature: float, *tensors: N) -> list[N]:
    """The logarithms of each tensor's softmax, at a temperature. Raises `ShapeError` where there are no classes."""
    if tensors[0].shape[1] == 0:
        raise ShapeError(f"{op}: expected logits of one class or more, got V=0")
    return [xp.log_softmax(x if temperature == 1 else x / temperature) for x in tensors]


def _divergence(xp: Arithmetic[N], log_p: N, log_q: N) -> N:
    """sum p (log p - log q) [T], of the shares from their logarithms; term by term, or as two sums."""
    share = xp.exp(log_p)
    both = xp.any_formula(
        lambda: xp.sum(share * (log_p - log_q)),
        lambda: xp.sum(share * log_p) - xp.sum(share * log_q),
        lambda: xp.sum(share * log_p - share * log_q),
    )
    return both[:, 0]


def _of_logarithms(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a divergence that is ``loss(xp, log_p, log_q, beta)`` of each token."""

    def definition(xp: Any, logits: Any, target_logits: Any, *, reduction: str, temperature: float = 1.0,
                   beta: float | None = None) -> Any:  # fmt: skip
        log_q, log_p = logarithms(xp, "divergence", temperature, logits, target_logits)
        return _reduced(xp, loss(xp, log_p, log_q, beta), reduction)

    return definition


KL_OPTIONS = {
    "temperature": number(1.0, positive=True, usual=(1.0, 2.0)),
    "reduction": choice("batchmean", "sum", "none"),
}


@define(
    "kl_div",
    lambda options: f"logits[T,V], target_logits[T,V] -> loss:float32[{loss_size(options)}]",
    options=KL_OPTIONS,
    rows=_by_token,
    reduction=Reduction("V"),
    faults=(
        Fault("kl_of_other_direction", "the divergence of the target from the logits is taken the other way round",
              altered("kl_div", logits=lambda target_logits: target_logits, target_logits=lambda logits: logits),
              "loss"),
        Fault("kl_without_entropy", "the target's entropy is missing: a cross-entropy",
              _of_logarithms(lambda xp, log_p, log_q, _: -xp.sum(xp.exp(log_p) * log_q)[:, 0]), "loss"),
        Fault("kl_temperature_ignored", "the temperature is ignored", altered("kl_div", temperature=1.0), "loss"),
        Fault("kl_times_temperature_squared", "the loss is multiplied by the temperature's square",
              altered("kl_div", loss=lambda loss, temperature: loss * temperature**2), "loss"),
        Fault("kl_mean_over_classes", "the loss is divided by the number of classes too",
              altered("kl_div", loss=lambda loss, logits: loss / max(logits.shape[1], 1)), "loss"),
    ),
    exempt=("flushed_subnormals",),
)  # fmt: skip
def kl_div(xp: Arithmetic[N], logits: N, target_logits: N, *, temperature: float, reduction: str) -> N:
    """sum p (log p - log q) per token, p = softmax(target_logits / temperature), q = softmax(logits / temperature).

    reduction="batchmean" divides the sum over tokens by their number.
    """
    log_q, log_p = logarithms(xp, "kl_div", temperature, logits, target_logits)
    return _reduced(xp, _divergence(xp, log_p, log_q), reduction)


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1


def mixture(xp: Arithmetic[N], log_p: N, log_q: N, beta: float) -> N:
    """log(beta p + (1 - beta) q): as the larger logarithm plus that of one and a ratio, or of the shares."""
    share = xp.exact(np.full(1, beta))
    rest = 1.0 - share

    def by_ratio() -> N:
        one, other = log_p + xp.log(share), log_q + xp.log(rest)
        return xp.maximum(one, other) + xp.function("softplus", -xp.abs(one - other))

    def by_shares() -> N:
        mixed = xp.exp(log_p) * share + xp.exp(log_q) * rest
        known = xp.above(mixed, _LEAST)
        return xp.where(known, xp.log(xp.where(known, mixed, 1.0)), by_ratio())

    return xp.any_formula(by_ratio, by_shares)


def _unweighted(xp: Any, log_p: Any, log_q: Any, beta: float) -> Any:
    mixed = mixture(xp, log_p, log_q, beta)
    return _divergence(xp, log_p, mixed) + _divergence(xp, log_q, mixed)


def _geometric(xp: Any, log_p: Any, log_q: Any, beta: float) -> Any:
    mixed = log_p * beta + log_q * (1 - beta)
    return _divergence(xp, log_p, mixed) * beta + _divergence(xp, log_q, mixed) * (1 - beta)


JSD_OPTIONS = {
    "beta": Option(0.5, _is_share, "a number between 0 and 1", usual=(0.5, 0.125)),
    "reduction": choice("batchmean", "sum", "none"),
}


@define(
    "jsd",
    lambda options: f"logits[T,V], target_logits[T,V] -> loss:float32[{loss_size(options)}]",
    options=JSD_OPTIONS,
    rows=_by_token,
    reduction=Reduction("V"),
    faults=(
        Fault("jsd_one_side", "only the target's divergence from the mixture is taken",
              _of_logarithms(lambda xp, log_p, log_q, beta: (
               _divergence(xp, log_p, mixture(xp, log_p, log_q, beta)) * beta)), "loss"),
        Fault("jsd_unweighted", "both divergences count whole, not by beta and 1 - beta", _of_logarithms(_unweighted),
              "loss"),
        Fault("jsd_geometric_mixture", "logarithms are mixed instead of shares", _of_logarithms(_geometric), "loss"),
        Fault("jsd_other_beta", "beta is another", altered("jsd", beta=lambda beta: 0.5 if beta != 0.5 else 0.25),
              "loss"),
    ),
    exempt=("flushed_subnormals",),
)  # fmt: skip
def jsd(xp: Arithmetic[N], logits: N, target_logits: N, *, beta: float, reduction: str) -> N:
    """beta KL(p || m) + (1 - beta) KL(q || m) per token, m = beta p + (1 - beta) q.

    p = softmax(target_logits), q = softmax(logits); Lin, *Divergence measures based on the Shannon entropy*, 1991.
    """
    log_q, log_p = logarithms(xp, "jsd", 1.0, logits, target_logits)
    mixed = mixture(xp, log_p, log_q, beta)
    share = xp.exact(np.full(1, beta))
    loss = _divergence(xp, log_p, mixed) * share + _divergence(xp, log_q, mixed) * (1.0 - share)
    return _reduced(xp, loss, reduction)


_UPSTREAM: Inputs = {
    "plain": lambda draws: 0.5 + draws.uniform(),
    "one": lambda draws: np.ones(draws.shape),
    "normal": lambda draws: draws.normal(),
    "zeros": lambda draws: np.zeros(draws.shape),
    "small": lambda draws: 2.0**-12 * draws.normal(),
    "large": lambda draws: 2.0**10 * draws.normal(),
    "powers": lambda draws: 2.0**-2 * (1.0 + (draws.uniform() >= 0)),
}


def _weighted(xp: Arithmetic[N], gradient: N, dloss: N, reduction: str) -> N:
    """The gradient of each token's loss times that of the loss, or its share of it."""
    shared = dloss[:, None] if reduction == "none" else dloss.reshape(1, 1)
    count = gradient.shape[0]
    if reduction != "batchmean" or count < 2:
        return gradient * shared
    return xp.any_formula(lambda: gradient / count * shared, lambda: gradient * (shared / count))


@define(
    "kl_div_backward",
    lambda options: f"logits[T,V], target_logits[T,V], dloss:float32[{loss_size(options)}] -> dlogits[T,V]",
    options=KL_OPTIONS,
    rows=_by_token,
    gradient_of="kl_div",
    inputs={"dloss": _UPSTREAM},
    reduction=Reduction("V"),
    faults=(
        Fault("kl_gradient_sign", "p - q is given, not q - p",
              altered("kl_div_backward", dlogits=lambda dlogits: -dlogits), "loss"),
        Fault("kl_gradient_without_temperature", "the gradient is not divided by the temperature",
              altered("kl_div_backward", dlogits=lambda dlogits, temperature: dlogits * temperature), "loss",
              needs="a temperature"),
        Fault("kl_gradient_not_averaged", "the gradient is not divided by the number of tokens",
              altered("kl_div_backward", reduction=_not_averaged), "loss", needs="more than one token"),
        Fault("kl_gradient_target_alone", "-p is given: the softmax of the logits is missing",
              lambda xp, logits, target_logits, dloss, *, temperature, reduction: _weighted(
               xp, -xp.softmax(target_logits / temperature) / temperature, dloss, reduction), "loss"),
    ),
    exempt=("flushed_subnormals",),
)  # fmt: skip
def kl_div_backward(
    xp: Arithmetic[N], logits: N, target_logits: N, dloss: N, *, temperature: float, reduction: str
) -> N:
    """dloss (q - p) / temperature of each token, over their number for "batchmean"; p, q as `kl_div` has them.

    Shares by softmax, or by the exponential of its logarithm. Where a logit is not finite nothing is said.
    """
    pair = [x if temperature == 1 else x / temperature for x in (logits, target_logits)]
    gap = xp.any_formula(
        lambda: xp.softmax(pair[0]) - xp.softmax(pair[1]),
        lambda: xp.exp(xp.log_softmax(pair[0])) - xp.exp(xp.log_softmax(pair[1])),
    )
    gradient = _weighted(xp, gap if temperature == 1 else gap / temperature, dloss, reduction)
    return _of_finite(xp, gradient, logits, target_logits)


def _of_finite(xp: Arithmetic[N], x: N, *logits: N) -> N:
    def touched() -> Any:
        first, second = ((~xp.is_finite(part)).any(-1)[:, None] for part in logits)
        return first | second

    return xp.unspecified(touched, x)


def _jsd_gradient(xp: Arithmetic[N], log_p: N, log_q: N, shared: N, beta: float) -> N:
    """q (c - sum q c) (1 - beta) times the loss's gradient, in any order; c = log q - log m."""
    q = xp.exp(log_q)
    gap = log_q - mixture(xp, log_p, log_q, beta)
    rest = 1.0 - xp.exact(np.full(1, beta))
    each = xp.product(q, gap * rest, shared)
    return xp.any_formula(
        lambda: xp.product(q, (gap - xp.sum(q * gap)) * rest, shared),
        lambda: each - q * xp.sum(each),
        lambda: (q * gap * rest - q * xp.sum(q * gap * rest)) * shared,
    )


def _unprojected(xp: Any, logits: Any, target_logits: Any, dloss: Any, *, beta: float, reduction: str) -> Any:
    log_q, log_p = logarithms(xp, "jsd_backward", 1.0, logits, target_logits)
    gap = log_q - mixture(xp, log_p, log_q, beta)
    return _weighted(xp, xp.exp(log_q) * gap * (1 - beta), dloss, reduction)


@define(
    "jsd_backward",
    lambda options: f"logits[T,V], target_logits[T,V], dloss:float32[{loss_size(options)}] -> dlogits[T,V]",
    options=JSD_OPTIONS,
    rows=_by_token,
    gradient_of="jsd",
    inputs={"dloss": _UPSTREAM},
    reduction=Reduction("V"),
    faults=(
        Fault("jsd_gradient_unprojected", "the gradient of the logarithms is not taken through the softmax",
              _unprojected, "loss"),
        Fault("jsd_gradient_other_beta", "beta and 1 - beta are exchanged",
              altered("jsd_backward", beta=lambda beta: 1 - beta), "loss", needs="a beta other than a half"),
        Fault("jsd_gradient_unweighted", "the gradient is not multiplied by 1 - beta",
              altered("jsd_backward", dlogits=lambda dlogits, beta: dlogits / (1 - beta)), "loss"),
        Fault("jsd_gradient_sign", "the gradient has the other sign",
              altered("jsd_backward", dlogits=lambda dlogits: -dlogits), "loss"),
    ),
    exempt=("flushed_subnormals",),
)  # fmt: skip
def jsd_backward(xp: Arithmetic[N], logits: N, target_logits: N, dloss: N, *, beta: float, reduction: str) -> N:
    """dloss (1 - beta) q (c - sum q c) of each token, c = log q - log m; p, q and m as `jsd` has them."""
    log_q, log_p = logarithms(xp, "jsd_backward", 1.0, logits, target_logits)
    shared = dloss[:, None] if reduction == "none" else dloss.reshape(1, 1)
    count = logits.shape[0] if reduction == "batchmean" else 1
    gradient = _jsd_gradient(xp, log_p, log_q, shared / count if count > 1 else shared, beta)
    return _of_finite(xp, gradient, logits, target_logits)
