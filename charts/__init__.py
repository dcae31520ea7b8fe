"""Charts as SVG and HTML text, as wide as the page that holds them and drawn without a script.

In: series of numbers, each with the words that a reader is told of it. Out: markup, and the style and the script that a
page takes once. Called by the pages of precision and verify.

scale (from numbers to places, with ticks) · chart (lines, points and bars) · labels (names beside points) ·
heat (tables of colours) · markup (all of them as HTML) ·
rendering (pages of templates)
"""

from assay.charts.chart import Chart, Guide, Mark, Series
from assay.charts.heat import HeatMap
from assay.charts.markup import SCRIPT, STYLE, drawn, heated
from assay.charts.rendering import environment
from assay.charts.scale import Axis

__all__ = ["SCRIPT", "STYLE", "Axis", "Chart", "Guide", "HeatMap", "Mark", "Series", "drawn", "environment", "heated"]
