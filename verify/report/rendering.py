"""What pages are rendered by: jinja2 over the templates of this room; torch is not needed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jinja2

from assay import charts


@cache
def environment() -> jinja2.Environment:
    """What templates are rendered by; `report.html` adds what those of verdicts need."""
    return charts.environment(Path(__file__).with_name("templates"))
