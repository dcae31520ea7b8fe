"""`assay golden`: build, check, show and diff stores of golden records, and discard one."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay import configs
from assay.cli import golden_tables as tables
from assay.cli.help import Commands, help_alone
from assay.cli.progress import ProgressBar
from assay.cli.settings import Ops
from assay.golden.errors import CampaignError, StoreError
from assay.runtime.engines import engine_named, part_of

if TYPE_CHECKING:
    from assay.golden.jobs.build import Outcome, Part
    from assay.golden.jobs.campaign import Campaign
    from assay.golden.store import Store

app = typer.Typer(
    cls=Commands,
    help="Golden records: build a campaign, check a store, show it, discard a record, tell two apart.",
    callback=help_alone,
    invoke_without_command=True,
)

_STORE = "A path, s3://bucket/folder, or another address of fsspec's."
_LISTED = 20  # failures or problems that are listed individually
_BUNDLED = "campaigns/"

Address = Annotated[str, typer.Argument(metavar="STORE", help=_STORE)]
AddressToo = Annotated[str, typer.Option("--store", help="The same.")]


@app.command()
def build(
    campaign: Annotated[str, typer.Argument(metavar="CAMPAIGN", help="A TOML file, or a bundled campaign's name.")],
    store: Annotated[str, typer.Option(help=_STORE)],
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; one for each core if left out.")] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: at RAY_ADDRESS, or started here.")] = "local",
    part: Annotated[str, typer.Option(help="3/10: only the third of ten equal parts.")] = "",
    retries: Annotated[int, typer.Option(min=0, help="How often a task that failed is tried again.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one task may take.")] = 900.0,
    recheck: Annotated[bool, typer.Option("--recheck", help="Replace records that are there and damaged.")] = False,
    ops: Ops = None,
) -> int:
    """Make the goldens of a campaign that the store hasn't got yet.

    It can be stopped or killed at any moment and started again; two builds may share a store. Exits with 1 if a task
    failed for good.
    """
    if store.startswith("memory://"):
        raise StoreError(
            "--store memory://: each worker has a memory of its own; expected a path, s3://bucket/folder, ..."
        )
    with engine_named(engine, workers, preload="assay.golden.jobs.build", timeout=timeout) as running:
        from assay.golden.jobs.build import PRESENT, Job
        from assay.golden.jobs.build import build as make

        result = _campaign(campaign)
        chosen = _part(part, result)
        job = Job(result.name, result.text, _address(store), tuple(ops or ()), recheck=recheck)
        numbers, counts = chosen.task_numbers(result), Counter[str]()
        with ProgressBar("golden", len(numbers), result.total_milliseconds(numbers), rate=True) as bar:

            def watch(outcome: Outcome) -> None:
                counts[outcome.status] += 1
                (bar.skip if outcome.status == PRESENT else bar.advance)(result.milliseconds(outcome.task))

            try:
                report = make(result, job, running, part=chosen, retries=retries, watch=watch)
            except KeyboardInterrupt:
                done = f"{counts.total()} of {len(numbers)} tasks of {result.name} are done"
                print(f"assay: interrupted; {done}; the same command goes on from there", file=sys.stderr)
                return 130
    for failure in report.failures[:_LISTED]:
        tries = f"after {failure.attempts} attempts" if failure.attempts > 1 else "at once"
        print(f"assay: task {failure.task} ({failure.recipe}) failed {tries}: {failure.message}", file=sys.stderr)
    _more(report.failures)
    print(
        f"{result.name}: {report.made} records made, {report.present} were there, {len(report.failures)} failed; "
        f"{report.seconds:.1f} s, {report.made / max(report.seconds, 1e-3):.3g} made a second; {store}"
    )
    return int(bool(report.failures))


@app.command()
def check(
    address: Address = "",
    store: AddressToo = "",
    sample: Annotated[int, typer.Option(min=0, help="How many records are derived again by mpmath.")] = 20,
    digits: Annotated[int, typer.Option(min=20, help="With how many digits.")] = 50,
    ops: Ops = None,
) -> int:
    """Look at every bit of a store, for what is missing, and derive a sample again by mpmath.

    Exits with 1 if anything is wrong; what is wrong is named by its record's key.
    """
    from assay.golden.jobs.check import check as examine

    opened = _store(address, store)
    keys = opened.keys()
    count = sum(1 for _ in keys) if sys.stderr.isatty() else 0
    with ProgressBar("read", count, float(count), rate=True) as bar:
        result = examine(opened, sample=sample, digits=digits, watch=lambda done: bar.advance(1.0))
    for problem in result.problems[:_LISTED]:
        print(f"FAIL  {problem}")
    _more(result.problems)
    notes = [f"{result.derived} derived again by mpmath ({result.elements} elements)"]
    notes += [f"{result.too_large} of the sample too large to be"] if result.too_large else []
    notes += [f"{result.outdated} of earlier definitions or inputs"] if result.outdated else []
    print(f"{result.records} records read, {', '.join(notes)}; {len(result.problems) or 'no'} problems; {opened.url}")
    return int(bool(result.problems))


@app.command()
def show(
    address: Address = "",
    key: Annotated[str, typer.Argument(metavar="KEY", help="A record's key, or what it begins with.")] = "",
    store: AddressToo = "",
    spec: Annotated[str, typer.Option(help="Only records of this spec.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="How many records are listed.")] = 40,
    ops: Ops = None,
) -> int:
    """A table of a store's records, or one record."""
    opened = _store(address, store)
    opened.require()
    if key:
        tables.show_record(opened.get(_whole_key(opened, key)))
    else:
        tables.show_store(opened, spec, limit)
    return 0


@app.command()
def discard(
    address: Annotated[str, typer.Argument(metavar="STORE", help=_STORE)],
    key: Annotated[str, typer.Argument(metavar="KEY", help="A record's key, or what it alone begins with.")],
) -> int:
    """Remove a record that `check` found wrong; the next build of its campaign makes it again."""
    opened = _store(address, "")
    opened.require()
    whole = _whole_key(opened, key)
    opened.discard(whole)
    print(f"record {whole} removed; {opened.url}")
    return 0


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_STORE)],
    b: Annotated[str, typer.Argument(metavar="B", help=_STORE)],
) -> int:
    """What changed between two stores; exits with 1 if they contradict each other or a record is damaged."""
    from assay.golden.jobs.diff import WRONG, differences

    kinds = Counter[str]()
    for difference in differences(_store(a, ""), _store(b, "")):
        kinds[difference.kind] += 1
        if kinds[difference.kind] <= _LISTED:
            message = "" if difference.message == difference.kind else f": {difference.message}"
            print(f"{difference.kind}  {difference.key[:16]} {difference.recipe}{message}")
    print(", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no difference")
    return int(any(kinds[kind] for kind in WRONG))


def _more(items: Sequence[Any]) -> None:
    if len(items) > _LISTED:
        print(f"assay: and {len(items) - _LISTED} more", file=sys.stderr)


def _campaign(name: str) -> Campaign:
    from assay.golden.jobs.campaign import parse_campaign, read_campaign

    if Path(name).suffix or os.sep in name:
        return read_campaign(name)
    names = [table.removeprefix(_BUNDLED) for table in configs.names() if table.startswith(_BUNDLED)]
    known = [table for table in names if "/" not in table]  # names with a folder are campaigns of `assay verify`
    if name not in known:
        raise CampaignError(f"campaign {name!r}; expected a TOML file, or one of: {', '.join(known)}")
    text = files("assay.configs").joinpath(_BUNDLED, f"{name}.toml").read_text(encoding="utf-8")
    return parse_campaign(text, name, f"configs/{_BUNDLED}{name}.toml")


def _part(text: str, campaign: Campaign) -> Part:
    from assay.golden.jobs.build import Part

    return Part(*part_of(text, campaign.count))


def _store(address: str, option: str) -> Store:
    from assay.golden.store import Store

    if bool(address) == bool(option):
        raise StoreError("expected the address of one store, e.g. assay golden check goldens")
    return Store(_address(address or option))


def _address(url: str) -> str:
    """Return the address in a form that workers with another current folder understand."""
    if not url:
        raise StoreError("--store: empty; expected a path, s3://bucket/folder, ...")
    return url if "://" in url else os.path.abspath(url)


def _whole_key(store: Store, prefix: str) -> str:
    keys = store.keys()
    results = [key for key in keys if key.startswith(prefix.lower())]
    if len(results) != 1:
        what = (
            f"{len(results)} records, {results[0][:16]}... and {results[1][:16]}... among them"
            if results
            else "no record"
        )
        raise StoreError(f"key {prefix!r}: {what}; expected what one record's key begins with")
    return results[0]
