"""The perturbations that a scheme makes at a site, and when a site changes nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from assay.precision.schemes import FakeQuantizer, Quantizer, Scheme

Perturbation = tuple[str, object, str]
"""A scheme's effect on a tensor: "weight", "values", "queries" or "sum"; how it is stored, how transformed."""
Key = tuple[str, Perturbation]
"""A site and one perturbation there: a row of the quadratic form."""

Change = Callable[[FakeQuantizer, Tensor], Tensor]
"""The change that storing makes in a tensor, such as `sensitivity.change_of`."""


@dataclass(slots=True)
class Term:
    """The products of one perturbation of one site in one batch."""

    sums: Tensor
    """[B], float32: the product of every sequence."""
    squares: Tensor
    """[B], float32: the sum of squares of each product's terms, a row of the tensor each."""
    sampling: float
    """How many rows each sampled row represents, except the largest."""
    variance: float = 0.0
    """Sampling variance of the sum of the squares."""


def perturbations_of(scheme: Scheme) -> tuple[Perturbation, ...]:
    """Return the parts of a scheme's change. Schemes that store a weight in the same way share that part."""
    transform = scheme.name if scheme.transform == "smooth" else scheme.transform
    parts = {"weight": scheme.weight, "values": scheme.activation, "queries": scheme.queries, "sum": scheme.split}
    return tuple((kind, stored, transform) for kind, stored in parts.items() if stored is not None)


def value_perturbation(scheme: Scheme, part: str) -> Perturbation | None:
    """Return a scheme's perturbation of values at its site, of a cache its ``part``: keys, values or queries; None:
    none.

    Keys and values of a cache are one perturbation.
    """
    kind = "queries" if part == "queries" else "values"
    return next((each for each in perturbations_of(scheme) if each[0] == kind), None)


def is_repeated(name: str, schemes: Mapping[str, Scheme], sources: Mapping[str, str]) -> bool:
    """Return whether a site's input was already stored in such a way that its own scheme leaves it unchanged.

    schemes: the assignment. sources: the site of each site's unchanged input, such as a norm for a linear.
    """
    quantizer, before = schemes[name].activation, _last(name, schemes, sources)
    if quantizer is None or before is None or schemes[name].transform != "none":
        return False
    return _leaves(quantizer, before)


def _last(name: str, schemes: Mapping[str, Scheme], sources: Mapping[str, str]) -> Quantizer | None:
    """Return the last quantizer of a site's input, for rows of a table its weight's; None without one."""
    source = sources.get(name)
    if source is None:
        return None
    before = _last(source, schemes, sources)
    quantizer = (schemes[source].weight or schemes[source].activation) if source in schemes else None
    repeated = quantizer is not None and before is not None and _leaves(quantizer, before)
    return before if quantizer is None or repeated else quantizer


def _leaves(quantizer: Quantizer, stored: Quantizer) -> bool:
    """Return whether a quantizer leaves values of ``stored`` unchanged: the same again, or a cast to a wider format.

    Symmetric integers change a little more each time, for their largest magnitude is half a step beyond the last code,
    so a new scale is smaller: by less than half of the first error, which counts alone.
    """
    if quantizer == stored:
        return True
    if quantizer.per != "element" or stored.per != "element":
        return False
    wide, narrow = quantizer.element, stored.element
    finer = wide.min_exponent - wide.precision <= narrow.min_exponent - narrow.precision
    return finer and wide.precision >= narrow.precision and wide.largest >= narrow.largest
