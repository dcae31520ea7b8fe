"""Which definitions of FlashInfer Trace have a golden and a tolerance.

Called by `benchmarks.coverage` with a folder of definitions (JSON files, in folders of any depth). Their constant axes
are made smaller, in the axes as in the reference's text: halved while they are even and beyond 64.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.golden.arithmetic import RoundingModel
from assay.judge.problems.flashinfer_trace import is_definition
from benchmarks.verify.kernelbench import Found, found

_SMALL = 64
_ODD = 61  # what becomes of a large odd size


def smaller(content: dict[str, Any]) -> dict[str, Any]:
    """A definition with smaller constant axes."""
    sizes = {axis["value"] for axis in content["axes"].values() if axis.get("type") == "const" and "value" in axis}
    least = {str(size): str(_least(size)) for size in sizes if isinstance(size, int) and size > _SMALL}
    for axis in content["axes"].values():
        if str(axis.get("value")) in least:
            axis["value"] = int(least[str(axis["value"])])
    if least:
        numbers = re.compile(rf"(?<![\w.])({'|'.join(least)})(?![\w.])")
        content["reference"] = numbers.sub(lambda number: least[number[1]], content["reference"])
    return content


def _least(size: int) -> int:
    while size > _SMALL and size % 2 == 0:
        size //= 2
    return size if size <= 16 * _SMALL else _ODD


def measured(folder: Path, model: RoundingModel) -> Iterator[tuple[str, Found]]:
    """The type and what becomes of each definition below a folder."""
    with tempfile.TemporaryDirectory() as place:
        for path in sorted(path for path in folder.rglob("*.json") if is_definition(path)):
            content = smaller(json.loads(path.read_text(encoding="utf-8")))
            copy = Path(place, path.name)
            copy.write_text(json.dumps(content), encoding="utf-8")
            yield str(content.get("op_type", "")), found(copy, model)


def section(folder: Path, model: RoundingModel) -> Iterator[str]:
    """The lines of the page: a table of the types, and what doesn't evaluate."""
    every = list(measured(folder, model))
    rows = [(kind, row) for kind, row in every if "random numbers" not in row.why]
    asked, right = Counter(kind for kind, _ in rows), Counter(kind for kind, row in rows if _whole(row))
    bounded = Counter(kind for kind, row in rows if _whole(row) and row.allowed >= 0.99)
    yield (
        f"{right.total()} of {len(rows)} definitions ({right.total() / len(rows):.1%}) have a golden that is finite at "
        f"99 % of the elements, with constant axes made smaller. {len(every) - len(rows)} more draw random numbers, "
        "which is refused."
    )
    yield ""
    yield "| type | definitions | with a golden | tolerance finite at 99 % |"
    yield "|---|---|---|---|"
    yield from (f"| {kind} | {asked[kind]} | {right[kind]} | {bounded[kind]} |" for kind in sorted(asked))
    yield ""
    yield "Without a golden, or with one that is open at more than 1 % of the elements:"
    yield ""
    yield from (
        f"- {row.name}: {row.why or f'{row.finite:.1%} of the elements finite'}" for _, row in rows if not _whole(row)
    )


def _whole(row: Found) -> bool:
    return not row.why and row.finite >= 0.99
