"""`assay op`: what an op means."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from assay.cli import settings


def op(
    name: Annotated[str, Argument(metavar="[NAME]", help="An op, e.g. gemm_int4; without it all are listed.")] = "",
    ops: settings.Ops = None,
) -> int:
    """Describe an op: formula, tensors with their layouts, options, sizes, stages, contract fields, and an example.

    The example runs as it is as a script.
    """
    from assay.golden import specs
    from assay.verify.report.op import op_in_words

    print(op_in_words(name) if name else "\n".join(specs()))
    return 0
