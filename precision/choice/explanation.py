"""What a recommendation says of itself: budgets by the names that `recommend` gives them, with what was asked for."""

import math
from collections.abc import Iterable, Mapping, Sequence

from assay.precision.amounts import in_bytes, in_error, in_seconds
from assay.precision.choice.problem import Quantity, Totals

ARGUMENTS: Mapping[Quantity, str] = {
    "error": "max_error",
    "bytes": "max_bytes",
    "kv_bytes": "max_kv_bytes",
    "prefill": "max_prefill",
    "decode": "max_time",
}
"""The argument of `recommend` that limits each quantity."""


def bound(binding: Iterable[Quantity], totals: Totals, limits: Totals, unit: str) -> str:
    """By what a choice is bound: ``bound by max_bytes (1.24 MB of at most 1.25 MB)``."""
    pairs = {name: _apart(name, totals[name], limits[name], unit) for name in binding}
    return "bound by " + " and ".join(
        f"{ARGUMENTS[name]} ({has} of at most {ask})" for name, (has, ask) in pairs.items()
    )


def missed(
    sets: Iterable[Iterable[Quantity]],
    shown: Iterable[Quantity],
    totals: Totals,
    limits: Totals,
    unit: str,
    formats: int,
) -> str:
    """Sets of budgets of which none can be kept, neither one alone nor several together; what the closest has."""
    names = [[ARGUMENTS[name] for name in each] for each in sets]
    first, *others = [" and ".join(each) + "{}" + " together" * (len(each) > 1) for each in names]
    kept = ", nor ".join([first.format(" can't be kept"), *(other.format("") for other in others)])
    pairs = {name: _apart(name, totals[name], limits[name], unit) for name in shown}
    has = " and ".join(f"{has} where {ARGUMENTS[name]} asks for at most {ask}" for name, (has, ask) in pairs.items())
    return f"{kept}{',' * bool(others)} {among(formats)}; the closest has {has}"


def outdone(totals: Totals, limits: Totals, unit: str) -> str:
    """Where the measured error is not what was predicted, and nothing that was tried keeps the budgets."""
    if "error" not in limits:
        return f"predicted to keep the budgets, but measured {in_error(totals['error'])} {unit}"
    has, ask = _apart("error", totals["error"], limits["error"], unit)
    return f"predicted to keep max_error, but measured {has} where at most {ask} was asked for; none tried did better"


def unconfirmed(chosen_on: float, totals: Totals, limits: Totals, unit: str) -> str:
    """Where a choice keeps the error on the data that it was made on, and not on the held-out data."""
    has, ask = _apart("error", totals["error"], limits.get("error", math.inf), unit)
    return (
        f"max_error is kept on the data that was chosen on ({in_error(chosen_on)}), but not on the held-out data: "
        f"{has} of at most {ask}; give more text, which narrows the gap, or a smaller max_error"
    )


def among(formats: int) -> str:
    """What a choice was made from: fewer formats where `audit` was given ``formats`` or a ``target``."""
    return f"with the {formats} formats that this audit looked at" if formats > 1 else "with this audit's only format"


def untrusted(reasons: Sequence[str]) -> str:
    """A clause for reasons, sentences each, not to trust a prediction; empty without any."""
    if not reasons:
        return ""
    return f"; go by what was measured, not by the prediction: {' '.join(reasons).removesuffix('.')}"


def _apart(quantity: Quantity, total: float, limit: float, unit: str) -> tuple[str, str]:
    """A total with its unit and its limit, in as many digits as tell them apart, up to nine."""
    pairs = [(_told(quantity, total, digits), _told(quantity, limit, digits)) for digits in (3, 6, 9)]
    has, ask = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    return f"{has} {unit}" if quantity == "error" else has, ask


def _told(quantity: Quantity, value: float, digits: int = 3) -> str:
    if quantity == "error":
        return in_error(value, digits)
    return (in_bytes if quantity in ("bytes", "kv_bytes") else in_seconds)(value, digits)
