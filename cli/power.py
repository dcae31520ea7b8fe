"""`assay power`: which known faults an examination would catch, and which a plain tolerance."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from assay.cli import settings
from assay.cli.progress import ProgressBar, note
from assay.cli.verify import entries_of
from assay.verify.errors import SettingError, TargetError

if TYPE_CHECKING:
    from assay.verify.settings import Settings


def power(
    target: Annotated[
        str, Argument(metavar="[TARGET]", help="A kernel of the survey, whose campaign is measured.")
    ] = "",
    spec: Annotated[str, Option(help="A spec as a whole, or what package.module:function implements.")] = "",
    dtype: settings.Dtype = "",
    option: settings.Options = None,
    shape: settings.Shapes = None,
    contract: settings.ContractFields = None,
    family: Annotated[list[str] | None, Option(help="A fault family to try, not all; may be repeated.")] = None,
    examples: settings.Examples = 50,
    seed: settings.Seed = 0,
    against: Annotated[
        str, Option(help="A plain check to compare with, e.g. 'allclose(1e-2,1e-2)' or assert_close.")
    ] = "",
    as_json: settings.AsJson = False,
    out: Annotated[
        Path | None, Option(metavar="FILE.json", dir_okay=False, help="Write the report as JSON, too.")
    ] = None,
    ops: settings.Ops = None,
) -> int:
    """Run known faults as kernels, and print which of them an examination catches, by family.

    TARGET is the name of a kernel of `assay survey`, or package.module:function with --spec: the faults take its place
    in its campaign. With --spec alone the campaign varies all options of the spec.
    """
    from assay.verify.power import measured

    settings.check_ours("--out", out, '{\n  "spec": ')
    said = {"dtype": settings.one_dtype(dtype), "examples": examples, "seed": seed}
    campaign = settings.adapted(_campaign(target, spec), option, shape, contract, **said)
    bars: list[ProgressBar] = []
    with contextlib.ExitStack() as stack:

        def show(name: str, done: int, of: int) -> None:
            if not bars:
                bars.append(stack.enter_context(ProgressBar("faults tried", of)))
            else:
                bars[0].advance()

        report = measured(campaign, families=family, against=against, progress=show)
    print(report.to_json() if as_json else report)
    if out is not None:
        report.to_json(out)
        note(f"wrote {out}")
    return 0


def _campaign(target: str, op: str) -> Settings:
    from assay.golden.registry import spec
    from assay.verify.settings import Settings

    if not target:
        if not op:
            raise SettingError("power: expected --spec NAME, or a kernel of `assay survey`")
        return Settings(op, **spec(op).default_settings)
    result = entries_of(target, op)
    if len(result) > 1:
        names = ", ".join(entry.name for entry in result[:4])
        raise TargetError(f"target {target!r} names {len(result)} kernels ({names}, ...); expected one")
    (entry,) = result
    return replace(entry.settings, dtype=entry.dtypes[0])
