"""Compile and examine every bundled Triton kernel on the device."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.verify.campaign.table import entries
from assay.verify.examination.procedure import examination as examination_of
from assay.verify.harness.target import load_target
from benchmarks.gpu.part import LONGEST, Part, main

_REHEARSED = ("assay.softmax",)


def body(part: Part, share: str) -> None:
    """Report one verdict per kernel, in one of its dtypes, with quick effort; ``share`` is "1/2", "2/2" or "1/1"."""
    first, _, of = share.partition("/")
    ours = [entry for entry in entries() if entry.group == "assay"][int(first) - 1 :: int(of)]
    torch.set_num_threads(1 if part.rehearsal else 8)
    for entry in ours:
        if part.rehearsal and entry.name not in _REHEARSED:
            continue
        for dtype in entry.survey_dtypes or entry.dtypes:
            if part.seconds > LONGEST - 60:
                part.claim(f"{entry.name} in {dtype} was examined", False, "no time was left; ask for --share 1/2")
                continue
            settings = replace(entry.settings, dtype=dtype, effort="quick", device=part.device)
            verdict = examination_of(load_target(entry.target), settings)
            detail = f"{verdict.outcome}, {verdict.cases} cases, {part.seconds:.0f} s so far"
            part.claim(f"{entry.name} in {dtype or 'its dtypes'} keeps its contract", verdict.passed, detail)
            if not verdict.passed:
                part.say(f"  {verdict.repro}")


if __name__ == "__main__":
    main("kernels", body, {"share": {"default": "1/1", "help": "which of how many parts of the table, such as 1/2"}})
