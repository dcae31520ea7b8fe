"""Stores and records as tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from assay.cli.progress import console, console_table, in_rows
from assay.golden.errors import CampaignError, DamagedRecord, MissingRecord, OtherFormat, StoreError
from assay.golden.registry import specs

if TYPE_CHECKING:
    from assay.golden.store import Record, Store

_PIPED_WIDTH = 200  # columns if standard output is no terminal


def show_store(store: Store, spec: str, limit: int) -> None:
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
    for name in store.manifests():
        if state := _manifest(store, name):
            out.print(Text(state), soft_wrap=True)


def _manifest(store: Store, name: str) -> str:
    from assay.golden.jobs.build import read_plan

    try:
        plan = read_plan(store, name)
    except MissingRecord:
        return ""  # removed since it was listed
    except (DamagedRecord, CampaignError) as error:
        return f"campaign {name}: {error}"
    state = f"built, {len(plan.failed)} failed" if plan.finished else "not finished"
    return f"campaign {name}: {len(plan.part.task_numbers(plan.campaign))} tasks, {state}"


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
        f"{worst_radius(record):.2g}",
        f"assay {record.versions.get('assay')}, torch {record.versions.get('torch')}",
    )


def worst_radius(record: Record) -> float:
    """Return the largest radius / |value| over all nonzero numbers; 0.0 if there are none."""
    worst = 0.0
    for golden in record.goldens:
        size = golden.value.double().abs()
        ratio = (golden.radius / size)[size.isfinite() & (size > 0)]
        worst = max(worst, float(ratio.max()) if ratio.numel() else 0.0)
    return worst


def show_record(record: Record) -> None:
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
