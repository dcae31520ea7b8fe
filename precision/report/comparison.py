"""Two assignments of one model side by side: predicted, measured, and whether they can be told apart."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from assay.precision.amounts import in_bytes, in_error, in_seconds
from assay.precision.auditing import Audit
from assay.precision.choice.assignment import Assignment
from assay.precision.report.content import assigned
from assay.precision.report.summary import interval
from assay.precision.report.words import counted, plain


def compared(
    audit: Audit, names: Sequence[str], assignments: Sequence[Mapping[str, str]], *, decodes: bool = True
) -> dict[str, Any]:
    """Error, bytes and times of both, as plain data, and the verdict in words.

    Both are measured on the same calibration data. They count as alike where their errors differ by no more than the
    noise floor. decodes: the model has a KV cache and decode steps. Raises BadAssignment for one that doesn't fit the
    model.
    """
    both = []
    for name, schemes in zip(names, assignments, strict=True):
        assignment = Assignment(schemes)
        assignment.prediction, assignment.cost = audit.predict(schemes), audit.cost(schemes)
        assignment.measured = audit.measure(schemes)
        both.append({"name": name, **plain(msgspec.to_builtins(assigned(assignment, decodes)))})
    first, second = assignments
    differ = [name for name in audit.sites if first.get(name) != second.get(name)]
    words, better = _verdict(both, audit.noise_floor)
    return {
        "unit": audit.metric.unit,
        "noise_floor": plain(audit.noise_floor),
        "compared": both,
        "sites_that_differ": [str(name) for name in differ],
        "better": better,
        "words": words,
    }


def _verdict(both: Sequence[Mapping[str, Any]], floor: float) -> tuple[str, str | None]:
    """Which has the smaller measured error, by how much against the noise floor."""
    a, b = (math.inf if one["measured"] is None else float(one["measured"]) for one in both)
    if not math.isfinite(a) and not math.isfinite(b):
        return "both break the model", None
    gap = abs(a - b)
    if gap <= floor:
        return f"they can't be told apart: their errors differ by {gap:.3g}, the noise floor is {floor:.3g}", None
    better, worse = both if a < b else both[::-1]
    if not math.isfinite(gap):
        return f"{better['name']} is better: {worse['name']} breaks the model", better["name"]
    times = f", {gap / floor:.3g} times the noise floor" if floor > 0 else ""
    return f"{better['name']} is better, by {gap:.3g}{times}", better["name"]


def in_lines(content: Mapping[str, Any]) -> str:
    """What `compared` gives, for a terminal."""
    lines = [content["words"]]
    for letter, one in zip("AB", content["compared"], strict=True):
        lines += [
            f"  {letter}           {one['name']}",
            f"    predicted   {interval(one['prediction'])} {content['unit']}",
            f"    measured    {in_error(one['measured'])} {content['unit']}",
            f"    costs       weights {in_bytes(one['bytes'])}, {_times(one)}",
        ]
    lines.append(f"  differ      at {counted(len(content['sites_that_differ']), 'site')}")
    lines.append(f"  noise floor {in_error(content['noise_floor'])} {content['unit']}")
    return "\n".join(lines)


def _times(one: Mapping[str, Any]) -> str:
    if one["decode"] is None:
        return f"pass {in_seconds(one['prefill'])}"
    times = f"prefill {in_seconds(one['prefill'])}, decode step {in_seconds(one['decode'])}"
    return f"KV cache {in_bytes(one['kv_bytes'])}, {times}"
