"""Times of solutions: by a clock that none reaches, of calls that none can foresee or tell from others."""

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from assay.judge import timing
from assay.judge.solution import host
from assay.judge.solution.inputs import Kind, may_roll, rolled
from assay.judge.solution.solution_process import SolutionHost, SolutionProcess
from assay.judge.speed import Series, Stopwatch, compared
from assay.judge.verdict import SolutionVerdict

from .conftest import Judged
from .judged.kernels import RELU, linear, solution

CLOCK = """
import sys, time
sys.modules['__main__']._clock = lambda: 1e-9 * time.perf_counter()
"""
HOST = """
host = next(kind for kind in object.__subclasses__() if kind.__name__ == '_Host')
honest = host.time

def told(self, ask):
    answer, content = honest(self, ask)
    content["seconds"] = [1e-8 * seconds for seconds in content["seconds"]]
    return answer, content

host.time = told
"""
LATER = """
def later(out, result):
    time.sleep(0.01)
    out.copy_(result)
"""


def names(verdict: SolutionVerdict) -> set[str]:
    return {cheat.name for cheat in verdict.cheats}


@pytest.mark.parametrize("before", [CLOCK, HOST], ids=["clock", "host"])
def test_a_replaced_clock_is_named_however_short_the_calls(judged: Judged, before: str) -> None:
    verdict = judged(linear("SOFTMAX\nreturn result", before), timed=True)
    assert verdict.outcome == "FAIL"
    assert "patched-timer" in names(verdict), str(verdict)
    assert verdict.speed.factor is not None
    assert verdict.speed.factor < 20


def _watch(told: float, passed: float, busy: float = 0.0) -> Stopwatch:
    """One side whose calls took this by its own clock, of series of 100 that took this by ours."""
    process = cast("Any", None)
    series = [Series(100, 100 * passed, 100 * busy, 100 * told) for _ in range(3)]
    return Stopwatch(process, ["a"], [1], [0], seconds=[told] * 300, series=series)


@pytest.mark.parametrize(
    ("told", "passed", "factor"), [(1e-4, 4e-3, 38.0), (1e-10, 1e-3, 1e4), (9e-4, 1.2e-3, 1.0), (1e-3, 1.3e-3, 1.0)]
)
def test_what_a_clock_leaves_out_beside_the_references_counts(told: float, passed: float, factor: float) -> None:
    own = _watch(told, passed)
    compared(own, _watch(1e-3, 1.2e-3), on_cpu=True)
    assert bool(own.cheats) == (factor > 1)
    assert own.seconds[0] >= 0.9 * factor * told


def test_what_a_busy_machine_delays_once_is_timed_again(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([1e-3, 0.0])
    monkeypatch.setattr(timing, "hidden", lambda own, reference: next(found))
    verdict = judged(linear("SOFTMAX\nreturn result"), timed=True)
    assert verdict.outcome == "PASS", str(verdict)
    assert next(found, None) is None


def test_threads_count_where_the_reference_has_one() -> None:
    own = _watch(1e-3, 1.2e-3, busy=4.8e-3)
    (note,) = compared(own, _watch(1e-3, 1.2e-3), on_cpu=True)
    assert "4 threads" in note
    assert own.seconds[0] == pytest.approx(4e-3)
    own = _watch(1e-3, 1.2e-3, busy=1.2e-3)
    assert compared(own, _watch(1e-3, 1.2e-3), on_cpu=True) == []
    assert own.seconds[0] == 1e-3


def test_remembered_inputs_are_no_help(judged: Judged) -> None:
    """A solution that keeps all inputs, and those of the seeds that can be guessed, has each call's work to do."""
    body = """
    for old, kept in known:
        if old.shape == x.shape and torch.equal(old, x):
            return kept.clone()
    time.sleep(0.005)
    SOFTMAX
    known.append((x.clone(), result))
    return result.clone()
    """
    verdict = judged(linear(body, "import time\nknown = []"), timed=True)
    assert verdict.speed.solution.median > 5, str(verdict)


@pytest.mark.parametrize("when", ["not gc.isenabled()", "self.calls > 10"], ids=["collector", "count"])
def test_what_is_filled_in_later_by_timed_calls_alone_is_seen(judged: Judged, when: str) -> None:
    body = f"""
    self.calls = getattr(self, 'calls', 0) + 1
    SOFTMAX
    if not ({when}):
        return result
    out = torch.zeros_like(x)
    Thread(target=later, args=(out, result)).start()
    return out
    """
    verdict = judged(linear(body, "import gc, time\nfrom threading import Thread\n" + LATER), timed=True)
    assert verdict.outcome == "FAIL"
    assert names(verdict) & {"late-results", "background-work", "only-untimed"}, str(verdict)


def test_rolled_inputs_are_the_same_on_both_sides() -> None:
    arguments = (torch.arange(6.0).reshape(2, 3), 3, torch.arange(4), torch.arange(6.0).reshape(2, 3).T)
    kinds = [Kind("free", True), Kind("fixed", False), Kind("fixed", False), Kind("free", True)]
    places = may_roll(arguments, kinds)
    assert places == [0]
    found = rolled(arguments, places, 8)
    assert found[0].tolist() == [[4, 5, 0], [1, 2, 3]]
    assert found[1] == 3
    assert torch.equal(found[2], arguments[2])


NESTED = RELU.replace("return torch.relu(x)", "y = torch.relu(x)\n        return y, (y + 1, None, [y * 2])")


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ("y, (y + 1, None, [y * 2])", "PASS"),
        ("[y, [y + 1, y * 2]]", "PASS"),
        ("y, y + 1, y * 2", "FAIL"),
        ("y, (y + 1, y * 3)", "FAIL"),
        ("y, (y + 1, None)", "FAIL"),
    ],
)
def test_results_may_stand_in_tuples_of_tuples(judged: Judged, result: str, outcome: str) -> None:
    verdict = judged(solution(NESTED, f"y = x.clamp(min=0)\nreturn {result}"), NESTED, timed=True)
    assert verdict.outcome == outcome, str(verdict)
    assert names(verdict) == set()


@pytest.mark.parametrize(
    "answer",
    ["{}", "{'seconds': 3, 'seen': {'dict': {}}}", "{'seconds': ['x'], 'seen': 1}", "[1]", "'no'", "{'outputs': [1]}"],
)
def test_answers_of_no_form_are_a_verdict(judged: Judged, answer: str) -> None:
    """A solution that takes over its process and answers with anything: it fails in one line, and nothing is raised."""
    before = f"""
    import json
    kind = next(kind for kind in object.__subclasses__() if kind.__name__ == 'Answer')
    kind.packed = lambda self, value: (lambda head: len(head).to_bytes(8, 'little') + head)(
        json.dumps({answer}).encode())
    """
    verdict = judged(linear("SOFTMAX\nreturn result", before), timed=True)
    assert verdict.outcome == "FAIL"
    assert "\n" not in verdict.failure.message


def test_processor_time_of_a_process_can_be_read() -> None:
    from assay.judge.problems.problem import Answer, Entry

    answer = Answer("none", {}, "none.py", Entry("none"))
    with SolutionHost("auto", Path("problems"), gpus=False) as host, SolutionProcess(answer, host) as process:
        assert 0 <= process.processor_seconds < 60


def test_memory_that_is_handed_in_is_made_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*shape: Any, **how: Any) -> torch.Tensor:
        time.sleep(0.05)
        return torch.empty(*shape, **how)

    monkeypatch.setattr(host, "NEW", slow)
    monkeypatch.setattr(host.watched, "active", False)
    made = host._Host()
    made.style, made.callable = "destination", lambda x, y: y.copy_(x)
    made.stored["a"] = (torch.ones(3),)
    ask = {"names": ["a"], "seeds": [1], "rolled": [0], "scaled": [0], "into": ("y",)}
    ask["changes"] = [(1, 1.0), (2, 0.75)]
    _, content = made.time({**ask, "results": [((3,), torch.float32)]})
    assert max(content["seconds"]) < 0.05
    assert [len(part) for part in made.timed[0][:2]] == [1, 1]
    assert [call[0][0].tolist() for call in made.timed] == [[1, 1, 1], [0.75, 0.75, 0.75]]
