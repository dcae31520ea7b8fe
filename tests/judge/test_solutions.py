"""What a verdict on a solution says beside cheats: sizes, speed, trials again, errors, and lists of solutions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli.main import main
from assay.judge import batch
from assay.judge.solution import weights
from assay.judge.solution.host import overlaps
from assay.judge.solution.inputs import kind_of, redrawn
from assay.runtime import results
from assay.runtime.process import Lost
from assay.verify import Contract

from .conftest import Judged
from .judged.kernels import AFFINE, LINEAR, RELU, linear, solution

GOOD = linear("SOFTMAX\nreturn result")
WRONG = linear("SOFTMAX\nreturn result * 1.001")


def test_a_right_solution_passes_with_its_speed(judged: Judged) -> None:
    verdict = judged(GOOD, timed=True)
    assert verdict.outcome == "PASS", str(verdict)
    assert "given: batch=96, features=64" in verdict.sizes
    assert verdict.speed.factor == verdict.speed.reference.median / verdict.speed.solution.median
    assert verdict.phases["timed"] > 0
    content = json.loads(verdict.to_line())
    assert content["speed"]["factor"] == verdict.speed.factor
    assert content["outcome"] == "PASS"


def test_a_wrong_solution_fails_with_a_line_that_repeats_it(judged: Judged) -> None:
    verdict = judged(WRONG)
    assert verdict.outcome == "FAIL"
    assert verdict.aspects["numbers"].status == "broken"
    line = verdict.aspects["numbers"].repro.partition("--trial ")[2].strip("'")
    again = judged(WRONG, trial=line)
    assert again.failure.ratio == verdict.failure.ratio
    assert again.cases == 1


FORKS = """import os, time
for _ in range(40):
    if os.fork() == 0:
        time.sleep(600)
time.sleep(2.0)
SOFTMAX
return result"""


def test_processes_without_end_are_a_crash(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.judge.solution.solution_process.MOST_PROCESSES", 30)
    verdict = judged(linear(FORKS))
    assert verdict.outcome == "FAIL"
    assert (verdict.failure.kind, verdict.failure.message) == ("crash", "it had started more than 30 processes")


def test_tensors_that_share_memory_are_found_among_thousands() -> None:
    rows, vector = torch.ones(2000, 4), torch.ones(3)
    some = [rows[0], vector, rows[2:], torch.ones(0)]
    assert overlaps(some, [rows[:3, 1], vector[2:], rows[0]]) == [[0, 0], [0, 2], [1, 1], [2, 0]]
    assert overlaps([], some) == overlaps(some, []) == []
    begun = time.process_time()
    assert overlaps(list(rows), list(rows)) == [[k, k] for k in range(2000)]
    assert time.process_time() - begun < 2.0


def test_a_contract_is_what_solutions_are_held_to(judged: Judged) -> None:
    """What bfloat16 products give is wrong by default, and right where the contract says so."""
    body = (
        "y = (x.bfloat16() @ self.linear.weight.t().bfloat16()).float() + self.linear.bias\nreturn torch.softmax(y, 1)"
    )
    assert judged(linear(body)).outcome == "FAIL"
    wide = Contract(accumulate="bfloat16", compute="bfloat16")
    assert "numbers" not in judged(linear(body), contract=wide).broken


@pytest.mark.parametrize(
    ("solution", "kind"),
    [
        (linear("raise RuntimeError('no')"), "crash"),
        (linear("return os._exit(3)", "import os"), "crash"),
        ("def broken(:\n    class ModelNew", "crash"),
        (linear("SOFTMAX\nreturn result.t().contiguous()"), "shape"),
    ],
)
def test_what_a_solution_dies_of_is_told(judged: Judged, solution: str, kind: str) -> None:
    verdict = judged(solution)
    assert verdict.outcome == "FAIL"
    assert verdict.failure.kind in (kind, "conduct")


def test_a_solution_that_hangs_is_ended(judged: Judged) -> None:
    failure = judged(linear("while True: pass"), timeout=1.0).failure
    assert failure.kind == "timeout"


def test_a_solution_for_the_given_sizes_alone_is_judged_at_these(judged: Judged) -> None:
    """It says so at others; the verdict tells, and doesn't hold it against it. All calls are made at the given ones."""
    body = "if tuple(x.shape) != (96, 64):\n    raise ValueError('made for 96 x 64')\nSOFTMAX\nreturn result"
    verdict = judged(linear(body))
    assert verdict.outcome == "PASS", str(verdict)
    assert "it takes no other sizes (ValueError: made for 96 x 64" in verdict.note
    assert verdict.aspects["range"].status == "kept"


@pytest.mark.parametrize(
    "solution",
    [
        linear("assert x.shape == (batch, features)\nSOFTMAX\nreturn result", "batch = 96\nfeatures = 64"),
        GOOD.replace("self.linear", "self.layer"),
    ],
    ids=["constants of its own", "other names of weights"],
)
def test_constants_and_weights_follow(judged: Judged, solution: str) -> None:
    verdict = judged(solution)
    assert verdict.outcome == "PASS", str(verdict)
    assert verdict.aspects["numbers"].status == "kept"


PLAIN = """
import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        MAKES

    def forward(self, x):
        return RESULT
"""


@pytest.mark.parametrize(
    ("makes", "result", "outcome"),
    [
        ("self.weight = torch.rand(features) + 0.5", "x * self.weight", "FAIL"),
        ("self.kept = {'w': torch.rand(features) + 0.5}", "x * self.kept['w']", "FAIL"),
        ("self.w, self.bias = torch.rand(features) + 0.5, torch.zeros(features)", "x * self.w + self.bias", "PASS"),
        (
            "self.all = torch.stack([torch.rand(features) + 0.5, torch.zeros(features)])",
            "x * self.all[0] + self.all[1]",
            "PASS",
        ),
    ],
    ids=["dropped", "in a dict", "honest", "together"],
)
def test_weights_that_are_no_parameters_are_redrawn(judged: Judged, makes: str, result: str, outcome: str) -> None:
    """Plain tensors get other numbers too; a bias of zeros that is left out is seen, one made part of another isn't."""
    text = PLAIN.replace("MAKES", makes).replace("RESULT", result)
    verdict = judged(text, AFFINE)
    assert verdict.outcome == outcome, str(verdict)
    assert ("weights-kept" in [cheat.name for cheat in verdict.cheats]) == (outcome == "FAIL")


def test_constant_weights_are_redrawn() -> None:
    state = {"a": torch.zeros(8), "b": torch.ones(8), "c": torch.arange(8.0), "n": torch.tensor(3)}
    found = weights.redrawn(state, 1)
    assert len(found["a"].unique()) == 8
    assert float((found["b"] - 1).abs().max()) <= 0.25
    assert torch.equal(found["c"], state["c"])
    assert torch.equal(found["n"], state["n"])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.randn(8, 8), "free"),
        (lambda: torch.triu(torch.rand(8, 8)), "scalable"),
        (lambda: (lambda a: a + a.T)(torch.rand(8, 8)), "scalable"),
        (lambda: torch.randint(0, 2, (8, 8)).float(), "fixed"),
        (lambda: torch.softmax(torch.randn(8, 8), 1), "fixed"),
        (lambda: torch.softmax(torch.randn(4, 9), 0), "fixed"),
        (lambda: torch.softmax(torch.randn(64, 9), 1).bfloat16(), "fixed"),
        (lambda: torch.eye(8), "fixed"),
        (lambda: torch.randint(0, 9, (8,)), "fixed"),
    ],
    ids=["normal", "triangular", "symmetric", "labels", "shares", "shares-down", "shares-bf16", "constant", "integers"],
)
def test_inputs_stay_what_a_problem_promises(make: object, kind: str) -> None:
    torch.manual_seed(1)
    first, second = make(), make()
    found = kind_of(first, second)
    assert found.name == kind
    for scheme in ("scaled", "mixed", "normal"):
        (made,) = redrawn((first,), [found], scheme, 3, signs=True)
        assert made.shape == first.shape
        if kind == "fixed":
            assert torch.equal(made, first)
        elif kind == "scalable":
            assert torch.equal(made == 0, first == 0)
            assert torch.equal(made == made.mT, first == first.mT)
        else:
            assert not torch.equal(made, first)


def _list(folder: Path, count: int) -> Path:
    """A list of so many lines, every second of which is wrong, and one that can't be read."""
    (folder / "problem.py").write_text(LINEAR)
    lines = []
    for number in range(count):
        (folder / f"s{number}.py").write_text(f"# {number}\n" + (WRONG if number % 2 else GOOD))
        lines.append({"problem": "problem.py", "solution": f"s{number}.py", "id": number})
    lines.append({"problem": "problem.py", "solution": "none.py", "id": count})
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder / "list.jsonl"


def test_parts_of_a_list_make_the_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    list_, out = _list(tmp_path, 1), tmp_path / "out.jsonl"
    command = ("judge", "--list", str(list_), "--jobs", "1", "--no-timing", "--effort", "quick", "--out", str(out))
    assert main((*command, "--part", "1/2")) == 0
    assert main((*command, "--part", "2/2")) == 1
    assert sorted(json.loads(line)["id"] for line in out.read_text().splitlines()) == [0, 1]
    capfd.readouterr()
    assert main(command) == 0
    assert "2 of 2 verdicts were in" in capfd.readouterr().err
    assert main((*command, "--part", "3/2")) == 2


def test_an_item_whose_process_is_lost_is_judged_again(tmp_path: Path) -> None:
    (item,) = batch.items(_list(tmp_path, 0), {})
    out = tmp_path / "out.jsonl"

    class Losing:
        """An engine that loses the first so many of its tasks' processes."""

        def __init__(self, count: int) -> None:
            self.left = count

        def run(self, task: Any, items: Any, until: float = 0.0) -> Any:
            for place, _ in enumerate(items):
                self.left -= 1
                yield place, Lost("crash", "killed") if self.left >= 0 else {"outcome": "PASS"}

    ((_, line),) = batch.run([item], Losing(1))
    assert line["outcome"] == "PASS"
    ((_, line),) = batch.run([item], Losing(2))
    assert "was lost: killed" in line["error"]
    batch.add(out, line)
    assert batch.stored(out) == set()
    batch.add(out, {"key": item.key, "outcome": "PASS"})
    assert batch.stored(out) == {item.key}


def test_a_list_that_was_killed_goes_on(tmp_path: Path) -> None:
    """Each verdict is in the file once, whatever was on its way when the run ended; half a line is cut off."""
    list_, out = _list(tmp_path, 2), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "assay.cli.main", "judge", "--list", str(list_), "--jobs", "1", "--out", str(out)]
    command += ["--no-timing", "--effort", "quick"]
    first = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out.exists() and out.read_bytes().count(b"\n") >= 1) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    with out.open("ab") as file:
        file.write(b'{"key":"half')
    assert main(command[3:]) == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted((line["id"], line["outcome"]) for line in lines) == [(0, "PASS"), (1, "FAIL"), (2, "ERROR")]
    assert "expected a solution there" in next(line["error"] for line in lines if line["id"] == 2)


def test_two_runs_add_a_verdict_once(tmp_path: Path) -> None:
    """One whose process was lost is added beside it."""
    out = tmp_path / "out.jsonl"
    for line in ({"key": "a", "outcome": "ERROR", "lost": True}, *[{"key": "a", "outcome": "PASS"}] * 2):
        batch.add(out, line)
    assert [json.loads(line)["outcome"] for line in out.read_text().splitlines()] == ["ERROR", "PASS"]


def test_a_verdict_of_another_version_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (item,) = batch.items(_list(tmp_path, 0), {})
    keys = {item.key}
    digest, versions = results.own_sources("assay.judge.batch")
    assert "torch" in versions
    for changed in ((digest, versions | {"torch": "9"}), ("another", versions)):
        monkeypatch.setattr(results, "own_sources", lambda *modules, changed=changed: changed)
        keys.add(item.key)
    assert len(keys) == 3


def test_the_command_prints_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text, its status 1 where the solution fails; 2 and one line where it can't be judged."""
    _list(tmp_path, 2)
    problem, solution = str(tmp_path / "problem.py"), str(tmp_path / "s1.py")
    assert main(["judge", problem, solution, "--effort", "quick", "--no-timing"]) == 1
    assert "numbers     broken" in capsys.readouterr().out
    assert main(["judge", problem]) == 2
    assert "expected PROBLEM and SOLUTION" in capsys.readouterr().err
    assert main(["judge", problem, str(tmp_path / "none.py")]) == 2
    assert "expected a solution there, got no such file" in capsys.readouterr().err


RELU_IN_TRITON = """
import triton
import triton.language as tl


@triton.jit
def relu(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, tl.maximum(x, 0.0), mask=i < n)
"""


def test_a_triton_solution_is_interpreted_where_there_is_no_gpu(judged: Judged) -> None:
    call = "relu[(triton.cdiv(n, 256),)](x, y, n, BLOCK=256)"
    body = f"x, n = x.cuda(), x.numel()\ny = torch.empty_like(x)\n{call}\nreturn y"
    right = judged(solution(RELU, body, RELU_IN_TRITON), RELU, timed=True)
    assert right.outcome == "PASS", str(right)
    assert right.speed is not None
    assert right.speed.factor is None
    assert "interpreted on the CPU, whose times tell nothing" in str(right)
    text = solution(RELU, body.replace("y, n, BLOCK", "y, n - n % 128, BLOCK"), RELU_IN_TRITON)
    wrong = judged(text, RELU)
    assert wrong.outcome == "FAIL"
    assert wrong.aspects["memory"].failure.kind == "unwritten_output"
