"""`assay compare`: a script recorded in a process of its own, two runs compared, the gate, the page, equal bits."""

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from assay.cli.main import main

_SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                     intermediate_size=48, vocab_size=50)
model = LlamaForCausalLM(config).eval()
if sys.argv[1] == "scaled":
    model.model.layers[0].self_attn.scaling *= 2
with torch.no_grad():
    model(torch.arange(12)[None])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "script.py").write_text(_SCRIPT, encoding="utf-8")
    for name, kind in (("a", "plain"), ("b", "scaled")):
        command = ["compare", "record", "--out", str(folder / name), "--", "python", str(folder / "script.py"), kind]
        assert main(command) == 0
    return folder


def test_a_faulty_run_is_named_and_the_page_written(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, out = str(runs / "a"), str(runs / "b"), tmp_path / "report"
    assert main(["compare", a, b, "--out", str(out)]) == 1
    text = capsys.readouterr().out
    assert "run a is right: run b leaves its bounds" in text
    assert "layers.0.self_attn.attention" in text
    content = json.loads((out / "report.json").read_text(encoding="utf-8"))
    jsonschema.validate(
        content, json.loads((files("assay.compare") / "report.schema.json").read_text(encoding="utf-8"))
    )
    assert content["first_beyond"] == "layers.0.self_attn.attention"
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "layers.0.self_attn.attention" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_equal_runs_pass_the_gate_and_have_equal_bits(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(runs / "a"), str(runs / "b")
    assert main(["compare", a, a, "--max-kl", "1e-9"]) == 0
    assert main(["compare", a, a, "--bits"]) == 0
    assert main(["compare", a, b, "--bits"]) == 1
    assert "first region with other bits: layers.0.self_attn.attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a"], "expected two recorded runs"),
        (["record", "--", "python", "x.py"], "expected --out FOLDER"),
        (["record", "--out", "new", "--", "torchrun", "x.py"], "expected python and a script"),
        (["nowhere", "nothing"], "expected a folder"),
    ],
)
def test_a_wrong_line_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1
