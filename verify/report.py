"""HTML reports: one verdict, or a survey of many. Each page is one file that needs nothing from a network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from assay.verify.drawing import bars, drawn, told
from assay.verify.verdict import OUTCOMES, Verdict

if TYPE_CHECKING:
    from assay.verify.inputs.cases import Case
    from assay.verify.power import PowerReport
    from assay.verify.survey import Row

_TEMPLATES = Path(__file__).with_name("templates")


def verdict_page(verdict: Verdict, power: PowerReport | None = None) -> str:
    """A verdict as an HTML page, with the ``power`` of the examination where it was measured."""
    return environment().get_template("verdict.html.j2").render(verdict=verdict, case=_case(verdict), power=power)


def survey_page(rows: Sequence[Row], about: Mapping[str, str]) -> str:
    """A survey as an HTML page: ``about`` it, counts by outcome, and a table whose rows unfold to their verdicts."""
    listed = [(row, _case(row.verdict)) for row in rows]
    return environment().get_template("survey.html.j2").render(rows=listed, about=about, counts=tally(rows))


def tally(rows: Iterable[Row]) -> dict[str, int]:
    """How many rows have each outcome; those of verdicts first."""
    found = [row.outcome for row in rows]
    order = (*OUTCOMES, *sorted(set(found) - set(OUTCOMES)))
    return {outcome: found.count(outcome) for outcome in order if outcome in found}


@cache
def environment() -> jinja2.Environment:
    """What templates are rendered by."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "ratio": ratio, "tone": _tone, "total": math.prod}
    environment.filters |= {"drawn": drawn, "bars": bars, "told": told, "sentence": _sentence, "places": _places}
    return environment


def number(value: float | None) -> str:
    """A number in full, as a reader compares it."""
    return "" if value is None else f"{value:.9g}"


def ratio(value: float) -> str:
    """A ratio in three digits; those of NaN, of infinities, and of what is no matter of numbers are infinite."""
    return "∞" if math.isinf(value) else f"{value:#.3g}".rstrip(".")


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _places(size: int) -> str:
    return "0" if size == 1 else f"0 to {size - 1}"


def _tone(outcome: str) -> str:
    """The colour that an outcome is shown in; the word itself is always beside it."""
    return {"PASS": "good", "FAIL": "bad", "NOT HERE": "quiet", "NOT RUN": "quiet"}.get(outcome, "doubt")


def _case(verdict: Verdict | None) -> Mapping[str, Any] | None:
    """What a template shows of the failing case."""
    if verdict is None or verdict.failure is None:
        return None
    case = verdict.failure.case
    return {
        "sizes": case.sizes,
        "options": _options(case),
        "tensors": [
            (
                tensor.name,
                " × ".join(map(str, case.shape(tensor))) or "scalar",
                case.dtypes[tensor.name],
                case.values.get(tensor.name, ""),
                case.layouts.get(tensor.name, "contiguous"),
            )
            for tensor in case.signature.tensors
        ],
        "zeros": sum(value == 0 for _, _, value in case.edits),
        "edits": [(f"{name}{list(index)}", f"{value:g}") for name, index, value in case.edits if value != 0],
        "memory": _MEMORY[case.memory],
        "protocol": _PROTOCOLS.get(case.protocol, case.protocol),
    }


_MEMORY = {"plain": "", "nan": "fresh memory is filled with NaN", "huge": "fresh memory is filled with 2¹⁰⁰"}
_PROTOCOLS = {
    "once": "",
    "repeat": "the same call is made twice",
    "after_other": "a call with other data of the same shapes comes first",
    "after_refill": "a call with other data in the same memory comes first",
    "after_many": "many equal calls with other data in the same memory come first",
    "alone": "each row is also given alone",
    "bias": "a series of calls with fresh data",
    "outside": "the call is made in a process of its own, where nothing tells of an examination",
}


def _options(case: Case) -> dict[str, Any]:
    """The options that are not at their defaults."""
    defaults = case.definition.complete({})
    return {name: value for name, value in case.options.items() if value != defaults[name]}
