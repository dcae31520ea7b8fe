"""A survey as an HTML page, and counts of its outcomes."""

from collections.abc import Iterable, Mapping, Sequence

from assay.verify.campaign.survey import Row
from assay.verify.findings import ASPECTS, OUTCOMES
from assay.verify.report.html import environment


def survey_page(rows: Sequence[Row], about: Mapping[str, str]) -> str:
    """Return a survey as an HTML page: ``about`` it, counts by outcome, and a table whose rows unfold to their
    verdicts.
    """
    page = environment().get_template("survey.html.j2")
    return page.render(rows=rows, about=about, counts=tally(rows), aspects=ASPECTS)


def tally(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of rows with each outcome, outcomes of verdicts first."""
    results = [row.outcome for row in rows]
    order = (*OUTCOMES, *sorted(set(results) - set(OUTCOMES)))
    return {outcome: results.count(outcome) for outcome in order if outcome in results}
