"""Charts: every number has its place, or is counted; words are whole and safe; what doesn't fit is refused."""

import math
import re
from collections.abc import Callable
from itertools import pairwise

import pytest

from assay.charts import Axis, Chart, Guide, HeatMap, Series, drawn, heated
from assay.charts.chart import Layout, Scale, labels_of
from assay.charts.markup import short, steps_of

LOG, LINEAR = Axis("error, nats", log=True), Axis("bits")


def chart(*series: Series, x: Axis = LINEAR, y: Axis = LOG, guides: tuple[Guide, ...] = ()) -> Chart:
    """A chart of these series."""
    return Chart("what it shows", x, y, series, guides, height=100)


def test_numbers_have_places_in_their_order() -> None:
    log, linear = Scale(LOG, [1e-6, 1.0]), Scale(LINEAR, [0.0, 6.0])
    for scale, values in ((log, [1e-6, 1e-4, 1e-2, 1.0]), (linear, [0.0, 2.0, 4.0, 6.0])):
        places = [scale.position(value) for value in values]
        assert 0 < places[0] < places[-1] < 1
        gaps = [after - before for before, after in pairwise(places)]
        assert gaps == pytest.approx([gaps[0]] * 3)
    assert (log.position(0.0), log.position(math.inf)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("axis", "values", "labels"),
    [
        (LOG, [1e-3, 1.0], ["0.001", "0.01", "0.1", "1"]),
        (LOG, [1e-7, 1e-5], ["10⁻⁷", "2·10⁻⁷", "5·10⁻⁷", "10⁻⁶", "2·10⁻⁶", "5·10⁻⁶", "10⁻⁵"]),
        (LOG, [1.0, 4.0], ["1", "2"]),
        (LOG, [2.0e10, 4.0e10], ["2·10¹⁰", "2.5·10¹⁰", "3·10¹⁰", "3.5·10¹⁰", "4·10¹⁰"]),
        (LINEAR, [0.0, 1.0], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (LINEAR, [0.0, 2500.0], ["0", "500", "1,000", "1,500", "2,000", "2,500"]),
        (LINEAR, [5.0], None),
        (LOG, [5.0], None),
        (LOG, [], None),
        (Axis("x", log=True, ticks=[(8, "8"), (0, "none"), (16, "16")]), [8.0, 16.0], ["8", "16"]),
    ],
)
def test_ticks_are_round_numbers_inside(axis: Axis, values: list[float], labels: list[str] | None) -> None:
    found = Scale(axis, values).ticks()
    assert len(found) >= 2
    assert all(-1e-9 <= place <= 1 + 1e-9 for place, _ in found)
    if labels is not None and len(labels) > 2:
        assert [label for _, label in found] == labels


def test_a_scale_begins_at_zero_where_that_is_asked() -> None:
    assert Scale(Axis("size", zero=True), [50.0, 60.0]).position(0.0) == 0.0
    assert Scale(LINEAR, [50.0, 60.0]).position(0.0) < 0


def test_every_point_is_drawn_or_counted() -> None:
    values = [1e-3, 0.0, math.inf, math.nan, 1e-1]
    series = Series("errors", range(5), values, [f"point {place}" for place in range(5)], low=values, high=values)
    found = Layout(chart(series))
    assert ([point.words for point in found.points], found.lost) == (["point 0", "point 4"], 3)
    assert found.points[0].y > found.points[1].y
    markup = drawn(chart(series), "name")
    assert markup.count('<svg class="mark dot front" x=') == 3  # two points, and the legend
    assert "3 of the points have no place here, being 0, infinite or unknown." in markup
    assert "nan" not in re.sub("<title>.*?</title>", "", markup)


def test_words_are_whole_and_no_markup() -> None:
    bad = "</svg><b>&"
    series = Series(bad, [1.0], [1.0], [bad], labels=[bad])
    markup = drawn(chart(series, guides=(Guide("y", 2.0, bad),)), "name")
    assert bad not in markup
    assert markup.count("&lt;/svg&gt;&lt;b&gt;&amp;") >= 4
    heat = HeatMap(bad, [bad], [bad], [[1.0]], [None], bad)
    assert bad not in heated(heat, "name")


def test_bars_are_one_outline() -> None:
    bars = Series("all", range(4), [1.0, 2.0, 3.0, 4.0], mark="bar")
    found = Layout(chart(bars, Series("one", [2.5], [3.0], ["third"]), y=Axis("size", zero=True)))
    (stroke,) = found.strokes
    tops, ends = zip(
        *((float(top), float(end)) for top, end in re.findall(r"V([\d.]+)H([\d.]+)", stroke.path)), strict=True
    )
    assert tops == tuple(sorted(tops, reverse=True))
    assert ends == (250.0, 500.0, 750.0, 1000.0)
    assert [(point.x, point.y) for point in found.points] == [(625.0, tops[2])]


def test_labels_cover_nothing() -> None:
    marks = [(500.0 + 5 * place, 50.0) for place in range(20)] + [(995.0, 90.0)]
    named = [(x, y, f"a name {place}", "ink") for place, (x, y) in enumerate(marks)]
    found = labels_of(named, marks, [], [("y", 20.0)], 100.0)
    assert 2 < len(found) < len(named)
    assert found[-1].anchor == "end"  # at the right edge there is room on the left alone
    places = [(label.x + label.dx, label.y + label.dy) for label in found]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout(chart(Series("s", [1.0], [1.0, 2.0], ["a"]))), "y of the series 's': expected 1"),
        (lambda: Layout(chart(Series("s", [1.0], [1.0]))), "words of the series 's': expected 1"),
        (lambda: Layout(chart(Series("s", [1.0], [1.0], ["a"], low=[1.0]))), "low and high of the series 's'"),
        (lambda: HeatMap("", ["a"], ["b"], [], [None], ""), "values: expected 1"),
        (lambda: HeatMap("", ["a"], ["b"], [[1.0, 2.0]], [None], ""), "values: expected 1 a row"),
        (lambda: HeatMap("", ["a"], ["b"], [[1.0]], [], ""), "chosen: expected 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_colours_follow_the_logarithm() -> None:
    row = [1.0, 1e-2, 1e-4, 1e-9, 0.0, None, math.nan]
    heat = HeatMap("", ["row", "other"], list("abcdefg"), [row, [math.inf] * 7], ["b", None], "nats")
    assert steps_of(heat) == [[9, 5, 0, 0, 0, None, None], [9] * 7]
    markup = heated(heat, "name")
    assert '<td class="h5 chosen" title="0.01 nats">0.01</td>' in markup
    assert markup.count("<td></td>") == 2
    assert [short(value) for value in (0.00834, 0.25, 123.4, 1e-12, math.inf, 0.0)] == [
        "8e-3",
        "0.25",
        "123",
        "1e-12",
        "∞",
        "0",
    ]
