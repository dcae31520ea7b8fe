"""An op of one's own, complete in one file, or a PyTorch function: everything that asks of built-in ops knows it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from assay.cli.main import main
from assay.golden import Golden, define, define_torch, evaluate, spec, specs
from assay.golden.registry import _REGISTRY
from assay.runtime.errors import AssayError
from assay.verify import examine, examine_backward
from assay.verify.examination.repro import run_line

from .examined import fails, first, quick

pytest_plugins = ["pytester"]

FILE = """
import torch
from assay.golden import Fault, define, number

def forgotten(xp, x, gate, *, bias):
    return x * xp.sigmoid(gate)

def twice(xp, x, gate, *, bias):
    return x * xp.sigmoid(gate + bias) * 2.0

@define("own_gate", "x[R,N], gate[R,1] -> y[R,N]", options={"bias": number(0.0, usual=(0.0, 1.0))}, rows="R",
        inputs={"gate": {"plain": lambda d: d.normal(), "near_zero": lambda d: 2.0**-6 * d.uniform()}}, public=False,
        faults=(Fault("bias_forgotten", "the bias is left out", forgotten), Fault("twice", "twice the result", twice)))
def own_gate(xp, x, gate, *, bias):
    return x * xp.sigmoid(gate + bias)

@define("own_gate_backward", "x[R,N], gate[R,1], dy[R,N] -> dx[R,N], dgate[R,1]", options={"bias": number(0.0)},
        rows="R", gradient_of="own_gate", public=False)
def own_gate_backward(xp, x, gate, dy, *, bias):
    opened = xp.sigmoid(gate + bias)
    return dy * opened, xp.sum(dy * x) * (opened * (1.0 - opened))

def honest(x, gate, *, bias=0.0):
    return (x.float() * torch.sigmoid(gate.float() + bias)).to(x.dtype)

def doubled(x, gate, *, bias=0.0):
    return (2 * x.float() * torch.sigmoid(gate.float() + bias)).to(x.dtype)
"""
SMALL = ("--dtype", "float32", "--option", "bias=0.0,1.0", "--shape", "R=3", "--shape", "N=1:10")
TESTS = """
import own_gate_op

def test_honest(assay):
    assay.check(own_gate_op.honest, "own_gate", dtype="float32", shapes={"R": [3], "N": range(1, 10)}, effort="quick")

def test_doubled(assay):
    assay.check(own_gate_op.doubled, "own_gate", dtype="float32", shapes={"R": [3], "N": range(1, 10)}, effort="quick")
"""
TABLE = """
[[kernel]]
name = "gate"
target = "own_gate_op:honest"
spec = "own_gate"
"""
CAMPAIGN = """
[[golden]]
spec = "{spec}"
shapes = {{ R = 2, N = [1, 3] }}
dtypes = ["float32"]
options = {{ bias = [0.0, 1.0] }}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The module, importable from a folder of its own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_gate_op.py").write_text(FILE, encoding="ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # and all of sys.path as it was afterwards
        yield import_module("own_gate_op")
        del sys.modules["own_gate_op"]


def fresh(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that knows nothing yet, in a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


def assay(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fresh(folder, "-m", "assay.cli.main", *arguments)


def folder_of(own: ModuleType) -> Path:
    assert own.__file__ is not None
    return Path(own.__file__).parent


def test_it_is_evaluated_to_any_digits(own: ModuleType) -> None:
    for name in ("own_gate", "own_gate_op:own_gate"):
        golden = evaluate(name, torch.ones(2, 3), torch.zeros(2, 1), digits=25)
        assert isinstance(golden, Golden)
        assert golden.value.tolist() == [[0.5] * 3] * 2
    assert spec("own_gate").qualified_name == "own_gate_op:own_gate"


def test_a_failure_is_explained_and_repeats_in_a_fresh_process(own: ModuleType) -> None:
    """By the fault of the op's own file; the repro line knows where the op is defined."""
    verdict = fails(first(own.doubled, "own_gate", shrinking=True))
    assert verdict.spec == "own_gate"
    assert [found.name for found in verdict.explanations][:1] == ["twice"], verdict.not_asked
    found = assay(folder_of(own), *shlex.split(verdict.repro)[1:])
    assert (found.returncode, found.stdout[:4]) == (1, "FAIL"), found.stderr


FEW = """few = {"shapes": {"R": [3], "N": [5]}, "effort": "quick", "examples": 0, "every_aspect": False}"""
IN_A_TEST = f"""{FILE}
def test_doubled(assay):
    {FEW}
    assay.check(doubled, "own_gate", dtype="float32", **few)
"""
IN_A_SCRIPT = f"""{FILE}
if __name__ == "__main__":
    from assay.verify import examine
    {FEW}
    print(examine(doubled, "own_gate", dtype="float32", **few))
"""
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "tests")


@pytest.mark.parametrize(
    ("file", "text", "command", "more"),
    [
        pytest.param("tests/test_gate.py", IN_A_TEST, PYTEST, (), marks=pytest.mark.evidence),
        ("gates.py", IN_A_SCRIPT, ("gates.py",), ("--target", "gates:doubled")),
    ],
)
def test_an_op_of_a_test_or_a_script_repeats(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    text: str,
    command: tuple[str, ...],
    more: tuple[str, ...],
) -> None:
    """From the folder that the run began in; of a script, whose functions have no other name, with that of its file."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text, encoding="ascii")
    printed = next(line for line in fresh(tmp_path, *command).stdout.splitlines() if " repeat " in line)
    again = shlex.split(printed[printed.index("assay repro") :])
    found = assay(tmp_path, *again[1:], *more)
    assert (found.returncode, found.stdout[:4]) == (1, "FAIL"), found.stderr
    if more:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(AssayError, match=r"no importable name; add --target package\.module:function"):
            run_line(again[-1])


def test_its_gradient_is_examined_with_it(own: ModuleType) -> None:
    """`gradient_of` in the same file is all that `examine_backward` needs; a gradient that is cut off fails."""
    small: dict[str, Any] = {"dtype": "float32", "effort": "quick", "examples": 3, "options": {"bias": [1.0]}}
    small["shapes"] = {"R": [3], "N": range(1, 10)}
    verdict = examine_backward(own.honest, "own_gate", **small)
    assert verdict.passed, str(verdict)
    wrong = examine_backward(lambda x, gate, bias: own.honest(x, gate.detach(), bias=bias), "own_gate", **small)
    assert wrong.failed == ("backward",), str(wrong)


ELSEWHERE = ("elsewhere:honest", "--spec", "own_gate", "--ops", "own_gate_op")


@pytest.mark.parametrize("question", [("mine.toml",), pytest.param(ELSEWHERE, marks=pytest.mark.evidence)])
def test_the_command_line_knows_it(own: ModuleType, question: tuple[str, ...]) -> None:
    kernels = "import torch\n" + FILE[FILE.index("def honest") :]
    (folder_of(own) / "elsewhere.py").write_text(kernels, encoding="ascii")
    (folder_of(own) / "mine.toml").write_text(TABLE, encoding="ascii")
    found = assay(folder_of(own), "verify", *question, *SMALL, "--effort", "quick", "--examples", "0")
    assert (found.returncode, found.stdout[:4]) == (0, "PASS"), found.stderr


def test_ops_that_are_not_there_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("verify", "own_gate_op:honest", "--spec", "own_gate", "--ops", "no_such_ops")) == 2
    assert "ops 'no_such_ops': no_such_ops can't be imported" in capsys.readouterr().err


@pytest.mark.usefixtures("own")
def test_its_faults_are_what_power_tries(capsys: pytest.CaptureFixture[str]) -> None:
    question = ("power", "own_gate_op:honest", "--spec", "own_gate", *SMALL, "--examples", "2", "--family", "formula")
    assert main(question) == 0
    printed = capsys.readouterr().out
    assert "formula             2 / 2" in printed
    assert printed.startswith("power of 2 examples: own_gate in float32")


def test_the_plugin_knows_it(own: ModuleType, pytester: pytest.Pytester) -> None:
    quick(own.doubled, "own_gate")  # imports what a run in this process would forget
    pytester.makepyfile(test_kernels=TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.re_match_lines([r"honest +own_gate +float32 .* PASS", r"doubled +own_gate +float32 .* FAIL"])


def test_goldens_are_built_and_checked(own: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Workers import the op; records name it by its reference, so that a check in a fresh process finds it."""
    campaign, store = tmp_path / "own.toml", str(tmp_path / "store")
    for name, ops, made in (("own_gate", ("--ops", "own_gate_op"), 4), ("own_gate_op:own_gate", (), 0)):
        campaign.write_text(CAMPAIGN.format(spec=name), encoding="ascii")
        assert main(("golden", "build", str(campaign), "--store", store, "--workers", "1", *ops)) == 0
        assert f"own: {made} records made" in capfd.readouterr().out
    checked = assay(folder_of(own), "golden", "check", store)
    assert checked.stdout.startswith("4 records read, 4 derived again by mpmath"), checked.stdout + checked.stderr


def test_installed_distributions_bring_theirs(own: ModuleType) -> None:
    """By the entry points of assay.ops; of one that is broken the distribution is named, and the others count."""
    for distribution, module in (("own-ops", "own_gate_op"), ("broken-ops", "no_such_module")):
        folder = folder_of(own) / f"{distribution.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[assay.ops]\nops = {module}\n")
    found = fresh(folder_of(own), "-c", "from assay.golden import spec; print(spec('own_gate').qualified_name)")
    assert found.stdout == "own_gate_op:own_gate\n", found.stderr
    assert "broken-ops: its ops (no_such_module, entry point of assay.ops) can't be loaded: Module" in found.stderr


@pytest.fixture(autouse=True)
def _ops_go_again() -> Iterator[None]:
    specs()  # the built-in ones, which are read once
    known = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(known)


def gated(x: Any, gate: Any, bias: float = 0.0) -> Any:
    return x * torch.sigmoid(gate + bias)


def gated_backward(x: Any, gate: Any, dy: Any, bias: float = 0.0) -> Any:
    opened = torch.sigmoid(gate + bias)
    return dy * opened, (dy * x).sum(-1, keepdim=True) * opened * (1.0 - opened)


def defined() -> None:
    define_torch("torch_gate", "x[R,N], gate[R,1] -> y[R,N]", rows="R", public=False)(gated)
    define_torch(
        "torch_gate_backward", "x[R,N], gate[R,1], dy[R,N] -> dx[R,N], dgate[R,1]", rows="R",
        gradient_of="torch_gate", public=False,
    )(gated_backward)  # fmt: skip


def test_its_golden_is_that_of_the_same_definition() -> None:
    defined()

    @define("plain_gate", "x[R,N], gate[R,1] -> y[R,N]", rows="R", public=False)
    def plain_gate(xp: Any, x: Any, gate: Any) -> Any:
        return x * xp.sigmoid(gate + 0.0)

    x, gate = torch.randn(5, 7), torch.randn(5, 1)
    one, other = evaluate("torch_gate", x, gate), evaluate("plain_gate", x, gate)
    assert isinstance(one, Golden)
    assert isinstance(other, Golden)
    assert torch.equal(one.value, other.value)
    assert bool((one.radius <= 2 * other.radius).all())
    assert spec("torch_gate").options["bias"].default == 0.0


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.evidence), "bfloat16"])
def test_kernels_are_held_against_it(dtype: str) -> None:
    defined()

    def honest(x: Any, gate: Any, *, bias: float) -> Any:
        return (x.float() * torch.sigmoid(gate.float() + bias)).to(x.dtype)

    def doubled(x: Any, gate: Any, *, bias: float) -> Any:
        return 2 * honest(x, gate, bias=bias)

    asked: dict[str, Any] = {"dtype": dtype, "effort": "quick", "examples": 3, "options": {"bias": [0.0, 1.0]}}
    assert examine(honest, "torch_gate", **asked).passed
    assert examine(doubled, "torch_gate", **asked, shrinking=False, every_aspect=False).outcome == "FAIL"


def test_its_gradient_is_another_such_function() -> None:
    defined()
    asked: dict[str, Any] = {"dtype": "float32", "effort": "quick", "examples": 3, "layouts": ["contiguous"]}
    assert examine_backward(lambda x, gate: gated(x, gate), "torch_gate", **asked).passed
    wrong = examine_backward(
        lambda x, gate: gated(x, gate.detach() + gate * 0), "torch_gate", **asked, shrinking=False, every_aspect=False
    )
    assert wrong.failed == ("backward",)
