"""What a verdict says of a reference whose own formula is ill-conditioned."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic import BallArithmetic
from assay.golden.errors import Undecided
from assay.golden.evaluation.binding import bind
from assay.verify.cases.case import all_contents
from assay.verify.cases.sampler import seeded, with_values
from assay.verify.comparison.oracle import one_thread
from assay.verify.examination.question import Question

_DATA = {"normal": "", "large_mean": "on data of a large mean, ", "steep": "on data of a wide range, "}


def remarks(question: Question) -> tuple[str, ...]:
    """The lines of a reference that lose much on ordinary data, of a large mean, or of a wide range; none of an op."""
    definition: Any = question.definition.definition
    if not hasattr(definition, "remarks"):
        return ()
    results: dict[str, str] = {}
    first = question.sampler.case(seeded(0), style="tile", options=question.sampler.option_sets()[0])
    for kind, words in _DATA.items():
        case = with_values(first, kind)
        call = bind(question.definition, list(all_contents(case).values()), case.options)
        xp = BallArithmetic(question.settings.contract.model(question.definition, case.input_format))
        numbers = [
            xp.integers(value) if tensor.is_integer else xp.exact(value.double())
            for tensor, value in zip(call.signature.tensors, call.tensors.values(), strict=True)
        ]
        dtypes = [value.dtype for value in call.tensors.values()]
        try:
            with one_thread():
                said = definition.remarks(xp, numbers, dtypes, call.options)
        except Undecided:
            continue
        for remark in said:
            results.setdefault(remark.partition(": ")[0], words + remark)
    return tuple(results.values())
