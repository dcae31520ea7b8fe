"""`judge`: judges a solution of a kernel benchmark's problem, and turns the observations into a verdict."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from assay.bench.timing.timed import bits_of
from assay.golden.evaluation.device import evaluating_on
from assay.judge.problems.own import own_answer
from assay.judge.problems.problem import Answer, Problem, Sizes
from assay.judge.problems.reading import read
from assay.judge.problems.running import watched
from assay.judge.problems.sizes import Choice, Extent, edge, extent, limits, near, odd, sizes_text, small, wide
from assay.judge.report import Options, Report
from assay.judge.run import Run
from assay.judge.solution import source
from assay.judge.solution.solution_process import SolutionError
from assay.judge.solution.trials import Observation, Trial
from assay.judge.tampering import SUSPECT, Cheat, detected_cheats, each_once
from assay.judge.timing import timed as time_it
from assay.judge.under_test import SolutionUnderTest
from assay.judge.verdict import SolutionVerdict, Workload
from assay.runtime.environment import generators_kept, standard_environment
from assay.runtime.errors import names_checked
from assay.runtime.modules import asks_for_cuda
from assay.verify.comparison.result import Result, by_reason
from assay.verify.contract import Contract, contract_from_table
from assay.verify.errors import SettingError
from assay.verify.findings import ASPECTS, Aspect, Failure
from assay.verify.harness.target import about

_MOST_PRINTED = 32 << 20  # bytes in a judgement: compilers print megabytes
_TRUSTED_SHARE = 0.01  # of judged elements must be nonzero; a strided transposed convolution has one in 27
_STATUSES = {"shape": "INCORRECT_SHAPE", "dtype": "INCORRECT_DTYPE", "crash": "RUNTIME_ERROR", "timeout": "TIMEOUT"}


def verdict_of(report: Report, run: Run | None, outcome: str = "", note: str = "") -> SolutionVerdict:
    """Return the verdict; ``outcome`` and ``note``, its reason, are given if they are known beforehand."""
    cheats = each_once(run.cheats) if run is not None else ()
    results = [observation.result for observation in run.observations] if run is not None else []
    if not outcome and run is not None:
        outcome, note = _outcome(run, cheats, results)
    failing = [result.failure.ratio or math.inf for result in results if result.failure is not None]
    left: Counter[str] = Counter()
    for result in results:
        left.update(by_reason(result.left_out))
    notes = [*([note] if note else []), *(run.notes if run is not None else [])]
    return SolutionVerdict(
        outcome=outcome,
        kernel=report.answer.name,
        spec=report.problem.name,
        dtype=", ".join(dict.fromkeys(results[0].case.dtypes.values())) if results else "",
        contract=str(report.options.contract),
        cases=len(results),
        worst=max([*(result.worst for result in results), *failing], default=0.0),
        aspects=_aspects(report, run, cheats) if run is not None else {},
        phases=dict(
            Counter("timed" if observation.timed else observation.trial.kind for observation in run.observations)
        )
        if run
        else {},
        elements=sum(result.judged for result in results),
        unjudged=sum(result.unjudged for result in results),
        left_out=dict(left),
        unresolved=sum(result.unresolved for result in results),
        seed=report.options.seed,
        note="; ".join(notes),
        target=report.path,
        about=about(verdict_of, report.options.device, ""),
        problem=str(report.problem.path),
        solution=report.path,
        format=report.problem.format,
        cheats=cheats,
        sizes=tuple(dict.fromkeys(report.sizes)),
        not_judged=tuple(dict.fromkeys(report.not_judged)),
        speed=report.speed,
        workloads=tuple(report.workloads),
        sandbox=report.host.sandboxed,
    )


def _outcome(run: Run, cheats: Sequence[Cheat], results: Sequence[Result]) -> tuple[str, str]:
    """Return the outcome, and a reason if it is neither PASS nor FAIL."""
    if run.failures or any(cheat.name not in SUSPECT for cheat in cheats):
        return "FAIL", ""
    if run.refusal and not results:
        return "INCONCLUSIVE", f"it takes only the given sizes, which are beyond this machine: {run.refusal}"
    judged, nonzero = sum(result.judged for result in results), sum(result.nonzero for result in results)
    if not judged:
        return "VACUOUS", "nothing was decided: no element of any call was judged"
    if unresolved := sum(result.unresolved for result in results):
        return "INCONCLUSIVE", f"{unresolved} elements lie within the golden's own radius of the limit"
    if nonzero < _TRUSTED_SHARE * judged:
        return "MISTRUSTED", f"only {nonzero} of {judged} judged elements should be other than zero"
    note = f"it takes no other sizes ({run.refusal})" if run.refusal else ""
    return ("WARN", "; ".join(filter(None, [str(cheats[0]), note]))) if cheats else ("PASS", note)


def _aspects(report: Report, run: Run, cheats: Sequence[Cheat]) -> dict[str, Aspect]:
    """Return each aspect: broken with its failure, kept, or not tried."""
    results = {}
    for name in ASPECTS:
        cases, worst = run.kept.get(name, 0), run.worst.get(name, 0.0)
        if name in run.failures:
            failure, trial = run.failures[name]
            ratio = float(failure.ratio or math.inf)
            results[name] = Aspect("broken", cases + 1, max(worst, ratio), failure, repro=report.repro(trial))
        elif cases:
            results[name] = Aspect("kept", cases, worst)
        else:
            results[name] = Aspect(note=run.refusal if name == "shapes" else "")
    certain = [cheat for cheat in cheats if cheat.name not in SUSPECT]
    if certain:
        words = "; ".join(map(str, certain))
        failure = Failure("conduct", report.some_case(run), words, aspect="conduct")
        line = next((cheat.trial for cheat in certain if cheat.trial), "")
        trial = Trial.of_line(line) if line else Trial()
        results["conduct"] = Aspect("broken", len(certain), math.inf, failure, repro=report.repro(trial))
    elif "conduct" not in run.failures and run.observations:
        status = "suspect" if cheats else "kept"
        results["conduct"] = Aspect(status, len(run.observations), note="; ".join(map(str, cheats)))
    return results


def workload_of(report: Report, sizes: str, given: Any, observation: Observation) -> Workload:
    """Return the result at sizes that the problem states."""
    failure, limits = observation.result.failure, observation.result.tolerances
    absolute = relative = radius = 0.0
    bits = math.nan
    if limits and observation.outputs:
        golden = limits[0].golden
        off = (observation.outputs[0].double() - golden).abs()
        off = torch.where(off.isfinite(), off, 0.0)
        inner = limits[0].pre_store_radius[limits[0].pre_store_radius.isfinite()]
        absolute, radius = _largest(off), _largest(inner)
        relative = _largest(off / golden.abs().clamp(min=torch.finfo(torch.float32).tiny))
        bits = bits_of(float(off.square().sum()), float(golden[golden.isfinite()].square().sum()))
    worst = observation.result.worst if failure is None else float(failure.ratio or math.inf)
    status = "PASSED" if failure is None else _STATUSES.get(failure.kind, "INCORRECT_NUMERICAL")
    message = failure.message if failure is not None else ""
    repro = report.repro(observation.trial)
    uuid = str(given.get("@uuid", ""))
    return Workload(uuid, status, sizes, message, worst, radius, relative, absolute, bits, repro=repro)


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


_GIVEN = {"quick": 1, "usual": 3, "thorough": 1000}  # how many of the stated sizes are judged
_INTERPRETED = ("python", "triton", "pytorch")  # languages that need no GPU


@names_checked("judge", "setting", SettingError)
def judge(
    problem: str | Path,
    solution: str | Path,
    *,
    effort: Literal["quick", "usual", "thorough"] = "usual",
    seed: int = 0,
    device: str = "cpu",
    contract: Contract | str | None = None,
    timeout: float = 30.0,
    memory: float = 8.0,
    timed: bool | Literal["all"] = True,
    compiled: bool | None = None,
    seconds: float | None = None,
    trial: str = "",
    sandbox: Literal["auto", "bwrap", "none"] = "auto",
) -> SolutionVerdict:
    """Judge a solution of a problem: a KernelBench file, a FlashInfer Trace definition, a folder with reference.py and
    task.yml, or a robust-kbench folder (docs/judge.md).

    The solution runs in a process of its own, which gets only its files and arguments. It is called at small, odd and
    large sizes and at the problem's own, as far as this machine can; with weights none of which is
    constant, with numbers of any amplitude, and in memory whose numbers change. All results, also those of timed calls,
    are compared with the reference's golden, within the tolerance of ``contract``.

    ``effort``: how much is tried. ``timeout``: seconds of CPU time per request, and for each call of the problem's own
    code, four times as much for what may compile. ``memory``: GiB beyond what its process starts with. ``timed``: time
    it and the reference alternately, at the first stated size or at "all" of them, which are then judged too; with
    ``compiled`` (None: except at quick effort) also the reference under `torch.compile`; for ``seconds`` each (None: by
    effort). ``trial``: make only the call of this line, from an earlier verdict.
    ``sandbox``: "auto" runs the solution in a sandbox where this machine has one, and the verdict says otherwise why
    not; "bwrap" needs it, "none" takes none (docs/sandbox.md).

    Raises `ProblemError`, `ProblemTimeout`, `SettingError`, `ContractError` or `ReproError` if the judgement can't be
    made; whatever the solution does becomes part of the verdict.
    """
    promised = contract_from_table(contract) if isinstance(contract, str) else contract or Contract()
    options = Options(effort, seed, str(device), promised, timeout, memory, timed, compiled, seconds, sandbox)
    with watched(seconds=timeout):
        result, answer = read(problem, solution)
    only = Trial.of_line(trial) if trial else None
    with options.host(result) as host:
        return judged(Report(result, answer, options, str(solution), host), only)


def judged(report: Report, only: Trial | None = None) -> SolutionVerdict:
    """Judge a solution that was read; only the trial ``only`` if it is given."""
    started = time.perf_counter()
    device, seconds = report.options.device, report.options.timeout
    with generators_kept(), standard_environment(), evaluating_on(device), watched(seconds=seconds):
        return replace(_verdict(report, only), seconds=time.perf_counter() - started)


def _verdict(report: Report, only: Trial | None) -> SolutionVerdict:
    answer, options = report.answer, report.options
    has_gpu = torch.cuda.is_available()
    if answer.language not in _INTERPRETED and not has_gpu:
        words = f"the solution is {answer.language}, which needs a GPU, and there is none here"
        return verdict_of(report, None, "REFUSED", words)
    pretend = not has_gpu and ("triton" in answer.text or "cuda" in answer.text)
    with options.process(answer, report.host) as process:
        run = Run(report.problem, process, options.contract, options.seed, options.effort, pretend)
        run.cheats += _in_the_text(report.problem, answer)
        try:
            if only is None:
                _all(report, run)
            else:
                _alone(report, run, only)
        except SolutionError as error:
            if asks_for_cuda(error) and not has_gpu:
                return verdict_of(report, run, "REFUSED", f"the solution needs a GPU, which isn't here ({error})")
            failure = Failure(error.kind, report.some_case(run), str(error))
            run.cheats += detected_cheats(error.seen, set()) + _hidden_import(report, str(error), run.cheats)
            run.fail("numbers", failure, error.during or Trial())
        run.of_all()
    detached = report.host.left_behind()
    if detached != 0:
        words = "they don't end" if detached is None else f"{detached} at the end"
        run.cheats.append(Cheat("leaves-processes", words))
    if process.printed > _MOST_PRINTED:
        run.cheats.append(Cheat("floods-output", f"{process.printed >> 20} MiB"))
    return verdict_of(report, run)


def _hidden_import(report: Report, message: str, shown: Sequence[Cheat]) -> list[Cheat]:
    """Return the cheat of a solution that looked for the reference's module in vain, unless its text shows it."""
    name = report.problem.path.stem
    is_missing = re.search(rf"No module named '{re.escape(name)}'", message) is not None
    if not is_missing or any(cheat.name == "reference-imported" for cheat in shown):
        return []
    return [Cheat("hidden-import", message)]


def _in_the_text(problem: Problem, answer: Answer) -> list[Cheat]:
    """Return the cheats that the solution's text shows."""
    files = {name: text for name, text in answer.files.items() if name not in problem.companions}
    results = []
    if source.is_pasted(problem.source, own_answer(problem).entry.name, files, answer.entry.name):
        results.append(Cheat("reference-pasted", answer.main))
    if imported := source.imported_graders(files, problem.path.stem):
        results.append(Cheat("reference-imported", imported[0]))
    if patched := source.patches(files):
        results.append(Cheat("patched-library", patched[0]))
    return results


def _all(report: Report, run: Run) -> None:
    """Judge at small, odd, edge and wide sizes, and at the stated ones."""
    problem, limit = report.problem, limits(report.options.effort)
    given = problem.given[0]
    base = small(problem, given, limit["small"])
    if base is None:
        base = Choice("given", given, extent(problem, given))
    if run.first(_bench(report, run, base, given)):
        others = [odd(problem, base, limit["small"])]
        others += [of(problem, base, given, limit["wide"]) for of in (edge, wide)]
        for other in others:
            if other is not None:
                run.other_sizes(_bench(report, run, other, given))
    most = len(problem.given) if report.options.timed == "all" else _GIVEN[report.options.effort]
    for stated in problem.given[:most]:
        _given(report, run, stated)
    for stated in problem.given[most:]:
        report.not_judged.append(f"{_named(stated)}: this effort judges {most} of {len(problem.given)} that are stated")
    if run.refusal and not any(each.outputs for each in run.observations) and not run.is_explicit:
        words = f"at sizes other than the given ones: {run.refusal}"
        failure = Failure("crash", report.some_case(run), words)
        run.fail("numbers", failure, Trial(base.kind, base.sizes))


def _bench(report: Report, run: Run, choice: Choice, given: Sizes) -> SolutionUnderTest:
    report.sizes.append(f"{choice.kind}: {sizes_text(choice, given)}")
    return run.build(choice, given)


def _given(report: Report, run: Run, given: Sizes) -> None:
    """Judge at stated sizes, or the nearest that this machine can run: single calls and timed ones."""
    on_cpu = limits(report.options.effort)["given"]
    choice = near(report.problem, given, limits(report.options.effort, report.options.device)["given"])
    if choice is None:
        report.not_judged.append(f"{_named(given)}: beyond this machine")
        return
    under_test, before = _bench(report, run, choice, given), len(run.observations)
    first = under_test.tried(under_test.trial("given", report.options.seed + 31), name="t0", pause=True)
    refused = run.refused(first, under_test)
    if choice.kind != "given":
        instead = "and it takes no others" if refused else f"{sizes_text(choice, given)} was"
        report.not_judged.append(f"{_named(given)}: beyond what this effort takes on here; {instead}")
    if refused:
        return
    run.take(first, ["shapes"])
    if choice.kind == "given":
        report.workloads.append(workload_of(report, sizes_text(choice, given), given, first))
    if not first.outputs:
        return
    few = not choice.extent.within(replace(on_cpu, operations=on_cpu.operations // 4 - 1))
    run.stated_sizes(under_test, first, few=few)
    is_next = report.speed is None or (report.options.timed == "all" and choice.kind == "given")
    if report.options.timed and is_next:
        speed = time_it(report, run, under_test, first)
        report.speed = report.speed or speed
        if choice.kind == "given":
            report.workloads[-1] = replace(report.workloads[-1], speed=speed)
    if choice.kind == "given":
        report.workloads[-1] = replace(report.workloads[-1], judged=len(run.observations) - before)


def _named(given: Sizes) -> str:
    """Return stated sizes in words, with the problem's name for them."""
    words, name = sizes_text(Choice("given", given, Extent(0, 0)), given), given.get("@uuid")
    return f"{words} ({name})" if name else words


def _alone(report: Report, run: Run, trial: Trial) -> None:
    """Repeat one call of an earlier verdict."""
    given = report.problem.given[0]
    sizes: Mapping[str, object] = {**given, **trial.sizes}
    under_test = _bench(report, run, Choice(trial.kind, sizes, extent(report.problem, sizes)), given)
    if trial.weights == "redrawn" and under_test.can_redraw:
        under_test.load_redrawn()
    if trial.memory != "new":
        run.take(under_test.tried(under_test.trial("given", report.options.seed + 2), name="a"), ["numbers"])
    run.take(under_test.tried(trial, name="a", pause=True), ["numbers"])
