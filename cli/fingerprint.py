"""`assay fingerprint`: infers a kernel's internal arithmetic from its results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from assay.cli import settings
from assay.cli.progress import ProgressBar, note
from assay.golden import registry
from assay.runtime.pool import Heartbeat, Raised, run_alone
from assay.runtime.process import Lost
from assay.verify.errors import SettingError, TargetError

if TYPE_CHECKING:
    from assay.verify.fingerprint import Card
    from assay.verify.settings import Settings

_SILENT = 600.0  # seconds that reading a kernel may take


def fingerprint(
    target: Annotated[str, Argument(metavar="TARGET", help="package.module:function.")],
    spec: Annotated[str, Option(help="What the function implements, e.g. gemm.")],
    dtype: settings.Dtype = "",
    option: settings.Options = None,
    shape: settings.Shapes = None,
    out_dtype: settings.OutDtype = "",
    framework: settings.Framework = "torch",
    device: settings.Device = "cpu",
    timeout: settings.Timeout = 30.0,
    out: Annotated[
        Path | None, Option(file_okay=False, help="Folder for the card as JSON and as an HTML page.")
    ] = None,
    as_json: settings.AsJson = False,
    ops: settings.Ops = None,
) -> int:
    """Read a kernel's accumulator, order of summation, rounding, subnormals and NaN policy from its results."""
    from assay.verify.settings import Settings

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # it fails before anything is read
    said: dict[str, Any] = {"framework": framework, "device": device, "timeout": timeout, "out_dtype": out_dtype}
    op = Settings(registry.spec(spec, target).qualified_name)
    chosen = settings.adapted(op, option, shape, dtype=settings.one_dtype(dtype), **said)
    with ProgressBar("read", 1):
        answer = run_alone(read, (target, chosen), preload="assay.verify.fingerprint", timeout=_SILENT, quiet=False)
    if isinstance(answer, Raised):
        raise SettingError(answer.message if answer.user_error else f"fingerprint of {target}: {answer.message}")
    if isinstance(answer, Lost):
        raise TargetError(f"fingerprint of {target}: {answer.message}")
    print(answer.to_json() if as_json else answer)
    if out is not None:
        name = "-".join(re.findall(r"[\w.]+", f"{target} {chosen.dtype_name}"))
        answer.to_json(out / f"{name}.json")
        note(f"wrote {out / f'{name}.json'}")
        note(f"wrote {answer.to_html(out / f'{name}.html')}")
    return 0


def read(item: tuple[str, Settings], heartbeat: Heartbeat) -> Card:
    from assay.verify.fingerprint.reading import card_of
    from assay.verify.harness.target import load_target

    target, chosen = item
    return replace(card_of(load_target(target), chosen), kernel=target)
