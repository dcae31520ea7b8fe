"""Tell the causes of the illegal memory accesses of attention and mla_decode apart, each trial in a process of its own.

A trial runs an examination's first cases in bfloat16, with launches blocking, in one configuration of the autotuner, by
one assembler (ptxas as shipped, the other of Triton's two, a newer one), in an empty cache of compiled kernels. What
fails, or, where nothing does, everything, is tried again without TMA descriptors, by the other assemblers and under
compute-sanitizer.
"""

import functools
import itertools
import json
import os
import pkgutil
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.bench.tuning.choice import config_of
from assay.interpreter import emulating
from assay.interpreter.replacing import replaced
from assay.runtime.errors import first_line
from assay.verify.campaign.table import entries
from assay.verify.examination.phases import ordinary_cases
from assay.verify.examination.plan import Plan, make_plan
from assay.verify.examination.repro import repro_line
from assay.verify.examination.run import arranged, fixed_cases
from assay.verify.harness.compute_sanitizer import findings
from assay.verify.harness.target import load_target
from benchmarks.gpu import causes
from benchmarks.gpu.causes import NEWER, OTHER, SHIPPED, Outcome, Trial
from benchmarks.gpu.device import compilers, shipped, version
from benchmarks.gpu.part import Part, main
from benchmarks.gpu.run import Running, side_by_side

TUNERS = {  # the kernels, each with its autotuned Triton kernel
    "assay.attention": "assay.kernels.triton.attention:_attention_kernel",
    "assay.mla_decode": "assay.kernels.triton.mla_decode:_mla_kernel",
}
_TMA_KERNELS = ("assay.attention",)  # those that may load by TMA
_UNPRUNED = ("assay.mla_decode",)  # its pruning avoids a form that is suspected; the trials have it
_CASES, _REHEARSED = 15, 2  # of an examination; the crashes came among the first ten or so
_LONGEST = 90.0  # seconds of a trial without compute-sanitizer
_SANITIZED = 4  # times as long under it
_FP32_STAGES = 1  # configurations for float32, and no others
_ILLEGAL = re.compile(r"illegal memory access|misaligned address|unspecified launch failure|illegal instruction", re.I)
_SPACE = re.compile(r"Invalid __(shared|global|local)__")
_SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--print-limit", "5", "--target-processes", "all")
_TRIAL = "--trial"
_CASE, _MARK = "case: ", "outcome: "  # a trial's lines before each case, and at its end


def body(part: Part, ptxas: Path | None, failing: bool) -> None:
    """Report every trial, and for each kernel the cause that they speak for; claim that no call fails.

    ``failing``: only what fails is tried again.
    """
    newer = ptxas or (Path(path) if (path := os.environ.get("TRITON_PTXAS_PATH")) else None)
    assemblers: dict[str, Path | None] = {SHIPPED: None, **_others(newer)}
    for name, path in assemblers.items():
        part.say(f"  ptxas {name}: {version(path or shipped())}")
    kernels = ["assay.mla_decode"] if part.rehearsal else list(TUNERS)
    first = [trial for kernel in kernels for trial in _first(kernel)]
    outcomes = _tried(part, first[-2:] if part.rehearsal else first, assemblers)
    again = [trial for kernel in kernels for trial in _again(kernel, outcomes, assemblers, failing or part.rehearsal)]
    outcomes += _tried(part, again, assemblers)
    part.tables.append(causes.table(outcomes))
    for kernel in kernels:
        own = [outcome for outcome in outcomes if outcome.trial.kernel == kernel]
        evidence = causes.evidence(own)
        part.say(f"  {kernel}: the cause that this speaks for: {causes.cause(evidence)}")
        ended = evidence.alone is False and evidence.together is False
        part.claim(f"{kernel} runs its first {_CASES} cases in every configuration", ended)


def _others(newer: Path | None) -> dict[str, Path | None]:
    other = next((path for path in compilers().values() if path.name != shipped().name), None)
    return ({OTHER: other} if other else {}) | ({NEWER: newer} if newer else {})


def _first(kernel: str) -> Iterator[Trial]:
    """Yield a trial for each configuration for 16 bits, by the shipped assembler, and one of the autotuner."""
    for config in _tuner(kernel).configs:
        if config.num_stages != _FP32_STAGES:
            yield Trial(kernel, _words(config), config.num_warps)
    yield Trial(kernel, "")


def _again(
    kernel: str, outcomes: Sequence[Outcome], assemblers: dict[str, Path | None], failing: bool
) -> Iterator[Trial]:
    """Yield trials that tell causes apart: of the configurations that failed, else, unless ``failing``, of all."""
    own = [each for each in outcomes if each.trial.kernel == kernel and each.trial.config]
    failed = [each.trial for each in own if each.result in causes.FAILED]
    for trial in failed or ([] if failing else [each.trial for each in own if each.result == causes.RAN]):
        yield from (replace(trial, assembler=name) for name in assemblers if name != SHIPPED)
        if kernel in _TMA_KERNELS:
            yield replace(trial, descriptors=False)
        if shutil.which(_SANITIZER[0]):
            yield replace(trial, sanitized=True)


def _tried(part: Part, trials: Sequence[Trial], assemblers: dict[str, Path | None]) -> list[Outcome]:
    """Run trials side by side; return their outcomes, including the ones that an earlier run finished."""
    by_name = {_name(trial, assemblers): trial for trial in trials}
    results = {
        name: Outcome(trial, **answer) for name, trial in by_name.items() if (answer := part.kept(name)) is not None
    }
    for outcome in results.values():
        part.say_listed(str(outcome))

    def start(name: str) -> Running:
        trial = by_name[name]
        return _started(part, name, trial, assemblers[trial.assembler])

    def ended(running: Running) -> None:
        outcome = _outcome(by_name[running.name], running, in_time=time.monotonic() < part.until)
        shutil.rmtree(_cache(running), ignore_errors=True)
        results[running.name] = outcome
        part.say_listed(str(outcome))
        if outcome.result != "not tried":
            answer = asdict(outcome)
            answer.pop("trial")
            part.keep(running.name, answer)

    side_by_side([name for name in by_name if name not in results], start, ended, part.until, part.workers)
    return [results.get(name, Outcome(trial, "not tried")) for name, trial in by_name.items()]


def _name(trial: Trial, assemblers: dict[str, Path | None]) -> str:
    path = assemblers[trial.assembler]
    return f"{trial} {version(path)}" if path else str(trial)


def _cache(running: Running) -> Path:
    return running.log.with_suffix(".triton")


def _started(part: Part, name: str, trial: Trial, assembler: Path | None) -> Running:
    """Start a trial: a process with its own log and an empty cache, where other assemblers' code can't be found."""
    log = part.out / "crashes" / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    seconds = _LONGEST * (_SANITIZED if trial.sanitized else 1)
    running = Running(name, log, time.monotonic() + seconds)
    shutil.rmtree(_cache(running), ignore_errors=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_PTXAS")}
    environment |= {"TRITON_CACHE_DIR": str(_cache(running)), "CUDA_LAUNCH_BLOCKING": "1"}
    if assembler is not None:  # later versions of Triton take the second for Hopper too
        environment |= dict.fromkeys(("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"), str(assembler))
    about = json.dumps([asdict(trial), part.device, seconds])
    command = [sys.executable, "-P", str(Path(__file__).resolve()), _TRIAL, about]
    if trial.sanitized:
        command = [*_SANITIZER, *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else an allocation hides its neighbours
    return running.start(command, environment)


def _outcome(trial: Trial, running: Running, *, in_time: bool) -> Outcome:
    """Return how a process that has ended, or was ended, tried its cases; ``in_time``: the part had time left."""
    text = running.log.read_text(encoding="utf-8", errors="replace")
    report = [line.removeprefix(_MARK) for line in text.splitlines() if line.startswith(_MARK)]
    cases = [line for line in text.splitlines() if line.startswith(_CASE)]
    last = cases[-1].removeprefix(_CASE) if cases else ""
    space = match[1] if trial.sanitized and (match := _SPACE.search(text)) else ""
    if report:
        outcome = Outcome(trial, **json.loads(report[-1]), space=space)
        said = findings(text, status=0) if space else outcome.words
        return replace(outcome, words=said)
    if running.stopped:
        return Outcome(trial, "hang", len(cases), last) if in_time else Outcome(trial, "not tried")
    if _ILLEGAL.search(text):
        return Outcome(trial, "illegal", len(cases), last, space)
    status = running.process.returncode
    if status < 0:
        return Outcome(trial, "died", len(cases), f"signal {-status}: {last}", space)
    lines = text.strip().splitlines()
    return Outcome(trial, "error", len(cases), lines[-1] if lines else f"status {status}", space)


def _tuner(kernel: str) -> Any:
    return pkgutil.resolve_name(TUNERS[kernel])


def _words(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in config_of(config).items())


# What follows runs in the process of a trial.


class _Pinned:
    """A kernel whose tuner has one configuration, given in words; none: as it is. ``applied``: a call had it.

    Raises `_PrunedError` where the tuner's own pruning drops it, unless ``unpruned``.
    """

    def __init__(self, kernel: Callable[..., Any], tuner: Any, words: str, unpruned: bool) -> None:
        functools.update_wrapper(self, kernel, assigned=("__name__", "__qualname__"))
        self.kernel, self.tuner, self.words, self.unpruned, self.applied = kernel, tuner, words, unpruned, False

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        before = Autotuner.run  # here, since the interpreter has its own inside of a call

        def run(tuner: Any, *arguments: Any, **keywords: Any) -> Any:
            if tuner is not self.tuner or not self.words:
                return before(tuner, *arguments, **keywords)
            with replaced([(tuner, "nargs", dict(zip(tuner.arg_names, arguments, strict=False)))]):
                kept = tuner.configs if self.unpruned else tuner.prune_configs(dict(keywords))
                kept = [config for config in kept if _words(config) == self.words]
            if not kept:
                raise _PrunedError
            self.applied = True
            with replaced([(tuner, "configs", kept), (tuner, "early_config_prune", None)]):
                return before(tuner, *arguments, **keywords)

        with replaced([(Autotuner, "run", run)]):
            return self.kernel(*tensors, **options)


class _PrunedError(Exception):
    """The configuration isn't one of this call's."""


def trial(about: str) -> None:
    """Try an examination's first cases, printing each before it is tried, and how the trial ended last."""
    fields, device, seconds = json.loads(about)
    what = Trial(**fields)
    signal.alarm(int(seconds) + 60)  # ends a process whose parent was killed, even inside of the driver
    (entry,) = (entry for entry in entries() if entry.name == what.kernel)
    settings = replace(entry.settings, dtype="bfloat16", effort="quick", device=device)
    with ExitStack() as stack:
        stack.enter_context(emulating(settings.faithful, settings.pretend, settings.emission))
        kernel = load_target(entry.target)
        pinned = _Pinned(kernel, _tuner(what.kernel), what.config, what.kernel in _UNPRUNED)
        plan = make_plan(pinned, settings)
        if not what.descriptors:
            module = sys.modules[kernel.__module__]
            stack.enter_context(replaced([(module, "can_use_tma", lambda *tensors: False)]))
        result, tried, words = _through(plan, entry.target, device)
    if result == "ran" and what.config and not pinned.applied:
        result = "pruned"
    print(_MARK + json.dumps({"result": result, "cases": tried, "words": words}), flush=True)


def _through(plan: Plan, target: str, device: str) -> tuple[str, int, str]:
    """Try the cases in order until one fails; return how, how many were tried, and the case and the failure."""
    fixed = (case for _, case in arranged(fixed_cases(plan), "quick"))
    first = itertools.chain(itertools.islice(ordinary_cases(plan.sampler, "small"), 1), fixed)
    tried = 0
    for case in itertools.islice(map(plan.sampler.tied, first), _CASES if device != "cpu" else _REHEARSED):
        line = repro_line(plan.settings, target, case)
        print(_CASE + line, flush=True)
        try:
            failure = plan.harness.try_case(case).failure
            if device != "cpu":
                torch.cuda.synchronize()
        except Exception as error:
            kind = "illegal" if _ILLEGAL.search(str(error)) else "error"
            return kind, tried, f"{first_line(error)}; {line}"
        if failure is not None and _PrunedError.__name__ in failure.message:
            continue
        tried += 1
        if failure is not None:
            refused = failure.kind == "refused" or "ptxas" in failure.message
            kind = "illegal" if failure.device_lost else "refused" if refused else "wrong"
            return kind, tried, f"{failure.kind}: {failure.message}; {line}"
    return "ran", tried, ""


if __name__ == "__main__":
    if sys.argv[1:2] == [_TRIAL]:
        trial(sys.argv[2])
    else:
        options: dict[str, dict[str, Any]] = {
            "ptxas": {"type": Path, "help": "a newer ptxas (default: TRITON_PTXAS_PATH)"},
            "failing": {"action": "store_true", "help": "try again only what fails"},
        }
        main("crashes", body, options)
