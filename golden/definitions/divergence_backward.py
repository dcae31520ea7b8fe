"""Gradients of the divergences, of the logits that learn; the target's are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.definitions.divergence import JSD_OPTIONS, KL_OPTIONS, logarithms, mixture
from assay.golden.registry import Fault, Reduction, define
from assay.golden.signature import Inputs


def _signature(options: Mapping[str, Any]) -> str:
    size = "T" if options["reduction"] == "none" else ""
    return f"logits[T,V], target_logits[T,V], dloss:float32[{size}] -> dlogits[T,V]"


_UPSTREAM: Inputs = {
    "plain": lambda draws: 0.5 + draws.uniform(),
    "one": lambda draws: np.ones(draws.shape),
    "normal": lambda draws: draws.normal(),
    "powers": lambda draws: 2.0**-2 * (1.0 + (draws.uniform() >= 0)),
}


def _weighted(xp: Arithmetic[N], gradient: N, dloss: N, reduction: str) -> N:
    """The gradient of each token's loss times that of the loss, or its share of it."""
    shared = dloss[:, None] if reduction == "none" else dloss.reshape(1, 1)
    count = gradient.shape[0]
    if reduction != "batchmean" or count < 2:
        return gradient * shared
    return xp.any_formula(lambda: gradient / count * shared, lambda: gradient * (shared / count))


def _no_mean(xp: Any, *tensors: Any, reduction: str, **options: Any) -> Any:
    return kl_div_backward(xp, *tensors, reduction="sum" if reduction == "batchmean" else reduction, **options)


@define(
    "kl_div_backward",
    _signature,
    options=KL_OPTIONS,
    rows=lambda options: "T" if options["reduction"] == "none" else None,
    gradient_of="kl_div",
    inputs={"dloss": _UPSTREAM},
    reduction=Reduction("V"),
    faults=(
        Fault("kl_gradient_sign", "p - q is given, not q - p",
              lambda xp, logits, target_logits, dloss, **options: -kl_div_backward(
               xp, logits, target_logits, dloss, **options), "loss"),
        Fault("kl_gradient_without_temperature", "the gradient is not divided by the temperature",
              lambda xp, *tensors, temperature, **options: kl_div_backward(
               xp, *tensors, temperature=temperature, **options) * temperature, "loss", needs="a temperature"),
        Fault("kl_gradient_not_averaged", "the gradient is not divided by the number of tokens", _no_mean, "loss",
              needs="more than one token"),
        Fault("kl_gradient_target_alone", "-p is given: the softmax of the logits is left out",
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
    found = _weighted(xp, gap if temperature == 1 else gap / temperature, dloss, reduction)
    return _of_finite(xp, found, logits, target_logits)


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
    _signature,
    options=JSD_OPTIONS,
    rows=lambda options: "T" if options["reduction"] == "none" else None,
    gradient_of="jsd",
    inputs={"dloss": _UPSTREAM},
    reduction=Reduction("V"),
    faults=(
        Fault("jsd_gradient_unprojected", "the gradient of the logarithms is not taken through the softmax",
              _unprojected, "loss"),
        Fault("jsd_gradient_other_beta", "beta and 1 - beta are exchanged",
              lambda xp, *tensors, beta, reduction: jsd_backward(xp, *tensors, beta=1 - beta, reduction=reduction),
              "loss", needs="a beta other than a half"),
        Fault("jsd_gradient_unweighted", "the gradient is not multiplied by 1 - beta",
              lambda xp, *tensors, beta, reduction: jsd_backward(xp, *tensors, beta=beta, reduction=reduction)
               / (1 - beta), "loss"),
        Fault("jsd_gradient_sign", "the gradient has the other sign",
              lambda xp, *tensors, **options: -jsd_backward(xp, *tensors, **options), "loss"),
    ),
    exempt=("flushed_subnormals",),
)  # fmt: skip
def jsd_backward(xp: Arithmetic[N], logits: N, target_logits: N, dloss: N, *, beta: float, reduction: str) -> N:
    """dloss (1 - beta) q (c - sum q c) of each token, c = log q - log m; p, q and m as `jsd` has them."""
    log_q, log_p = logarithms(xp, "jsd_backward", 1.0, logits, target_logits)
    shared = dloss[:, None] if reduction == "none" else dloss.reshape(1, 1)
    count = logits.shape[0] if reduction == "batchmean" else 1
    found = _jsd_gradient(xp, log_p, log_q, shared / count if count > 1 else shared, beta)
    return _of_finite(xp, found, logits, target_logits)
