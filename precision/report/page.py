"""The report of an audit as one HTML file that needs nothing from a network."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from assay.charts import SCRIPT, STYLE, environment
from assay.precision.report.charts import charts_of, undrawn
from assay.precision.report.next_steps import next_steps
from assay.precision.report.summary import (
    advice_lines,
    budget_lines,
    coverage,
    export_lines,
    fixed_lines,
    headline,
    interval,
    interval_ends,
    measured_words,
)
from assay.precision.report.words import counted, growth_words
from assay.precision.units import format_bytes, format_error, format_seconds


def page(content: Mapping[str, Any]) -> str:
    """What audit.json holds as an HTML page, with charts that are drawn in it."""
    return (
        _rendering()
        .get_template("report.html.j2")
        .render(
            audit=content,
            charts=charts_of(content),
            chart_style=STYLE,
            chart_script=SCRIPT,
            undrawn=undrawn(content),
            headline=headline(content),
            instead=advice_lines(content),
            budgets=budget_lines(content),
            exports=export_lines(content),
            fixed=fixed_lines(content),
            coverage=coverage(content),
            steps=next_steps(content),
        )
    )


@cache
def _rendering() -> jinja2.Environment:
    rendering = environment(Path(__file__).with_name("templates"))
    rendering.filters |= {
        "bytes": format_bytes,
        "error": format_error,
        "seconds": format_seconds,
        "interval": interval,
        "ends": interval_ends,
        "between": measured_words,
        "counted": counted,
        "growth": growth_words,
    }
    return rendering
