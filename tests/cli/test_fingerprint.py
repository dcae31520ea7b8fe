"""`assay fingerprint`: a card on the terminal and in files, and mistakes in one line."""

import json
from pathlib import Path

import pytest

from assay.cli.main import main


def test_a_card_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card of torch's product stands on the terminal, and as JSON and HTML where asked."""
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
    ("arguments", "message"),
    [
        (("torch:mm", "--spec", "gem"), "did you mean 'gemm'?"),
        (("torch:mm", "--spec", "gemm"), "gemm needs the dtype of a, b"),
        (("torch", "--spec", "gemm", "--dtype", "float32"), "expected package.module:function"),
        (("torch:mm",), "--spec"),
    ],
)
def test_mistakes_are_said_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be read is answered with exit status 2 and what to do."""
    assert main(["fingerprint", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len([line for line in said.splitlines() if line.startswith("assay:")]) == 1


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("softmax", "rms_norm is no softmax: called as f(x), but it takes (x"),
        ("gemm", "rms_norm is no gemm: "),
    ],
)
def test_a_kernel_of_another_op_is_said_to_be_one(
    op: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that takes other arguments, or gives another shape, has no card but one line: what was expected, and got."""
    source = "def rms_norm(x, weight):\n    return x * weight[: x.shape[-1]].sum()\n"
    (tmp_path / "of_another_op.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["fingerprint", "of_another_op:rms_norm", "--spec", op, "--dtype", "float32"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.strip().count("assay:") == 1
    assert "not observable" not in said.out
