"""Problems, solutions and lists by anybody: one line for each that can't be read, and sizes found in any text."""

import ast
import json
import re
import shlex
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.cli.main import main
from assay.judge import batch
from assay.judge.problems import flashinfer_trace, reference_folder
from assay.judge.problems.expressions import value_of
from assay.judge.problems.kernelbench import constants, endless, rewritten
from assay.judge.problems.problem import ProblemError, ProblemTimeout
from assay.judge.problems.reading import read, read_problem
from assay.judge.problems.running import watched
from assay.judge.problems.sizes import limits, near, small
from assay.judge.reference_model import ReferenceModel
from assay.judge.report import Options, Report
from assay.judge.solution.source import imported_graders, is_pasted, patches
from assay.judge.solution.trials import Trial
from assay.runtime.errors import AssayError
from assay.runtime.process import Lost
from assay.verify import Contract

from .judged.formats import DEFINITION, INTO
from .judged.kernels import LINEAR, RELU, linear

GOOD = linear("SOFTMAX\nreturn result")

LINE_ENDS = st.sampled_from(["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
"""JSON and what Python writes beyond it: NaN, infinities."""


@given(st.lists(LINE_ENDS, max_size=5).map("".join), LINE_ENDS, st.text(max_size=8))
def test_sizes_are_rewritten_where_the_tree_says_whatever_ends_lines(ends: str, end: str, words: str) -> None:
    """Comments, strings and constants stay but for the sizes."""
    comment = ends.replace("\n", "").replace("\r", "")
    text = f"# a{comment}page\nR = 64; T = {ends + words!r}{end}N = (2 +\n 3)\nX = R"
    try:
        ast.parse(text)
    except SyntaxError:  # a form feed amid a line
        return
    result = rewritten(text, {"R": 1000, "N": 7})
    assert constants(result) == {**constants(text), "R": 1000, "N": 7}
    before, after = (ast.dump(ast.parse(one)) for one in (text, result))
    assert re.sub("value=64", "value=1000", before, count=1).split("targets")[2] == after.split("targets")[2]


def test_constants_are_folded_once_and_within_bounds() -> None:
    """Forty levels take no time; what is too large, too deep or no size is left as it is."""
    nested = "1"
    for _ in range(40):
        nested = f"1+({nested})"
    started = time.monotonic()
    assert constants(f"Q = {nested}\nP = 9**9**9**9\nS = 1 << 2**50\nD = 7 // 0\nE = 2**10 * 3\nM = 2**50") == {
        "Q": 41,
        "E": 3072,
    }
    assert rewritten(f"Q = {nested}\n", {"Q": 5}) == "Q = 5\n"
    assert constants("Q = " + "+".join("1" * 300)) == {}
    assert time.monotonic() - started < 5.0


def test_numbers_that_python_never_finishes_are_named() -> None:
    assert endless("X = 9**64**8\n") == "9 ** 64 ** 8"
    assert endless("X = [1 << (1 << 40)]\n") == "1 << (1 << 40)"
    assert endless("X = 2**2**10 + ((2**63) << 64) * (10**100)\nY = a**9**9\n") == ""


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("9**9**9**9", "an exponent of"),
        ("2**64**1", "a number of 9e\\+18 or more"),
        ("(0 - 8)**0.5", "a number of"),
        ("1e308 * 10", "a number of"),
        ("1 // (a - a)", "by zero"),
        ("(" * 60 + "a" + ")" * 60 + "+" + "-" * 60 + "a", "more than 50 levels"),
        ("a" * 2000, "at most 1000 characters"),
        ("a +", "expected an expression"),
        ("a\0", "expected an expression"),
        ("(lambda: 1)()", "expected an expression over a"),
        ("a if a else a", "expected an expression over a"),
        ("'a' * 9", "expected an expression over a"),
    ],
)
def test_an_expression_beyond_its_bounds_is_refused(expression: str, words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        value_of(expression, {"a": 3})


@given(st.text(alphabet="a19+-*/%()<>= .**", max_size=30))
def test_any_expression_is_a_number_or_refused(expression: str) -> None:
    try:
        assert isinstance(value_of(expression, {"a": 3}), int | float)
    except ProblemError:
        return


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_text_of_a_solution_is_searched(text: str, other: str) -> None:
    files = {"solution.py": text, "other.py": f"class Model:\n  def forward(self):\n    {other}"}
    patches(files)
    imported_graders(files, "problem")
    is_pasted(files["other.py"], "Model", files, "Model")


def test_a_text_that_is_nested_deeply_is_compared_all_the_same() -> None:
    deep = "class Model:\n  def forward(self, x):\n    return " + "+".join("x" * 3000)
    assert not is_pasted(deep, "Model", {"a.py": deep}, "Model")
    assert patches({"a.py": deep}) == []


@given(JSON, st.sampled_from(["", *DEFINITION]), JSON, st.sampled_from(["", "spec", "sources", "name"]), JSON)
def test_any_definition_workload_and_solution_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, part: Any, key: str, workload: Any, of_solution: str, other: Any
) -> None:
    folder = tmp_path_factory.mktemp("trace")
    solution = {
        "name": "mine",
        "spec": {"language": "python", "entry_point": "main.py::run"},
        "sources": [{"path": "main.py", "content": INTO}],
    }
    (folder / "definition.json").write_text(json.dumps({**DEFINITION, key: part} if key else part))
    (folder / "workload.jsonl").write_text(f"{json.dumps(workload)}\n{json.dumps({'axes': workload})}\n")
    (folder / "solution.json").write_text(json.dumps({**solution, of_solution: other} if of_solution else other))
    with suppress(ProblemError):
        read(folder / "definition.json", folder / "solution.json")


@pytest.mark.parametrize(
    "paths", [["a", "a/b.py"], [""], ["d" * 300], ["x/" * 600 + "y"], ["a\0b"], ["../a"], ["/a"], ["./"]]
)
def test_sources_that_no_folder_can_hold_are_refused(paths: list[str]) -> None:
    assert flashinfer_trace._misplaced([*paths, "main.py"]) is not None
    assert flashinfer_trace._misplaced(["main.py", "a/b.py", "a/c/d.py", "with space.py"]) is None


@given(st.text(max_size=40))
def test_any_line_of_a_task_is_read_or_refused(words: str) -> None:
    try:
        assert isinstance(reference_folder._item(f"{{{words}}}", Path("task.yml")), dict)
    except ProblemError:
        return


@given(JSON, st.text(max_size=20))
def test_any_trial_is_read_or_refused(content: Any, text: str) -> None:
    for line in (json.dumps(content), json.dumps({"sizes": content, "seed": content}), text):
        try:
            Trial.of_line(line)
        except AssayError:
            continue


BAD_LINES = [
    '{"problem": "p.py", "solution": "\\ud800"}',
    '{"problem": "p.py", "solution": "s.py", "x": NaN}',
    "[" * 100_000,
    "3",
    '{"problem": 1, "solution": {}}',
    '{"problem": "p.py"',
]


def test_a_malformed_line_of_a_list_costs_itself_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.py").write_text(LINEAR)
    (tmp_path / "s.py").write_text(GOOD)
    good = '{"problem": "p.py", "solution": "s.py", "key": "forged", "id": 7}'
    (tmp_path / "list").write_text("\n".join([*BAD_LINES, good, ""]))
    items = batch.items(tmp_path / "list", {})
    assert len({item.key for item in items}) == len(BAD_LINES) + 1
    assert [bool(item.error) for item in items] == [True] * len(BAD_LINES) + [False]
    for number, item in enumerate(items[:-1], 1):
        assert item.error.startswith(f"{tmp_path / 'list'}:{number}: ")
        with pytest.raises(ProblemError):
            batch.one(item, lambda *_: None)

    class Engine:
        def run(self, task: Any, items: Any, until: float = 0.0) -> Any:
            yield from ((index, {"outcome": "PASS"}) for index, _ in enumerate(items))

    ((_, line),) = batch.run(items[-1:], Engine())  # type: ignore[arg-type]
    assert (line["key"], line["id"]) == (items[-1].key, 7)
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("bytes", "none", ""):
        assert main(["judge", "--list", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    ["my notes, without an end", "my notes\n", '{"key": 1}\n', '{"key":"a","outcome":"PASS"}\nnotes', "[1]\n"],
)
def test_a_file_that_is_not_ours_stays_as_it_is(tmp_path: Path, content: str) -> None:
    (tmp_path / "notes").write_text(content)
    with pytest.raises(ProblemError, match="expected a file of verdicts"):
        batch.stored(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == content


def test_verdicts_are_added_after_a_line_without_an_end(tmp_path: Path) -> None:
    """A whole line gets its end, half a line is cut off."""
    whole = '{"key":"a","outcome":"PASS"}'
    for end in ("", "\n", '\n{"key":"b","outc', '\n{"ke'):
        (tmp_path / "out").write_text(whole + end)
        assert batch.stored(tmp_path / "out") == {"a"}
        batch.add(tmp_path / "out", {"key": "c", "outcome": "FAIL"})
        assert (tmp_path / "out").read_text() == f'{whole}\n{{"key":"c","outcome":"FAIL"}}\n'
    assert batch.stored(tmp_path / "new" / "out") == set()


def test_the_repeat_line_is_quoted_for_a_shell(tmp_path: Path) -> None:
    (tmp_path / "problem.py").write_text(LINEAR)
    name = tmp_path / "x;touch y; $(id) 'z.py"
    name.write_text(GOOD)
    problem, answer = read(tmp_path / "problem.py", name)
    options = Options(seed=3)
    with options.host(problem) as host:
        words = shlex.split(Report(problem, answer, options, str(name), host).repro(Trial(sizes={"it's": 3})))
    assert words[:6] == ["assay", "judge", str(tmp_path / "problem.py"), str(name), "--seed", "3"]
    assert Trial.of_line(words[7]).sizes == {"it's": 3}


def test_sizes_that_no_machine_holds_and_a_reference_without_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(RELU.replace("batch = 96", f"batch = {2**39}"))
    (tmp_path / "none.py").write_text(RELU.replace("return torch.relu(x)", "return None"))
    large, none = (read_problem(tmp_path / f"{name}.py") for name in ("large", "none"))
    with pytest.raises(ProblemError, match="expected sizes that a machine holds"):
        near(large, large.given[0], limits("quick")["given"])
    instance = none.make({"batch": 4, "features": 4}, 0)
    with pytest.raises(ProblemError, match="expected a tensor from the reference"):
        ReferenceModel.of(instance, Contract(), "none").case(instance.draw(0))


def test_odd_numbers_and_escapes_warn_nobody(tmp_path: Path) -> None:
    (tmp_path / "problem.py").write_text(f'{LINEAR}\nodd = 1if 1else 0, "\\d"\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem = read_problem(tmp_path / "problem.py")
        assert problem.make(problem.given[0], 0).draw(0)


@pytest.mark.parametrize(
    "raised", ["import sys; sys.exit(0)", "raise KeyboardInterrupt", "raise type('E', (BaseException,), {})"]
)
def test_whatever_a_problem_raises_is_one_line(tmp_path: Path, raised: str) -> None:
    (tmp_path / "problem.py").write_text(f"{LINEAR}\n{raised}\n")
    (tmp_path / "solution.py").write_text(GOOD)
    problem, _ = read(tmp_path / "problem.py", tmp_path / "solution.py")
    with pytest.raises(ProblemError, match="the problem's own text failed"):
        problem.make(problem.given[0], 0)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("batch = 96", "batch = 96\nwhile True: pass", "longer than 0.8 s (the problem's own text)"),
        ("return torch.relu(x)", "import time; time.sleep(600)", "longer than 0.2 s (the reference)"),
        ("return torch.relu(x)", "\n        while x.shape: x = torch.relu(x)", "longer than 0.2 s (the reference)"),
        ("get_inputs():", "get_inputs():\n    while True: pass", "longer than 0.2 s (get_inputs())"),
    ],
    ids=["text", "sleeping", "reference", "inputs"],
)
def test_a_problem_that_never_ends_is_one_line(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert RELU.count(before) >= 1
    (tmp_path / "problem.py").write_text(RELU.replace(before, after))
    problem, began = read_problem(tmp_path / "problem.py"), time.monotonic()
    with watched(seconds=0.2), pytest.raises(ProblemTimeout, match=re.escape(words)):
        small(problem, problem.given[0], limits("quick")["small"])
    assert time.monotonic() - began < 30


def test_a_problem_that_cannot_be_interrupted_ends_with_its_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "problem.py").write_text(f"{RELU}\nsum(iter(int, 1))")
    (tmp_path / "solution.py").write_text(GOOD)
    command = ["judge", str(tmp_path / "problem.py"), str(tmp_path / "solution.py"), "--timeout", "0.1"]
    assert main([*command, "--sandbox", "none"]) == 2
    printed = capfd.readouterr().err
    assert "problem.py: the problem's own text: the problem's code took too long (nothing came back for 0.8" in printed
    assert printed.count("\n") == 1


def test_a_judging_process_that_a_problem_ends_is_told_from_one_that_is_lost() -> None:
    note, ending = "p.py: get_inputs()", "the process ended itself with status 0"
    assert batch.lost_words(Lost("crash", ending, note)) == f"{note}: the problem's code ended the process ({ending})"
    assert batch.lost_words(Lost("crash", ending)) == f"the process that judged was lost: {ending}"
