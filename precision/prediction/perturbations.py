"""What a scheme's change at a site is made of, and when a site changes nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from assay.precision.schemes import FakeQuantizer, Quantizer, Scheme

Perturbation = tuple[str, object, str]
"""What a scheme does to a tensor: "weight", "values", "queries" or "sum"; how it is stored, how transformed."""
Key = tuple[str, Perturbation]
"""A site and one perturbation there: a row of the quadratic form."""

Change = Callable[[FakeQuantizer, Tensor], Tensor]
"""What storing changes in a tensor, such as `sensitivity.change_of`."""


@dataclass(slots=True)
class Term:
    """What one perturbation of one site does in one batch."""

    sums: Tensor
    """[B], float32: the products of every sequence."""
    squares: Tensor
    """[B], float32: the squares of each product's terms, a row of the tensor each, summed."""
    sampling: float
    """One row of this many was looked at, but for the largest."""
    variance: float = 0.0
    """Of the sum of the squares, what the sampling of a weight's rows leaves open."""


def perturbations_of(scheme: Scheme) -> tuple[Perturbation, ...]:
    """The parts that a scheme's change is made of. Schemes that store a weight alike share that part."""
    transform = scheme.name if scheme.transform == "smooth" else scheme.transform
    perturbations: list[Perturbation] = []
    if scheme.weight is not None:
        perturbations.append(("weight", scheme.weight, transform))
    if scheme.activation is not None:
        perturbations.append(("values", scheme.activation, transform))
    if scheme.queries is not None:
        perturbations.append(("queries", scheme.queries, transform))
    if scheme.split is not None:
        perturbations.append(("sum", scheme.split, transform))
    return tuple(perturbations)


def value_perturbation(scheme: Scheme, part: str) -> Perturbation | None:
    """What a scheme does to values that pass its site, of a cache its ``part``: keys, values or queries; None: nothing.

    Keys and values of a cache are one perturbation.
    """
    kind = "queries" if part == "queries" else "values"
    return next((each for each in perturbations_of(scheme) if each[0] == kind), None)


def is_repeated(name: str, schemes: Mapping[str, Scheme], sources: Mapping[str, str]) -> bool:
    """Whether a site is given values that were stored before in such a way that its own scheme leaves them as they are.

    schemes: the assignment. sources: from where each site is given values as they are, as a linear is a norm's output.
    """
    quantizer, before = schemes[name].activation, _last(name, schemes, sources)
    if quantizer is None or before is None or schemes[name].transform != "none":
        return False
    return _leaves(quantizer, before)


def _last(name: str, schemes: Mapping[str, Scheme], sources: Mapping[str, str]) -> Quantizer | None:
    """How the values that a site is given were stored last, rows of a table as its weight is; None: they weren't."""
    source = sources.get(name)
    if source is None:
        return None
    before = _last(source, schemes, sources)
    quantizer = (schemes[source].weight or schemes[source].activation) if source in schemes else None
    repeated = quantizer is not None and before is not None and _leaves(quantizer, before)
    return before if quantizer is None or repeated else quantizer


def _leaves(quantizer: Quantizer, stored: Quantizer) -> bool:
    """Whether all that the one has stored is as it is to the other: the same once more, or a cast to a wider format.

    Symmetric integers change a little more each time, for their largest magnitude lies half a step beyond the last
    code, so a new scale is smaller: by less than half of the first error, which counts alone.
    """
    if quantizer == stored:
        return True
    if quantizer.per != "element" or stored.per != "element":
        return False
    wide, narrow = quantizer.element, stored.element
    finer = wide.min_exponent - wide.precision <= narrow.min_exponent - narrow.precision
    return finer and wide.precision >= narrow.precision and wide.largest >= narrow.largest
