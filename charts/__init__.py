"""Charts as SVG and HTML text, as wide as the page that contains them and drawn without a script.

chart (axes, series, guides and labels, and their layout) · markup (charts, heat maps and templates as HTML)
"""

from assay.charts.chart import Axis, Chart, Guide, Mark, Series
from assay.charts.markup import SCRIPT, STYLE, HeatMap, drawn, environment, heated

__all__ = ["SCRIPT", "STYLE", "Axis", "Chart", "Guide", "HeatMap", "Mark", "Series", "drawn", "environment", "heated"]
