"""Problems of every format are read: reference, arguments, sizes that may change, and a solution's entry."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from assay.judge import procedure
from assay.judge.problems.flashinfer_trace import Definition, Tensor, drawn, value_of
from assay.judge.problems.kernelbench import constants, rewritten
from assay.judge.problems.problem import ProblemError
from assay.judge.problems.reading import read, read_problem
from assay.judge.problems.sizes import edge, extent, limits, near, odd, small
from assay.judge.procedure import judge
from assay.judge.trace import traces, write_traces

from .judged.formats import (
    CONFIG,
    CONSTANTS,
    DEFINITION,
    FORWARD,
    INTO,
    REFERENCE,
    ROBUST,
    SUBMISSION,
    TASK,
    TASK_YML,
    WORKLOADS,
    filled,
    flashinfer_trace,
)
from .judged.kernels import LINEAR, linear


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return flashinfer_trace(tmp_path)


def test_constants_are_what_literals_set() -> None:
    assert constants(CONSTANTS) == {
        "N": 4096, "height": 128, "width": 128, "shape[0]": 64, "shape[1]": 3, "shape[2]": 5, "a": 7, "b": 9,
        "count": 12,
    }  # fmt: skip


def test_constants_are_rewritten_in_place() -> None:
    """Other values stand there, what follows from them follows, and lines keep their numbers.

    Those of a solution follow where they were the same: a number of another value is the solution's own.
    """
    text = rewritten(CONSTANTS, {"N": 6, "height": 5, "width": 5, "shape[1]": 8, "b": 2})
    namespace: dict[str, object] = {}
    exec(text, namespace)
    assert [namespace[name] for name in ("N", "width", "shape", "a", "b", "twice")] == [6, 5, (64, 8, 5), 7, 2, 12]
    assert len(text.splitlines()) == len(CONSTANTS.splitlines())
    assert rewritten("N = 64\nM = 5\n", {"N": 8, "M": 9}, {"N": 64, "M": 6}) == "N = 8\nM = 5\n"


def test_kernelbench(tmp_path: Path) -> None:
    filled(tmp_path, {"p.py": LINEAR, "s.py": linear("SOFTMAX\nreturn result")})
    problem, answer = read(tmp_path / "p.py", tmp_path / "s.py")
    assert (problem.format, problem.given[0], answer.entry.name) == (
        "KernelBench", {"batch": 96, "features": 64}, "ModelNew",
    )  # fmt: skip
    base = small(problem, problem.given[0], limits("quick")["small"])
    other = odd(problem, base, limits("quick")["small"])
    assert all(other.sizes[name] == base.sizes[name] + 1 for name in problem.changeable)
    for sizes in (base.sizes, other.sizes, problem.given[0]):
        instance = problem.make(sizes, 0)
        (x,) = instance.draw(1)
        assert instance.reference(x).shape == (sizes["batch"], sizes["features"])
    assert torch.equal(problem.make(base.sizes, 3).draw(5)[0], problem.make(base.sizes, 4).draw(5)[0])


def test_sizes_beyond_a_machine_are_asked_without_memory(tmp_path: Path) -> None:
    filled(tmp_path, {"p.py": LINEAR.replace("batch = 96", "batch = 2 ** 32")})
    problem = read_problem(tmp_path / "p.py")
    assert extent(problem, problem.given[0]).elements > 2**38
    choice = near(problem, problem.given[0], limits("quick")["given"])
    assert (choice.kind, choice.sizes["features"]) == ("near", 64)
    assert choice.extent.within(limits("quick")["given"])


def test_a_gpu_takes_stated_sizes_that_a_cpu_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KernelBench product, by the goldens that a GPU evaluates; the solution runs where it is judged."""
    text = LINEAR.replace("batch = 96", "batch = 2048").replace("features = 64", "features = 2048")
    filled(tmp_path, {"p.py": text, "s.py": linear("return result")})
    problem = read_problem(tmp_path / "p.py")
    assert problem.given[0] == {"batch": 2048, "features": 2048}
    kinds = [near(problem, problem.given[0], limits("quick", device)["given"]).kind for device in ("cpu", "cuda:0")]
    assert kinds == ["near", "given"]
    asked = []
    monkeypatch.setattr(procedure, "evaluating_on", lambda device: asked.append(device) or nullcontext())
    monkeypatch.setattr(procedure, "limits", lambda effort, device="cpu": asked.append(device) or limits(effort))
    filled(tmp_path, {"small.py": LINEAR})
    judge(tmp_path / "small.py", tmp_path / "s.py", effort="quick", timed=False)
    assert set(asked) == {"cpu"}


def test_flashinfer_trace(trace: Path) -> None:
    problem, answer = read(trace, trace)
    assert (problem.format, problem.changeable, answer.entry.style) == ("FlashInfer Trace", ("T",), "destination")
    assert [sizes["T"] for sizes in problem.given] == [40, 9]
    assert not problem.wanted({**problem.given[0], "T": 5000})
    instance = problem.make({**problem.given[0], "T": 6}, 0)
    x, s = instance.draw(0)
    assert (x.shape, s, instance.results) == ((6, 24), 0.5, (("y", (6, 24), torch.float32),))


def test_a_verdict_is_written_back_as_a_trace(trace: Path, tmp_path: Path) -> None:
    """With the format's statuses, and ratio, radius and repeat line in `extra`."""
    verdict = judge(trace, trace / "solution.json", effort="quick")
    assert verdict.outcome == "PASS", str(verdict)
    (line,) = write_traces(tmp_path / "traces.jsonl", verdict).read_text().splitlines()
    found = json.loads(line)
    assert (found["definition"], found["solution"], found["workload"]["uuid"]) == ("scaled_rows", "mine", "w40")
    evaluation = found["evaluation"]
    assert evaluation["status"] == "PASSED"
    assert 0 < evaluation["correctness"]["extra"]["ratio"] <= 1
    assert evaluation["correctness"]["extra"]["radius"] > 0
    assert evaluation["correctness"]["extra"]["repro"].startswith("assay judge ")
    assert evaluation["performance"]["latency_ms"] > 0


def test_a_workload_that_was_not_judged_is_listed_and_has_no_trace(trace: Path) -> None:
    definition = {**DEFINITION, "constraints": []}
    (trace / "definition.json").write_text(json.dumps(definition))
    sizes = {"huge": 2**22, "a": 40, "b": 9, "c": 5}
    lines = [{**WORKLOADS[0], "uuid": name, "axes": {"T": rows}} for name, rows in sizes.items()]
    (trace / "workload.jsonl").write_text("\n".join(json.dumps({"workload": one}) for one in lines))
    verdict = judge(trace, trace / "solution.json", effort="quick")
    assert verdict.outcome == "PASS", str(verdict)
    assert traces(verdict) == []
    assert [name for name in sizes if any(f"({name})" in words for words in verdict.not_judged)] == list(sizes)
    assert "was" in verdict.not_judged[0]
    (trace / "workload.jsonl").write_text("\n".join(json.dumps({"workload": one}) for one in lines[1:]))
    found = traces(judge(trace, trace / "solution.json", seconds=0.1))
    assert [(one["workload"]["uuid"], one["evaluation"]["status"]) for one in found] == [
        (name, "PASSED") for name in ("a", "b", "c")
    ]
    assert [one["evaluation"]["performance"]["latency_ms"] > 0 for one in found] == [True, False, False]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (("y.copy_(z / z.sum(1, keepdim=True))", "y.copy_(z)"), "INCORRECT_NUMERICAL"),
        (("z / z.sum(1, keepdim=True)", "z @ z"), "RUNTIME_ERROR"),
        (("y.copy_(z / z.sum(1, keepdim=True))", "pass"), "INCORRECT_NUMERICAL"),
    ],
)
def test_a_wrong_solution_has_the_formats_status(trace: Path, change: tuple[str, str], status: str) -> None:
    content = json.loads((trace / "solution.json").read_text())
    content["sources"][0]["content"] = INTO.replace(*change)
    (trace / "solution.json").write_text(json.dumps(content))
    verdict = judge(trace, trace / "solution.json", effort="quick", timed=False)
    assert verdict.outcome == "FAIL", str(verdict)
    assert [found["evaluation"]["status"] for found in traces(verdict)] == [status]


def test_a_definition_without_workloads_is_read_as_far_as_it_says(tmp_path: Path) -> None:
    """Axes without a size are variable, constraints set usual sizes, and the reference may have a name of its own."""
    content = {
        "name": "any",
        "axes": {"T": {"type": "var"}, "S": {"type": "var"}, "page": {"type": "const"}},
        "constraints": ["S > 20", "T == S + 1"],
        "inputs": {"probs": {"shape": ["T", "S"], "dtype": "float32"}},
        "outputs": {"y": {"shape": ["T"], "dtype": "float32"}},
        "reference": "def _twice(x):\n    return 2 * x\n\ndef _rows(probs):\n    return _twice(probs.sum(-1))",
    }
    (tmp_path / "any.json").write_text(json.dumps(content))
    problem = read_problem(tmp_path / "any.json")
    assert {name: problem.given[0][name] for name in ("T", "S")} == {"T": 22, "S": 21}
    instance = problem.make(problem.given[0], 0)
    (probs,) = instance.draw(0)
    assert torch.allclose(instance.reference(probs), torch.full((22,), 2.0))


def test_expressions_of_axes() -> None:
    assert value_of("(a + 7) // 8 * 8 - b % 2", {"a": 9, "b": 3}) == 15
    with pytest.raises(ProblemError, match="expected an expression over a, got"):
        value_of("__import__('os')", {"a": 1})


def test_reference_py(tmp_path: Path) -> None:
    """Benchmarks and tests are the given sizes, the seed is none; the answer gets the data as one argument."""
    files = {"reference.py": REFERENCE, "task.yml": TASK_YML, "task.py": TASK}
    filled(tmp_path, {**files, "utils.py": "def checker(f):\n    return f\n", "submission.py": SUBMISSION})
    problem, answer = read(tmp_path, tmp_path / "submission.py")
    assert [dict(sizes) for sizes in problem.given] == [
        {"size": 40, "wide": False}, {"size": 17, "wide": False}, {"size": 33, "wide": True},
    ]  # fmt: skip
    assert problem.changeable == ("size",)
    assert set(answer.files) == {"submission.py", "task.py", "utils.py"}
    verdict = judge(tmp_path, tmp_path / "submission.py", effort="quick", timed=False)
    assert verdict.outcome == "PASS", str(verdict)


def test_robust_kbench(tmp_path: Path) -> None:
    """The lists of the configuration are the given sizes; the solution stands for the function of the module."""
    filled(tmp_path, {"func_forward.py": ROBUST, "config_forward.json": CONFIG, "forward.py": FORWARD})
    problem, answer = read(tmp_path, tmp_path)
    assert [(sizes["batch"], sizes["features"]) for sizes in problem.given] == [(24, 48), (3, 16), (5, 16)]
    assert problem.changeable == ("features", "batch")
    assert answer.entry.name == "forward"
    verdict = judge(tmp_path, tmp_path, effort="quick", timed=False)
    assert verdict.outcome == "PASS", str(verdict)


def test_what_is_no_problem_is_told_in_one_line(tmp_path: Path) -> None:
    filled(tmp_path, {"p.py": LINEAR, "s.py": "x = 1\n", "text.md": "# no"})
    for problem, solution, words in (
        ("none.py", "s.py", "expected a problem there, got no such file"),
        ("text.md", "s.py", "expected a KernelBench file"),
        ("p.py", "none.py", "expected a solution there, got no such file"),
        ("p.py", "s.py", "expected a class ModelNew, got none"),
    ):
        with pytest.raises(ProblemError, match=words) as caught:
            judge(tmp_path / problem, tmp_path / solution)
        assert "\n" not in str(caught.value)


SEGMENTS = """
import torch

def run(x, indptr):
    out = torch.zeros(indptr.shape[0] - 1, x.shape[1])
    for i in range(indptr.shape[0] - 1):
        first, last = int(indptr[i].item()), int(indptr[i + 1].item())
        if last > first:
            out[i] = x[first:last].sum(0)
    return out
"""


def test_a_reference_that_looks_at_numbers_is_asked_with_some(tmp_path: Path) -> None:
    """Loops over offsets can't be followed without numbers; sizes are found all the same, and constraints kept."""
    definition = {
        "name": "segments",
        "op_type": "sum",
        "axes": {
            "total": {"type": "var"}, "batch": {"type": "var"}, "len_indptr": {"type": "var"},
            "H": {"type": "const", "value": 8},
        },
        "inputs": {
            "x": {"shape": ["total", "H"], "dtype": "float32"},
            "indptr": {"shape": ["len_indptr"], "dtype": "int32"},
        },
        "outputs": {"y": {"shape": ["batch", "H"], "dtype": "float32"}},
        "reference": SEGMENTS,
        "constraints": ["len_indptr == batch + 1", "total == indptr[-1].item()"],
    }  # fmt: skip
    random = {"x": {"type": "random"}, "indptr": {"type": "random"}}
    workload = {"uuid": "w", "axes": {"total": 50, "batch": 6, "len_indptr": 7}, "inputs": random}
    solution = {
        "name": "mine",
        "spec": {"language": "python", "entry_point": "main.py::run", "destination_passing_style": False},
        "sources": [{"path": "main.py", "content": SEGMENTS.replace("x[first:last].sum(0)", "x[first:last].T.sum(1)")}],
    }
    filled(tmp_path, {"definition.json": definition, "workload.jsonl": json.dumps(workload), "s.json": solution})
    verdict = judge(tmp_path, tmp_path / "s.json", effort="quick", timed=False)
    assert verdict.outcome == "PASS", str(verdict)
    assert any(words.startswith("small: total=") for words in verdict.sizes)


def test_a_function_has_its_own_order_of_arguments(tmp_path: Path) -> None:
    text = ROBUST.replace("fn(x, self.weight, self.eps)", "fn(x, eps=self.eps, weight=self.weight)")
    files = {"func_forward.py": text, "config_forward.json": CONFIG, "forward.py": FORWARD}
    folder = filled(tmp_path, files)
    problem, _ = read(folder, folder)
    x, weight, eps = problem.make(problem.given[0], 0).draw(0)
    assert (x.ndim, weight.ndim, eps) == (2, 1, 1e-5)
    assert judge(folder, folder, effort="quick", timed=False).outcome == "PASS"


def test_sizes_one_more_than_blocks_are_tried(tmp_path: Path) -> None:
    """129 of the size that is given largest, 33 of others, none beyond what was given; what is lost there is seen."""
    text = LINEAR.replace("batch = 96", "batch = 256").replace("features = 64", "features = 48")
    (tmp_path / "problem.py").write_text(text)
    problem = read_problem(tmp_path / "problem.py")
    given, limit = problem.given[0], limits("quick")
    base = small(problem, given, limit["small"])
    assert base is not None
    choice = edge(problem, base, given, limit["wide"])
    assert (choice.kind, choice.sizes["batch"], choice.sizes["features"]) == ("edge", 129, 33)
    body = "SOFTMAX\nif x.shape[0] > 32 and x.shape[0] % 32 == 1:\n    result[-1] = 0\nreturn result"
    (tmp_path / "solution.py").write_text(linear(body))
    assert judge(tmp_path / "problem.py", tmp_path / "solution.py", effort="quick", timed=False).outcome == "FAIL"


def test_integers_are_indices_where_a_word_of_their_name_says_so() -> None:
    """`width` and `hidden` are none; indices lie within the smallest axis of pages or experts."""
    for names, indices in (
        (("expert_ids", "kv_indices", "idx", "page_table"), True),
        (("width", "hidden", "valid", "kind", "grid", "talent"), False),
    ):
        for name in names:
            content = Definition("any", {}, {name: Tensor(["n"], "int32")}, {}, "")
            (found,) = drawn(content, {}, {"n": 400, "num_experts": 4}, {}, Path())
            assert bool(((found >= 0) & (found < 4)).all()) == indices, name
            assert bool((found < 0).any()) != indices, name
