"""`assay doctor`: versions, devices, what can run here, and whether assay itself works on this machine."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from rich.console import Console
from rich.text import Text

from assay.cli.progress import console, in_rows
from assay.runtime.results import installed_version

Row: TypeAlias = tuple[str, str | Text]
"""A row's subject and its text."""
_FIRST = 20  # characters of the first column
_PACKAGES = (  # distribution, and its purpose if it is optional
    ("kernel-assay", ""),
    ("torch", ""),
    ("numpy", ""),
    ("mpmath", ""),
    ("python-flint", ""),
    ("hypothesis", ""),
    ("gmpy2", "makes mpmath faster"),
    ("triton", "Triton kernels"),
    ("ml_dtypes", "numpy kernels in bfloat16 and float8"),
)


def doctor() -> int:
    """Versions, devices, what can run here, and quick self-tests; exits with 1 if one of these fails."""
    triton = importlib.util.find_spec("triton") is not None
    tests = {words: test for words, test in _SELF_TESTS.items() if triton or test is not _faithful_interpreter}
    looks: list[tuple[str, Callable[[], Iterable[Row]]]] = [
        ("versions", _versions),
        ("devices", _devices),
        ("sandbox", _sandbox),
        *([("compilers", _compilers)] if triton else []),
        ("kernels", _kernels),
        *((words, partial(_tried, words, test)) for words, test in tests.items()),
        *([("triton's own interpreter", _faults_of_plain_interpreter)] if triton else []),
    ]
    failed = False
    for words, look in looks:
        with Console(stderr=True).status(f"{words} ..."):  # shown only on a terminal
            rows = list(look())
        console().print(in_rows(rows, first=_FIRST))
        failed = failed or any(str(said).startswith("failed") for _, said in rows)
    return int(failed)


def _tried(words: str, test: Callable[[], str]) -> Iterator[Row]:
    try:
        reason = test()
    except Exception as error:  # any failure is a finding for the user
        reason = f"{type(error).__name__}: {error}"
    mark = ("failed", "bold red") if reason else ("ok", "green")
    yield "self-test", Text.assemble(mark, f"  {words}", f": {reason}" if reason else "")


def _versions() -> Iterator[Row]:
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    for name, purpose in _PACKAGES:
        missing = f"not installed (only for {purpose})" if purpose else "not installed, and needed"
        result = installed_version(name)
        yield name.replace("kernel-assay", "assay") if result else name, result or missing


def _devices() -> Iterator[Row]:
    import torch

    yield "cpu", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    threads = torch.get_num_threads(), torch.get_num_interop_threads()
    yield "threads", "{} inside an operation, {} operations at once".format(*threads)
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    if not torch.cuda.device_count():
        yield "cuda", "none; kernels are examined on the cpu"


def _compilers() -> Iterator[Row]:
    """Yield the assembler that Triton runs for Hopper, and the faults that are reported of its version."""
    from assay.verify.harness.compilers import ptxas_version, reported_faults

    try:
        version = ptxas_version()
    except RuntimeError as error:
        yield "ptxas", f"{error}; set TRITON_PTXAS_PATH to one that can be run"
        return
    yield "ptxas", "\n".join([f"{version}, for Hopper", *reported_faults("ptxas", version)])


def _sandbox() -> Iterator[Row]:
    from assay.runtime.sandbox import unavailable, version

    yield "sandbox", f"none for `assay judge`: {why}" if (why := unavailable()) else version()


def _kernels() -> Iterator[Row]:
    from assay.golden.registry import specs
    from assay.verify.campaign.table import entries

    yield "ops", ", ".join(specs())
    absent = {entry.name: entry.absence("cpu") for entry in entries()}
    missing = "; ".join(f"{name}: {reason}" for name, reason in absent.items() if reason)
    here = f"{sum(not reason for reason in absent.values())} kernels on the cpu"
    yield "survey", here + (f"; not here: {missing}" if missing else "")
    if importlib.util.find_spec("triton") is None:
        yield "triton kernels", "can't run: triton is not installed"


def _faults_of_plain_interpreter() -> Iterator[Row]:
    """Yield errors of the installed Triton's own interpreter, found in a separate process."""
    command = [sys.executable, "-W", "ignore", "-P", "-m", "assay.interpreter.self_test"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield "triton's interpreter", f"could not be tried: {reason}"
        return
    results = json.loads(done.stdout)
    wrong = [f"{claim}: {reason}" for claim, reason in results.items() if reason]
    head = f"by itself it gets {len(wrong)} of {len(results)} things wrong, which are put right here:"
    yield "triton's interpreter", "\n".join([head, *wrong])


def _faithful_interpreter() -> str:
    """Run the interpreter's self-tests under `faithful`; return the failures, or nothing."""
    from assay.interpreter import faithful
    from assay.interpreter.self_test import self_test

    with faithful():
        return "; ".join(f"{claim}: {reason}" for claim, reason in self_test().items() if reason)


def _golden_against_arb() -> str:
    """Compare the golden with 30 digits of Arb; return the difference in words, or nothing."""
    import torch

    from assay.golden.evaluation import evaluate
    from assay.golden.evaluation.golden import Golden

    x = torch.linspace(-30, 30, 24, dtype=torch.float64).reshape(4, 6).float()
    ours, witness = evaluate("softmax", x), evaluate("softmax", x, digits=30)
    assert isinstance(ours, Golden)
    assert isinstance(witness, Golden)
    off = (ours.value - witness.value).abs()
    return "" if bool((off <= ours.radius + witness.radius + (off == 0)).all()) else f"off by {float(off.max()):.3g}"


def _rounding_against_fractions() -> str:
    """Compare rounding to e4m3 with the nearest value in exact fractions, ties to even."""
    import torch

    from assay.formats.codes import all_values
    from assay.formats.rounding import round_to

    target = "float8_e4m3fn"
    values = sorted({value for value in all_values(target).tolist() if value >= 0})
    for index, (low, high) in enumerate(pairwise(values)):
        middle = float((Fraction(low) + Fraction(high)) / 2)
        even = low if index % 2 == 0 else high
        for point, expected in ((middle, even), (middle * (1 - 2**-40), low), (middle * (1 + 2**-40), high)):
            got = float(round_to(torch.tensor(point, dtype=torch.float64), target))
            if got != expected:
                return f"{point!r} became {got!r}, not {expected!r}"
    return ""


def _fault_is_detected() -> str:
    """Check that a correct softmax passes and one without the shift by the maximum fails."""
    import torch

    from assay.verify.examination.procedure import examine

    def right(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    def unshifted(x: torch.Tensor) -> torch.Tensor:
        weights = x.exp()
        return weights / weights.sum(-1, keepdim=True)

    outcomes = [examine(kernel, "softmax", dtype="float32", examples=0).outcome for kernel in (right, unshifted)]
    return "" if outcomes == ["PASS", "FAIL"] else f"the outcomes are {outcomes[0]} and {outcomes[1]}"


_SELF_TESTS: dict[str, Callable[[], str]] = {
    "a golden is within its radius of 30 digits by Arb": _golden_against_arb,
    "rounding to float8_e4m3fn agrees with exact fractions": _rounding_against_fractions,
    "triton kernels are interpreted with a GPU's numbers": _faithful_interpreter,
    "a right softmax passes, a faulty one fails": _fault_is_detected,
}
