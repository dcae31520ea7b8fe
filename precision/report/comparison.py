"""Compares two assignments of one model: predicted and measured errors, and whether the difference is significant."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from assay.precision.auditing import Audit
from assay.precision.choice.recommendation import Assignment
from assay.precision.report.content import assigned
from assay.precision.report.summary import counted, interval, measured_words, plain
from assay.precision.sampling import Difference, difference
from assay.precision.units import format_bytes, format_error, format_seconds


def compared(
    audit: Audit, names: Sequence[str], assignments: Sequence[Mapping[str, str]], *, decodes: bool = True
) -> dict[str, Any]:
    """Return error, bytes and times of both assignments as plain data, and the verdict in words.

    Both are measured over the same sequences, the held-out ones if there are any. One is better if the interval of the
    paired difference excludes zero and the difference exceeds the noise floor. decodes: the model has a KV cache and
    decode steps. Raises BadAssignment for an assignment that doesn't fit the model.
    """
    both, errors = [], []
    for name, schemes in zip(names, assignments, strict=True):
        assignment = Assignment(schemes)
        assignment.prediction, assignment.cost = audit.predict(schemes), audit.cost(schemes)
        assignment.measured = audit.measure(schemes)
        errors.append(assignment.measured)
        both.append({"name": name, **plain(msgspec.to_builtins(assigned(assignment, decodes)))})
    first, second = assignments
    differ = [name for name in audit.sites if first.get(name) != second.get(name)]
    gap = difference(*errors)
    words, better = _verdict(names, gap, audit.noise_floor)
    return {
        "unit": audit.metric.unit,
        "noise_floor": plain(float(audit.noise_floor)),
        "difference": plain({"error": gap.error, "low": gap.low, "high": gap.high}),
        "compared": both,
        "sites_that_differ": [str(name) for name in differ],
        "better": better,
        "words": words,
    }


def _verdict(names: Sequence[str], gap: Difference, floor: float) -> tuple[str, str | None]:
    """Return a sentence on the difference of the errors, and the name of the better one if it is significant."""
    if math.isnan(gap.error):
        return "both break the model", None
    better, worse = names if gap.error < 0 else reversed(names)
    if math.isinf(gap.error):
        return f"{better} is better: {worse} breaks the model", better
    if gap.sign == 0:
        return f"they can't be told apart on this text: A minus B is {_signed(gap)}", None
    if abs(gap.error) <= floor:
        return f"they can't be told apart in 16 bits: A minus B is {_signed(gap)}, the noise floor is {floor:.3g}", None
    low, high = sorted((abs(gap.low), abs(gap.high)))
    size = f"{format_error(abs(gap.error))} (95 %: {format_error(low)} to {format_error(high)})"
    times = f", {abs(gap.error) / floor:.3g} times the noise floor" if floor > 0 else ""
    return f"{better} is better, by {size}{times}", better


def _signed(gap: Difference) -> str:
    return f"{format_error(gap.error)} (95 %: {format_error(gap.low)} to {format_error(gap.high)})"


def in_lines(content: Mapping[str, Any]) -> str:
    """Return the result of `compared` as lines for a terminal."""
    lines = [content["words"]]
    for letter, one in zip("AB", content["compared"], strict=True):
        lines += [
            f"  {letter}           {one['name']}",
            f"    predicted   {interval(one['prediction'])} {content['unit']}",
            f"    measured    {measured_words(one)} {content['unit']}",
            f"    costs       weights {format_bytes(one['bytes'])}, {_times(one)}",
        ]
    lines.append(f"  differ      at {counted(len(content['sites_that_differ']), 'site')}")
    lines.append(f"  noise floor {format_error(content['noise_floor'])} {content['unit']}")
    return "\n".join(lines)


def _times(one: Mapping[str, Any]) -> str:
    if one["prefill"] is None:
        return f"KV cache {format_bytes(one['kv_bytes'])}" if one["kv_bytes"] is not None else "times of no device"
    if one["decode"] is None:
        return f"pass {format_seconds(one['prefill'])}"
    times = f"prefill {format_seconds(one['prefill'])}, decode step {format_seconds(one['decode'])}"
    return f"KV cache {format_bytes(one['kv_bytes'])}, {times}"
