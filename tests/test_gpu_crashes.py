"""`./dev gpu crashes`: the cause that outcomes speak for; trials with stand-ins for Python, ptxas and the sanitizer."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def causes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.gpu import causes

    return causes


ROWS: list[tuple[dict[str, Any], str]] = [
    ({}, "NOT_TRIED"),
    ({"alone": False}, "NOT_TRIED"),
    ({"alone": False, "together": False}, "NOT_SEEN"),
    ({"alone": False, "together": False, "newer": False, "other": False, "plain": False}, "NOT_SEEN"),
    ({"alone": True, "newer": False}, "COMPILER"),
    ({"alone": True, "newer": False, "other": True, "plain": True, "space": "shared"}, "COMPILER"),
    ({"alone": True, "other": False}, "COMPILER"),
    ({"alone": True, "other": False, "newer": True}, "UNDECIDED"),  # in no order of versions
    ({"alone": True}, "UNDECIDED"),
    ({"alone": True, "other": True, "space": "shared"}, "UNDECIDED"),  # 13.3 or later wasn't tried
    ({"alone": True, "other": True, "newer": True}, "UNDECIDED"),
    ({"alone": True, "newer": True, "plain": False}, "DESCRIPTORS"),
    ({"alone": True, "newer": True, "plain": False, "space": "shared"}, "DESCRIPTORS"),
    ({"alone": True, "newer": True, "plain": True, "space": "shared"}, "NARROW"),
    ({"alone": True, "newer": True, "narrow": True}, "NARROW"),
    ({"alone": True, "newer": True, "narrow": True, "space": "global", "plain": True}, "ADDRESS"),
    ({"alone": True, "newer": True, "plain": True, "space": "global"}, "ADDRESS"),
    ({"alone": False, "together": True}, "TUNER"),
    ({"together": True}, "UNDECIDED"),
    ({"alone": False, "together": True, "plain": True}, "UNDECIDED"),
    ({"alone": False, "newer": True, "together": False}, "NEWER_COMPILER"),
]


@pytest.mark.parametrize(("fields", "expected"), ROWS)
def test_evidence_speaks_for_a_cause(causes: ModuleType, fields: dict[str, Any], expected: str) -> None:
    assert causes.cause(causes.Evidence(**fields)) == getattr(causes, expected)


def test_no_cause_is_named_without_what_it_needs(causes: ModuleType) -> None:
    """Over the whole table of what a run may have found."""
    three = (None, True, False)
    spaces = ("", "shared", "global", "local")
    seen = set()
    for values in itertools.product(three, three, three, three, three, three, spaces):
        e = causes.Evidence(*values)
        cause = causes.cause(e)
        seen.add(cause)
        assert cause in causes.CAUSES
        failed = True in (e.alone, e.other, e.newer, e.together, e.plain)
        assert (cause in (causes.NOT_SEEN, causes.NOT_TRIED)) == (not failed), e
        needed = {
            causes.COMPILER: e.alone and (e.newer is False or (e.newer is None and e.other is False)),
            causes.NEWER_COMPILER: e.alone is False and (e.newer or e.other),
            causes.NARROW: e.alone and e.newer and e.plain is not False,
            causes.ADDRESS: e.alone and e.newer and e.plain,
            causes.DESCRIPTORS: e.alone and e.plain is False,
            causes.TUNER: e.together and e.alone is False and not e.plain,
            causes.NOT_SEEN: e.alone is False and e.together is False,
        }
        assert needed.get(cause, True), e
    assert seen == set(causes.CAUSES)


def test_outcomes_become_evidence(causes: ModuleType) -> None:
    four, eight = causes.Trial("k", "four", 4), causes.Trial("k", "eight", 8)
    together = causes.Trial("k", "")

    def of(*rows: tuple[Any, str, str]) -> Any:
        return causes.evidence([causes.Outcome(trial, result, space=space) for trial, result, space in rows])

    assert of() == causes.Evidence()
    assert of((four, "pruned", ""), (eight, "refused", ""), (together, "not tried", "")) == causes.Evidence()
    fewer = of((four, "ran", ""), (eight, "illegal", ""), (together, "ran", ""))
    assert fewer == causes.Evidence(alone=True, together=False, narrow=True)
    assert of((four, "wrong", ""), (eight, "ran", "")).narrow is False
    newer = dataclasses.replace(eight, assembler=causes.NEWER)
    plain = dataclasses.replace(eight, descriptors=False)
    checked = dataclasses.replace(eight, sanitized=True)
    every = of((eight, "hang", ""), (newer, "ran", ""), (plain, "died", ""), (checked, "ran", "shared"))
    assert every == causes.Evidence(alone=True, newer=False, plain=True, space="shared")
    assert of((checked, "ran", "shared")).alone  # found without a fault


PYTHON = """#!{python}
import json, os, sys
trial, device, seconds = json.loads(sys.argv[-1])
assembler = os.environ.get("TRITON_PTXAS_PATH", "")
assert os.environ["CUDA_LAUNCH_BLOCKING"] == "1" and not os.path.exists(os.environ["TRITON_CACHE_DIR"])
print("case: assay repro 1")
fails = {fails}
if fails and trial["sanitized"]:
    print("========= Invalid __shared__ read of size 16 bytes")
if fails:
    print("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    sys.exit(1)
print('outcome: {{"result": "ran", "cases": 15, "words": ""}}')
"""
PTXAS = "#!/bin/sh\necho 'Cuda compilation tools, release 13.4, V13.4.59'\n"
SANITIZER = '#!/bin/sh\nwhile [ "$1" != "$STAND_IN" ]; do shift; done\nexec "$@"\n'


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with a newer ptxas and compute-sanitizer, and the name of a GPU."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"ptxas": PTXAS, "compute-sanitizer": SANITIZER}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(folder / "python"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "stand-in")
    return folder


@pytest.mark.parametrize(
    ("fails", "expected", "trials"),
    [
        ('trial["warps"] == 8 and not assembler', "COMPILER", 6),
        ('trial["warps"] == 8', "NARROW", 6),
        ('not trial["config"]', "TUNER", 3),
        ("False", "NOT_SEEN", 3),
    ],
)
def test_one_run_tells_the_causes_apart(
    causes: ModuleType,
    stand_ins: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails: str,
    expected: str,
    trials: int,
) -> None:
    from benchmarks.gpu import crashes
    from benchmarks.gpu.part import Part

    (stand_ins / "python").write_text(PYTHON.format(python=sys.executable, fails=fails))
    (stand_ins / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_ins / "python"))
    monkeypatch.setattr(crashes, "TUNERS", {"assay.mla_decode": crashes.TUNERS["assay.mla_decode"]})
    part = Part(False, "crashes", tmp_path / "out", workers=4)
    crashes.body(part, stand_ins / "ptxas", failing=True)
    assert f"assay.mla_decode: the cause that this speaks for: {getattr(causes, expected)}" in "\n".join(part.lines)
    assert bool(part.failed) == (expected != "NOT_SEEN")
    assert "ptxas newer: 13.4.59" in "\n".join(part.lines)
    assert part.tables[0].count("\n| assay.mla_decode |") == trials
    if expected == "NARROW":
        assert "| illegal (shared) |" in part.tables[0]
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.log")}
    again = Part(False, "crashes", tmp_path / "out", workers=4)
    crashes.body(again, stand_ins / "ptxas", failing=True)
    assert again.tables == part.tables
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.log")}
    capsys.readouterr()


def test_a_trial_that_hangs_or_dies_has_an_outcome(causes: ModuleType, tmp_path: Path) -> None:
    from benchmarks.gpu import crashes
    from benchmarks.gpu.run import Running

    def outcome(text: str, command: str = "exit 0", stopped: bool = False, in_time: bool = True) -> Any:
        running = Running("x", tmp_path / "x.log", 0.0).start(["sh", "-c", command], os.environ)
        running.process.wait()
        running.log.write_text(text)
        running.stopped = stopped
        return crashes._outcome(causes.Trial("k", ""), running, in_time=in_time)

    case = "case: assay repro 1\ncase: assay repro 2\n"
    assert dataclasses.astuple(outcome(case, stopped=True))[1:4] == ("hang", 2, "assay repro 2")
    assert outcome(case, stopped=True, in_time=False).result == "not tried"
    assert outcome(case, command="kill -SEGV $$").words == "signal 11: assay repro 2"
    assert outcome(case + "ImportError: no x\n", command="exit 1").words == "ImportError: no x"
    report = json.dumps({"result": "wrong", "cases": 2, "words": "contract"})
    assert outcome(f"{case}outcome: {report}\n") == causes.Outcome(causes.Trial("k", ""), "wrong", 2, "contract")


@pytest.mark.parametrize(("warps", "unpruned", "applied"), [(4, False, True), (8, True, True), (8, False, False)])
def test_a_trial_pins_one_configuration(causes: ModuleType, warps: int, unpruned: bool, applied: bool) -> None:
    """That of 8 warps is dropped by MLA's own pruning where a tile has 16 heads."""
    from assay.interpreter import faithful
    from assay.kernels.triton.mla_decode import _mla_kernel, mla_decode
    from benchmarks.gpu import crashes

    words = f"BLOCK_N=64 num_warps={warps} num_stages=2"
    assert words in [crashes._words(config) for config in _mla_kernel.configs]
    pinned = crashes._Pinned(mla_decode, _mla_kernel, words, unpruned)
    shapes = (2, 16, 64), (2, 16, 64), (4, 16, 64), (4, 16, 64)
    tensors = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes]
    arguments = *tensors, torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 20, dtype=torch.int32)
    with faithful():
        if applied:
            assert bool((pinned(*arguments) == 1).all())
        else:
            with pytest.raises(crashes._PrunedError):
                pinned(*arguments)
    assert pinned.applied == applied
    assert len(_mla_kernel.configs) > 1


@pytest.mark.slow
def test_a_trial_reports_its_cases_and_its_end(causes: ModuleType, tmp_path: Path) -> None:
    """The process of a trial, on the CPU."""
    trial = causes.Trial("assay.mla_decode", "")
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "gpu" / "crashes.py"), "--trial"]
    done = subprocess.run(
        [*command, json.dumps([dataclasses.asdict(trial), "cpu", 60])], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("case: ", "outcome: "))]
    assert [line.split()[0] for line in lines] == ["case:", "case:", "outcome:"], done.stdout + done.stderr
    assert json.loads(lines[-1].removeprefix("outcome: ")) == {"result": "ran", "cases": 2, "words": ""}
