"""The report of an audit as one HTML file without external resources, with charts drawn from audit.json."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from assay.charts import SCRIPT, STYLE, Axis, Chart, Guide, HeatMap, Series, drawn, environment, heated
from assay.precision.report.summary import (
    advice_lines,
    budget_lines,
    counted,
    export_lines,
    fixed_lines,
    grouped,
    growth_words,
    headline,
    interval,
    interval_ends,
    measured_words,
    next_steps,
)
from assay.precision.units import format_bytes, format_error, format_seconds
from assay.runtime.output import visible

_LINES = 14
"""Groups of an assignment listed in the tooltip of its point."""
_LARGEST = 12
"""Channels of a site that are marked and labelled."""
_FAR_BELOW = 10.0
"""Errors this many times below the noise floor aren't drawn: no 16-bit computation can resolve them."""
_RECIPES = (
    (" at every linear", "square", "c3"),
    (" at every linear and embedding", "triangle", "c2"),
    (", first and last layers kept", "cross", "ink"),
    (" at every KV cache", "square", "c4"),
)
"""Suffixes of baselines' names; each is drawn with its own marker."""


def charts_of(content: Mapping[str, Any]) -> dict[str, Markup]:
    """Return every chart, by the name of its slot on the page."""
    results = {"pareto": drawn(_pareto(content), "pareto"), "measured": drawn(_measured(content), "measured")}
    results |= {name: heated(_heat(content, indices), name) for name, indices in _POSITIONS.items()}
    if content["positions"]:
        results["positions"] = drawn(_positions(content), "positions")
    results |= {
        f"outlier{index}": drawn(_outlier(site), f"outlier{index}") for index, site in enumerate(content["outliers"])
    }
    return results


def _pareto(content: Mapping[str, Any]) -> Chart:
    """Return the chart of bytes against error: the front with its intervals, baselines and budgets."""
    unit, chosen, budgets = content["settings"]["unit"], content["recommended"], content["settings"]["budgets"]
    front, floor = content["pareto"], _number(content["noise_floor"])
    largest = max(content["untouched"]["bytes"], *(point["bytes"] for point in front or [chosen]))
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    size, name = next(((size, name) for size, name in units if largest >= size), (1.0, "B"))

    def series(name: str, points: Sequence[Mapping[str, Any]], error: Callable[[Any], Any], **how: Any) -> Series:
        words = [_assignment_words(content, point) for point in points]
        return Series(
            name, [point["bytes"] / size for point in points], [_number(error(point)) for point in points], words, **how
        )

    predicted = series(
        "best by prediction, with intervals",
        front,
        lambda point: point["prediction"]["error"],
        line="dotted",
        low=[_number(point["prediction"]["low"]) for point in front],
        high=[_number(point["prediction"]["high"]) for point in front],
    )
    best = chosen["measured"] if chosen["measured"] is not None else chosen["prediction"]["error"]
    known = [point for point in front if point["measured"] is not None]
    shown = [each for each in content["baselines"] if _drawn(content, each)]
    measured, beside = (lambda each: each["measured"]), []
    for ending, mark, tone in _RECIPES:
        if of_it := [each for each in shown if each["name"].endswith(ending)]:
            labels = [each["name"].removesuffix(ending) for each in of_it]
            beside.append(series(f"one scheme{ending}", of_it, measured, mark=mark, tone=tone, labels=labels))
    if rest := [each for each in shown if not each["name"].endswith(tuple(ending for ending, *_ in _RECIPES))]:
        labels = ["bfloat16"]
        beside.append(series(rest[0]["name"], rest, measured, mark="triangle", tone="ink", labels=labels))
    guides = [Guide("y", floor, f"noise floor, {format_error(floor)} {unit}", line="dotted")] if floor > 0 else []
    if "error" in budgets:
        guides.append(Guide("y", budgets["error"], f"budget, {format_error(budgets['error'])} {unit}", "bad"))
    if "bytes" in budgets:
        guides.append(Guide("x", budgets["bytes"] / size, f"budget, {format_bytes(budgets['bytes'])}", "bad"))
    return Chart(
        f"Bytes of the weights against the error of {len(front)} assignments and of {len(shown)} simple ones; "
        "the numbers are in the tables.",
        Axis(f"weights, {name}, logarithmic", log=True),
        Axis(f"error, {unit}, logarithmic", log=True),
        [
            series("recommended", [chosen], lambda _: best, mark="diamond", tone="chosen", labels=["recommended"]),
            predicted,
            series("the same, measured", known, measured, tone="front", mark="cross"),
            *beside,
        ],
        guides,
        height=440,
    )


def _drawn(content: Mapping[str, Any], each: Mapping[str, Any]) -> bool:
    """Return whether a baseline is neither larger than the model itself nor far below the noise floor."""
    floor, error = _number(content["noise_floor"]), _number(each["measured"])
    return bool(each["bytes"] <= content["untouched"]["bytes"] and error > 0 and error * _FAR_BELOW >= floor)


def undrawn(content: Mapping[str, Any]) -> int:
    """Return the number of baselines that only the table shows."""
    return sum(not _drawn(content, each) for each in content["baselines"])


def _measured(content: Mapping[str, Any]) -> Chart:
    """Return the chart of predicted against measured errors, with those outside of their intervals in red."""
    unit = content["settings"]["unit"]
    random, front = content["calibration"], [*content["pareto"], content["recommended"]]
    usable = [[point for point in points if point["measured"] is not None] for points in (random, front)]

    def series(name: str, points: Sequence[Mapping[str, Any]], mark: Any, tone: str) -> Series:
        guesses = [point["prediction"] for point in points]
        return Series(
            name,
            [_number(guess["error"]) for guess in guesses],
            [_number(point["measured"]) for point in points],
            [
                f"predicted {interval(p['prediction'])} {unit}\nmeasured {format_error(p['measured'])} {unit}"
                for p in points
            ],
            mark=mark,
            tone=tone,
            low=[_number(guess["low"]) for guess in guesses],
            high=[_number(guess["high"]) for guess in guesses],
        )

    results, kinds = [], (("measured to calibrate", "dot", "front"), ("front and recommended", "diamond", "chosen"))
    for points, (what, mark, tone) in zip(usable, kinds, strict=True):
        inside = [
            point
            for point in points
            if _number(point["prediction"]["low"]) <= _number(point["measured"]) <= _number(point["prediction"]["high"])
        ]
        results.append(series(f"{what}, inside its interval", inside, mark, tone))
        if outside := [point for point in points if point not in inside]:
            results.append(series(f"{what}, outside of it", outside, mark, "bad"))
    return Chart(
        f"Predicted against measured error of {len(usable[0])} assignments that calibrate and {len(usable[1])} others.",
        Axis(f"predicted error, {unit}, logarithmic", log=True),
        Axis(f"measured error, {unit}, logarithmic", log=True),
        results,
        diagonal="predicted = measured",
        height=400,
    )


_POSITIONS = {"weights": ("linear", "embedding"), "values": ("kv_cache", "activation")}


def _heat(content: Mapping[str, Any], indices: Sequence[str]) -> HeatMap:
    """Return the predicted error of each single site in each scheme of its menu."""
    sites = [site for site in content["sites"] if site["place"] in indices and site["alone"]]
    schemes = list(dict.fromkeys(scheme for site in sites for scheme in site["alone"]))
    values = [
        [_number(site["alone"][scheme]) if scheme in site["alone"] else None for scheme in schemes] for site in sites
    ]
    rows = [site["kind"] if site["layer"] is None else f"{site['layer']} {site['kind']}" for site in sites]
    what = " and ".join(index.replace("_", " ") for index in indices)
    return HeatMap(
        f"Predicted error of each {what} alone in each scheme, {content['settings']['unit']}",
        rows,
        schemes,
        values,
        [site["scheme"] for site in sites],
        content["settings"]["unit"],
        "layer, part",
    )


def _outlier(site: Mapping[str, Any]) -> Chart:
    """Return the chart of the largest magnitude of each channel of a site, with its largest ones marked."""
    values, channels = [float(value) for value in site["largest"]], site["channels"]
    size, more = divmod(channels, len(values))  # run lengths as torch.tensor_split makes them
    at = [index * size + min(index, more) for index in range(len(values) + 1)]
    runs = [f"channel {a}" if b - a == 1 else f"channels {a} to {b - 1}" for a, b in pairwise(at)]
    middle = statistics.median(values)
    top = sorted(sorted(range(len(values)), key=lambda index: -values[index])[:_LARGEST])
    over = [f", {values[index] / middle:.3g} times the median" if middle > 0 else "" for index in top]
    words = [f"{runs[index]}: {values[index]:.3g}{times}" for index, times in zip(top, over, strict=True)]
    return Chart(
        f"Largest magnitude of each of {channels} channels of {site['site']}; {words[0]}",
        Axis("channel"),
        Axis("largest magnitude", zero=True),
        [
            Series("all", at[:-1], values, mark="bar", tone="front"),
            Series("largest", [(at[p] + at[p + 1]) / 2 for p in top], [values[p] for p in top], words, tone="chosen"),
        ],
        [Guide("y", middle, f"median, {middle:.3g}", tone="ink", line="dotted")],
        height=130,
        legend=False,
    )


def _positions(content: Mapping[str, Any]) -> Chart:
    """Return the chart of the error over positions, with its interval."""
    unit, steps = content["settings"]["unit"], content["positions"]["steps"]
    known = [step for step in steps if step["error"] is not None]
    ends = [step["interval"] or {"low": step["error"], "high": step["error"]} for step in known]
    errors = [measured_words({"measured": step["error"], "interval": step["interval"]}) for step in known]
    return Chart(
        f"The error over {len(known)} steps of positions with its interval; the numbers are in the table below.",
        Axis(
            "up to position, tokens from the beginning, logarithmic",
            log=True,
            ticks=[(step["end"], f"{step['end']:,}") for step in known],
        ),
        Axis(f"error, {unit}", zero=True),
        [
            Series(
                "measured, with its 95 % interval",
                [float(step["end"]) for step in known],
                [_number(step["error"]) for step in known],
                [f"up to position {step['end']:,}\n{words} {unit}" for step, words in zip(known, errors, strict=True)],
                line="solid",
                low=[_number(end["low"]) for end in ends],
                high=[_number(end["high"]) for end in ends],
                band=True,
            )
        ],
        height=260,
    )


def _assignment_words(content: Mapping[str, Any], point: Mapping[str, Any]) -> str:
    """Return bytes, errors and groups of an assignment, or the name of a baseline."""
    unit = content["settings"]["unit"]
    size = f"weights {format_bytes(point['bytes'])}"
    measured = f"measured {measured_words(point)} {unit}"
    if "name" in point:
        return "\n".join([point["name"], size, measured])
    sites = [{**site, "scheme": point["assignment"].get(site["tied"] or site["name"])} for site in content["sites"]]
    lines = [f"{group.where}: {group.scheme or 'as it is'}" for group in grouped(sites) if group.weighty]
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return "\n".join([size, f"predicted {interval(point['prediction'])} {unit}", measured, *lines[:_LINES], *more])


def _number(value: float | str | None) -> float:
    """Return a number of audit.json, where infinities are strings and unmeasured values null."""
    return math.nan if value is None else float(value)


def page(content: Mapping[str, Any]) -> str:
    """Return the content of audit.json as an HTML page with charts."""
    rendering = environment(Path(__file__).with_name("templates"), visible)
    rendering.filters |= {
        "bytes": format_bytes,
        "error": format_error,
        "seconds": format_seconds,
        "interval": interval,
        "ends": interval_ends,
        "between": measured_words,
        "counted": counted,
        "growth": growth_words,
    }
    return rendering.get_template("report.html.j2").render(
        audit=content,
        charts=charts_of(content),
        chart_style=STYLE,
        chart_script=SCRIPT,
        undrawn=undrawn(content),
        headline=headline(content),
        instead=advice_lines(content),
        budgets=budget_lines(content),
        exports=export_lines(content),
        fixed=fixed_lines(content),
        steps=next_steps(content),
    )
