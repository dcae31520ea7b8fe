"""The report of a comparison as one HTML file: who is right, the map of regions by tokens, shares, and every region."""

from __future__ import annotations

from pathlib import Path

from assay.charts import SCRIPT, STYLE, HeatMap, environment, heated
from assay.compare.report import VERDICTS, Region, Report, Side, in_words


def page(report: Report) -> str:
    """Return a report as an HTML page without external resources."""
    rendering = environment(Path(__file__).with_name("templates"))
    shares = [region for region in report.regions if region.share is not None]
    shares.sort(key=lambda region: -abs(region.share or 0.0))
    beyond = [region for region in report.regions if region.is_beyond]
    largest = max((abs(region.share or 0.0) for region in shares), default=0.0)
    return rendering.get_template("report.html.j2").render(
        report=report,
        verdict=VERDICTS[report.verdict],
        first=report.first_beyond,
        beyond=beyond,
        words=in_words,
        shares=shares[:24],
        largest=largest or 1.0,
        kinds=report.by_kind(),
        maps=[
            (run, heated(_map(report, run), f"map_{run}"))
            for run in ("a", "b")
            if any(_side(r, run).tokens for r in report.regions)
        ],
        chart_style=STYLE,
        chart_script=SCRIPT,
    )


def _map(report: Report, run: str) -> HeatMap:
    """Return the errors of a run's regions by tokens, over those that its dtype explains."""
    regions = [region for region in report.regions if _side(region, run).tokens]
    tokens = [_side(region, run).tokens for region in regions]
    width = max(map(len, tokens))
    rows = [[*each, *[None] * (width - len(each))] for each in tokens]
    about = f"Errors of run {run} by region and token, over those of PyTorch in its dtypes"
    names, columns = [region.name for region in regions], [str(column) for column in range(width)]
    return HeatMap(about, names, columns, rows, [None] * len(rows), "times", "region")


def _side(region: Region, run: str) -> Side:
    return region.a if run == "a" else region.b
