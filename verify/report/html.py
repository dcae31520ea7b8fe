"""HTML reports: the page of a verdict, one file that needs nothing from a network, and what others share with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2

from assay.verify.cases.case import Case
from assay.verify.findings import Findings
from assay.verify.report.rendering import environment as plain_environment
from assay.verify.report.svg import bars, drawn, told
from assay.verify.report.text import failure_in_words, greatest

if TYPE_CHECKING:
    from assay.verify.power_report import PowerReport


def verdict_page(verdict: Findings, power: PowerReport | None = None) -> str:
    """A verdict as an HTML page, with the ``power`` of the examination where it was measured."""
    return environment().get_template("verdict.html.j2").render(verdict=verdict, power=power)


@cache
def environment() -> jinja2.Environment:
    """What pages of verdicts are rendered by."""
    environment = plain_environment()
    environment.filters |= {"number": number, "ratio": ratio, "tone": _tone, "total": math.prod}
    environment.filters |= {
        "drawn": drawn,
        "bars": bars,
        "told": told,
        "sentence": _sentence,
        "places": _places,
        "greatest": greatest,
        "shown_case": shown_case,
        "in_words": failure_in_words,
    }
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


_TONES = {
    **dict.fromkeys(("PASS", "kept"), "good"),
    **dict.fromkeys(("FAIL", "broken"), "bad"),
    **dict.fromkeys(("NOT HERE", "NOT RUN", "not tried"), "quiet"),
}


def _tone(outcome: str) -> str:
    """The colour that an outcome is shown in; the word itself is always beside it."""
    return _TONES.get(outcome, "doubt")


def shown_case(case: Case) -> Mapping[str, Any]:
    """What a template shows of a failing case."""
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
    "emitted": "a * b + c is rounded once, subnormals are flushed, functions are approximate: as NVIDIA has it",
    "outside": "the call is made in a process of its own, where nothing tells of an examination",
}


def _options(case: Case) -> dict[str, Any]:
    """The options that are not at their defaults."""
    defaults = case.definition.complete({})
    return {name: value for name, value in case.options.items() if value != defaults[name]}
