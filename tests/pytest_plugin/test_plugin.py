"""The pytest plugin: fixture, marker, options, reports and summary, in runs of pytest inside of pytest."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

pytest_plugins = ["pytester"]


def test_only_runs_with_the_fixture_have_a_summary(run: Any) -> None:
    """`assay.examine` lists a failure and leaves the test to decide."""
    result = run("def test_plain(): pass")
    result.assert_outcomes(passed=1)
    result.stdout.no_re_match_line("=+ assay =+")
    result.stdout.no_re_match_line("assay audit")
    result = run(
        """
        def test_both(assay):
            few = {"effort": "quick", "examples": 0, "shrinking": False}
            assert assay.check(softmax, "softmax", dtype="bfloat16", **few).passed
            assert assay.examine(doubled, "softmax", dtype="float32", **few).outcome == "FAIL"
        """
    )
    result.assert_outcomes(passed=1)
    row = r"softmax +softmax +bfloat16 +\d+ cases +worst +(0\.\d+|1) +PASS"
    result.stdout.re_match_lines([r"=+ assay =+", row, "doubled .* FAIL: numbers"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--assay-device=tpu:7"], "--assay-device: device='tpu:7' can't be used*; expected one*e.g. cpu"),
        (["--assay-faithful-device", "h2000"], "--assay-faithful-device: unknown device*did you mean 'h200'"),
        (["--assay-emission", "contracted"], "--assay-emission: emission='contracted': *did you mean 'contraction'"),
        (["--assay-pretend", "rocm"], "--assay-pretend: unknown device to pretend 'rocm'"),
        (["--assay-audit-function=own"], "--assay-audit-function: expected MODULE:FUNCTION*got 'own'"),
        (["--assay-faithful"], "--assay-faithful needs Triton, which is not installed"),
    ],
)
def test_a_wrong_option_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str) -> None:
    """Before any test, and no traceback."""
    if options == ["--assay-faithful"]:
        monkeypatch.setitem(sys.modules, "triton", None)
    result = run("def test_plain(): pass", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}*"])
    assert len([line for line in result.stderr.lines if line.strip()]) == 1


@pytest.mark.parametrize("style", ["auto", "short", "long"])
def test_a_faulty_kernel_fails_the_test_with_its_report_alone(run: Any, style: str) -> None:
    result = run(
        """
        def test_doubled(assay):
            assay.check(doubled, "softmax", dtype="bfloat16", effort="quick", examples=0, shapes={"R": [3]})
        """,
        f"--tb={style}",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*assay.check(doubled, *",
            "E *FAIL  doubled as softmax in bfloat16",
            "E *worst at*got *golden *",
            "E *repeat *assay repro '*test_kernels:doubled*",
            "doubled *softmax *bfloat16 * FAIL: numbers",
        ]
    )
    for ours in ("plugin.py", "examination.py", "def check", "raise VerificationError"):
        result.stdout.no_fnmatch_line(f"*{ours}*")


PRECEDENCE = """
@pytest.mark.assay(examples=3, seed=7)
class TestMarked:
    def seen(self, assay, **settings):
        verdict = assay.examine(softmax, "softmax", dtype="float32", effort="quick", shapes={{"N": [5]}}, **settings)
        return verdict.phases.get("fuzz", 0), verdict.seed

    def test_class(self, assay):
        assert self.seen(assay) == {class_}

    @pytest.mark.assay(examples=2)
    def test_closest(self, assay):
        assert self.seen(assay) == {closest}

    @pytest.mark.assay(examples=2)
    def test_call(self, assay):
        assert self.seen(assay, examples=4) == {call}
"""


@pytest.mark.parametrize(
    ("options", "examples", "seed"),
    [
        ([], (3, 2, 4), 7),
        (["--assay-examples=1"], (1, 1, 1), 7),
        (["--assay-seed", "9"], (3, 2, 4), 9),
        (["--assay-examples=0", "--assay-seed=0"], (0, 0, 0), 0),
    ],
    ids=["none", "examples", "seed", "zeros"],
)
def test_options_outrank_the_call_and_the_call_the_marker(
    run: Any, options: list[str], examples: tuple[int, int, int], seed: int
) -> None:
    expected = dict(zip(("class_", "closest", "call"), ((count, seed) for count in examples), strict=True))
    run(PRECEDENCE.format(**expected), *options).assert_outcomes(passed=3)


def test_sizes_of_production_are_for_ops_that_have_them(run: Any) -> None:
    result = run(
        """
        @pytest.mark.parametrize("kernel, op, lines", [(softmax, "softmax", 1), (torch.matmul, "gemm", 0)])
        def test_at(assay, kernel, op, lines):
            verdict = assay.examine(kernel, op, dtype="float32", effort="quick", shapes={"N": [33]})
            assert len(verdict.at) == lines
            assert verdict.phases.get("at", 0) == lines
        """,
        "--assay-at=R=2048,N=600",
        "--assay-examples=0",
    )
    result.assert_outcomes(passed=2)


def test_marker_and_fixture_are_documented(run: Any) -> None:
    """`--markers`, `--fixtures` and `--help` say what there is; the marker is no unknown one to --strict-markers."""
    tests = '@pytest.mark.assay(examples=0)\ndef test_s(assay): assay.check(softmax, "softmax", dtype="float32")'
    run(tests, "--strict-markers").assert_outcomes(passed=1)
    run(tests, "--markers").stdout.fnmatch_lines(["@pytest.mark.assay(*): settings of examine for this test*"])
    run(tests, "--fixtures").stdout.fnmatch_lines(["assay -- *", "*Examine kernels*"])
    run(tests, "--help").stdout.fnmatch_lines(["*--assay-examples=N*", "*--assay-report=DIR*"])


def test_a_run_without_kernels_loads_nothing_heavy(run: Any) -> None:
    """Neither torch nor hypothesis nor numpy is imported for tests that don't ask for the fixture."""
    heavy = ("torch", "hypothesis", "numpy", "assay.golden", "assay.verify.examination.procedure")
    test = f"""
        def test_light():
            import sys
            assert [name for name in {heavy} if name in sys.modules] == []
            assert "assay.pytest_plugin.plugin" in sys.modules
        """
    run(test, "--strict-markers", "--assay-examples=3", apart=True).assert_outcomes(passed=1)


FAITHFUL = """
import pytest, torch, triton
import triton.language as tl

@triton.jit
def rounding_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(y_ptr + places, tl.load(x_ptr + places).to(tl.bfloat16))

def rounded(x):
    y = torch.empty_like(x, dtype=torch.bfloat16)
    rounding_kernel[(1,)](x, y, SIZE=x.numel())
    return y

X = torch.linspace(1, 2, 128)

@pytest.fixture
def by_a_fixture():
    return rounded(X)

def test_plain(by_a_fixture):
    assert torch.equal(rounded(X), X.bfloat16()) and torch.equal(by_a_fixture, X.bfloat16())

def test_beside_the_fixture(assay):
    assert torch.equal(rounded(X), X.bfloat16())
"""


def test_the_whole_run_may_be_interpreted_faithfully(run: Any) -> None:
    """With the option Triton kernels run on a CPU and round to nearest, in any test and fixture; else they don't."""
    run(FAITHFUL, "--assay-faithful").assert_outcomes(passed=2)
    run(FAITHFUL, "-k", "plain").assert_outcomes(errors=1)


DOT = """
import torch, triton
from triton import language as tl

@triton.jit
def dot_kernel(a_ptr, c_ptr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    a = tl.load(a_ptr + at)
    tl.store(c_ptr + at, tl.dot(a, a))

def test_dot():
    a, c = torch.full((64, 64), 1.125).to(torch.float8_e4m3fn), torch.empty(64, 64)
    a[0, 0] = 448.0
    dot_kernel[(1,)](a, c)
    assert float(c[0, 1]) == (448 * 1.125 + 63 * 1.125**2) - %s
"""


def test_the_whole_run_may_have_the_tensor_cores_of_a_device(run: Any) -> None:
    """With --assay-faithful-device alone dots lose what that device's lose."""
    run(DOT % "0", "--assay-faithful").assert_outcomes(passed=1)
    run(DOT % "0.9843750", "--assay-faithful-device", "h200").assert_outcomes(passed=1)


CONTRACTED = """
import pytest, torch, triton
from triton import language as tl

@triton.jit
def difference(x_ptr):
    x = tl.load(x_ptr)
    tl.store(x_ptr, x * x - x * x)

def test_rounding():
    x = torch.tensor([1.1])
    difference[(1,)](x)
    assert (x != 0).item() == %s

def refusing(x):
    if x.shape[1] > 4096:
        raise ValueError("too wide")
    return torch.softmax(x, -1)

@pytest.mark.assay(refuses={"too wide": "N > 4096"})
def test_refusing(assay):
    settings = dict(dtype="float32", effort="quick", examples=0, layouts=["contiguous"])
    assert assay.examine(refusing, "softmax", shapes={"R": [1], "N": [4000, 5000]}, **settings).refused
"""


def test_the_whole_run_may_be_as_a_compiler_has_it(run: Any) -> None:
    """With --assay-emission alone kernels are interpreted so; an unknown choice is one line; refusals are marked."""
    run(CONTRACTED % "False", "--assay-faithful").assert_outcomes(passed=2)
    run(CONTRACTED % "True", "--assay-emission", "nvidia", "-k", "rounding").assert_outcomes(passed=1)


STORED = """
def test_softmax(assay):
    assay.check(softmax, "softmax", dtype="float32", effort="quick", examples=0, goldens="nothing")
"""


def test_stored_goldens_are_tried_too(run: Any, tmp_path: Any) -> None:
    """`--assay-golden STORE` adds the store's cases: a fault at a size that only they have fails the test."""
    from assay.golden.inputs.recipe import recipe
    from assay.golden.store import Store, make_record

    store = Store(str(tmp_path))
    store.put(make_record(recipe("softmax", {"R": 2, "N": 977}, "float32")))
    tests = """
        def test_softmax(assay):
            kernel = lambda x: softmax(x) * (2 if 3 * x.shape[-1] == 2931 else 1)
            assay.check(kernel, "softmax", dtype="float32", effort="quick", examples=0, shapes={"N": range(1, 2000)})
    """
    run(tests).assert_outcomes(passed=1)
    result = run(tests, "--assay-golden", store.url)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*FAIL: *  (1 of them stored)"])


@pytest.mark.parametrize("tests", ["def test_plain(): pass", STORED])
def test_a_missing_store_of_goldens_is_one_line(run: Any, tests: str, tmp_path: Any) -> None:
    """Named by the option, the run doesn't start; named by a test, that test fails with the line alone."""
    named = "goldens" in tests
    result = run(tests, *([] if named else ["--assay-golden", f"{tmp_path}/nothing"]), "--tb=short")
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if named else pytest.ExitCode.USAGE_ERROR)
    said = [line for line in (*result.outlines, *result.errlines) if "nothing; build a campaign first" in line]
    assert [re.sub(r"store \S*nothing", "store nothing", line) for line in said if "FAILED" not in line] == [
        ("" if named else "ERROR: --assay-golden: ")
        + "store nothing: there is nothing; build a campaign first: assay golden build CAMPAIGN --store URL"
    ]
    result.stdout.no_fnmatch_line("*plugin.py*")
    result.stdout.no_fnmatch_line("*another exception*")


def test_a_lost_device_fails_its_test_and_no_other(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that another process can import loses a device there; after another one a line says what to do."""
    monkeypatch.setattr("assay.verify.harness.lost_device.can_be_lost", lambda device: True)
    result = run(
        """
        FEW = {"dtype": "float32", "effort": "quick", "examples": 0, "every_aspect": False, "shrinking": False}
        lost = []

        def loses(x):
            lost.extend([True] if x.shape[-1] > 20 else [])
            if lost:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return softmax(x)

        def test_loses(assay):
            assay.check(loses, "softmax", **FEW)

        def test_honest(assay):
            assert not lost
            assay.check(softmax, "softmax", **FEW)

        def test_in_this_process(assay):
            assay.check(lambda x: loses(x), "softmax", **FEW)

        def test_after_it(assay, monkeypatch):
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            monkeypatch.setattr(torch.cuda, "synchronize", lambda: loses(torch.zeros(1, 30)))
            assay.check(lambda x: softmax(x), "softmax", **FEW)
        """
    )
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.re_match_lines([r"E +memory +broken .*crash: RuntimeError: CUDA error: an illegal memory access"])
    result.stdout.fnmatch_lines(["*the device's context is lost: run again with --isolate*(CUDA error: an illegal*)"])
    result.stdout.no_fnmatch_line("*assay/verify*")


def test_a_test_without_a_gpu_names_the_option(run: Any) -> None:
    """Where Triton finds no driver, and nowhere else."""
    result = run(
        """
        def test_of_a_kernel():
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        """
    )
    result.stdout.fnmatch_lines(["*Triton finds no GPU. pytest --assay-faithful runs its kernels on the CPU*"])
    assert "--assay-faithful" not in run("def test_wrong(): raise RuntimeError('1 active driver')").stdout.str()
