"""Examine PyTorch's own CUDA kernels: those of the survey's table, and code that is composed of several."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.verify.campaign.table import entries
from benchmarks.gpu.kernels import examined
from benchmarks.gpu.part import Part, main

GROUPS = ("torch-cuda", "torch", "torch-composed")
_REHEARSED = ("torch.nn.functional.softmax",)


def body(part: Part) -> None:
    """Report one verdict per kernel and dtype, with quick effort; claim that each was examined, whatever it found."""
    every = [entry for group in GROUPS for entry in entries() if entry.group == group]
    chosen = [entry for entry in every if entry.name in _REHEARSED] if part.rehearsal else every
    here = [entry for entry in chosen if not entry.absence(part.device)]
    left = sorted({row.entry.name for row in examined(part, here) if row.verdict is None})
    part.claim("every kernel was examined", not left, f"not examined: {', '.join(left)}" if left else "")


if __name__ == "__main__":
    main("pytorch", body)
