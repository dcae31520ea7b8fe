"""A chart: series over two axes, with guides and labels, laid out in thousandths of the width and pixels of height."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
_TICKS = 6
_FEW = 3
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LETTER, _LINE, _GAP, _MARK = 6.6, 14.0, 9.0, 6.0
"""Pixels, at which a drawing is taken to be 1000 wide."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One side of a chart; ``title`` names its quantity with the unit.

    ``log``: a logarithmic scale, on which numbers not above 0 have no position. ``zero``: a linear scale begins at 0.
    ``ticks``: numbers with their labels; round numbers if there are none.
    """

    title: str
    log: bool = False
    zero: bool = False
    ticks: Sequence[tuple[float, str]] = ()

    def holds(self, value: float) -> bool:
        """Whether a number has a position on it."""
        return math.isfinite(value) and (value > 0 or not self.log)


class Scale:
    """An axis over the range of ``values``, of those that have a position.

    ``edge``: the margin at either end, as a fraction; none at 0 if the axis begins there.
    """

    def __init__(self, axis: Axis, values: Iterable[float], edge: float = 0.04) -> None:
        known = [self._along(axis, value) for value in values if axis.holds(value)] or [0.0, 1.0]
        low, high = min(known), max(known)
        if axis.zero and not axis.log:
            low = min(low, 0.0)
        room = (high - low) * edge if high > low else 0.15 if axis.log else abs(high) * 0.05 or 1.0
        self.axis = axis
        self._low = low if axis.zero and low == 0 else low - room
        self._high = high + room

    def position(self, value: float) -> float:
        """Return a position from 0 to 1; a number without one is at the nearer end."""
        if not self.axis.holds(value):
            return float(value > 0)
        return (self._along(self.axis, value) - self._low) / (self._high - self._low)

    @property
    def ends(self) -> tuple[float, float]:
        """The numbers at its ends."""
        low, high = (10.0**end if self.axis.log else end for end in (self._low, self._high))
        return low, high

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels."""
        if self.axis.ticks:
            return [(self.position(value), label) for value, label in self.axis.ticks if self.axis.holds(value)]
        values = self._powers() if self.axis.log else []
        if len(values) < _FEW:
            values = _round_numbers(*self.ends)
        return [(self.position(value), label) for value, label in zip(values, _labels(values), strict=True)]

    def _powers(self) -> list[float]:
        """Powers of ten, not more than a few of them; 2 and 5 times each where there are hardly any."""
        first, last = math.floor(self._low), math.ceil(self._high)
        step = math.ceil((self._high - self._low) / _TICKS)
        digits = (1, 2, 5) if self._high - self._low < _FEW else (1,)
        results = [digit * 10.0**power for power in range(first, last + 1, step) for digit in digits]
        return [value for value in results if self._low <= math.log10(value) <= self._high]

    @staticmethod
    def _along(axis: Axis, value: float) -> float:
        return math.log10(value) if axis.log else value


def _round_numbers(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two numbers."""
    least = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _labels(values: Sequence[float]) -> list[str]:
    """Plain decimals; digits and powers of ten where some are far from 1."""
    if any(value and not 1e-4 <= abs(value) < 1e7 for value in values):
        return [_power(value) for value in values]
    return [f"{float(f'{value:.10g}'):,.10g}" for value in values]


def _power(value: float) -> str:
    """A number of two digits at most: 10⁻³, 2·10⁻³, 2.5·10⁸."""
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    digits = f"{value / 10.0**power:.2g}"
    return f"{'' if digits == '1' else f'{digits}·'}10{str(power).translate(_RAISED)}"


@dataclass(frozen=True, slots=True)
class Label:
    """Text at a point (thousandths of the width, pixels from the top), ``dx`` and ``dy`` pixels from there."""

    x: float
    y: float
    dx: float
    dy: float
    anchor: str
    words: str
    tone: str


def labels_of(
    named: Sequence[tuple[float, float, str, str]],
    marks: Sequence[tuple[float, float]],
    others: Sequence[Label],
    lines: Sequence[tuple[str, float]],
    height: float,
) -> list[Label]:
    """Label each of ``named`` (x, y, words, tone) that has room right of it, left, above or below.

    A label covers neither ``marks``, the labels ``others``, earlier labels, nor ``lines`` at a position of the axis "x"
    or "y".
    """
    results: list[Label] = []
    taken = [(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in marks] + [_box(label) for label in others]
    taken += [(at - 1, 0.0, at + 1, height) if axis == "x" else (0.0, at - 1, 1000.0, at + 1) for axis, at in lines]
    for x, y, words, tone in named:
        for dx, dy, anchor in (
            (_GAP, 4.0, "start"),
            (-_GAP, 4.0, "end"),
            (0.0, -_GAP, "middle"),
            (0.0, 18.0, "middle"),
        ):
            label = Label(x, y, dx, dy, anchor, words, tone)
            box = _box(label)
            inside = box[0] >= 0 and box[2] <= 1000 and box[1] >= 0 and box[3] <= height
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                results.append(label)
                break
    return results


def _box(label: Label) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a label."""
    wide = _LETTER * len(label.words)
    left = label.x + label.dx - {"start": 0.0, "middle": wide / 2, "end": wide}[label.anchor]
    bottom = label.y + label.dy + 2
    return left, bottom - _LINE, left + wide, bottom


def _overlap(one: Iterable[float], other: Iterable[float]) -> bool:
    (left, top, right, bottom), (left2, top2, right2, bottom2) = one, other
    return left < right2 and left2 < right and top < bottom2 and top2 < bottom


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind, in the legend by ``name``. ``words``: the tooltip of each point, with units.

    ``mark``: the symbol of each; "bar": a bar from its x to the next, without a tooltip; "": none. ``line`` joins them.
    ``tone``: a colour of chart.css. ``low``, ``high``: the ends of an interval at each point, drawn as a bar, or as a
    ``band`` over all. ``labels``: names of points, shown where there is room.
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
    """A line across the chart at one value of an axis, with a text."""

    axis: Literal["x", "y"]
    value: float
    words: str
    tone: str = "floor"
    line: Literal["dashed", "dotted"] = "dashed"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart to draw; ``about`` describes it for screen readers. ``height`` in pixels, without its axes.

    ``diagonal``: the name of a line through all points where both axes have the same value.
    """

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
    """A label at a position; ``minor``: left out where there is little room."""

    at: float
    words: str
    minor: bool


@dataclass(slots=True)
class Layout:
    """A chart with all positions; ``lost``: the number of points without one."""

    x_ticks: list[Tick]
    y_ticks: list[Tick]
    strokes: list[Stroke] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    guides: list[Label] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    lost: int = 0


def laid_out(chart: Chart) -> Layout:
    """Compute the positions of a chart's elements. Raises ValueError if sequences of a series differ in length."""
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
        return _rounded(WIDE * self.x.position(value))

    def down(self, value: float) -> float:
        return _rounded(self.height * (1 - self.y.position(value)))

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
        """Return the position of a guide along its axis."""
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
        """Return position, name and tone of each point that has a name."""
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
