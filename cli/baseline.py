"""`assay baseline`: the findings that a team knows of, in a file beside its code.

`assay.cli.main` makes commands of its public functions.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from assay.cli.progress import console, console_table, note
from assay.runtime.files import read_text
from assay.runtime.records import from_json

if TYPE_CHECKING:
    from assay.verify.verdict import Verdict

_DAYS = 90  # from today to the expiry of a finding without one
_PIPED_WIDTH = 200  # columns if standard output is no terminal
_REPORTS = "Verdicts as JSON, or folders of such: of pytest --assay-report, or of assay verify --out."

File = Annotated[Path, Argument(metavar="FILE", help="The baseline, a TOML file.")]


def add(
    file: File,
    reports: Annotated[list[Path], Argument(metavar="REPORT...", help=_REPORTS)],
    reason: Annotated[str, Option(help="Why this is left as it is for now, e.g. the number of an issue.")],
    expires: Annotated[str, Option(metavar="YYYY-MM-DD", help=f"The last day; {_DAYS} days from now if none.")] = "",
    aspect: Annotated[list[str] | None, Option(help="Only this aspect's findings; may be given several times.")] = None,
) -> int:
    """Add the findings of reports to a baseline, which is made if it is missing."""
    from assay.verify.baseline import BaselineError, findings_of
    from assay.verify.baseline import add as add_to

    today = datetime.date.today()
    last = _date(expires) if expires else today + datetime.timedelta(days=_DAYS)
    if last < today:
        raise BaselineError(f"--expires {last}: expected a day that isn't over")
    if not reason.strip():
        raise BaselineError("--reason: expected why this is left as it is, e.g. the number of an issue")
    findings = [finding for verdict in _verdicts(reports) for finding in findings_of(verdict)]
    if aspect:
        known = {finding.aspect for finding in findings}
        if missing := set(aspect) - known:
            have = ", ".join(sorted(known)) or "none"
            raise BaselineError(f"--aspect {min(missing)}: the reports have no such finding; they have {have}")
        findings = [finding for finding in findings if finding.aspect in aspect]
    added = add_to(file, findings, reason, last)
    for entry in added:
        print(f"{entry.as_finding()}, until {entry.expires}")
    note(f"{len(added)} of {len(set(findings))} findings are new in {file}")
    return 0


def list_(file: File) -> int:
    """List the findings of a baseline, those that expire first at the top."""
    from assay.verify.baseline import read_baseline

    today = datetime.date.today()
    rows = [
        (
            f"{entry.expires}{' (over)' if entry.has_expired(today) else ''}",
            *(entry.target, entry.spec, entry.dtype, entry.aspect, entry.cause, entry.reason),
        )
        for entry in sorted(read_baseline(file), key=lambda entry: entry.expires)
    ]
    head = ("expires", "target", "spec", "dtype", "aspect", "cause", "reason")
    console(_PIPED_WIDTH).print(console_table(head, rows))
    return 0


def prune(
    file: File,
    reports: Annotated[list[Path] | None, Argument(metavar="[REPORT...]", help=_REPORTS)] = None,
) -> int:
    """Remove findings whose expiry is over, and those that reports of the same kernels no longer show.

    The reports should have been made with the effort and the settings with which the findings were found.
    """
    from assay.verify.baseline import read_baseline, remove, unseen

    today = datetime.date.today()
    known = read_baseline(file)
    over = [entry for entry in known if entry.has_expired(today)]
    gone = [entry for entry in unseen(known, _verdicts(reports or [])) if entry not in over]
    if over or gone:
        remove(file, [*over, *gone])
    for entry in over:
        print(f"over since {entry.expires}: {entry.as_finding()}")
    for entry in gone:
        print(f"no longer found: {entry.as_finding()}")
    note(f"{len(over) + len(gone)} of {len(known)} findings are removed from {file}")
    return 0


def _date(text: str) -> datetime.date:
    from assay.verify.baseline import BaselineError

    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise BaselineError(f"--expires {text!r}: expected a day as YYYY-MM-DD") from None


def _verdicts(reports: Sequence[Path]) -> list[Verdict]:
    """Return the verdicts of reports. Raises `BaselineError`."""
    from assay.verify.baseline import BaselineError, verdict_files
    from assay.verify.errors import ReproError
    from assay.verify.verdict import Verdict

    verdicts = []
    for path in verdict_files(reports):
        content = from_json(read_text(path, BaselineError), str(path), BaselineError)
        for each in content if isinstance(content, list) else [content]:
            try:
                verdicts.append(Verdict.from_dict(each))
            except (ValueError, KeyError, TypeError, AttributeError, ReproError):
                raise BaselineError(f"{path}: not a verdict; expected the JSON of a report") from None
    return verdicts
