"""Compile and examine every bundled Triton and CUDA C++ kernel on the device, in processes side by side."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.runtime.pool import Pool
from assay.verify.campaign.cache import keep, known, name_of
from assay.verify.campaign.survey import Row, plan, run
from assay.verify.campaign.table import Entry, entries
from benchmarks.gpu.part import Part, main
from benchmarks.gpu.verdicts import Line, table

GROUPS = ("assay", "cuda")
FEW = (
    *("assay.softmax", "assay.rmsnorm", "assay.layernorm", "assay.gemm", "assay.gemm_fp8 (Hopper)"),
    *("assay.attention", "assay.attention_decode", "assay.mla_decode", "assay.moe", "assay.cross_entropy"),
)
_REHEARSED = ("assay.softmax",)
_TIMEOUT = 30.0  # seconds of a call
_SILENT = 120.0  # seconds without a sign of life after which a worker is ended


def body(part: Part, few: bool) -> None:
    """Report one verdict per kernel, in one of its dtypes, with quick effort; claim that each keeps its contract."""
    wanted = _REHEARSED if part.rehearsal else FEW if few else None
    chosen = [entry for entry in entries() if (entry.name in wanted if wanted else entry.group in GROUPS)]
    rows = [row for row in examined(part, chosen) if row.outcome != "NOT HERE"]
    for row in rows:
        if row.outcome != "NOT RUN":
            kept = row.verdict is not None and row.verdict.passed
            part.claim(f"{row.entry.name} in {row.dtype or 'its dtypes'} keeps its contract", kept, row.outcome)
            if row.verdict is not None and not kept:
                part.say(f"  {row.verdict.repro}")
    left = sorted({row.entry.name for row in rows if row.outcome == "NOT RUN"})
    part.claim("every kernel was examined", not left, f"not reached: {', '.join(left)}" if left else "")


def examined(part: Part, chosen: Iterable[Entry]) -> list[Row]:
    """Examine kernels at quick effort and print each verdict as it comes; return the rows, in order.

    A verdict that ``part.out`` holds of the same sources and device is taken from there. A kernel that the time didn't
    suffice for has the outcome "NOT RUN".
    """
    surveyed = [replace(entry, dtypes=entry.survey_dtypes or entry.dtypes) for entry in chosen]
    jobs = plan(surveyed, effort="quick", device=part.device, timeout=_TIMEOUT, threads=1)
    kept, names = part.out / "kept", [name_of(job) for job in jobs]
    rows = {} if part.anew else known(kept, jobs)
    try:
        for row in rows.values():
            part.say_listed(str(_line(row)))
        left = [index for index in range(len(jobs)) if index not in rows]
        with Pool(min(part.workers, len(left)), preload="assay.verify.campaign.survey", timeout=_SILENT) as engine:
            for position, row in run([jobs[index] for index in left], engine, until=part.until):
                index = left[position]
                rows[index] = row
                if row.verdict is not None:
                    keep(kept, jobs[index], row.verdict, names[index])
                part.say_listed(str(_line(row)))
    finally:  # also where the time is up
        part.tables.append(table(_line(rows[index]) for index in sorted(rows)))
    return [rows[index] for index in sorted(rows)]


def _line(row: Row) -> Line:
    cases = row.verdict.cases if row.verdict else 0
    return Line(row.entry.name, row.dtype, row.outcome, cases, row.words)


if __name__ == "__main__":
    main("kernels", body, {"few": {"action": "store_true", "help": "ten kernels"}})
