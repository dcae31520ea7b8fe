"""Facts of a failure as charts: what came over what is right, errors over arguments, which indices are read."""

from __future__ import annotations

from markupsafe import Markup

from assay.charts import Axis, Chart, Series, drawn
from assay.verify.findings import Fact, Picture

_HEIGHT, _FLAT = 260, 90  # pixels; of a chart with levels


def pictured(fact: Fact, name: str) -> Markup:
    """Return a fact's picture as a figure whose id is ``name``."""
    picture = fact.picture
    assert picture is not None
    xs, ys = zip(*picture.points, strict=True)
    words = [f"{picture.x}: {x:.6g}\n{picture.y}: {_level(picture, y)}" for x, y in picture.points]
    ticks = [(float(level), label) for level, label in enumerate(picture.levels) if level in ys]
    chart = Chart(
        fact.words,
        Axis(picture.x),
        Axis(picture.y, ticks=ticks),
        [Series("elements", xs, ys, words, tone="bad" if not picture.levels else "front")],
        height=_FLAT if picture.levels else _HEIGHT,
        diagonal=picture.diagonal,
        legend=False,
    )
    return drawn(chart, name)


def _level(picture: Picture, value: float) -> str:
    return picture.levels[int(value)] if picture.levels else f"{value:.6g}"
