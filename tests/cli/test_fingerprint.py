"""`assay fingerprint`: a card on the terminal and in files, and mistakes in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.cli.main import main

pytestmark = pytest.mark.usefixtures("in_process")


def test_a_card_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fingerprint", "torch:mm", "--spec", "gemm", "--dtype", "bfloat16"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "torch:mm as gemm in bfloat16" in capsys.readouterr().out
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert sorted(written) == ["torch-mm-bfloat16.html", "torch-mm-bfloat16.json"]
    traits = {trait["name"]: trait["value"] for trait in json.loads(written["torch-mm-bfloat16.json"])["traits"]}
    assert traits["accumulator"] == "24 bits (float32)"
    assert "24 bits (float32)" in written["torch-mm-bfloat16.html"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(written["torch-mm-bfloat16.json"])


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("softmax", "rms_norm is no softmax: called as f(x), but it takes (x"),
        ("gemm", "rms_norm is no gemm: "),
    ],
)
def test_a_kernel_of_another_op_has_no_card(
    op: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_line: Callable[..., None]
) -> None:
    """One that takes other arguments, or gives another shape: the line has what was expected, and what it got."""
    source = "def rms_norm(x, weight):\n    return x * weight[: x.shape[-1]].sum()\n"
    (tmp_path / "of_another_op.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    one_line(("fingerprint", "of_another_op:rms_norm", "--spec", op, "--dtype", "float32"), message)
