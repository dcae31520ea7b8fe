"""`examine` and `check`: test a kernel against certified goldens, over fixed phases and fuzzed cases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from assay.golden.arithmetic import BallArithmetic
from assay.golden.errors import ReferenceRefuses, Undecided
from assay.golden.evaluation.call import bind
from assay.golden.evaluation.device import evaluating_on
from assay.interpreter import emulated_device, emulated_emission, emulating, lasting, pretended, suspended
from assay.runtime.deadline import Deadline
from assay.runtime.environment import generators_kept, standard_environment
from assay.runtime.errors import AssayError, names_checked
from assay.runtime.output import warned_once
from assay.runtime.process import GIB
from assay.verify.cases.case import Case, all_contents
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import seeded, with_values
from assay.verify.comparison.oracle import one_thread
from assay.verify.comparison.result import by_reason
from assay.verify.contract import Contract, contract_from_table
from assay.verify.errors import SettingError, VerificationError
from assay.verify.examination.diagnosis import diagnosed
from assay.verify.examination.kept import kept_or_made
from assay.verify.examination.plan import Plan, make_plan
from assay.verify.examination.repro import repro_line
from assay.verify.examination.run import Progress, Run, Tally
from assay.verify.examination.sensitivity import sensitivity_check
from assay.verify.examination.steps import in_words
from assay.verify.findings import Detectable, Pairs, Variant, vacuous_lengths
from assay.verify.harness import lost_device
from assay.verify.harness.call import signature_mismatch
from assay.verify.harness.compilation import Compiled
from assay.verify.harness.compilers import ptxas_version, suspected_faults
from assay.verify.harness.frameworks import drops_roundings
from assay.verify.harness.isolation import Isolation
from assay.verify.harness.refusals import refusals
from assay.verify.harness.target import about, target_of
from assay.verify.harness.time_limit import can_be_limited
from assay.verify.reference import Reference, spec_name_by_example, spec_name_of
from assay.verify.settings import Settings
from assay.verify.verdict import Verdict

_WARNINGS = {
    "special": "NaN, infinities or signed zeros differ, of which the contract says nothing (strict=True makes this "
    "FAIL, nonfinite='unspecified' accepts it)",
    "subnormals": "subnormals differ, of which the contract says nothing (strict=True makes this FAIL, "
    "subnormals='flush' accepts zeros)",
}
_WRONG = ("contract", "exact", "nonfinite")  # kinds of failures: numbers
_TRUSTED_SHARE = 0.1  # mean share of judged goldens that must be nonzero: a kernel that returns zeros gets those right


@names_checked("examine", "setting", SettingError)
def examine(
    kernel: Callable[..., Any],
    op: str | Reference | Sequence[Reference],
    *,
    tensors: str | None = None,
    inputs: Callable[[], Any] | None = None,
    dtype: str | Mapping[str, str] | None = None,
    out_dtype: str | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    shapes: Mapping[str, Sequence[int] | str] | None = None,
    at: Mapping[str, int] | Sequence[Mapping[str, int]] = Settings.at,
    contract: Contract | str | None = None,
    effort: Literal["quick", "usual", "thorough"] = Settings.effort,
    examples: int | None = Settings.examples,
    seed: int = Settings.seed,
    device: str = Settings.device,
    framework: str = Settings.framework,
    layouts: Sequence[str] = LAYOUTS,
    timeout: float = Settings.timeout,
    budget: float | None = Settings.budget,
    isolate: bool = Settings.isolate,
    memory: float = Settings.memory,
    goldens: str | None = Settings.goldens,
    shrinking: bool = Settings.shrinking,
    strict: bool = Settings.strict,
    refuses: Mapping[str, str] | Sequence[str] = (),
    every_aspect: bool = Settings.every_aspect,
    keep: str | Path | None = None,
    progress: Progress | None = None,
    watch: Callable[[str, float], None] | None = None,
) -> Verdict:
    """Examine ``kernel`` as an implementation of ``op``: an op's name, or a reference with its ``tensors``.

    A reference is a PyTorch function or module, called as ``reference(*tensors, **options)``, or a list of such, which
    are forms of one function. ``tensors`` describes its inputs and results, ``"x[T,D], weight[D] -> y[T,D]"``. Without
    them ``inputs()`` returns example arguments: their sizes vary if the reference accepts others, and their values are
    drawn anew, as are the parameters of a module; ``kernel`` is then a module with parameters of the same names
    (docs/references.md).

    The kernel is called with the spec's tensors by position and only the listed ``options`` by keyword, each over its
    list of values. ``dtype`` is the dtype of all its floating tensors, or of each by name; it may be left out if the
    spec fixes them all. ``contract`` is the kernel's promise, or the name of a contract such as "transformers".
    ``shapes`` restricts symbolic dimensions, to sizes or to those of another (``{"Sk": "Sq"}``), ``layouts`` the memory
    layouts. ``at`` are production sizes, or a list of such: the kernel is run there too, with its whole output watched
    and samples of it judged (docs/at-shape.md); a symbol that is left out has its largest size of ``shapes``.

    ``effort``: "quick" tries the fixed cases that find the most faults per second and 12 fuzzed ones, "usual" all fixed
    cases and 60 fuzzed ones, "thorough" 200; ``examples`` is another number of fuzzed cases. ``timeout`` is in seconds
    of processor time per call, more if earlier calls show that a case takes longer; compilation doesn't count, and has
    a limit of its own (`assay.verify.harness.time_limit`). ``budget`` is in seconds by the clock for the whole
    examination: no case begins after it, and the verdict says which were left out (``cut``); only what explains a
    failure comes after it. With ``isolate`` the kernel runs in a process of its own
    (`assay.verify.harness.isolation`), which may allocate ``memory`` GiB beyond what it starts with, and once in a
    plain process, where it can't detect the examination. On CUDA a kernel that another process can import always has
    one, without a limit of memory, since a fault of it may take the device from its process. ``goldens`` is the address
    of a golden store (`assay.golden.store`), whose matching records become cases too. Without ``shrinking`` failures
    are reported as found, unexplained. ``strict``: NaN, infinities, signed zeros and subnormals are part of the
    promise, as if the contract named them. Without ``every_aspect`` the examination ends with the first failure.

    ``refuses`` are patterns of the messages with which the kernel documents to refuse, with the sizes at which it does
    (``{"too wide": "N * itemsize > 65536"}``; a list: at any sizes). A ValueError, NotImplementedError or RuntimeError
    with such a message is listed and isn't a crash; if more cases are refused than tried, the verdict is MISTRUSTED.

    ``keep`` is a folder of verdicts: one of the same settings that passed is returned from it while no source of the
    kernel, its reference and this package changes (`assay.verify.examination.kept`), and a new one is kept there.

    ``progress(phase, done, of)`` is called during the examination. ``watch(line, seconds)`` is called with the repro
    line of each case before it is tried, and before and after each call of the kernel, which returns within
    ``seconds`` unless it hangs beyond interruption; 0 if no call is in progress.

    Raises `UnknownSpec`, `OptionError`, `ContractError` or `SettingError` for invalid settings, `DeviceLost` where an
    earlier kernel has left this process without its device; whatever the kernel does becomes part of the verdict.
    """
    if inputs is None:
        spec = spec_name_of(op, tensors)
    else:
        kernel, spec, usual = spec_name_by_example(kernel, op, inputs)
        dtype = usual if dtype is None else dtype
    settings = Settings(
        spec,
        dtype=dtype,
        out_dtype=out_dtype,
        options={} if options is None else options,
        shapes={} if shapes is None else shapes,
        at=[at] if isinstance(at, Mapping) else at,
        layouts=layouts,
        contract=contract_from_table(contract) if isinstance(contract, str) else contract or Contract(),
        effort=effort,
        examples=examples,
        seed=seed,
        device=device,
        framework=framework,
        timeout=timeout,
        budget=budget,
        isolate=isolate,
        memory=memory,
        goldens=goldens,
        shrinking=shrinking,
        strict=strict,
        refuses=refusals(refuses),
        every_aspect=every_aspect,
        faithful=emulated_device(),
        pretend=pretended(),
        emission=emulated_emission(),
    )
    if keep is None or inputs is not None:
        return examination(kernel, settings, progress, watch)
    return kept_or_made(Path(keep), target_of(kernel), settings, lambda: examination(kernel, settings, progress, watch))


def check(kernel: Callable[..., Any], op: str | Reference | Sequence[Reference], **settings: Any) -> Verdict:
    """Run `examine`; raise `VerificationError` (an AssertionError) with the report unless the kernel passes."""
    verdict = examine(kernel, op, **settings)
    if not verdict.passed:
        raise VerificationError(str(verdict))
    return verdict


def examination(
    kernel: Callable[..., Any],
    settings: Settings,
    progress: Progress | None = None,
    watch: Callable[[str, float], None] | None = None,
    target: str = "",
) -> Verdict:
    """Run `examine` with its settings as a record; ``target`` names a kernel that has no importable name of its own."""
    target = target_of(kernel) or target

    def heartbeat(case: Case, seconds: float) -> None:
        if watch is not None:
            watch(repro_line(settings, target, case), seconds)

    with _planned(kernel, settings, target, heartbeat) as plan:
        return _verdict(plan, target, progress or (lambda phase, done, of: None))


def observed_variants(kernel: Callable[..., Any], settings: Settings, target: str = "") -> tuple[Variant, ...]:
    """Return what the kernel runs at which sizes, none of them tried; see `examination`."""
    with _planned(kernel, settings, target_of(kernel) or target) as plan:
        run = Run(plan, lambda phase, done, of: None)
        run.execute(("none",))  # but for the first case, which shows whether the kernel launches programs
        run.observe_variants()
        return run.variants


@contextmanager
def _planned(
    kernel: Callable[..., Any],
    settings: Settings,
    target: str,
    heartbeat: Callable[[Case, float], None] | None = None,
) -> Iterator[Plan]:
    """Return the plan of an examination, in a context with all that it needs."""
    with ExitStack() as stack:
        stack.enter_context(warned_once())
        stack.enter_context(lasting())  # keeps the interpreter's changes to Triton from call to call
        stack.enter_context(suspended())  # no pretended device here: each call of the kernel pretends one anew
        if (settings.faithful, settings.emission) != (emulated_device(), emulated_emission()):
            stack.enter_context(emulating(settings.faithful, emission=settings.emission))
        try:
            plan = make_plan(kernel, settings, heartbeat)
        except AssayError:
            raise
        except Exception as error:
            raise SettingError(f"these settings can't be examined: {in_words(error)}") from error
        first = plan.sampler.case(lambda values: values[0], style="small")
        if words := signature_mismatch(kernel, first, settings.options):
            raise SettingError(f"kernel: {words}")
        if isolation := _isolation(plan, target):
            stack.enter_context(isolation)
            plan = replace(plan, harness=replace(plan.harness, isolation=isolation))
        stack.enter_context(generators_kept())
        stack.enter_context(standard_environment())
        stack.enter_context(evaluating_on(settings.device))
        yield plan


def _isolation(plan: Plan, target: str) -> Isolation | None:
    """Return the kernel's process: if one is wanted, or if the device could be lost and another process can import the
    kernel.

    Raises `DeviceLost` if the kernel must run in this process, and an earlier one has lost the device.
    """
    settings = plan.settings
    if settings.isolate:
        return Isolation(plan.harness, int(settings.memory * GIB), target)
    if plan.refusal or not lost_device.can_be_lost(settings.device):
        return None
    isolation = Isolation(plan.harness, 0, target)
    if isolation.takes_kernel(settings.spec):
        return isolation
    lost_device.check_not_lost()
    return None


def _verdict(plan: Plan, target: str, progress: Progress) -> Verdict:
    """Run the sensitivity check and the phases, diagnose the failures, and return the verdict."""
    started = time.perf_counter()
    tally, detectable, made, steps = Tally(), list[Detectable](), Compiled(), plan.steps
    pairs, variants, cut, remarks, circumstances = Pairs(), tuple[Variant, ...](), "", tuple[str, ...](), {}
    if plan.refusal:
        outcome, note = "REFUSED", plan.refusal
    else:
        deadline, undetected = Deadline(plan.settings.budget) if plan.settings.budget is not None else None, None
        with steps.step("the sensitivity check", looks_for_faults=True, raises=(AssayError,)):  # nothing is found yet
            undetected = sensitivity_check(plan)
        run = Run(plan, progress, deadline=deadline)
        run.compile_beforehand()
        made = run.compiled
        with steps.step("the examination", looks_for_faults=True):
            run.execute()
        tally, detectable = run.tally, run.levels
        pairs, variants, cut = run.pairs(), run.variants, run.cut
        if tally.broken:
            progress("shrinking", 0, 0)
        if run.device_lost:  # every further case would fail, whatever it is
            plan = replace(plan, settings=replace(plan.settings, shrinking=False))
        with steps.step("explaining the failures"):
            tally = replace(tally, aspects=diagnosed(tally.aspects, plan, target))
        outcome, note = _outcome(tally, undetected, plan.settings)
        unseen = [min(level.broken, level.suspect) for level in detectable if level.vacuous]
        if outcome in ("PASS", "WARN") and unseen:
            error = f"an error of {min(unseen):.0%} of" if min(unseen) < math.inf else "any error of"
            words = f"{error} the whole output passes unseen"
            if run.detectable and all(level.vacuous for level in run.detectable):
                outcome, note = "VACUOUS", f"at every length {words}"
            else:
                note = "; ".join(filter(None, (note, f"at {vacuous_lengths(detectable)} {words}")))
        if outcome in ("PASS", "WARN") and (untried := run.untried_for_time):
            outcome, note = "INCONCLUSIVE", f"the budget was over before a case of {', '.join(untried)}"
        if run.losses and run.loss_budget <= 0:
            note = f"it ended early, as the kernel has lost {run.losses} processes or left them hanging"
        if steps.untried and (outcome in ("PASS", "WARN") or not tally.cases):
            outcome, note = "INCONCLUSIVE", f"not all could be tried: {steps.lines[0]}"
        with steps.step("remarks on the reference"):
            remarks = (*_remarks(plan), *_of_compiler(tally, made, plan.settings.device))
    with steps.step("naming the machine"):
        circumstances = about(plan.harness.call.kernel, plan.settings.device, str(plan.harness.call.pretend))
    return Verdict(
        outcome=outcome,
        kernel=plan.kernel,
        spec=plan.definition.name,
        dtype=plan.dtype,
        contract=str(plan.settings.contract),
        cases=tally.cases,
        worst=tally.worst,
        aspects=dict(tally.aspects),
        target=target,
        phases=dict(tally.phases),
        elements=tally.judged,
        unjudged=tally.unjudged,
        left_out=by_reason(tally.left_out),
        refused=dict(tally.refused),
        refused_configs=plan.harness.call.assignment.refusals,
        compiled=made.programs,
        compile_seconds=made.seconds,
        unresolved=tally.unresolved,
        histogram=tally.histogram,
        detectable=tuple(detectable),
        pairs=pairs,
        seconds=time.perf_counter() - started,
        seed=plan.settings.seed,
        note=note,
        cut=cut,
        remarks=remarks,
        at=tally.at,
        variants=variants,
        left_changed=tuple(plan.harness.call.left_changed),
        unlimited=not (plan.harness.isolation or can_be_limited()),
        # XLA may have left out roundings in this process; an isolated kernel runs in another one
        unrounded=plan.settings.framework == "jax"
        and plan.settings.device == "cpu"
        and not plan.settings.isolate
        and drops_roundings(),
        about=circumstances,
        errors=steps.lines,
    )


def _outcome(tally: Tally, undetected_corruption: str | None, settings: Settings) -> tuple[str, str]:
    """Return the outcome, and the reason for it unless it is PASS or FAIL."""
    if tally.broken - settings.unpromised:
        return "FAIL", ""
    if tally.not_interpreted:
        return "REFUSED", tally.not_interpreted[0]
    if undetected_corruption:
        return "VACUOUS", f"under this contract the check lets through {undetected_corruption}"
    if tally.mostly_refused:
        return "MISTRUSTED" if tally.judged else "VACUOUS", tally.mostly_refused
    if tally.undecided:
        return "INCONCLUSIVE", tally.undecided
    if tally.cases == 0 or tally.judged == 0:
        return "VACUOUS", "nothing was decided: no element of any case was judged"
    if tally.mostly_left_out:
        return "MISTRUSTED", tally.mostly_left_out
    if tally.nonzero < _TRUSTED_SHARE * tally.cases:
        share = tally.nonzero / tally.cases
        return "MISTRUSTED", f"only {share:.1%} of what is judged of a case should be other than zero"
    warned = [_WARNINGS[name] for name in sorted(tally.broken)]
    if tally.suspect:
        warned.append("numbers are within what the contract's worst case allows, and far outside of what rounding does")
    if warned:
        return "WARN", " and ".join(warned)
    return "PASS", ""


def _of_compiler(tally: Tally, made: Compiled, device: str) -> list[str]:
    """Return the reported faults of the compiler that a lost device, or wrong numbers on one, may come from."""
    failures = [aspect.failure for aspect in tally.aspects.values() if aspect.status == "broken" and aspect.failure]
    alike = any(failure.device_lost or failure.kind in _WRONG for failure in failures)
    if not alike or not made.programs or not lost_device.can_be_lost(device):
        return []
    try:
        return suspected_faults("ptxas", ptxas_version(), made.instructions)
    except RuntimeError:  # without a ptxas that can be run nothing was compiled, but loaded
        return []


def _remarks(plan: Plan) -> tuple[str, ...]:
    """Return the warnings about a reference whose formula loses accuracy on ordinary, large-mean or wide-range data.

    The bundled ops have none.
    """
    definition: Any = plan.definition.definition
    if not hasattr(definition, "remarks"):
        return ()
    results: dict[str, str] = {}
    first = plan.sampler.case(seeded(0), style="tile", options=plan.sampler.option_sets()[0])
    for kind, words in (
        ("normal", ""),
        ("large_mean", "on data of a large mean, "),
        ("steep", "on data of a wide range, "),
    ):
        case = with_values(first, kind)
        call = bind(plan.definition, list(all_contents(case).values()), case.options)
        xp = BallArithmetic(plan.settings.contract.model(plan.definition, case.input_format))
        numbers = [
            xp.integers(value) if tensor.is_integer else xp.exact(value.double())
            for tensor, value in zip(call.signature.tensors, call.tensors.values(), strict=True)
        ]
        dtypes = [value.dtype for value in call.tensors.values()]
        try:
            with one_thread():
                warnings = definition.remarks(xp, numbers, dtypes, call.options)
        except (Undecided, ReferenceRefuses):
            continue
        for remark in warnings:
            results.setdefault(remark.partition(": ")[0], words + remark)
    return tuple(results.values())
