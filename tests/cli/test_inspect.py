"""`assay inspect`: a table, JSON and a page, and mistakes in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.cli.main import main

pytest.importorskip("triton")

KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def _twice(x_ptr, y_ptr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, 2 * tl.load(x_ptr + places))

def twice(x):
    y = torch.empty_like(x)
    _twice[(x.numel() // 1024,)](x, y, 1024)
    return y

def softmax(x):
    return twice(x)

def arguments():
    return (torch.zeros(4096, device="cuda"),)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the current folder."""
    (tmp_path / "doubled.py").write_text(KERNEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as many test suites have it
    return "doubled"


def test_a_users_kernel_is_compiled_from_its_arguments(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{module}:twice", "--inputs", f"{module}:arguments", "--json", "--out", "page.md"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["arch"], told["limits"]["shared"]) == ("sm_90a", 227 * 1024)
    (launch,) = told["kernels"][0]["calls"][0]["launches"]
    assert (launch["kernel"], launch["grid"], launch["spilled"]) == ("_twice", [4, 1, 1], 0)
    assert launch["amounts"] == {"products": 0, "others": 4096, "loaded": 16384, "stored": 16384, "complete": True}
    assert "| _twice | 1 |" in Path("page.md").read_text(encoding="utf-8")


def test_a_table_is_printed_of_an_op_at_given_sizes(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--spec", "softmax", "--at", "R=2,N=2048", "--dtype", "float16", "--arch", "a100"]
    assert main(["inspect", f"{module}:softmax", *arguments]) == 0
    out = capsys.readouterr().out
    assert "R=2, N=2048" in " ".join(out.split())
    assert "0 findings on sm_80" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doubled:twice"], "needs --spec"),
        (["doubled:twice", "--spec", "softmax", "--arch", "sm_42"], "--arch sm_42: unknown"),
        (["doubled:twice", "--spec", "softmax", "--at", "Q=2"], "unknown dimension 'Q'"),
        (
            ["doubled:twice", "--spec", "softmax", "--tensor-layout", "x=upright"],
            "--tensor-layout x=upright: expected one of",
        ),
        (["--inputs", "doubled:arguments"], "expected one package.module:function beside it"),
        (["doubled:twice", "--inputs", "doubled:missing"], "unknown function 'missing'"),
        (["doubled:missing", "--spec", "softmax"], "unknown function 'missing' (known: "),
        (["no_such_kernel"], "expected package.module:function, or a kernel"),
    ],
)
def test_mistakes_are_one_line(module: str, arguments: list[str], words: str, one_line: Callable[..., None]) -> None:
    one_line(("inspect", *arguments), words)
