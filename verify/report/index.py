"""The index page of a folder of verdicts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from assay.runtime.files import write_text_atomically
from assay.verify.report.rendering import environment

_TONES = {"PASS": "good", "FAIL": "bad"}


def write_index(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write ``index.html``, with verdicts that didn't pass first, and return its path.

    Each row has the fields of a `report.summary.Line`, the file name of its ``page``, and the name of its ``test``.
    """
    page = environment().get_template("index.html.j2")
    content = page.render(
        rows=sorted(rows, key=lambda row: (row["outcome"] == "PASS", row["test"])),
        counts=Counter(sorted(row["outcome"] for row in rows)),
        made=datetime.now().astimezone().isoformat(" ", timespec="minutes"),
        tones=_TONES,
    )
    return write_text_atomically(folder / "index.html", content)
