"""What an audit found: a table for the terminal, one HTML page that needs no network, and JSON."""

import io
import json
import math
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from assay.mutation import words
from assay.mutation.ledger import Ledger, Site
from assay.runtime.results import installed_version
from assay.verify.report.rendering import environment

_PIPED = 10_000  # letters: whoever reads a file or a pipe gets a line whole
_SHOWN = 20  # lines in the terminal; the page has all


def print_table(ledger: Ledger, terminal: Any) -> None:
    """The worst lines, the totals, and what to know about them."""
    from rich.console import Console
    from rich.table import Table

    sites = ledger.ranked
    if sites:
        width = max(80, terminal._tw.fullwidth) if terminal.isatty else _PIPED
        table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
        longest = max(len(_line(site)) for site in sites[:_SHOWN])
        table.add_column("line", overflow="fold", min_width=min(width // 3, longest))
        table.add_column("grade", no_wrap=True)
        table.add_column("runs", justify="right")
        table.add_column("gain", justify="right", no_wrap=True)
        table.add_column("never noticed", min_width=24)
        for site in sites[:_SHOWN]:
            table.add_row(_line(site), site.grade, str(site.runs), gain(site), remarks(site))
        text = io.StringIO()
        Console(file=text, width=width, highlight=False).print(table)
        for line in text.getvalue().splitlines():
            terminal.line(line.rstrip())
        if len(sites) > _SHOWN:
            terminal.line(f"... and {len(sites) - _SHOWN} more")
    for line in totals(ledger):
        terminal.line(line)


def _line(site: Site) -> str:
    return f"{site.file}:{site.line}"


def totals(ledger: Ledger) -> list[str]:
    """Sentences that sum an audit up."""
    sites = list(ledger.sites.values())
    grades = Counter(site.grade for site in sites)
    counted = ", ".join(f"{grades[name]} {name}" for name in words.GRADES if grades[name])
    lines = [
        f"{sum(site.runs for site in sites)} comparisons on {len(sites)} lines in {ledger.tests} passing tests, "
        f"{sum(site.replays for site in sites)} of them replayed{': ' + counted if counted else ''}",
        f"{len(ledger.silent)} passing tests made no comparison that the audit sees, "
        f"{len(ledger.bare)} of these hold no other assertion",
    ]
    lines += [f"{name}, named by --assay-audit-function, was never imported" for name in sorted(set(ledger.missing))]
    if ledger.errors:
        lines.append(f"{len(ledger.errors)} steps of the audit itself went wrong, first: {ledger.errors[0]}")
    return lines


def gain(site: Site) -> str:
    """The smallest relative error of all elements together that a replay notices: in the best, to in the worst."""
    if not site.gains:
        return ""
    best, worst = (_short(value) for value in site.gains)
    return best if best == worst or site.gains[1] < 1.5 * site.gains[0] else f"{best} to {worst}"


def _short(value: float) -> str:
    return (
        "none" if math.isinf(value) else "1e-8" if value < 1e-8 else f"{value:.1e}" if value < 0.01 else f"{value:.2g}"
    )


def remarks(site: Site) -> str:
    """What a line never notices, what it doesn't notice in all its runs, and what else there is to say about it."""
    parts = [site.unused] if site.unused else []
    parts += site.never_noticed(words.ALL)
    some = site.sometimes_noticed((*words.STRUCTURE, *words.SIZE))
    parts += [f"in some runs {name}" for name in some]
    parts += [f"({flag})" for flag in site.flags if not site.replays or flag in (words.SAME, words.NANS)]
    return ", ".join(parts)


def write_page(ledger: Ledger, folder: Path) -> Path:
    """Write the report of an audit into a folder, as ``audit.html`` and ``audit.json``; the path of the page."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "audit.html"
    page = environment().get_template("audit.html.j2")
    content = page.render(
        gain=gain,
        remarks=remarks,
        ledger=ledger,
        sites=ledger.ranked,
        totals=totals(ledger),
        counts={name: sum(site.grade == name for site in ledger.ranked) for name in words.GRADES},
        grades=words.GRADES,
        tones={"unused": "bad", "blind": "bad", "coarse": "doubt", "strict": "good", "unjudged": "quiet"},
        corruptions=words.ALL,
        made=made,
    )
    path.write_text(content, encoding="utf-8")
    data = {"assay": installed_version("kernel-assay"), "made": made} | ledger.as_data()
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path
