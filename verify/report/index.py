"""The index page of a folder of verdicts."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from assay.runtime.files import locked, read_text, write_text_atomically
from assay.verify.report.rendering import environment
from assay.verify.report.summary import Line

_ROWS = "index.jsonl"
_PARTS = {"test", "page", *(part.name for part in fields(Line))}
_TONES = {"PASS": "good", "FAIL": "bad"}


def write_index(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write ``index.html``, with verdicts that didn't pass first, and return its path.

    Each row has the fields of a `report.summary.Line`, the file name of its ``page``, and the name of its ``test``.
    Rows of other runs whose pages the folder holds stay: ``index.jsonl`` has them all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        pages = {row["page"]: row for row in [*_earlier(folder), *rows]}
        return _written(folder, [row for page, row in pages.items() if (folder / page).is_file()])


def _earlier(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of earlier runs; none if there is no index that can be read."""
    with suppress(ValueError):
        rows = msgspec.json.Decoder(dict[str, Any]).decode_lines(read_text(folder / _ROWS, ValueError))
        return [row for row in rows if row.keys() >= _PARTS]
    return []


def _written(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    write_text_atomically(folder / _ROWS, "".join(json.dumps(row) + "\n" for row in rows))
    page = environment().get_template("index.html.j2")
    content = page.render(
        rows=sorted(rows, key=lambda row: (row["outcome"] == "PASS", row["test"])),
        counts=Counter(sorted(row["outcome"] for row in rows)),
        made=datetime.now().astimezone().isoformat(" ", timespec="minutes"),
        tones=_TONES,
    )
    return write_text_atomically(folder / "index.html", content)
