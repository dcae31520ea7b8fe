"""`judge`: a solution of a kernel benchmark's problem, by the derived tolerance, at many sizes, and by its conduct.

From what was seen to a verdict: the outcome, and each aspect.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from assay.bench.timing.timed import bits_of
from assay.judge.account import Account, Ways
from assay.judge.bench import Bench
from assay.judge.conduct import SUSPECT, Cheat, each_once, noticed
from assay.judge.course import Course
from assay.judge.problems.own import own_answer
from assay.judge.problems.problem import Answer, Problem, Sizes
from assay.judge.problems.reading import read
from assay.judge.problems.sizes import Choice, Extent, described, edge, extent, limits, near, odd, small, wide
from assay.judge.solution import source
from assay.judge.solution.solution_process import SolutionError
from assay.judge.solution.trials import Seen, Trial
from assay.judge.timing import timed as time_it
from assay.judge.verdict import SolutionVerdict, Workload
from assay.runtime.environment import generators_kept, standard_environment
from assay.runtime.errors import names_checked
from assay.runtime.modules import asks_for_cuda
from assay.verify.comparison.result import Result, by_reason
from assay.verify.contract import Contract, contract_from_table
from assay.verify.errors import SettingError
from assay.verify.examination.about import about
from assay.verify.findings import ASPECTS, Aspect, Failure

_TRUSTED_SHARE = 0.01  # of the judged elements must be nonzero; of a strided transposed convolution one in 27 is
_STATUSES = {"shape": "INCORRECT_SHAPE", "dtype": "INCORRECT_DTYPE", "crash": "RUNTIME_ERROR", "timeout": "TIMEOUT"}


def verdict_of(account: Account, course: Course | None, outcome: str = "", note: str = "") -> SolutionVerdict:
    """The verdict; ``outcome`` and its reason where they are known beforehand."""
    cheats = each_once(course.cheats) if course is not None else ()
    results = [seen.result for seen in course.seen] if course is not None else []
    if not outcome and course is not None:
        outcome, note = _outcome(course, cheats, results)
    failing = [result.failure.ratio or math.inf for result in results if result.failure is not None]
    left: Counter[str] = Counter()
    for result in results:
        left.update(by_reason(result.left_out))
    notes = [*([note] if note else []), *(course.notes if course is not None else [])]
    return SolutionVerdict(
        outcome=outcome,
        kernel=account.answer.name,
        spec=account.problem.name,
        dtype=", ".join(dict.fromkeys(results[0].case.dtypes.values())) if results else "",
        contract=str(account.ways.contract),
        cases=len(results),
        worst=max([*(result.worst for result in results), *failing], default=0.0),
        aspects=_aspects(account, course, cheats) if course is not None else {},
        phases=dict(Counter("timed" if seen.timed else seen.trial.kind for seen in course.seen)) if course else {},
        elements=sum(result.judged for result in results),
        unjudged=sum(result.unjudged for result in results),
        left_out=dict(left),
        unresolved=sum(result.unresolved for result in results),
        seed=account.ways.seed,
        note="; ".join(notes),
        target=account.path,
        about=about(verdict_of, account.ways.device, ""),
        problem=str(account.problem.path),
        solution=account.path,
        format=account.problem.format,
        cheats=cheats,
        sizes=tuple(dict.fromkeys(account.sizes)),
        not_judged=tuple(dict.fromkeys(account.not_judged)),
        speed=account.speed,
        workloads=tuple(account.workloads),
    )


def _outcome(course: Course, cheats: Sequence[Cheat], results: Sequence[Result]) -> tuple[str, str]:
    """The outcome, and why where it is neither PASS nor FAIL."""
    if course.failures or any(cheat.name not in SUSPECT for cheat in cheats):
        return "FAIL", ""
    if course.refusal and not results:
        return "INCONCLUSIVE", f"it takes only the given sizes, which are beyond this machine: {course.refusal}"
    judged, nonzero = sum(result.judged for result in results), sum(result.nonzero for result in results)
    if not judged:
        return "VACUOUS", "nothing was decided: no element of any call was judged"
    if unresolved := sum(result.unresolved for result in results):
        return "INCONCLUSIVE", f"{unresolved} elements lie within the golden's own radius of the limit"
    if nonzero < _TRUSTED_SHARE * judged:
        return "MISTRUSTED", f"only {nonzero} of {judged} judged elements should be other than zero"
    note = f"it takes no other sizes ({course.refusal})" if course.refusal else ""
    return ("WARN", "; ".join(filter(None, [str(cheats[0]), note]))) if cheats else ("PASS", note)


def _aspects(account: Account, course: Course, cheats: Sequence[Cheat]) -> dict[str, Aspect]:
    """Each aspect: what is broken with its failure, what is kept, what wasn't tried."""
    results = {}
    for name in ASPECTS:
        cases, worst = course.kept.get(name, 0), course.worst.get(name, 0.0)
        if name in course.failures:
            failure, trial = course.failures[name]
            ratio = float(failure.ratio or math.inf)
            results[name] = Aspect("broken", cases + 1, max(worst, ratio), failure, repro=account.repro(trial))
        elif cases:
            results[name] = Aspect("kept", cases, worst)
        else:
            results[name] = Aspect(note=course.refusal if name == "shapes" else "")
    certain = [cheat for cheat in cheats if cheat.name not in SUSPECT]
    if certain:
        words = "; ".join(map(str, certain))
        failure = Failure("conduct", account.some_case(course), words, aspect="conduct")
        line = next((cheat.trial for cheat in certain if cheat.trial), "")
        trial = Trial.of_line(line) if line else Trial()
        results["conduct"] = Aspect("broken", len(certain), math.inf, failure, repro=account.repro(trial))
    elif "conduct" not in course.failures and course.seen:
        status = "suspect" if cheats else "kept"
        results["conduct"] = Aspect(status, len(course.seen), note="; ".join(map(str, cheats)))
    return results


def workload_of(account: Account, sizes: str, given: Any, seen: Seen) -> Workload:
    """What was found at sizes that the problem states."""
    failure, limits = seen.result.failure, seen.result.tolerances
    absolute = relative = radius = 0.0
    bits = math.nan
    if limits and seen.outputs:
        golden = limits[0].golden
        off = (seen.outputs[0].double() - golden).abs()
        off = torch.where(off.isfinite(), off, 0.0)
        inner = limits[0].inner[limits[0].inner.isfinite()]
        absolute, radius = _largest(off), _largest(inner)
        relative = _largest(off / golden.abs().clamp(min=torch.finfo(torch.float32).tiny))
        bits = bits_of(float(off.square().sum()), float(golden[golden.isfinite()].square().sum()))
    worst = seen.result.worst if failure is None else float(failure.ratio or math.inf)
    status = "PASSED" if failure is None else _STATUSES.get(failure.kind, "INCORRECT_NUMERICAL")
    message = failure.message if failure is not None else ""
    repro = account.repro(seen.trial)
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
) -> SolutionVerdict:
    """Judge a solution of a problem: a KernelBench file, a FlashInfer Trace definition, a folder with reference.py and
    task.yml, or a robust-kbench folder (docs/judge.md).

    The solution lives in a process of its own, which gets no more than its files and its arguments. It is called at
    small sizes, odd ones, one large one, and at the sizes that the problem states, as far as this machine copes; with
    weights none of which is constant; with numbers of any amplitude; in memory whose numbers change. All results, those
    of timed calls among them, are held against the reference's golden and what ``contract`` allows. ``effort`` says how
    much is tried; ``timeout`` is in seconds of processor time per question, ``memory`` in GiB beyond what its process
    starts with. ``timed``: it is timed beside the reference at the first of the stated sizes, or at "all" of them,
    which are judged then; with ``compiled`` (None: not at quick effort) beside what `torch.compile` makes of the
    reference; for ``seconds`` each (None: as the effort has it). ``trial`` is one call's line, to be made alone.

    Raises `ProblemError`, `SettingError`, `ContractError` or `ReproError` on what can't be judged; whatever the
    solution does becomes part of the verdict.
    """
    promised = contract_from_table(contract) if isinstance(contract, str) else contract or Contract()
    ways = Ways(effort, seed, str(device), promised, timeout, memory, timed, compiled, seconds)
    result, answer = read(problem, solution)
    only = Trial.of_line(trial) if trial else None
    return judged(Account(result, answer, ways, str(solution)), only)


def judged(account: Account, only: Trial | None = None) -> SolutionVerdict:
    """`judge` of what was read; ``only`` one trial."""
    started = time.perf_counter()
    with generators_kept(), standard_environment():
        return replace(_verdict(account, only), seconds=time.perf_counter() - started)


def _verdict(account: Account, only: Trial | None) -> SolutionVerdict:
    answer, ways = account.answer, account.ways
    has_gpu = torch.cuda.is_available()
    if answer.language not in _INTERPRETED and not has_gpu:
        words = f"the solution is {answer.language}, which needs a GPU, and there is none here"
        return verdict_of(account, None, "REFUSED", words)
    texts = "".join(text for name, text in answer.files.items() if name.endswith(".py"))
    pretend = not has_gpu and ("triton" in texts or "cuda" in texts)
    with ways.process(answer) as process:
        course = Course(account.problem, process, ways.contract, ways.seed, ways.effort, pretend)
        course.cheats += _in_the_text(account.problem, answer)
        try:
            if only is None:
                _all(account, course)
            else:
                _alone(account, course, only)
        except SolutionError as error:
            if asks_for_cuda(error) and not has_gpu:
                return verdict_of(account, course, "REFUSED", f"the solution needs a GPU, which isn't here ({error})")
            failure = Failure(error.kind, account.some_case(course), str(error))
            course.cheats += noticed(error.seen, set())
            course.fail("numbers", failure, error.during or Trial())
        course.of_all()
    return verdict_of(account, course)


def _in_the_text(problem: Problem, answer: Answer) -> list[Cheat]:
    """What the solution's text shows."""
    files = {name: text for name, text in answer.files.items() if name not in problem.companions}
    results = []
    if source.is_pasted(problem.source, own_answer(problem).entry.name, files, answer.entry.name):
        results.append(Cheat("reference-pasted", answer.main))
    if imported := source.imported_graders(files, problem.path.stem):
        results.append(Cheat("reference-imported", imported[0]))
    if patched := source.patches(files):
        results.append(Cheat("patched-library", patched[0]))
    return results


def _all(account: Account, course: Course) -> None:
    """Small sizes, odd ones, one large one, and the stated ones."""
    problem, limit = account.problem, limits(account.ways.effort)
    given = problem.given[0]
    base = small(problem, given, limit["small"])
    if base is None:
        base = Choice("given", given, extent(problem, given))
    if course.first(_bench(account, course, base, given)):
        others = [odd(problem, base, limit["small"])]
        others += [of(problem, base, given, limit["wide"]) for of in (edge, wide)]
        for other in others:
            if other is not None:
                course.other_sizes(_bench(account, course, other, given))
    most = len(problem.given) if account.ways.timed == "all" else _GIVEN[account.ways.effort]
    for stated in problem.given[:most]:
        _given(account, course, stated, limit["given"])
    for stated in problem.given[most:]:
        account.not_judged.append(
            f"{_named(stated)}: this effort judges {most} of {len(problem.given)} that are stated"
        )
    if course.refusal and not any(seen.outputs for seen in course.seen) and not course.is_explicit:
        words = f"at sizes other than the given ones: {course.refusal}"
        failure = Failure("crash", account.some_case(course), words)
        course.fail("numbers", failure, Trial(base.kind, base.sizes))


def _bench(account: Account, course: Course, choice: Choice, given: Sizes) -> Bench:
    account.sizes.append(f"{choice.kind}: {described(choice, given)}")
    return course.bench(choice, given)


def _given(account: Account, course: Course, given: Sizes, limit: Extent) -> None:
    """Stated sizes, or what comes nearest: judged alone and among timed calls."""
    choice = near(account.problem, given, limit)
    if choice is None:
        account.not_judged.append(f"{_named(given)}: beyond this machine")
        return
    bench, before = _bench(account, course, choice, given), len(course.seen)
    first = bench.tried(bench.trial("given", account.ways.seed + 31), name="t0", pause=True)
    refused = course.refused(first, bench)
    if choice.kind != "given":
        instead = "and it takes no others" if refused else f"{described(choice, given)} was"
        account.not_judged.append(f"{_named(given)}: beyond what this effort takes on here; {instead}")
    if refused:
        return
    course.take(first, ["shapes"])
    if choice.kind == "given":
        account.workloads.append(workload_of(account, described(choice, given), given, first))
    if not first.outputs:
        return
    if choice.extent.operations < limit.operations // 4:
        course.one_element(bench, first)
    is_next = account.speed is None or (account.ways.timed == "all" and choice.kind == "given")
    if account.ways.timed and is_next:
        speed = time_it(account, course, bench, first)
        account.speed = account.speed or speed
        if choice.kind == "given":
            account.workloads[-1] = replace(account.workloads[-1], speed=speed)
    if choice.kind == "given":
        account.workloads[-1] = replace(account.workloads[-1], judged=len(course.seen) - before)


def _named(given: Sizes) -> str:
    """Stated sizes in words, with the name that the problem has for them."""
    words, name = described(Choice("given", given, Extent(0, 0)), given), given.get("@uuid")
    return f"{words} ({name})" if name else words


def _alone(account: Account, course: Course, trial: Trial) -> None:
    """One call of an earlier verdict."""
    given = account.problem.given[0]
    sizes: Mapping[str, object] = {**given, **trial.sizes}
    bench = _bench(account, course, Choice(trial.kind, sizes, extent(account.problem, sizes)), given)
    if trial.weights == "redrawn" and bench.can_redraw:
        bench.load_redrawn()
    if trial.memory != "new":
        course.take(bench.tried(bench.trial("given", account.ways.seed + 2), name="a"), ["numbers"])
    course.take(bench.tried(trial, name="a", pause=True), ["numbers"])
