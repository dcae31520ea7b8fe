"""A chart: series over two axes, with guides, laid out in thousandths of its width and in pixels of its height."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from assay.charts.labels import Label, labels_of
from assay.charts.scale import Axis, Scale

WIDE = 1000
"""The width of every drawing, which is stretched to that of its page."""
_LETTERS = 30
"""Of ticks, that a narrow page has room for."""

Mark = Literal["dot", "diamond", "square", "cross", "triangle", "bar", ""]
MARKS = {
    "dot": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "diamond": "M0-6.5L6.5 0L0 6.5L-6.5 0z",
    "square": "M-4-4h8v8h-8z",
    "cross": "M-4-4L4 4M-4 4L4-4",
    "triangle": "M0-5.5L5.5 4h-11z",
}


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind, in the legend by ``name``. ``words``: what a reader is told of each, with units.

    ``mark``: how each is drawn; "bar": as a bar from its x to the next, of which no words are told; "": not. ``line``:
    what joins them. ``tone``: a colour of chart.css. ``low``, ``high``: the ends of an interval at each point, drawn as
    a bar, or as a ``band`` over all. ``labels``: names that stand beside points where there is room.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    words: Sequence[str] = ()
    mark: Mark = "dot"
    line: Literal["solid", "dotted", ""] = ""
    tone: str = "front"
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    band: bool = False
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Guide:
    """A line across at one value of an axis, with words beside it."""

    axis: Literal["x", "y"]
    value: float
    words: str
    tone: str = "floor"
    line: Literal["dashed", "dotted"] = "dashed"


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn; ``about``: it in words, for those who don't see it. ``height`` in pixels, without its axes.
    ``diagonal``: a line through all points where both axes have the same value, with its name."""

    about: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    guides: Sequence[Guide] = ()
    height: int = 340
    diagonal: str = ""
    legend: bool = True


@dataclass(frozen=True, slots=True)
class Stroke:
    """A path over the whole width, and its classes in chart.css."""

    path: str
    classes: str


@dataclass(frozen=True, slots=True)
class Point:
    """A mark: thousandths of the width, pixels from the top."""

    x: float
    y: float
    path: str
    classes: str
    words: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A label at a place; ``minor``: left out where there is little room."""

    at: float
    words: str
    minor: bool


@dataclass(slots=True)
class Layout:
    """A chart with all its places; ``lost``: how many points have none."""

    x_ticks: list[Tick]
    y_ticks: list[Tick]
    strokes: list[Stroke] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    guides: list[Label] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    lost: int = 0


def laid_out(chart: Chart) -> Layout:
    """Where everything of a chart stands. Raises ValueError for a series whose sequences differ in length."""
    for series in chart.series:
        _check(series)
    xs = [value for series in chart.series for value in series.x]
    ys = [value for series in chart.series for value in (*series.y, *series.low, *series.high)]
    if chart.diagonal:
        xs = ys = xs + ys
    bars = [_edges(series.x) for series in chart.series if series.mark == "bar"]
    xs = [*xs, *(edges[-1] for edges in bars)]  # with a diagonal ys is the same list
    x = Scale(chart.x, xs + [guide.value for guide in chart.guides if guide.axis == "x"], 0.0 if bars else 0.04)
    y = Scale(chart.y, ys + [guide.value for guide in chart.guides if guide.axis == "y"])
    plan = _Plan(x, y, chart.height)
    result = Layout(
        _ticks(x),
        [Tick(_rounded(chart.height * (1 - at)), words, False) for at, words in y.ticks()],
    )
    if chart.diagonal:
        result.strokes.append(Stroke(plan.line(x.ends, x.ends), "line soft"))
    for series in chart.series:
        plan.draw(series, result)
    for guide in chart.guides:
        plan.guide(guide, result)
    marks = [(point.x, point.y) for point in result.points]
    lines = [(guide.axis, plan.at(guide)) for guide in chart.guides]
    result.labels = labels_of(plan.named(chart.series), marks, result.guides, lines, chart.height)
    return result


def _ticks(x: Scale) -> list[Tick]:
    """Those below; of many letters every second is minor."""
    result = x.ticks()
    many = sum(len(words) for _, words in result) > _LETTERS
    return [Tick(_rounded(WIDE * at), words, many and index % 2 == 1) for index, (at, words) in enumerate(result)]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Two scales over a width of 1000 and a height in pixels."""

    x: Scale
    y: Scale
    height: int

    def across(self, value: float) -> float:
        return _rounded(WIDE * self.x.place(value))

    def down(self, value: float) -> float:
        return _rounded(self.height * (1 - self.y.place(value)))

    def line(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        """A path through points."""
        indices = [f"{self.across(x):g} {self.down(y):g}" for x, y in zip(xs, ys, strict=True)]
        return f"M{'L'.join(indices)}" if indices else ""

    def holds(self, x: float, y: float) -> bool:
        return self.x.axis.holds(x) and self.y.axis.holds(y)

    def draw(self, series: Series, into: Layout) -> None:
        """The strokes and the marks of one series."""
        kept = [index for index, at in enumerate(zip(series.x, series.y, strict=True)) if self.holds(*at)]
        into.lost += len(series.x) - len(kept)
        xs, ys = [series.x[index] for index in kept], [series.y[index] for index in kept]
        if series.mark == "bar":
            into.strokes.append(Stroke(self._bars(_edges(xs), ys), f"area {series.tone}"))
            return
        if series.low:
            low, high = [series.low[index] for index in kept], [series.high[index] for index in kept]
            into.strokes.append(self._intervals(series, xs, low, high))
        if series.line and len(kept) > 1:
            into.strokes.append(Stroke(self.line(xs, ys), f"line {series.line} {series.tone}"))
        if series.mark:
            classes = f"mark {series.mark} {series.tone}"
            for index in kept:
                at = self.across(series.x[index]), self.down(series.y[index])
                into.points.append(Point(*at, MARKS[series.mark], classes, series.words[index]))

    def _intervals(self, series: Series, xs: Sequence[float], low: Sequence[float], high: Sequence[float]) -> Stroke:
        if series.band:
            around = self.line([*xs, *reversed(xs)], [*high, *reversed(low)])
            return Stroke(f"{around}z", f"band {series.tone}")
        bars = (f"M{self.across(x):g} {self.down(a):g}V{self.down(b):g}" for x, a, b in zip(xs, low, high, strict=True))
        return Stroke("".join(bars), f"interval {series.tone}")

    def _bars(self, edges: Sequence[float], ys: Sequence[float]) -> str:
        """Bars side by side, as the outline of all."""
        tops = (f"V{self.down(y):g}H{self.across(edge):g}" for edge, y in zip(edges[1:], ys, strict=True))
        return f"M{self.across(edges[0]):g} {self.height}{''.join(tops)}V{self.height}z"

    def at(self, guide: Guide) -> float:
        """Where a guide stands along its axis."""
        return self.down(guide.value) if guide.axis == "y" else self.across(guide.value)

    def guide(self, guide: Guide, into: Layout) -> None:
        """A line across and its words, at the end where there is more room."""
        classes = f"line {guide.line} {guide.tone}"
        at = self.at(guide)
        if guide.axis == "y":
            into.strokes.append(Stroke(f"M0 {at:g}H{WIDE}", classes))
            into.guides.append(Label(WIDE, at, -4, -5 if at > 20 else 14, "end", guide.words, guide.tone))
        else:
            left = at > WIDE / 2
            into.strokes.append(Stroke(f"M{at:g} 0V{self.height}", classes))
            into.guides.append(Label(at, 0, -5 if left else 5, 12, "end" if left else "start", guide.words, guide.tone))

    def named(self, all_series: Sequence[Series]) -> list[tuple[float, float, str, str]]:
        """Places of the points that have names, the names and their tones."""
        return [
            (self.across(x), self.down(y), words, series.tone)
            for series in all_series
            if series.labels
            for x, y, words in zip(series.x, series.y, series.labels, strict=True)
            if words and self.holds(x, y)
        ]


def _check(series: Series) -> None:
    length = len(series.x)
    parts = {"y": series.y, "words": series.words, "low": series.low, "high": series.high, "labels": series.labels}
    needed = {"y"} | ({"words"} if series.mark not in ("bar", "") else set())
    for name, part in parts.items():
        if len(part) != length and (part or name in needed):
            raise ValueError(
                f"{name} of the series {series.name!r}: expected {length}, one for each x; got {len(part)}"
            )
    if bool(series.low) != bool(series.high):
        raise ValueError(f"low and high of the series {series.name!r}: expected both or none")


def _edges(xs: Sequence[float]) -> list[float]:
    """Where bars begin, and where the last one ends, which is as wide as all are on average."""
    if not xs:
        return [0.0]
    wide = (xs[-1] - xs[0]) / (len(xs) - 1) if len(xs) > 1 else 1.0
    return [*xs, xs[-1] + wide]


def _rounded(value: float) -> float:
    return round(value, 1)
