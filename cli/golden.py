"""`assay golden`: build, check, show and diff stores of golden records, and discard one.

`assay.cli.main` makes commands of its public functions.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Option

from assay import configs
from assay.cli import settings
from assay.cli.progress import ProgressBar, console, console_table, in_rows, note
from assay.golden.errors import CampaignError, DamagedRecord, MissingRecord, OtherFormat, StoreError
from assay.golden.registry import specs
from assay.runtime.engines import engine_named, part_of
from assay.runtime.records import MOST_DIGITS

if TYPE_CHECKING:
    from assay.golden.jobs.build import Outcome
    from assay.golden.jobs.campaign import Campaign
    from assay.golden.store import Record, Store

_STORE = "A path, s3://bucket/folder, or another address of fsspec's."
_LISTED = 20  # failures or problems that are listed individually
_PIPED_WIDTH = 200  # columns if standard output is no terminal
_BUNDLED = "campaigns/"

Address = Annotated[str, Argument(metavar="STORE", help=_STORE)]
AddressToo = Annotated[str, Option("--store", help="The same.")]


def build(
    campaign: Annotated[str, Argument(metavar="CAMPAIGN", help="A TOML file, or a bundled campaign's name.")],
    store: Annotated[str, Option(help=_STORE)],
    workers: Annotated[
        int | None, Option(min=1, max=settings.MOST_JOBS, help="Worker processes; one for each core if left out.")
    ] = None,
    engine: settings.EngineName = "local",
    part: settings.Part = "",
    retries: Annotated[int, Option(min=0, max=1000, help="How often a task that failed is tried again.")] = 2,
    timeout: Annotated[float, Option(min=0.1, max=settings.LONGEST, help="Seconds that one task may take.")] = 900.0,
    recheck: Annotated[bool, Option("--recheck", help="Replace records that are there and damaged.")] = False,
    ops: settings.Ops = None,
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
        from assay.golden.jobs.build import PRESENT, Job, Part
        from assay.golden.jobs.build import build as make

        result = _campaign(campaign)
        chosen = Part(*part_of(part, result.count))
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
                note(f"interrupted; {done}; the same command goes on from there")
                return 130
    for failure in report.failures[:_LISTED]:
        tries = f"after {failure.attempts} attempts" if failure.attempts > 1 else "at once"
        note(f"task {failure.task} ({failure.recipe}) failed {tries}: {failure.message}")
    _more(report.failures)
    print(
        f"{result.name}: {report.made} records made, {report.present} were there, {len(report.failures)} failed; "
        f"{report.seconds:.1f} s, {report.made / max(report.seconds, 1e-3):.3g} made a second; {store}"
    )
    return int(bool(report.failures))


def check(
    address: Address = "",
    store: AddressToo = "",
    sample: Annotated[int, Option(min=0, help="How many records are derived again by mpmath.")] = 20,
    digits: Annotated[int, Option(min=20, max=MOST_DIGITS, help="With how many digits.")] = 50,
    ops: settings.Ops = None,
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


def show(
    address: Address = "",
    key: Annotated[str, Argument(metavar="KEY", help="A record's key, or what it begins with.")] = "",
    store: AddressToo = "",
    spec: Annotated[str, Option(help="Only records of this spec.")] = "",
    limit: Annotated[int, Option(min=1, help="How many records are listed.")] = 40,
    ops: settings.Ops = None,
) -> int:
    """A table of a store's records, or one record."""
    opened = _store(address, store)
    opened.require()
    if key:
        _show_record(opened.get(_whole_key(opened, key)))
    else:
        _show_store(opened, spec, limit)
    return 0


def discard(
    address: Annotated[str, Argument(metavar="STORE", help=_STORE)],
    key: Annotated[str, Argument(metavar="KEY", help="A record's key, or what it alone begins with.")],
) -> int:
    """Remove a record that `check` found wrong; the next build of its campaign makes it again."""
    opened = _store(address, "")
    opened.require()
    opened.discard(whole := _whole_key(opened, key))
    print(f"record {whole} removed; {opened.url}")
    return 0


def diff(
    a: Annotated[str, Argument(metavar="A", help=_STORE)],
    b: Annotated[str, Argument(metavar="B", help=_STORE)],
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
        note(f"and {len(items) - _LISTED} more")


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
    results = [key for key in store.keys() if key.startswith(prefix.lower())]  # noqa: SIM118  a store is no mapping
    if len(results) == 1 and prefix:
        return results[0]
    few = len(results) < 2
    several = "" if few else f"{len(results)} records, {results[0][:16]}... and {results[1][:16]}... among them"
    raise StoreError(f"key {prefix!r}: {several or 'no record'}; expected what one record's key begins with")


def _show_store(store: Store, spec: str, limit: int) -> None:
    """Print a row for each of the first ``limit`` records, of ``spec`` if it is named, and the totals.

    Raises `StoreError` if the store has none of ``spec``.
    """
    radius = "worst radius", {"overflow": "fold", "justify": "right"}
    table = console_table(("key", "spec", "sizes", "dtype", "distribution", "digits", radius, "versions"))
    shown, more, unread, others = 0, 0, 0, set[str]()
    for key in store.keys():  # noqa: SIM118  a store is no mapping
        if shown == limit and not spec:
            more += 1
            continue
        try:
            record = store.get(key)
        except MissingRecord:
            continue  # removed since it was listed
        except (DamagedRecord, OtherFormat):
            unread += 1
            continue
        if spec and record.recipe.spec != spec:
            others.add(record.recipe.spec)
        elif shown == limit:
            more += 1
        else:
            shown += 1
            table.add_row(*map(Text, _row(record)))
    if spec and not shown:
        there = f"there are records of {', '.join(sorted(others))}" if others else "there are no records"
        raise StoreError(f"--spec {spec}: no record of it in {store.url}; {there}")
    out = console(_PIPED_WIDTH)
    out.print(table)
    rest = f", and {more} more (--limit)" if more else ""
    rest += f", {unread} damaged or of another format (assay golden check)" if unread else ""
    out.print(Text(f"\n{shown} records shown{rest}; {store.url}"), soft_wrap=True)
    from assay.golden.jobs.build import read_plan

    for name in store.manifests():
        try:
            plan = read_plan(store, name)
        except MissingRecord:
            continue  # removed since it was listed
        except (DamagedRecord, CampaignError) as error:
            out.print(Text(f"campaign {name}: {error}"), soft_wrap=True)
            continue
        state = f"built, {len(plan.failed)} failed" if plan.finished else "not finished"
        count = len(plan.part.task_numbers(plan.campaign))
        out.print(Text(f"campaign {name}: {count} tasks, {state}"), soft_wrap=True)


def _row(record: Record) -> tuple[str, ...]:
    recipe = record.recipe
    defaults = recipe.definition.complete({}) if recipe.spec in specs() else {}  # it may be a user's own
    options = [f"{name}={value}" for name, value in recipe.options.items() if value != defaults.get(name)]
    sizes = " ".join([*(f"{symbol}={size}" for symbol, size in recipe.sizes.items()), *options])
    return (
        record.key[:12],
        recipe.spec,
        sizes,
        ", ".join(dict.fromkeys(recipe.dtypes.values())),
        ", ".join(dict.fromkeys(recipe.values.values())),
        str(record.digits or "float64"),
        f"{_worst_radius(record):.2g}",
        f"assay {record.versions.get('assay')}, torch {record.versions.get('torch')}",
    )


def _worst_radius(record: Record) -> float:
    """Return the largest radius / |value| over all nonzero numbers; 0.0 if there are none."""
    worst = 0.0
    for golden in record.goldens:
        size = golden.value.double().abs()
        ratio = (golden.radius / size)[size.isfinite() & (size > 0)]
        worst = max(worst, float(ratio.max()) if ratio.numel() else 0.0)
    return worst


def _show_record(record: Record) -> None:
    """Print everything about a record, and the first numbers of each result."""
    recipe = record.recipe
    rows = [
        ("key", record.key),
        ("spec", recipe.spec),
        ("sizes", ", ".join(f"{symbol}={size}" for symbol, size in recipe.sizes.items())),
        ("options", ", ".join(f"{name}={value}" for name, value in recipe.options.items()) or "none"),
        *((f"input {name}", f"{dtype}, {recipe.values.get(name, '')}") for name, dtype in recipe.dtypes.items()),
        ("seed", str(recipe.seed)),
        ("digits", str(record.digits or "as many as float64 certifies")),
        ("inputs", f"SHA-256 {record.inputs}"),
        ("versions", ", ".join(f"{name} {number}" for name, number in record.versions.items())),
    ]
    for returned, golden in zip(recipe.signature.returns, record.goldens, strict=True):
        values = golden.value.double()
        first = ", ".join(f"{value:.17g}" for value in values.flatten()[:4].tolist())
        largest = float(golden.radius.max()) if golden.radius.numel() else 0.0
        text = f"{list(values.shape)}, largest radius {largest:.3g}; {first}" + (", ..." if values.numel() > 4 else "")
        classes = (("NaN", int(values.isnan().sum())), ("infinite", int(values.isinf().sum())))
        text += "".join(f"; {count} {name}" for name, count in classes if count)
        rows.append((f"result {returned.name}", text))
    console(_PIPED_WIDTH).print(in_rows(rows))
