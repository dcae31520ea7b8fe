"""Text reports: a verdict for the terminal, and a failure in one short line."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from assay.runtime.output import visible
from assay.verify.cases.case import edits_in_words
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.comparison.result import UNRESOLVED
from assay.verify.findings import ASPECTS, Aspect, Detectable, ErrorMap, Failure, Findings, Variant
from assay.verify.harness.frameworks import MEND

_WIDTH = 100  # width of a case's lines
_FEW_VARIANTS = 3  # that are named as not tried
_LIKELY = 3  # explanations that are shown
_LIMIT = {"unlikely": "rounding takes it"}


def text_report(result: Findings) -> str:
    """Return the terminal's report of a verdict."""
    vacuous = f", vacuous at {result.vacuous}" if result.vacuous else ""
    lines = [f"{result.outcome}{vacuous}  {result.kernel} as {result.spec} in {result.dtype}"]
    lines.append(f"  contract    {result.contract}")
    lines.append(f"  cases       {result.cases} decided, {result.elements} elements, worst ratio {result.worst:.3g}")
    lines += [f"  not judged  {count} elements {reason}" for reason, count in result.left_out.items()]
    if result.unresolved:
        lines.append(f"  unresolved  {result.unresolved} elements {UNRESOLVED}")
    if result.pairs.feasible:
        covered = f"{result.coverage:.0%} of the pairs of factors"
        lines.append("  covered     " + "; ".join(filter(None, (covered, result.coverage.left_out))))
    lines += [f"  refused     {count} cases: {words}" for words, count in result.refused.items()]
    if result.compiled:
        lines.append(
            f"  compiled    {result.compiled} programs in {result.compile_seconds:.3g} s, before the first case"
        )
    lines += [f"  refused     {config}: {words}" for config, words in result.refused_configs.items()]
    if result.unlimited:
        lines.append("  no limit    on time: it acts in a process's main thread only, or with isolate=True")
    if result.unrounded:
        lines.append(f"  unrounded   roundings to bfloat16 on the way may vanish: {MEND}")
    if result.detectable:
        lines += detectable(result.detectable)
    if result.cut:
        lines.append(f"  cut         {result.cut}")
    if result.note:
        lines.append(f"  why         {result.note}")
    lines += [line for words in result.remarks for line in _folded("remark", words)]
    lines += [f"  at          {words}" for words in result.at]
    lines += _untried(result.variants)
    lines += [f"  left        {words}; put back" for words in result.left_changed]
    lines += [_row(name, result.aspects[name]) for name in ASPECTS if name in result.aspects]
    for name, aspect in result.violated.items():
        lines.append(f"{name} {aspect.status}{aspect.note and f', {aspect.note}'}")
        try:
            lines += _finding(aspect)
        except Exception as error:  # the other findings, and the line that repeats this one, are still reported
            lines += [*_folded("error", f"the report of it: {type(error).__name__}: {error}; please report this")]
            lines.append(f"  repeat      {aspect.repro}")
    lines += [line for words in result.errors for line in _folded("error", words)]
    if result.violated and not result.target:
        lines.append("              (this kernel has no importable name: add --target package.module:function)")
    return visible("\n".join(lines))


def variants_in_words(variants: Sequence[Variant]) -> list[str]:
    """Return one line for each variant: at which sizes, which programs with which constants."""
    return [f"  {sizes_in_words(each)}: {_what_runs(each)}" for each in variants] or ["  nothing was observed"]


def sizes_in_words(variant: Variant) -> str:
    """Return the sizes of a variant, e.g. "M 513-1,024 or N 1-64"; "and" where they come together."""
    spans = {symbol: ", ".join(_span(*run) for run in runs) for symbol, runs in variant.runs.items()}
    together = len(spans) > 1 and len(set(spans.values())) == 1 and variant.together
    if together:
        return f"{' = '.join(spans)} {next(iter(spans.values()))}"
    return " or ".join(f"{symbol} {words}" for symbol, words in spans.items())


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def _what_runs(variant: Variant) -> str:
    if variant.refusal:
        return f"refused, {variant.refusal}"
    configs = f" with {'; '.join(variant.configs)}" if variant.configs else ""
    return f"{', '.join(variant.launches) or 'no operator'}{configs}"


def _untried(variants: Sequence[Variant]) -> list[str]:
    """Return a line of how many variants were tried, and which were not."""
    if len(variants) < 2:
        return []
    left = [sizes_in_words(each) for each in variants if not each.tried and not each.refusal]
    words = (
        f"; not tried: {'; '.join(left[:_FEW_VARIANTS])}{', ...' if len(left) > _FEW_VARIANTS else ''}" if left else ""
    )
    return [f"  variants    {sum(each.tried for each in variants)} of {len(variants)} tried{words}"]


def detectable(result: Sequence[Detectable]) -> list[str]:
    """Return the detectable relative errors of a whole output, by the length of the reduction."""
    rows = {
        "terms": [f"{row.length:,}" for row in result],
        "broken": [f"{row.broken:.1e}" for row in result],
        "suspect": [f"{row.suspect:.1e}" for row in result],
    }
    lines = [f"{name:9}" + "".join(f"{cell:>9}" for cell in cells) for name, cells in rows.items()]
    return ["  detectable  relative errors of a whole output", *(" " * 14 + line for line in lines)]


def _row(name: str, aspect: Aspect) -> str:
    """Return an aspect as a line of the card."""
    if aspect.status == "not tried":
        words = aspect.note
    elif aspect.failure is None:
        words = f"{aspect.cases:4} cases, worst {aspect.worst:.3g}"
    else:
        words = aspect.note or failure_in_words(aspect.failure)
        words += f"; {aspect.known.partition('; data')[0]}" if name == "shapes" and aspect.known else ""
    return f"  {name:11} {aspect.status:9} {words}".rstrip()


def _finding(aspect: Aspect) -> list[str]:
    """Return the lines for a broken aspect's failure: position, case, error and explanation."""
    failure = aspect.failure
    if failure is None:
        return []
    if aspect.note:  # another aspect reports the same fault
        return [*_folded("known", aspect.known), *_repeat(aspect)]
    lines = [f"  failure     {failure.kind}: {failure.message}"]
    if aspect.map is not None:
        lines.append(f"  where       {where(aspect.map)}")
    lines += _folded("case", str(failure.case))
    lines += _numbers(failure)
    lines += [f"  likely      {explanation.description}" for explanation in aspect.explanations[:_LIKELY]]
    if len(aspect.explanations) > 1:
        lines.append(f"              {len(aspect.explanations)} explanations agree with every call that was made")
    lines += [line for fact in aspect.facts for line in _folded("measured", fact.words)]
    lines += _folded("known", aspect.known)
    return [*lines, *_repeat(aspect)]


def _repeat(aspect: Aspect) -> list[str]:
    """Return the line that repeats a failure, and what it gave in a fresh process if it was run there."""
    return [f"  repeat      {aspect.repro}", *_folded("", aspect.repeated)]


def _folded(name: str, words: str) -> list[str]:
    """Wrap a line of a finding; return no lines for an empty one."""
    return textwrap.wrap(words, _WIDTH, initial_indent=f"  {name:12}", subsequent_indent=" " * 14)


def _numbers(failure: Failure) -> list[str]:
    if failure.got is None or failure.golden is None:
        return []
    index = f"{failure.output}{list(failure.index)}"
    lines = [f"  worst at    {index}: got {failure.got:.9g}, golden {failure.golden:.9g}"]
    if failure.is_of_index:
        return lines
    if failure.radius is not None and failure.ratio is not None:
        off = abs(failure.got - failure.golden)
        digits = 4 if failure.ratio >= 1.001 or failure.ratio <= 1 else 9
        beyond = f"{failure.ratio:.{digits}g} times the radius"
        limit = _LIMIT.get(failure.kind, "allowed")
        lines.append(f"              off by {off:.3g}, {limit} {failure.radius:.3g}: {beyond}")
    if failure.violations > 1:
        lines.append(f"  greatest    {greatest(failure)}")
    return lines


def greatest(failure: Failure) -> str:
    """Return the largest differences of wrong elements with their positions, and the number of wrong elements."""
    words = [
        f"{kind} difference {result.value:.3g} at {list(result.index)}"
        for kind, result in (("absolute", failure.greatest_absolute), ("relative", failure.greatest_relative))
        if result is not None
    ]
    return ", ".join([*words, f"{failure.percent:.3g} % of the elements"])


def where(errors: ErrorMap) -> str:
    """Return the position of the first wrong output in words."""
    return f"first met in {errors.output} of shape {list(errors.shape)}: {errors.words}"


def failure_in_words(failure: Failure) -> str:
    """Return a failure in one short line: the sizes other than 1, the result, the golden and the tolerance."""
    case = failure.case
    setting = [f"{symbol}={size}" for symbol, size in case.sizes.items() if size != 1]
    defaults = case.definition.complete({})
    setting += [f"{name}={value}" for name, value in case.options.items() if value != defaults[name]]
    if failure.kind == "layout":
        setting += [f"{name} {layout}" for name, layout in case.layouts.items() if layout != LAYOUTS[0]]
    setting += edits_in_words([edit for edit in case.edits if edit[2] != 0 or math.copysign(1, edit[2]) < 0], most=2)
    return f"{', '.join(setting) or 'all sizes 1'}: {_what_came(failure)}"


def _what_came(failure: Failure) -> str:
    if failure.got is None or failure.golden is None or failure.kind in ("layout", "unwritten_output"):
        return f"{failure.kind}: {failure.message}"
    index = f"{failure.output}{list(failure.index)}"
    allowed = (
        ""
        if failure.radius is None or failure.is_of_index
        else f", {_LIMIT.get(failure.kind, 'allowed')} ±{failure.radius:.2g}"
    )
    return f"{index} came {failure.got:.6g}, right {failure.golden:.6g}{allowed}"
