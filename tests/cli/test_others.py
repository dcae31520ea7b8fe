"""The bundled table of other people's kernels, its page, and adapters in a line; none of their packages is needed."""

import ast
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli.main import main
from assay.verify import examine
from assay.verify.campaign.survey import plan
from assay.verify.campaign.table import Entry, entries, entry_from_table
from assay.verify.errors import TableError, TargetError
from assay.verify.harness.target import load_target

ROOT = Path(__file__).resolve().parents[2]
DOCS = runpy.run_path(str(ROOT / "docs" / "others.py"))
TABLE = entries("others")

ABSENT = """
[packages.no-such-distribution]
requires = "no_such_module"
pretend = "cuda"

[[kernel]]
package = "no-such-distribution"
name = "somebody's softmax"
target = "no_such_module:lambda x: softmax(x, -1)"
spec = "softmax"
dtypes = ["float32"]
"""


def adapter(entry: Entry) -> ast.arguments | None:
    """The parameters of an entry's adapter, read and not run; None where the target is their own function."""
    module, _, name = entry.target.partition(":")
    if name.startswith("lambda"):
        found = ast.parse(name, mode="eval").body
        assert isinstance(found, ast.Lambda)
        return found.args
    if not module.startswith("assay.kernels.others."):
        return None
    source = ROOT / "kernels" / "others" / f"{module.rpartition('.')[2]}.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return next(node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def test_it_has_many_kernels_of_many_packages() -> None:
    assert len({entry.name for entry in TABLE}) == len(TABLE) >= 60
    assert len({entry.package for entry in TABLE}) >= 12
    assert len({entry.group for entry in TABLE}) == len({entry.package for entry in TABLE})


def test_adapters_take_what_their_ops_give() -> None:
    """As many tensors as the op has, and each option that the entry lists, by its name."""
    for entry in TABLE:
        found, settings = adapter(entry), entry.settings
        if found is None:
            continue
        listed = settings.definition.complete({name: values[0] for name, values in settings.options.items()})
        tensors = [tensor for tensor in settings.definition.signature(listed).tensors if not tensor.keyword]
        assert len(found.args) == len(tensors), entry.name
        assert {name.arg for name in found.kwonlyargs} == set(settings.options), entry.name


def test_absent_packages_are_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.verify.campaign.table._exists", lambda name: False)
    for entry in TABLE:
        words = entry.absence("cpu")
        assert words.startswith(f"there is no {entry.requires} in this build; {entry.install or 'pip install '}")
        assert "\n" not in words


def test_a_table_that_comes_along_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert entries("survey") == entries()
    with pytest.raises(TableError, match=r"another: can't be read .*; or one that comes along: survey, others"):
        entries("another")
    Path("others").write_text(ABSENT, encoding="utf-8")
    (entry,) = entries("others")
    assert (entry.name, entry.package, entry.version) == ("somebody's softmax", "no-such-distribution", "")
    assert entry.absence("cpu") == "there is no no_such_module in this build; pip install no-such-distribution"


def test_what_is_said_of_a_package_holds_for_its_kernels() -> None:
    assert {entry.settings.pretend for entry in TABLE if entry.package == "vllm"} == {"cuda"}
    (entry,) = (entry for entry in TABLE if entry.name == "attorch.GELU")
    assert entry.settings.layouts != ("contiguous",)
    assert (entry.version, entry.install[:5]) == ("67c2772", "clone")


def test_an_entry_may_pretend_where_there_is_no_gpu() -> None:
    entry = entry_from_table({"name": "k", "target": "torch:softmax", "spec": "softmax", "pretend": "cuda"})
    pretended = [plan([entry], **asked)[0].settings.pretend for asked in ({}, {"device": "cuda"}, {"pretend": "a100"})]
    assert pretended == ["cuda", "", "a100"]


def test_an_adapter_stands_in_a_target() -> None:
    honest = load_target("torch.nn.functional:lambda x, weight, *, eps: rms_norm(x, x.shape[-1:], weight, eps)")
    options = {"eps": [1e-5]}
    assert examine(honest, "rmsnorm", dtype="float32", options=options, effort="quick", examples=2).passed
    faulty = load_target("math:lambda x: torch.softmax(x * e, -1)")
    assert torch.equal(faulty(torch.zeros(2, 4)), torch.full((2, 4), 0.25))
    assert examine(faulty, "softmax", dtype="float32", effort="quick", examples=2).outcome == "FAIL"


@pytest.mark.parametrize("target", ["torch:lambda x: softmax(x", "torch:lambda: ("])
def test_a_target_that_is_no_expression_is_told(target: str) -> None:
    with pytest.raises(TargetError, match="expected module:lambda x: function\\(x\\)"):
        load_target(target)


@pytest.mark.usefixtures("in_process")
def test_an_adapter_s_repro_line_fails_again(capfd: pytest.CaptureFixture[str]) -> None:
    target = "torch:lambda x: softmax(x * 1.01, -1)"
    asked = ("--spec", "softmax", "--dtype", "float32", "--effort", "quick", "--examples", "1")
    assert main(("verify", target, *asked, "--json")) == 1
    (found,) = json.loads(capfd.readouterr().out)
    assert main(("repro", found["repro"])) == 1
    assert "softmax(x * 1.01, -1)" in capfd.readouterr().out


def test_the_page_is_what_the_data_say() -> None:
    """docs/results/others.md is made of docs/results/others.json and the table: `python -P docs/others.py`."""
    data = json.loads((ROOT / "docs" / "results" / "others.json").read_text(encoding="utf-8"))
    assert DOCS["page"](data, TABLE) == (ROOT / "docs" / "results" / "others.md").read_text(encoding="utf-8")
    assert set(data) <= {entry.name for entry in TABLE}


def test_a_report_is_taken_over() -> None:
    name = TABLE[0].name
    aspects = {
        "numbers": {"status": "broken", "explanations": [{"description": "sums are short"}]},
        "range": {"status": "kept", "explanations": []},
    }
    verdict = {"aspects": aspects, "worst": 2.0, "cases": 40}
    row: dict[str, Any] = {
        "name": name,
        "dtype": "float32",
        "outcome": "FAIL",
        "words": "N=3: y came 1 | 2",
        "version": "9",
    }
    report = {"made": "2026-01-02 03:04", "rows": [row | {"verdict": verdict}, {"name": "x", "outcome": "NOT HERE"}]}
    kept = {"outcome": "PASS", "version": "8", "date": "2026-01-01", "words": "", "breaks": [], "said": ""}
    data = DOCS["taken_over"](report, {name: {"bfloat16": kept, "float32": kept}})
    assert data[name]["bfloat16"] == kept
    assert data[name]["float32"]["breaks"] == ["numbers"]
    page = DOCS["page"](data, TABLE)
    assert "1 examined, 2 examinations: 1 PASS, 1 FAIL." in page
    assert "| FAIL | numbers | N=3: y came 1 \\| 2 |" in page
    assert f"| {name} | group_norm | bfloat16 | default |  |" in page
