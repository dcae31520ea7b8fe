"""A chart: series over two axes, with guides and labels, laid out in thousandths of the width and pixels of height."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
_SIDES = ((_GAP, 4.0, "start"), (-_GAP, 4.0, "end"), (0.0, -_GAP, "middle"), (0.0, 18.0, "middle"))


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
    """An axis over the range of ``values``, of the ones that have a position.

    ``edge``: the margin at either end, as a fraction; none at 0 if the axis begins there.
    """

    def __init__(self, axis: Axis, values: Iterable[float], edge: float = 0.04) -> None:
        self.axis = axis
        known = [self._along(value) for value in values if axis.holds(value)] or [0.0, 1.0]
        low, high = min(known), max(known)
        if axis.zero and not axis.log:
            low = min(low, 0.0)
        room = (high - low) * edge if high > low else 0.15 if axis.log else abs(high) * 0.05 or 1.0
        self._low = low if axis.zero and low == 0 else low - room
        self._high = high + room

    def position(self, value: float) -> float:
        """Return a position from 0 to 1; a number without one is at the nearer end."""
        if not self.axis.holds(value):
            return float(value > 0)
        return (self._along(value) - self._low) / (self._high - self._low)

    @property
    def ends(self) -> tuple[float, float]:
        """The numbers at its ends."""
        low, high = (10.0**end if self.axis.log else end for end in (self._low, self._high))
        return low, high

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels."""
        if self.axis.ticks:
            return [(self.position(value), label) for value, label in self.axis.ticks if self.axis.holds(value)]
        values: list[float] = []
        if self.axis.log:  # powers of ten, not more than a few of them; 2 and 5 times each where there are hardly any
            first, last = math.floor(self._low), math.ceil(self._high)
            step = math.ceil((self._high - self._low) / _TICKS)
            digits = (1, 2, 5) if self._high - self._low < _FEW else (1,)
            powers = [digit * 10.0**power for power in range(first, last + 1, step) for digit in digits]
            values = [value for value in powers if self._low <= math.log10(value) <= self._high]
        if len(values) < _FEW:
            values = _round_numbers(*self.ends)
        return [(self.position(value), label) for value, label in zip(values, _labels(values), strict=True)]

    def _along(self, value: float) -> float:
        return math.log10(value) if self.axis.log else value


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
        for dx, dy, anchor in _SIDES:
            label = Label(x, y, dx, dy, anchor, words, tone)
            left, top, right, bottom = box = _box(label)
            inside = left >= 0 and right <= WIDE and top >= 0 and bottom <= height
            if inside and not any(a < right and left < c and b < bottom and top < d for a, b, c, d in taken):
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


class Stroke(NamedTuple):
    """A path over the whole width, and its classes in chart.css."""

    path: str
    classes: str


class Point(NamedTuple):
    """A mark: thousandths of the width, pixels from the top."""

    x: float
    y: float
    path: str
    classes: str
    words: str


class Tick(NamedTuple):
    """A label at a position; ``minor``: left out where there is little room."""

    at: float
    words: str
    minor: bool


class Layout:
    """A chart with all positions; ``lost``: the number of points without one.

    Raises ValueError if sequences of a series differ in length.
    """

    def __init__(self, chart: Chart) -> None:
        for series in chart.series:
            _check(series)
        xs = [value for series in chart.series for value in series.x]
        ys = [value for series in chart.series for value in (*series.y, *series.low, *series.high)]
        if chart.diagonal:
            xs = ys = xs + ys
        bars = [_edges(series.x) for series in chart.series if series.mark == "bar"]
        xs = [*xs, *(edges[-1] for edges in bars)]  # with a diagonal ys is the same list
        self._x = Scale(chart.x, xs + [each.value for each in chart.guides if each.axis == "x"], 0.0 if bars else 0.04)
        self._y = Scale(chart.y, ys + [each.value for each in chart.guides if each.axis == "y"])
        self._height, self.lost = chart.height, 0
        self.strokes: list[Stroke] = []
        self.points: list[Point] = []
        self.guides: list[Label] = []
        ticks = self._x.ticks()
        many = sum(len(words) for _, words in ticks) > _LETTERS  # then every second is minor
        self.x_ticks = [
            Tick(round(WIDE * at, 1), words, many and index % 2 == 1) for index, (at, words) in enumerate(ticks)
        ]
        self.y_ticks = [Tick(round(chart.height * (1 - at), 1), words, False) for at, words in self._y.ticks()]
        if chart.diagonal:
            self.strokes.append(Stroke(self._line(self._x.ends, self._x.ends), "line soft"))
        for series in chart.series:
            self._draw(series)
        lines = [(guide.axis, self._guide(guide)) for guide in chart.guides]
        named = [
            (self._across(x), self._down(y), words, series.tone)
            for series in chart.series
            if series.labels
            for x, y, words in zip(series.x, series.y, series.labels, strict=True)
            if words and self._holds(x, y)
        ]
        marks = [(point.x, point.y) for point in self.points]
        self.labels = labels_of(named, marks, self.guides, lines, chart.height)

    def _across(self, value: float) -> float:
        return round(WIDE * self._x.position(value), 1)

    def _down(self, value: float) -> float:
        return round(self._height * (1 - self._y.position(value)), 1)

    def _line(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        indices = [f"{self._across(x):g} {self._down(y):g}" for x, y in zip(xs, ys, strict=True)]
        return f"M{'L'.join(indices)}" if indices else ""

    def _holds(self, x: float, y: float) -> bool:
        return self._x.axis.holds(x) and self._y.axis.holds(y)

    def _draw(self, series: Series) -> None:
        """Add the strokes and the marks of one series."""
        kept = [index for index, at in enumerate(zip(series.x, series.y, strict=True)) if self._holds(*at)]
        self.lost += len(series.x) - len(kept)
        xs, ys = [series.x[index] for index in kept], [series.y[index] for index in kept]
        if series.mark == "bar":  # side by side, as the outline of all
            edges = _edges(xs)
            tops = (f"V{self._down(y):g}H{self._across(edge):g}" for edge, y in zip(edges[1:], ys, strict=True))
            outline = f"M{self._across(edges[0]):g} {self._height}{''.join(tops)}V{self._height}z"
            self.strokes.append(Stroke(outline, f"area {series.tone}"))
            return
        if series.low:
            low, high = [series.low[index] for index in kept], [series.high[index] for index in kept]
            if series.band:
                path = self._line([*xs, *reversed(xs)], [*high, *reversed(low)]) + "z"
            else:
                ends = zip(xs, low, high, strict=True)
                path = "".join(f"M{self._across(x):g} {self._down(a):g}V{self._down(b):g}" for x, a, b in ends)
            self.strokes.append(Stroke(path, f"{'band' if series.band else 'interval'} {series.tone}"))
        if series.line and len(kept) > 1:
            self.strokes.append(Stroke(self._line(xs, ys), f"line {series.line} {series.tone}"))
        if series.mark:
            classes = f"mark {series.mark} {series.tone}"
            for index, x, y in zip(kept, xs, ys, strict=True):
                point = Point(self._across(x), self._down(y), MARKS[series.mark], classes, series.words[index])
                self.points.append(point)

    def _guide(self, guide: Guide) -> float:
        """Add a line across and its words, at the end where there is more room; return its position."""
        classes = f"line {guide.line} {guide.tone}"
        if guide.axis == "y":
            at = self._down(guide.value)
            self.strokes.append(Stroke(f"M0 {at:g}H{WIDE}", classes))
            self.guides.append(Label(WIDE, at, -4, -5 if at > 20 else 14, "end", guide.words, guide.tone))
        else:
            at = self._across(guide.value)
            dx, anchor = (-5, "end") if at > WIDE / 2 else (5, "start")
            self.strokes.append(Stroke(f"M{at:g} 0V{self._height}", classes))
            self.guides.append(Label(at, 0, dx, 12, anchor, guide.words, guide.tone))
        return at


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
    """Return where bars begin, and where the last one ends, which is as wide as all are on average."""
    if not xs:
        return [0.0]
    return [*xs, xs[-1] + ((xs[-1] - xs[0]) / (len(xs) - 1) if len(xs) > 1 else 1.0)]
