"""`assay fingerprint`: what a kernel does inside, read from its results."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli import settings
from assay.cli.progress import Ticker
from assay.golden.isolate import Lost, Raised, Remember, Workers
from assay.verify.errors import SettingError, TargetError

if TYPE_CHECKING:
    from assay.verify.fingerprint import Card

_PATIENCE = 600.0


def fingerprint(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="package.module:function.")],
    spec: Annotated[str, typer.Option(help="What the function implements, e.g. gemm.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, or q=float16,k=bfloat16.")] = "",
    option: Annotated[list[str] | None, typer.Option(help="causal=none: an option's value; may be repeated.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="D=64,128 or Sq=1:300 (as Python's range); may be repeated.")
    ] = None,
    out_dtype: Annotated[str, typer.Option(help="Dtype of the result, where it isn't the inputs'.")] = "",
    framework: Annotated[str, typer.Option(help="What the kernel is called with.")] = "torch",
    device: Annotated[str, typer.Option(help="Where the kernel runs.")] = "cpu",
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for one call.")] = 30.0,
    json: Annotated[Path | None, typer.Option(help="Write the card as JSON here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the card as an HTML page here.")] = None,
) -> int:
    """Read a kernel's accumulator, order of summation, rounding, subnormals and NaN policy from its results."""
    from assay.golden.registry import spec as spec_named

    chosen: dict[str, Any] = {
        "dtype": settings.dtypes([dtype])[0] if dtype else None,
        "out_dtype": out_dtype or None,
        "options": settings.options(spec_named(spec), option or []),
        "shapes": settings.shapes(shape or []),
        "framework": framework,
        "device": device,
        "timeout": timeout,
    }
    with Workers(1, preload="assay.verify.fingerprint", patience=_PATIENCE, quiet=False) as workers:
        with Ticker("read", 1, 1.0):
            ((_, answer),) = workers.each(read, [(target, spec, chosen)])
        if isinstance(answer, Raised):
            raise SettingError(answer.message if answer.mendable else f"fingerprint of {target}: {answer.message}")
        if isinstance(answer, Lost):
            raise TargetError(f"fingerprint of {target}: {answer.message}")
    print(answer)
    if json is not None:
        answer.to_json(json)
        print(f"assay: wrote {json}", file=sys.stderr)
    if html is not None:
        print(f"assay: wrote {answer.to_html(html)}", file=sys.stderr)
    return 0


def read(item: tuple[str, str, dict[str, Any]], remember: Remember) -> Card:
    """The card of a kernel, in a worker."""
    from assay.verify.fingerprint import fingerprint as read_card
    from assay.verify.repro import load_target

    target, op, chosen = item
    return replace(read_card(load_target(target), op, **chosen), kernel=target)
