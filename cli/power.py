"""`assay power`: which known faults an examination would catch, and which a plain tolerance."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.cli import settings
from assay.cli.progress import Ticker
from assay.cli.verify import entries_of
from assay.verify.errors import SettingError, TargetError


def power(
    target: Annotated[
        str, typer.Argument(metavar="[TARGET]", help="A kernel of the survey, whose campaign is measured.")
    ] = "",
    spec: Annotated[str, typer.Option(help="A spec as a whole, or what package.module:function implements.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, or q=float16,k=bfloat16.")] = "",
    option: Annotated[list[str] | None, typer.Option(help="causal=none,bottom_right; may be repeated.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="D=64,128 or Sq=1:300; may be repeated.")] = None,
    contract: Annotated[
        list[str] | None, typer.Option(help="A contract's name, or field=value; may be repeated.")
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="A fault family to try, not all; may be repeated.")] = None,
    examples: Annotated[int, typer.Option(min=0, help="Fuzzed cases for each fault, beside the fixed phases.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the examinations.")] = 0,
    against: Annotated[
        str, typer.Option(help="A plain check to compare with, e.g. 'allclose(1e-2,1e-2)' or assert_close.")
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file too.")] = None,
) -> int:
    """Run known faults as kernels, and print which of them an examination catches, by family.

    TARGET is the name of a kernel of `assay survey`, or package.module:function with --spec: the faults take its place
    in its campaign. With --spec alone the campaign varies all options of the spec.
    """
    from assay.golden.registry import spec as spec_named
    from assay.verify.contract import contract_from_table
    from assay.verify.power import power as measure
    from assay.verify.survey_table import contract_named

    op, campaign = _campaign(target, spec)
    chosen = settings.dtypes([dtype] if dtype else [])
    campaign |= {"dtype": chosen[0]} if chosen else {}
    campaign["options"] = {**campaign["options"], **settings.options(spec_named(op), option or [])}
    campaign["shapes"] = {**campaign["shapes"], **settings.shapes(shape or [])}
    campaign |= {"contract": contract_from_table(settings.contract(contract, contract_named))} if contract else {}
    tickers: list[Ticker] = []
    with contextlib.ExitStack() as stack:

        def show(name: str, done: int, of: int) -> None:
            if not tickers:
                tickers.append(stack.enter_context(Ticker("faults tried", of, float(of))))
            else:
                tickers[0].advance(1.0)

        report = measure(op, examples=examples, seed=seed, families=family, against=against, progress=show, **campaign)
    print(report)
    if json is not None:
        report.to_json(json)
        print(f"assay: wrote {json}", file=sys.stderr)
    return 0


def _campaign(target: str, op: str) -> tuple[str, dict[str, Any]]:
    """The spec, and how a kernel of it is examined."""
    from assay.golden.registry import spec
    from assay.verify.contract import contract_from_table
    from assay.verify.suspects.usual import usual

    if not target:
        if not op:
            raise SettingError("power: expected --spec NAME, or a kernel of `assay survey`")
        return spec(op).name, usual(op)
    found = entries_of(target, op)
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found[:4])
        raise TargetError(f"target {target!r} names {len(found)} kernels ({names}, ...); expected one")
    (entry,) = found
    known = {name: entry.settings[name] for name in ("out_dtype", "layouts") if name in entry.settings}
    return entry.spec, known | {
        "dtype": entry.dtypes[0],
        "options": dict(entry.options),
        "shapes": dict(entry.settings.get("shapes", {})),
        "contract": contract_from_table(dict(entry.contract)),
    }
