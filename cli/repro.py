"""`assay repro`: one case of a report again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from assay.cli import settings
from assay.cli.progress import ProgressBar
from assay.runtime.pool import Heartbeat, Raised, run_alone
from assay.runtime.process import Lost
from assay.verify.errors import ReproError

if TYPE_CHECKING:
    from assay.verify.findings import Failure
    from assay.verify.verdict import Verdict


def repro(
    line: Annotated[str, Argument(metavar="LINE", help="What a report prints after `assay repro`, in quotes.")],
    target: Annotated[str, Option(help="package.module:function, where the line doesn't name the kernel.")] = "",
    sanitized: Annotated[
        bool, Option("--sanitize", help="Also under NVIDIA's compute-sanitizer, where the kernel ran on CUDA.")
    ] = False,
    pretend: settings.Pretend = "",
) -> int:
    """Run one case of a report again: exits with 1 if it still fails, with 0 if it passes now."""
    if pretend:
        from assay.verify.examination.repro import pretending

        line = pretending(line, pretend)
    with ProgressBar("tried", 1):
        answer = run_alone(repeat, (line, target), preload="assay.verify.examination.repro", quiet=False)
    if isinstance(answer, Raised):
        raise ReproError(answer.message if answer.user_error else f"repro line: can't be run ({answer.message})")
    if isinstance(answer, Lost):  # the kernel crashed its process again
        from assay.verify.examination.repro import parse_line
        from assay.verify.findings import Failure

        failure = Failure(answer.kind, parse_line(line, target)[2], answer.message)
        verdict = _verdict(line, target, outcome="FAIL", failure=failure)
    else:
        verdict = answer
    print(verdict)
    if sanitized:
        from assay.verify.harness.compute_sanitizer import sanitize

        print(f"  {sanitize(line, target)}")
    return int(not verdict.passed)


def repeat(item: tuple[str, str], heartbeat: Heartbeat) -> Verdict:
    from assay.verify.comparison.result import by_reason
    from assay.verify.examination.repro import parse_line, run_line

    result = run_line(*item, lambda case, seconds: heartbeat("", seconds))
    failure, note = result.failure, ""
    if failure is not None and failure.kind == "not_interpreted":
        outcome, note, failure = "REFUSED", failure.message, None
    elif failure is not None and failure.kind == "refused":
        outcome, note, failure = "VACUOUS", f"refused: {failure.message}", None
    elif failure is not None:
        warns = failure.kind == "unlikely" or failure.aspect in parse_line(*item)[0].unpromised
        outcome = "WARN" if warns else "FAIL"
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
        left_out=by_reason(result.left_out),
        unresolved=result.unresolved,
        note=note,
    )


def _verdict(line: str, target: str, failure: Failure | None = None, **result: Any) -> Verdict:
    from assay.verify.examination.repro import parse_line, repro_line
    from assay.verify.findings import broken_by
    from assay.verify.verdict import Verdict

    settings, target, case, aspect = parse_line(line, target)
    again = repro_line(settings, target, case, aspect)
    return Verdict(
        kernel=target,
        target=target,
        spec=case.definition.name,
        dtype=", ".join(dict.fromkeys(case.dtypes.values())),
        contract=str(settings.contract),
        cases=1,
        aspects=broken_by(failure, again) if failure is not None else {},
        **result,
    )
