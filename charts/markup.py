"""Charts and heat maps as HTML, and the style and the script that a page takes once for all of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from assay.charts.chart import MARKS, WIDE, Chart, Layout

_TEMPLATES = Path(__file__).with_name("templates")
STYLE = Markup((_TEMPLATES / "chart.css").read_text(encoding="utf-8"))
"""Needs --sheet, --ink, --soft, --line and --bad of its page."""
SCRIPT = Markup((_TEMPLATES / "chart.js").read_text(encoding="utf-8"))
"""Shows the tooltip of the nearest point; without it a browser shows titles."""
STEPS = 10
_DECADES = 4.0
"""Smaller numbers than the largest by more decades have the palest colour."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Coloured numbers by row and column; None: empty. ``unit``: of the numbers, in tooltips.

    ``chosen``: the framed column of each row. ``about``: a description. ``corner``: the heading of the row names.
    """

    about: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    chosen: Sequence[str | None]
    unit: str
    corner: str = ""

    def __post_init__(self) -> None:
        for name, part in (("values", self.values), ("chosen", self.chosen)):
            if len(part) != len(self.rows):
                raise ValueError(f"{name}: expected {len(self.rows)}, one for each row; got {len(part)}")
        if wrong := next((row for row in self.values if len(row) != len(self.columns)), None):
            raise ValueError(f"values: expected {len(self.columns)} a row, one for each column; got {len(wrong)}")


def steps_of(heat: HeatMap) -> list[list[int | None]]:
    """The colour of each cell, from 0 (the least, and what isn't above 0) to 9; None where there is no number."""
    logs = [math.log10(value) for row in heat.values for value in row if value is not None and 0 < value < math.inf]
    high = max(logs, default=0.0)
    low = max(min(logs, default=0.0), high - _DECADES)

    def step(value: float | None) -> int | None:
        if value is None or math.isnan(value):
            return None
        if value <= 0 or math.isinf(value):
            return STEPS - 1 if value > 0 else 0
        share = (math.log10(value) - low) / (high - low) if high > low else 0.0
        return max(0, min(STEPS - 1, int(share * STEPS)))

    return [[step(value) for value in row] for row in heat.values]


def short(value: float | None) -> str:
    """Format a number in few letters: 0.25, 8e-3, ∞."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    digit, power = f"{value:.0e}".split("e")
    return f"{digit}e{int(power)}"


def drawn(chart: Chart, name: str) -> Markup:
    """A chart as a <figure> whose id is ``name``."""
    template = _rendering().get_template("chart.html.j2")
    return Markup(template.render(chart=chart, at=Layout(chart), name=name, marks=MARKS, wide=WIDE))


def heated(heat: HeatMap, name: str) -> Markup:
    """Coloured numbers as a <table> whose id is ``name``."""
    template = _rendering().get_template("heat.html.j2")
    return Markup(template.render(heat=heat, steps=steps_of(heat), name=name))


@cache
def _rendering() -> jinja2.Environment:
    rendering = environment(_TEMPLATES)
    rendering.filters |= {"short": short, "full": lambda value: "∞" if math.isinf(value) else f"{value:.3g}"}
    return rendering


@cache
def environment(templates: Path, visible: Callable[[str], str] = str) -> jinja2.Environment:
    """Return an environment that escapes everything and raises for an undefined name of a template.

    ``visible`` is applied to every text that a template shows.
    """
    return jinja2.Environment(
        finalize=lambda value: visible(value) if type(value) is str else value,
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
