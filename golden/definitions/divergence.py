"""Divergences between the distributions of two rows of logits: Kullback and Leibler's, and Jensen and Shannon's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.errors import ShapeError
from assay.golden.options import Option, choice, number
from assay.golden.registry import Fault, Reduction, define

_LEAST = 2.0**-100  # where shares are smaller their mixture is known by its logarithm alone


def _signature(options: Mapping[str, Any]) -> str:
    return f"logits[T,V], target_logits[T,V] -> loss:float32[{'T' if options['reduction'] == 'none' else ''}]"


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
    """sum p (log p - log q) [T], of the shares from their logarithms; term by term, or both sums apart."""
    share = xp.exp(log_p)
    both = xp.any_formula(
        lambda: xp.sum(share * (log_p - log_q)),
        lambda: xp.sum(share * log_p) - xp.sum(share * log_q),
        lambda: xp.sum(share * log_p - share * log_q),
    )
    return both[:, 0]


def _without_temperature(xp: Any, logits: Any, target_logits: Any, *, temperature: float, reduction: str) -> Any:
    return kl_div(xp, logits, target_logits, temperature=1.0, reduction=reduction)


def _squared(xp: Any, logits: Any, target_logits: Any, *, temperature: float, reduction: str) -> Any:
    return kl_div(xp, logits, target_logits, temperature=temperature, reduction=reduction) * temperature**2


def _mean_of_all(xp: Any, logits: Any, target_logits: Any, *, temperature: float, reduction: str) -> Any:
    return kl_div(xp, logits, target_logits, temperature=temperature, reduction=reduction) / max(logits.shape[1], 1)


def _cross(xp: Any, logits: Any, target_logits: Any, *, temperature: float, reduction: str) -> Any:
    log_q, log_p = logarithms(xp, "kl_div", temperature, logits, target_logits)
    return _reduced(xp, -xp.sum(xp.exp(log_p) * log_q)[:, 0], reduction)


KL_OPTIONS = {
    "temperature": number(1.0, positive=True, usual=(1.0, 2.0)),
    "reduction": choice("batchmean", "sum", "none"),
}


@define(
    "kl_div",
    _signature,
    options=KL_OPTIONS,
    rows=lambda options: "T" if options["reduction"] == "none" else None,
    reduction=Reduction("V"),
    faults=(
        Fault("kl_of_other_direction", "the divergence of the target from the logits is taken the other way round",
              lambda xp, logits, target_logits, **options: kl_div(xp, target_logits, logits, **options), "loss"),
        Fault("kl_without_entropy", "the target's entropy is left out: a cross-entropy", _cross, "loss"),
        Fault("kl_temperature_ignored", "the temperature is ignored", _without_temperature, "loss"),
        Fault("kl_times_temperature_squared", "the loss is multiplied by the temperature's square", _squared, "loss"),
        Fault("kl_mean_over_classes", "the loss is divided by the number of classes too", _mean_of_all, "loss"),
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


def _one_sided(xp: Any, logits: Any, target_logits: Any, *, beta: float, reduction: str) -> Any:
    log_q, log_p = logarithms(xp, "jsd", 1.0, logits, target_logits)
    return _reduced(xp, _divergence(xp, log_p, mixture(xp, log_p, log_q, beta)) * beta, reduction)


def _unweighted(xp: Any, logits: Any, target_logits: Any, *, beta: float, reduction: str) -> Any:
    log_q, log_p = logarithms(xp, "jsd", 1.0, logits, target_logits)
    mixed = mixture(xp, log_p, log_q, beta)
    return _reduced(xp, _divergence(xp, log_p, mixed) + _divergence(xp, log_q, mixed), reduction)


def _geometric(xp: Any, logits: Any, target_logits: Any, *, beta: float, reduction: str) -> Any:
    log_q, log_p = logarithms(xp, "jsd", 1.0, logits, target_logits)
    mixed = log_p * beta + log_q * (1 - beta)
    parts = _divergence(xp, log_p, mixed) * beta, _divergence(xp, log_q, mixed) * (1 - beta)
    return _reduced(xp, parts[0] + parts[1], reduction)


def _even(xp: Any, logits: Any, target_logits: Any, *, beta: float, reduction: str) -> Any:
    return jsd(xp, logits, target_logits, beta=0.5 if beta != 0.5 else 0.25, reduction=reduction)


JSD_OPTIONS = {
    "beta": Option(0.5, _is_share, "a number between 0 and 1", usual=(0.5, 0.125)),
    "reduction": choice("batchmean", "sum", "none"),
}


@define(
    "jsd",
    _signature,
    options=JSD_OPTIONS,
    rows=lambda options: "T" if options["reduction"] == "none" else None,
    reduction=Reduction("V"),
    faults=(
        Fault("jsd_one_side", "only the target's divergence from the mixture is taken", _one_sided, "loss"),
        Fault("jsd_unweighted", "both divergences count whole, not by beta and 1 - beta", _unweighted, "loss"),
        Fault("jsd_geometric_mixture", "logarithms are mixed in place of shares", _geometric, "loss"),
        Fault("jsd_other_beta", "beta is another", _even, "loss"),
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
