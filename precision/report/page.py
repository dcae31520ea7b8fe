"""The report of an audit as one HTML file that needs nothing from a network."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from assay.precision.amounts import in_bytes, in_error, in_seconds
from assay.precision.report.next_steps import next_steps
from assay.precision.report.summary import (
    advice_lines,
    budget_lines,
    coverage,
    export_lines,
    fixed_lines,
    headline,
    interval,
    measured_words,
)
from assay.precision.report.words import counted, grouped, growth_words
from assay.runtime.lazy import optional

_TEMPLATES = Path(__file__).with_name("templates")


def page(content: Mapping[str, Any]) -> str:
    """What audit.json holds as an HTML page, plots included. Raises NotInstalled where plotly is missing."""
    embedded = json.dumps(_shown(content), separators=(",", ":")).replace("<", "\\u003c")
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            audit=content,
            data=embedded,
            plotly=plotly_source(),
            headline=headline(content),
            instead=advice_lines(content),
            budgets=budget_lines(content),
            exports=export_lines(content),
            fixed=fixed_lines(content),
            coverage=coverage(content),
            steps=next_steps(content),
            worst=max((site["outlier"] or 0.0 for site in content["sites"]), default=0.0),
        )
    )


@cache
def plotly_source() -> str:
    """plotly.js, whole. Raises NotInstalled."""
    return str(optional("plotly.offline", purpose="report.html", extra="audit").get_plotlyjs())


def _shown(content: Mapping[str, Any]) -> dict[str, Any]:
    """What the plots are drawn from: the content, an assignment in the words that stand beside its point."""
    points = [{**point, "words": _in_words(content, point["assignment"])} for point in content["pareto"]]
    chosen = content["recommended"]
    return {**content, "pareto": points, "recommended": {**chosen, "words": _in_words(content, chosen["assignment"])}}


def _in_words(content: Mapping[str, Any], assignment: Mapping[str, str]) -> list[str]:
    sites = [{**site, "scheme": assignment.get(site["tied"] or site["name"])} for site in content["sites"]]
    weighty = [f"{group.where}: {group.scheme or 'as it is'}" for group in grouped(sites) if group.weighty]
    return weighty or ["everything as it is"]


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": in_bytes, "error": in_error, "seconds": in_seconds, "interval": interval}
    environment.filters["between"] = measured_words
    environment.filters["counted"] = counted
    environment.filters["growth"] = growth_words
    return environment
