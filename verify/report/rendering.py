"""Page rendering: jinja2 with the templates of this package; torch is not needed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2

from assay import charts
from assay.runtime.output import visible


@cache
def environment() -> jinja2.Environment:
    """Return the template environment; `report.html` adds the filters for verdicts."""
    return charts.environment(Path(__file__).with_name("templates"), visible)
