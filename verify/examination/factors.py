"""Scales, weights and slopes over all that their dtype holds, beside ordinary numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from assay.formats.format import format_named
from assay.golden.inputs.distributions import names_of
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, with_values
from assay.verify.examination.bases import bases


def factor_cases(sampler: Sampler) -> Iterator[Case]:
    """All factors at once over their range; then each scale by itself, as signs of two cancel, of either sign and zero.

    In the small ones a scale's first element is negative, so that a scale of one element is; in the others it is zero.
    """
    for base in bases(sampler, "vast", ("small", "tile"), most=2):
        ordinary = with_values(base, "normal", layouts={}, protocol="once", memory="plain")
        if vast := {tensor.name: "vast" for tensor in base.signature.tensors if "vast" in names_of(tensor)}:
            yield replace(ordinary, values={**ordinary.values, **vast})
    for seed, style in enumerate(("small", "tile")):
        for base in bases(sampler, "cycled", (style,)):
            ordinary = with_values(base, "normal", layouts={}, protocol="once", memory="plain", seed=seed)
            for tensor in base.signature.tensors:
                if tensor.role == "scale" and format_named(base.dtypes[tensor.name]).signed:
                    yield replace(ordinary, values={**ordinary.values, tensor.name: "cycled"})
