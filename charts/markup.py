"""Charts and tables of colours as HTML, and the style and the script that a page takes once for all of them."""

import math
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from assay.charts.chart import MARKS, WIDE, Chart, laid_out
from assay.charts.heat import HeatMap, short, steps_of
from assay.charts.rendering import environment

_TEMPLATES = Path(__file__).with_name("templates")
STYLE = Markup((_TEMPLATES / "chart.css").read_text(encoding="utf-8"))
"""Wants --sheet, --ink, --soft, --line and --bad of its page."""
SCRIPT = Markup((_TEMPLATES / "chart.js").read_text(encoding="utf-8"))
"""Shows the words of the nearest point; without it a browser shows them by itself, as titles."""


def drawn(chart: Chart, name: str) -> Markup:
    """A chart as a <figure> whose id is ``name``."""
    template = _rendering().get_template("chart.html.j2")
    return Markup(template.render(chart=chart, at=laid_out(chart), name=name, marks=MARKS, wide=WIDE))


def heated(heat: HeatMap, name: str) -> Markup:
    """Coloured numbers as a <table> whose id is ``name``."""
    template = _rendering().get_template("heat.html.j2")
    return Markup(template.render(heat=heat, steps=steps_of(heat), name=name))


def _full(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


@cache
def _rendering() -> jinja2.Environment:
    rendering = environment(_TEMPLATES)
    rendering.filters |= {"short": short, "full": _full}
    return rendering
