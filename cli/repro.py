"""`assay repro`: one case of a report again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.progress import Ticker
from assay.golden.isolate import Lost, Raised, Remember, Workers
from assay.verify.errors import ReproError

if TYPE_CHECKING:
    from assay.verify.verdict import Verdict


def repro(
    line: Annotated[str, typer.Argument(metavar="LINE", help="What a report prints after `assay repro`, in quotes.")],
    target: Annotated[str, typer.Option(help="package.module:function, where the line doesn't name the kernel.")] = "",
    sanitized: Annotated[
        bool, typer.Option("--sanitize", help="Also under NVIDIA's compute-sanitizer, where the kernel ran on CUDA.")
    ] = False,
) -> int:
    """Run one case of a report again: exits with 1 if it still fails, with 0 if it passes now."""
    with Workers(1, preload="assay.verify.repro", quiet=False) as workers:
        with Ticker("tried", 1, 1.0):
            ((_, answer),) = workers.each(repeat, [(line, target)])
        if isinstance(answer, Raised):
            raise ReproError(answer.message if answer.mendable else f"repro line: can't be run ({answer.message})")
        verdict = _lost(line, target, answer) if isinstance(answer, Lost) else answer
    print(verdict)
    if sanitized:
        from assay.verify.compute_sanitizer import sanitize

        print(f"  {sanitize(verdict.repro)}")
    return int(not verdict.passed)


def repeat(item: tuple[str, str], remember: Remember) -> Verdict:
    """What the case of a line shows now, in a worker."""
    from assay.verify.repro import run_line

    result = run_line(*item, lambda case, seconds: remember("", seconds))
    failure = result.failure
    if failure is not None:
        outcome, note = "FAIL", ""
    elif result.unresolved:
        outcome, note = "INCONCLUSIVE", f"{result.unresolved} elements lie within the golden's own radius of the limit"
    elif not result.judged and result.case.protocol == "once":
        outcome, note = "VACUOUS", "no element of this case is judged"
    else:
        outcome, note = "PASS", "this case passes now"
    return _verdict(
        *item,
        outcome=outcome,
        worst=result.worst,
        failure=failure,
        elements=result.judged,
        unjudged=result.unjudged,
        unresolved=result.unresolved,
        note=note,
    )


def _lost(line: str, target: str, lost: Lost) -> Verdict:
    """The kernel took its process down, again."""
    from assay.verify.repro import parse_line
    from assay.verify.result import Failure

    return _verdict(line, target, outcome="FAIL", failure=Failure(lost.kind, parse_line(line)[1], lost.message))


def _verdict(line: str, target: str, **found: Any) -> Verdict:
    from assay.verify.contract import contract_from_table
    from assay.verify.repro import parse_line
    from assay.verify.verdict import Verdict

    content, case = parse_line(line)
    return Verdict(
        kernel=target or content["target"],
        spec=case.spec,
        dtype=", ".join(dict.fromkeys(case.dtypes.values())),
        contract=str(contract_from_table(content.get("contract", {}))),
        cases=1,
        repro=f"assay repro '{json.dumps(content, separators=(',', ':'))}'",
        **found,
    )
