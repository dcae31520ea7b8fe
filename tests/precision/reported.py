"""The audit of the small model, and what its audit.json holds, made once for all tests of reports."""

import math
from functools import cache
from typing import Any

from assay.precision.advice import Finding
from assay.precision.auditing import Audit, audit
from assay.precision.baseline import baselines
from assay.precision.report import content_of, record
from tests.precision.small_models import FORMATS, made


@cache
def small_audit() -> Audit:
    """An audit of the small model in a few schemes."""
    model, batches = made()
    return audit(model, batches, "relative", FORMATS, "h200")


def asked(audited: Audit) -> dict[str, Any]:
    """Of which model, with what data and settings; the budget is half of the bytes."""
    settings = record.Settings(
        metric=audited.metric.name,
        unit=audited.metric.unit,
        target=audited.target,
        formats=list(FORMATS),
        context=4096,
        budgets=record.Budgets(bytes=audited.cost({}).bytes / 2),
        assumed=False,
        fixed=[],
    )
    model = record.Model("</script><b>bold</b>", "module", "float32", 0)
    return {"model": model, "data": record.Data("none", 8, 64), "settings": settings, "fingerprint": "0" * 64}


@cache
def small_content(beside: bool = False) -> dict[str, Any]:
    """The content of its audit.json, with five findings and a name that HTML could take for its own.

    ``beside``: with what needs no audit beside what is recommended.
    """
    audited = small_audit()
    chosen = audited.recommend(max_bytes=audited.cost({}).bytes / 2)
    front = audited.pareto(6)
    for *_, assignment in front:
        assignment.measured = audited.measure(assignment)
    findings = [
        Finding("overflow", site, f"Thing {number} is too large.", {"largest": math.inf, "at": [1, 2]}, "Mend it.")
        for number, site in enumerate(["head", "head", "layers.0.proj", "layers.1.proj", "layers.2.proj"])
    ]
    simple = baselines(audited, chosen, caches=False) if beside else []
    return content_of(audited, chosen, front, findings, baselines=simple, **asked(audited))
