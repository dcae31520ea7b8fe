"""Inspects a kernel: makes its calls with every launch compiled and none run, and collects facts and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from assay.bench.inspection.arch import Arch, arch_named
from assay.bench.inspection.calls import Request, calls, own_bytes, own_products
from assay.bench.inspection.facts import Facts, facts
from assay.bench.inspection.findings import Finding, findings
from assay.interpreter import put_on_device
from assay.runtime.errors import AssayError, one_line
from assay.runtime.pool import Heartbeat
from assay.verify.cases.case import Case, build
from assay.verify.errors import TargetError
from assay.verify.settings import Settings

_A_COMPILATION = 600.0  # seconds without a heartbeat; large kernels take minutes in ptxas


@dataclass(frozen=True)
class Job:
    """A kernel in one dtype for one architecture; one of ``shares`` that are compiled in parallel.

    Its arguments are those of ``settings``, or ``inputs``, a ``module:function`` that returns them. ``pruned``: also
    compile configurations that the kernel's tuner prunes.
    """

    name: str
    target: str
    arch: str
    settings: Settings | None = None
    request: Request = field(default_factory=Request)
    inputs: str = ""
    share: int = 0
    shares: int = 1
    pruned: bool = False

    @property
    def dtype(self) -> str:
        """Return the dtype in words; empty if the op or its arguments fix it."""
        return self.settings.dtype_name if self.settings else ""


@dataclass(frozen=True)
class Call:
    """One call of a kernel in words, its launches, and the operations and bytes that the op itself needs, if known."""

    words: str
    launches: tuple[Facts, ...]
    own_products: float | None = None
    own_bytes: float | None = None
    problem: str = ""

    def findings(self, arch: Arch) -> list[Finding]:
        """Return the findings of this call."""
        return findings(self.launches, arch, self.own_products)

    def as_dict(self, arch: Arch) -> dict[str, Any]:
        """Return plain data."""
        results = [finding.as_dict() for finding in self.findings(arch)]
        launches = [launch.as_dict() for launch in self.launches]
        return asdict(replace(self, launches=())) | {"launches": launches, "findings": results}


def inspect_job(job: Job, heartbeat: Heartbeat) -> list[Call]:
    """Return a job's calls; run in a worker."""
    return list(inspected(job, heartbeat))


def inspected(job: Job, heartbeat: Heartbeat = lambda note="", seconds=0.0: None) -> Iterator[Call]:
    """Yield the calls of a job. Raises `AssayError` for mistakes that the user can fix."""
    from assay.bench.inspection.recording import recorded

    arch = arch_named(job.arch)
    with recorded(arch, job.share, job.shares, pruned=job.pruned) as recording:
        from assay.verify.harness.target import load_target

        kernel = load_target(job.target)
        known: dict[str, Facts] = {}
        for attempts in _attempts(job):
            for attempt in attempts:
                heartbeat(attempt.words, _A_COMPILATION)
                recording.begin()
                problem = ""
                try:
                    attempt.call(kernel)
                except AssayError:
                    raise
                except Exception as error:
                    problem = f"{type(error).__name__}: {one_line(error)}"
                if recording.launches or not problem:
                    break
            seen = []
            for launch in recording.launches:
                heartbeat(attempt.words, _A_COMPILATION)
                seen.append(facts(launch, arch, known))
            yield Call(attempt.words, tuple(seen), attempt.own_products, attempt.own_bytes, problem)


@dataclass(frozen=True)
class _Attempt:
    """A call to try: in words, as a function of the kernel, with the op's own amounts."""

    words: str
    call: Callable[[Any], None]
    own_products: float | None = None
    own_bytes: float | None = None


def _attempts(job: Job) -> Iterator[tuple[_Attempt, ...]]:
    """Yield for each call the attempts: at models' sizes, then, if the kernel refuses, at its entry's sizes."""
    if job.settings is None:
        from assay.verify.harness.target import load_target

        def given(kernel: Any) -> None:
            arguments = load_target(job.inputs)()
            keywords: Mapping[str, Any] = {}
            if isinstance(arguments, tuple) and len(arguments) == 2 and isinstance(arguments[1], dict):
                arguments, keywords = arguments
            if not isinstance(arguments, Sequence):
                raise TargetError(f"--inputs {job.inputs} gave a {type(arguments).__name__}; expected the arguments")
            kernel(*arguments, **keywords)

        yield (_Attempt(f"inputs of {job.inputs}", given),)
        return
    settings = job.settings
    for cases in zip(calls(settings, job.request), calls(settings, job.request, within=True), strict=True):
        yield tuple(
            _Attempt(in_words(case, settings), partial(_call, settings, case), own_products(case), own_bytes(case))
            for case in (cases if cases[0] != cases[1] else cases[:1])
        )


def _call(settings: Settings, case: Case, kernel: Any) -> None:
    """Call the kernel as `assay verify` does."""
    from assay.verify.harness.call import options_for

    inputs = build(case)
    put_on_device(guarded.tensor for guarded in inputs.guarded.values())
    kernel(*inputs.positional, **options_for(case, inputs, settings.options))


def in_words(case: Case, settings: Settings) -> str:
    """Return a case in words: sizes, listed options that aren't defaults, and layouts."""
    usual = settings.definition.complete({})
    parts = [", ".join(f"{name}={size}" for name, size in case.sizes.items())]
    parts += [f"{name}={case.options[name]}" for name in settings.options if case.options[name] != usual[name]]
    parts += [f"{name} {layout}" for name, layout in case.layouts.items() if layout != "contiguous"]
    return "; ".join(parts)


def merged(shares: Sequence[Sequence[Call]]) -> list[Call]:
    """Return the calls of a job whose launches were compiled in several processes."""
    results = []
    for same in zip(*shares, strict=True):
        every = [facts for call in same for facts in call.launches]
        once = [facts for index, facts in enumerate(every) if not facts.error or facts not in every[:index]]
        results.append(replace(same[0], launches=tuple(once)))
    return results


__all__ = ["Call", "Job", "inspect_job", "inspected", "merged"]
