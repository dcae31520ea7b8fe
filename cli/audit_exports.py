"""Writes the exports of `assay audit` and loads them again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assay.precision.auditing import Audit
    from assay.precision.export import Exported
    from assay.precision.loading import Loaded


def exported_of(
    result: Audit, loaded: Loaded, chosen: Mapping[str, str], folder: Path, formats: Sequence[str], checkpoint: bool
) -> Exported | None:
    """Write the exports into a folder, replacing those of an earlier audit, and load the readable ones again.

    A difference between an export's error and that of its simulation is reported on standard error.
    """
    from assay.precision.export import clear, export, reloaded

    if not formats and not checkpoint:
        if clear(folder):
            print(f"assay: removed from {folder} what an earlier audit exported", file=sys.stderr)
        return None
    exported = export(
        result.model,
        chosen,
        folder,
        formats,
        sites={str(site): site for site in result.sites},
        fits=result.fits,
        source=loaded.path,
        dtype=loaded.stored,
        target=result.target,
        checkpoint=checkpoint,
        overwrite=True,
        partial=True,
    )
    parts = []
    for part in exported.parts:
        again = reloaded(result, part)
        if again is not None and not again.agrees:
            print(f"assay: {part.format}: {again.words}", file=sys.stderr)
        parts.append(replace(part, loaded=again))
    return replace(exported, parts=tuple(parts))
