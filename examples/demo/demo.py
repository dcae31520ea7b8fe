"""Demonstrate assay in one screen (`./dev demo [FOLDER]`): kernels judged, a bug explained, goldens repaired, an audit.

Exits with 1 on an unexpected result: a kernel that couldn't be judged, the planted bug not found or not explained, the
damage not seen or not repaired, a budget that the audit missed.
"""

import math
import re
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.cli.progress import ProgressBar, console, report_error
from assay.runtime.files import write_text_atomically
from assay.runtime.pool import Pool, Raised, worker_count
from assay.runtime.process import Lost

sys.path.insert(0, str(Path(__file__).resolve().parent))

_WIDTH = 120  # columns if the output is no terminal
_BAR = 40
_POINTS = 8  # of the front, at most
_SAID = 150  # characters of a command's output
_COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


def main(folder: str = "report/demo") -> int:
    """Do every part on all cores, and print the results."""
    out, began = Path(folder), time.monotonic()
    print("assay: this takes about a minute on two free cores", file=sys.stderr)
    with Pool(worker_count(), preload="parts") as pool:
        import parts

        from assay.verify.campaign.survey import row_of

        todo = parts.parts(out)
        order = sorted(range(len(todo)), key=lambda index: -todo[index].effort)
        answers: list[Any] = [None] * len(todo)
        with ProgressBar("part", len(todo), sum(part.effort for part in todo)) as bar:
            for position, answer in pool.run(parts.do, [todo[index] for index in order]):
                answers[order[position]] = answer
                bar.advance(todo[order[position]].effort)
    audit, goldens, allclose, *kernels = [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
    spent = [answer[1] if isinstance(answer, tuple) else math.nan for answer in answers]
    to = console(_WIDTH)
    words = f"audit {spent[0]:.0f}, goldens {spent[1]:.0f}, kernels {sum(spent[2:]):.0f}"
    to.print(Text(f"assay: {time.monotonic() - began:.0f} s; seconds of processor time: {words}", "dim"))
    rows = [row_of(part.item, answer) for part, answer in zip(todo[3:], kernels, strict=True)]
    amiss = show_kernels(rows, allclose, out, to)
    amiss += _lost(goldens) or show_goldens(goldens, to)
    amiss += _lost(audit) or show_audit(audit, out / "audit", to)
    for words in amiss:
        report_error(words)
    return int(bool(amiss))


def show_kernels(rows: Sequence[Any], allclose: Any, out: Path, to: Console) -> list[str]:
    """Print a line per kernel, and the findings on the planted one; return the problems."""
    import parts

    from assay.verify.campaign.page import survey_page

    _headline("Kernels against their contracts", "assay survey", to)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for justify in ("left", "left", "left", "right", "left"):
        table.add_column(justify=justify, no_wrap=justify == "right")
    group = ""
    for row in rows:
        cases = f"{row.verdict.cases} cases" if row.verdict else ""
        label = row.entry.group if row.entry.group != group else ""
        group = row.entry.group
        broken = ", ".join(row.verdict.broken) if row.verdict else ""
        findings = f"{broken}: {row.words}" if broken else "" if row.verdict else str(row.reason)
        table.add_row(label, row.entry.name, Text(row.outcome, _COLOURS.get(row.outcome, "dim")), cases, findings)
    to.print(table)
    made = datetime.now().astimezone().isoformat(" ", timespec="minutes")
    page = write_text_atomically(out / "index.html", survey_page(rows, {"what": "./dev demo", "made": made}))
    to.print(Text(f"a page with all of it: {page}"), soft_wrap=True)
    amiss = [f"{row.entry.name}: {row.words}" for row in rows if row.outcome in ("ERROR", "NOT RUN")]
    planted = next((row.verdict for row in rows if row.entry.target == parts.PLANTED), None)
    return amiss + (show_planted(planted, allclose, out, to) if planted else [])


def show_planted(verdict: Any, allclose: Any, out: Path, to: Console) -> list[str]:
    """Print the answers of `allclose` and of assay on the planted bug; return the problems."""
    failure = verdict.failure
    broken = ", ".join(verdict.broken)
    likely = [each.description for aspect in verdict.broken.values() for each in aspect.explanations[:1]]
    _headline("A planted bug", "examples/demo/planted.py", to)
    if isinstance(allclose, bool):
        said = "passes" if allclose else "fails"
        to.print(f"[bold]allclose[/]  {said}, with rtol = atol = 1e-2 on torch.randn(128, 1000)", highlight=False)
    if failure is None:
        return ["the planted bug was not found"]
    to.print(f"[bold]assay[/]     [red]{verdict.outcome}[/]: {broken}", highlight=False)
    _line("smallest", f"{failure.case}", to)
    if None not in (failure.got, failure.golden, failure.radius):
        _line("", f"got {failure.got:.6g}, right {failure.golden:.6g}, allowed ±{failure.radius:.2g}", to)
    _line("likely", likely[0] if likely else "", to)
    _line("repeat", verdict.repro, to)
    page = verdict.to_html(out / "planted.html")
    to.print(Text(f"a page with pictures: {page}"), soft_wrap=True)
    return [] if likely else ["the planted bug was not explained"]


def show_goldens(steps: Sequence[Any], to: Console) -> list[str]:
    _headline("A store of goldens: built, one bit changed, found out, mended", "docs/golden-jobs.md", to)
    for step in steps:
        to.print(Text.assemble(("$ ", "dim"), step.command), soft_wrap=True)
        said = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1...", step.said)  # names of records
        said = textwrap.shorten(said, _SAID, placeholder=" ...")
        to.print(Text(f"  {said}", "red" if step.status else "green"), soft_wrap=True)
    wanted = [0, 0, 1, 0, 0]
    return [] if [step.status for step in steps] == wanted else ["the store of goldens was not mended as it must be"]


def show_audit(content: Mapping[str, Any], out: Path, to: Console) -> list[str]:
    """Print the front of bytes and error as a picture, and the recommendation; return the problems."""
    model, chosen, before = content["model"], content["recommended"], content["untouched"]["bytes"]
    title = f"An audit of {model['name']}, {model['parameters'] / 1e6:.1f} M parameters: bytes against nats per token"
    _headline(title, "assay audit", to)
    points = [point for point in content["pareto"] if point["measured"]]
    least = min(math.log10(point["measured"]) for point in points)
    span = max(math.log10(point["measured"]) for point in points) - least
    for point in points[:: -(-len(points) // _POINTS)]:
        bar = "█" * round(1 + (_BAR - 1) * (math.log10(point["measured"]) - least) / span)
        to.print(f"{point['bytes'] / 1e6:6.2f} MB  {bar:{_BAR}}  {point['measured']:.1e}", highlight=False)
    kept = f"{chosen['bytes'] / 1e6:.2f} MB of {before / 1e6:.2f} MB, {chosen['measured']:.2g} nats per token"
    formats = ", ".join(sorted(set(chosen["assignment"].values())))
    _line("chosen", f"{kept} (predicted {chosen['prediction']['error']:.2g}), in {formats}", to)
    to.print(Text(f"a page with pictures: {out / 'report.html'}"), soft_wrap=True)
    return [] if chosen["met"] else ["the audit found no assignment within its budget"]


def _lost(answer: Any) -> list[str]:
    return [answer.message] if isinstance(answer, (Lost, Raised)) else []


def _headline(title: str, more: str, to: Console) -> None:
    to.print()
    to.print(Text.assemble((title, "bold cyan"), (f"   {more}", "dim")), soft_wrap=True)


def _line(name: str, words: str, to: Console) -> None:
    to.print(Text.assemble((f"{name:8}  ", "bold"), words), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
