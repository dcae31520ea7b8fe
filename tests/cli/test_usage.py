"""The command line: what can be mistaken is answered in one line with exit status 2, and what is meant is done."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.cli import doctor, progress, settings
from assay.cli.main import main
from assay.golden.registry import spec
from assay.runtime.errors import AssayError
from assay.runtime.pool import Raised
from assay.verify.campaign import table as survey_table
from assay.verify.harness.compilers import reported_faults

HERE = Path(__file__).parent
USER = "kernels_of_a_user"
QUICK = ("--effort", "quick", "--examples", "0")
SOFTMAX = ("verify", f"{USER}:honest", "--spec", "softmax", "--dtype", "float32", *QUICK)
CASE = '{"spec":"softmax","sizes":{"R":1,"N":2},"dtypes":{"x":"float32"}}'
LINE = f'{{"target":"","case":{CASE}}}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch",), "No such command"),
        (("verfiy",), "Did you mean 'verify'"),
        (("survey", "--frobnicate"), "(see: assay survey --help)"),
        (("golden", "build"), "(see: assay golden build --help)"),
        (("golden", "make"), "(see: assay golden --help)"),
        (("verify", "math"), "is a module; which function of it? expected math:function --spec NAME; or a longer"),
        (("survey", "--frobnicate"), "No such option"),
        (("survey", "--examples", "few"), "--examples"),
        (("survey", "--examples", "-1"), "--examples"),
        (("survey", "--only", "no such kernel"), "no kernel's name contains that"),
        (("survey", "--table", "none/such.toml"), "none/such.toml: can't be read (No such file or directory)"),
        (("survey", "--device", "warp"), "device='warp' can't be used"),
        (("doctor", "now"), "unexpected extra argument"),
        (("repro",), "Missing argument"),
        (("verify", "--spec", "softmax"), "--spec softmax: of what? e.g. assay verify my.kernels:softmax"),
        (("verify", "flex_atention"), "expected package.module:function, or a kernel of `assay survey`"),
        (("verify", f"{USER}:honest"), "needs --spec, the op that it computes; of "),
        (("verify", f"{USER}:honest", "--spec", "sofmax"), "unknown spec 'sofmax'; did you mean 'softmax'?"),
        (("verify", "logsumexp", "--spec", "logsumexp"), "leave --spec out"),
        ((*SOFTMAX, "--option", "eps=1"), "softmax: unknown option 'eps'"),
        ((*SOFTMAX, "--option", "eps"), "--option 'eps^': expected = after eps (as in causal="),
        ((*SOFTMAX, "--option", "eps=1,"), "--option 'eps=1,^': expected a value of eps at character 7, got the end"),
        ((*SOFTMAX, "--option", "eps=(1"), "--option 'eps=^(1': expected a value of eps"),
        ((*SOFTMAX, "--dtype", "x=bf16,=f16"), "--dtype 'x=bf16,^=f16': expected a value of x"),
        ((*SOFTMAX, "--contract", "rescale_every=0"), "rescale_every=0; expected a whole number of at least 1"),
        ((*SOFTMAX, "--contract", "subnormals=flsh"), "did you mean 'flush'?"),
        (("verify", "(flash)", "--option", "causal=nonne"), "'top_left'; did you mean 'none'?"),
        (("verify", "(flash)", "--option", "causal=diagonal"), "option causal='diagonal'; expected one of 'none'"),
        ((*SOFTMAX, "--shape", "N=wide"), "unknown dimension 'wide' (known: N, R)"),
        ((*SOFTMAX, "--shape", "N=1:2:3:4"), "expected whole numbers"),
        ((*SOFTMAX, "--contract", "nonesuch"), "contract: unknown name 'nonesuch'"),
        ((*SOFTMAX, "--contract", "acumulate=float16"), "unknown field 'acumulate'; did you mean 'accumulate'?"),
        ((*SOFTMAX, "--contract", "accumulate=float17"), "unknown accumulator 'float17'; did you mean 'float16'?"),
        ((*SOFTMAX, "--contract", "rounding=up"), "rounding='up'; expected one of"),
        ((*SOFTMAX, "--contract", "ulps.exp=few"), "expected a number of ulps"),
        ((*SOFTMAX, "--contract", "stages=input"), "expected stages.name=input, or stages=none"),
        ((*SOFTMAX, "--device", "warp"), "device='warp' can't be used"),
        ((*SOFTMAX, "--out", __file__), "is a file"),
        (("audit", "stdlib-llama", "--text", __file__, "--out", __file__), "is a file"),
        (("inspect", f"{USER}:honest", "--out", str(HERE)), "is a directory"),
        (("verify", f"{USER}:honest", "--spec", "softmax", "--dtype", "bflot16"), "did you mean 'bfloat16'"),
        (("verify", f"{USER}:honest", "--spec", "softmax"), "softmax needs the dtype of x"),
        ((*SOFTMAX, "--shape", "Q=1", "--contract", "stages.sum=float16"), "unknown dimension 'Q'"),
        ((*SOFTMAX, "--contract", "stages.sum=float16"), "unknown stage 'sum'"),
        (("repro", "rubbish"), "expected what a report prints after 'assay repro', got 'rubbish'"),
        (("repro", LINE), "the kernel has no importable name; add --target"),
        (("power",), "expected --spec NAME"),
        (("power", "--spec", "nosuch"), "nosuch"),
        (("power", "--spec", "exp", "--against", "eye(1)"), "expected allclose"),
        (("power", "bundled.nosuch"), "expected package.module:function"),
        (("power", "torch"), "is a module; which function of it?"),
        (("fingerprint", "torch:mm", "--spec", "gem"), "did you mean 'gemm'?"),
        (("fingerprint", "torch:mm", "--spec", "gemm"), "gemm needs the dtype of a, b"),
        (("fingerprint", "torch", "--spec", "gemm", "--dtype", "float32"), "expected package.module:function"),
        (("fingerprint", "torch:mm"), "--spec"),
        ((*SOFTMAX, "--at", "R"), "--at 'R'; expected sizes, e.g. R=8192,N=4096"),
        ((*SOFTMAX, "--at", "R=many"), "--at 'R=many'; expected sizes"),
        ((*SOFTMAX, "--at", "R=3,M=4"), "at: unknown dimension 'M'"),
    ],
)
@pytest.mark.usefixtures("users_kernels", "in_process")
def test_a_mistake_is_one_line(one_line: Callable[..., None], arguments: tuple[str, ...], message: str) -> None:
    one_line(arguments, message)


@pytest.mark.usefixtures("users_kernels", "in_process")
def test_mistakes_that_workers_find_are_a_line_each(one_line: Callable[..., None]) -> None:
    targets = ("verify", f"{USER}:nosuch", "nosuch:x", "--spec", "softmax", "--dtype", "bfloat16")
    one_line(targets, "unknown function 'nosuch'", "nosuch can't be imported")


def test_help_lists_commands_with_whole_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    """Also without a command; a group has each command's first paragraph, to its end."""
    for arguments, group in (((), ""), (("--help",), ""), (("verify", "--help"), " verify"), (("golden",), " golden")):
        assert main(arguments) == 0
        assert f"Usage: assay{group} " in capsys.readouterr().out
    for path in (("doctor",), ("audit",), ("golden", "diff")):
        assert main((*path, "--help")) == 0
        said = capsys.readouterr().out.split("\n\n")[1]
        assert main((*path[:-1], "--help")) == 0
        assert " ".join(said.split()) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("remote", [False, True], ids=["here", "worker"])
def test_an_error_that_nobody_foresaw_is_a_line_and_a_file(
    remote: bool, one_line: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **named: object) -> None:
        try:
            raise ZeroDivisionError("in\nthe middle")
        except ZeroDivisionError as error:
            raise (Raised.of(error).again(AssayError) if remote else error) from None

    monkeypatch.setattr("assay.cli.main.app", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one_line(("doctor",), "unforeseen error (ZeroDivisionError: in the middle)")
    (file,) = tmp_path.iterdir()
    assert 'raise ZeroDivisionError("in' in file.read_text()


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("--version",)) == 0
    assert capsys.readouterr().out == f"assay {version('kernel-assay')}\n"


def test_completions_complete() -> None:
    shell = {"_ASSAY_COMPLETE": "complete_bash", "COMP_WORDS": "assay fi", "COMP_CWORD": "1"}
    command = [sys.executable, "-P", "-m", "assay.cli.main"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | shell, check=False)
    assert done.stdout.split() == ["fingerprint"]


@pytest.mark.usefixtures("users_kernels")
def test_verify_reports_each_target(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Reports are printed and written; what kernels print goes to standard error."""
    targets = (f"{USER}:honest", f"{USER}:faulty")
    arguments = ("--spec", "softmax", "--dtype", "bfloat16", *QUICK, "--shape", "N=4,8", "--out", str(tmp_path))
    assert main(("verify", *targets, *arguments)) == 1
    out, err = capfd.readouterr()
    assert out.startswith(f"PASS  {targets[0]} as softmax in bfloat16")
    assert f"\n\nFAIL  {targets[1]} as softmax in bfloat16" in out
    assert "a kernel that prints" in err
    assert "a kernel that prints" not in out
    written = sorted(path.name for path in tmp_path.iterdir())
    names = [re.sub(r"-[0-9a-f]{12}", "", name) for name in written]
    assert names == [f"{USER}-{name}-bfloat16.{kind}" for name in ("faulty", "honest") for kind in ("html", "json")]
    assert json.loads((tmp_path / written[1]).read_text(encoding="utf-8"))["outcome"] == "FAIL"


OWN = f"""
[[kernel]]
name = "mine"
group = "assay"
target = "{USER}:honest"
spec = "softmax"
dtypes = ["float32", "bfloat16"]
contract = {{ nonfinite = "unspecified" }}

[[kernel]]
name = "elsewhere"
group = "assay"
target = "{USER}:honest"
spec = "logsumexp"
devices = ["cuda"]

[[kernel]]
name = "somebody else's"
target = "{USER}:faulty"
spec = "softmax"
dtypes = ["bfloat16"]
"""


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table above instead of the survey's."""
    monkeypatch.setattr(survey_table.configs, "table", lambda name: tomllib.loads(OWN))


@pytest.mark.usefixtures("users_kernels", "in_process", "_table")
def test_verify_without_a_target_is_of_the_bundled_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    """All of the group in each dtype, in the table's order; one that can't run here is named, and no failure."""
    assert main(("verify", "--examples", "0", "--shape", "N=4,8", "--json")) == 0
    out, err = capfd.readouterr()
    rows = [(verdict["kernel"], verdict["dtype"], verdict["contract"]) for verdict in json.loads(out)]
    assert rows == [("mine", dtype, "nonfinite='unspecified'") for dtype in ("float32", "bfloat16")]
    assert "assay: elsewhere: runs on cuda, not on cpu" in err
    assert main(("verify", "elsewhere")) == 2


@pytest.mark.usefixtures("users_kernels", "in_process", "_table")
@pytest.mark.parametrize("spec_given", [(), ("--spec", "softmax")])
def test_a_function_of_the_table_brings_its_settings(capsys: pytest.CaptureFixture[str], spec_given: Any) -> None:
    """Spec, dtypes and contract need not be repeated; those of the command line come first."""
    target = ("verify", f"{USER}:faulty", *spec_given, *QUICK, "--shape", "N=4,8")
    changed = ("--dtype", "float16", "--contract", "rounding=toward_zero")
    for more, dtype, contract in (((), "bfloat16", None), (changed, "float16", "rounding='toward_zero'")):
        assert main((*target, *more, "--json")) == 1
        out = capsys.readouterr().out
        (verdict,) = json.loads(out[out.index("[\n") :])  # after what the kernel prints
        assert (verdict["kernel"], verdict["dtype"]) == ("somebody else's", dtype)
        assert contract in (None, verdict["contract"])


@pytest.mark.usefixtures("users_kernels", "in_process")
def test_verify_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--spec", "attention", "--option", "causal=none", "--option", "window=(16,0)", "--json")
    assert main(("verify", f"{USER}:attention", *arguments, "--dtype", "float32", "--dtype", "float16")) == 1
    verdicts: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [verdict["dtype"] for verdict in verdicts] == ["float32", "float16"]
    assert "called with none and (16, 0)" in verdicts[0]["failure"]["message"]


LATE = "tests.verify.large_kernels:last_rows_scaled"
LATE_SOFTMAX = (LATE, *SOFTMAX[2:], "--shape", "N=130")


@pytest.mark.usefixtures("in_process")
def test_a_kernel_that_fails_at_its_size_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("verify", *LATE_SOFTMAX, "--at", "R=9001,N=130", "--json")) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert "wrong from R=8999 on" in verdict["failure"]["message"]
    assert main(("repro", verdict["repro"])) == 1
    assert "wrong from R=8999 on" in capsys.readouterr().out


@pytest.mark.usefixtures("in_process")
def test_a_table_has_sizes_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "mine.toml"
    table.write_text(
        f'[[kernel]]\nname = "late"\ntarget = "{LATE}"\nspec = "softmax"\ndtypes = ["float32"]\n'
        "shapes = { N = [130] }\nexamples = 0\nat = [{ R = 9001 }]\n",
        encoding="utf-8",
    )
    assert main(("verify", str(table))) == 1
    assert "wrong from R=8999 on" in capsys.readouterr().out
    assert main(("verify", str(table), "--at", "R=100")) == 0


def test_power_prints_rates_and_survivors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "power.json"
    small = ("--shape", "R=1,2,17", "--shape", "N=1,5,33", "--examples", "0")
    line = ("power", "--spec", "exp", "--dtype", "bfloat16", *small, "--against", "allclose(1e-2,1e-2)")
    assert main((*line, "--family", "store", "--family", "tail", "--out", str(path))) == 0
    out = capsys.readouterr().out
    assert "fault family" in out
    assert "allclose(1e-2,1e-2)" in out
    content = json.loads(path.read_text())
    assert content["spec"] == "exp"
    assert all(name in out for name in content["survivors"])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("causal=none,bottom_right", ["none", "bottom_right"]),
        ("softcap=none,30", [None, 30]),
        ("softcap=None,0.5", [None, 0.5]),
        ("alibi=false,True", [False, True]),
        ("window=None,(16,0),[3, 5]", [None, (16, 0), (3, 5)]),
    ],
)
def test_options_are_read_as_the_spec_means_them(text: str, values: list[Any]) -> None:
    """`none` is a word where the option has that word, and None where it hasn't."""
    assert settings.options(spec("attention"), [text]) == {text.partition("=")[0]: values}


def test_shapes_dtypes_and_contracts_are_read() -> None:
    """Sizes as lists or Python's ranges; one dtype or one per tensor; contracts as names and fields, later ones added
    to earlier ones."""
    shapes = settings.shapes(["D=64,128", "Sq=1:300", "N=0:4096:16"])
    assert shapes == {"D": [64, 128], "Sq": range(1, 300), "N": range(0, 4096, 16)}
    assert settings.dtypes(["bfloat16", "q=float16, k=bfloat16"]) == ("bfloat16", {"q": "float16", "k": "bfloat16"})
    texts = ["pytorch.topk", "accumulate=float16", "stages=none", "ulps.exp=4", "ulps.log=2", "batch_invariant=true"]
    assert settings.contract_fields(texts) == {
        "deterministic": False,
        "accumulate": "float16",
        "stages": {},
        "ulps": {"exp": 4.0, "log": 2.0},
        "batch_invariant": True,
    }
    assert settings.contract_fields(["stages.probabilities=float32"]) == {"stages": {"probabilities": "float32"}}


@pytest.mark.parametrize(
    ("count", "effort", "skipped", "steps", "line"),
    [
        (4, 100.0, 0, ((1.0, 10.0), (15.0, 40.0), (16.0, 25.0)), "examined 2 of 4, about 15 s left"),
        # With a rate, neither the start nor what was there already is work.
        (100, 400.0, 10, ((20.0, 4.0), (22.0, 4.0), (24.0, 4.0), (30.0, 4.0)), "12 of 100, 0.5/s, about 176 s left"),
    ],
)
def test_progress_is_occasional_lines_when_piped(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    effort: float,
    skipped: int,
    steps: tuple[tuple[float, float], ...],
    line: str,
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.ProgressBar("examined", count, effort, rate=skipped > 0) as bar:
        for _ in range(skipped):
            bar.skip(4.0)
        for now, step in steps:  # noqa: B007 - the clock reads it
            bar.advance(step)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert line in err


def test_the_doctor_reports_a_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(("doctor",)) == 0
    text = capsys.readouterr().out
    assert text.count(" ok ") == len(doctor._SELF_TESTS)
    assert "failed" not in text
    for package in ("python-flint", "mpmath", "hypothesis", "torch"):
        assert package in text
    failing = {"two is three": lambda: "it is not", "this breaks": lambda: str(1 // 0)}
    monkeypatch.setattr(doctor, "_SELF_TESTS", failing)
    assert main(("doctor",)) == 1
    text = capsys.readouterr().out
    assert text.count("failed") == 2
    assert "two is three: it is not" in text
    assert "ZeroDivisionError" in text


@pytest.mark.parametrize(
    ("version", "reported"),
    [("12.8.93", True), ("12.8", True), ("13.1.80", True), ("13.3", False), ("13.4.59", False), ("12.4", False)],
)
def test_the_doctor_tells_what_is_reported_of_a_compiler(version: str, reported: bool) -> None:
    lines = reported_faults("ptxas", version)
    assert bool(lines) == reported
    assert reported_faults("nvcc", version) == []
    if reported:
        assert lines[0].startswith("reported of 12.8 to 13.3, exclusive, not reproduced here: ")
        assert any("triton-lang/triton#10486" in line for line in lines)
        assert lines[-1] == "remedy: set TRITON_PTXAS_PATH to a ptxas of 13.3 or later"


def test_the_doctor_names_the_assembler_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import compiler

    def tool(arch: int) -> SimpleNamespace:
        assert arch == 90
        return SimpleNamespace(version="12.8")

    monkeypatch.setattr(compiler, "get_ptxas", tool)
    ((subject, words),) = doctor._compilers()
    assert (subject, words.splitlines()[0]) == ("ptxas", "12.8, for Hopper")
    assert "remedy: " in words

    def missing(arch: int) -> None:
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(compiler, "get_ptxas", missing)
    assert list(doctor._compilers()) == [("ptxas", "Cannot find ptxas; set TRITON_PTXAS_PATH to one that can be run")]


def test_an_interrupt_while_commands_are_imported_is_one_line() -> None:
    """The console script of the package imports nothing heavy before it can say so."""
    body = """
import builtins, sys
import_ = builtins.__import__
def interrupted(name, *rest, **named):
    if name == "typer":
        raise KeyboardInterrupt
    return import_(name, *rest, **named)
builtins.__import__ = interrupted
from assay.cli.start import run
assert "torch" not in sys.modules
run()
"""
    run = subprocess.run([sys.executable, "-P", "-c", body], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "assay: interrupted\n")
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]
    assert scripts["assay"] == "assay.cli.start:run"
