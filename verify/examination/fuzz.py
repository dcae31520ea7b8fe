"""The fuzz phase: Hypothesis draws cases and climbs towards larger ratios of error to radius."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import seed as seeded
from hypothesis import strategies as st

from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler

_SMALLER = 8  # times; only one in as many cases may have as many elements, and turns, as a case may have


def fuzz(sampler: Sampler, examples: int, attempt: Callable[[Case], float | None]) -> None:
    """Call ``attempt`` on up to ``examples`` cases; the search climbs the ratio that it returns (None: stop)."""

    @st.composite
    def cases(draw: Any) -> Case:
        def choose(values: Sequence[Any]) -> Any:
            if isinstance(values, range):
                return values[draw(st.integers(0, len(values) - 1))]
            return draw(st.sampled_from(values))

        share = choose((_SMALLER,) * (_SMALLER - 1) + (1,))
        return sampler.limited(sampler.most_elements // share, sampler.most_work, share).case(choose)

    @seeded(sampler.seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.target),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(cases())
    def run(case: Case) -> None:
        ratio = attempt(case)
        if ratio is not None and math.isfinite(ratio):
            target(ratio)

    run()
