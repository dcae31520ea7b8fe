"""Errors that are no longer small, which a quadratic form doesn't follow: no interval is promised, and it is told."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from assay.precision.auditing import audit, reliability
from assay.precision.prediction.calibration import Calibration, Measured
from assay.precision.report import content_of, page, summary
from tests.precision.reported import asked
from tests.precision.small_models import FORMATS, made


def pairs(seed: int, end: float = math.inf) -> list[Measured]:
    """24 errors of 1e-5 to 1 that are measured where they are predicted, within a tenth, up to ``end``; of those beyond
    half is measured."""
    draw = random.Random(seed)
    sizes = np.geomspace(1e-5, 1.0, 24)
    return [Measured(p, p * math.exp(draw.gauss(0, 0.1)) * (1 if p <= end else 0.4), 4.0) for p in map(float, sizes)]


@pytest.mark.parametrize("seed", range(4))
def test_no_interval_is_promised_above_what_was_measured_where_it_was_predicted(seed: int) -> None:
    """Where large measured errors leave the line the promise ends below them, and small ones keep it; where all lie on
    it, it ends with the largest but for chance, and nothing further is promised."""
    bent, straight = Calibration.fit(pairs(seed, 0.2)), Calibration.fit(pairs(seed))
    for found in (bent, straight):
        assert [found.level_of(Measured(size, 0.0, 4.0)) for size in (1e-7, 1e-3, 0.1)] == [0.95] * 3
        assert found.level_of(Measured(1.01, 0.0, 4.0)) == 0
    assert bent.level_of(Measured(0.37, 0.0, 4.0)) == 0
    assert straight.level_of(Measured(0.37, 0.0, 4.0)) == 0.95


def test_a_large_error_stands_in_record_terminal_and_page() -> None:
    model, batches = made()
    found = audit(model, batches, "relative", FORMATS)
    found.calibrate(12)
    chosen = found.recommend(max_bytes=0.5 * found.cost({}).bytes)
    assert "is large" not in chosen.why
    whole, told = found.predictor, []
    for limit in (whole.calibration.limit, 1e-9):
        found.predictor = replace(whole, calibration=replace(whole.calibration, limit=limit))
        chosen.prediction = found.predict(chosen)
        chosen.why = " ".join(["chosen", *reliability(found, chosen)])
        content = content_of(found, chosen, [], [], **asked(found))
        told.append([content["recommended"]["prediction"]["level"], " ".join(summary(content).split()), page(content)])
    (level, *before), (none, *after) = told
    assert (level > 0.9, none) == (True, 0)
    assert ["a guess" in text for text in (*before, *after)] == [False, False, True, True]
    assert ["is large: of those measured" in text for text in (*before, *after)] == [False, False, True, True]
