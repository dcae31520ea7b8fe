"""`assay audit`: files and lines that it gives, exit statuses, and bad input in one line each."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file

from assay.cli.audit import Stages, _bytes
from assay.cli.main import main
from assay.cli.progress import Ticker
from assay.precision.auditing import Audit
from assay.precision.loading import bundled
from tests.precision.tiny_models import MODELS, TEXT, edit_json, edit_weights

FEW = ("--formats", "bf16,fp8,w8a16,w4a16-g32,kv-fp8", "--sequence", "12", "--sequences", "4", "--batch", "2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, stored in bfloat16, and a text."""
    home = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = MODELS["llama"]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    model.bfloat16().save_pretrained(home / "llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled()["stdlib-llama"] / file, home / "llama")
    (home / "text.txt").write_text(TEXT)
    return home


@pytest.fixture(scope="module")
def audited(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an audit under a budget of the error, with exports."""
    out = tmp_path_factory.mktemp("audited")
    arguments = ("audit", str(models / "llama"), "--text", str(models / "text.txt"), "--out", str(out), *FEW)
    assert main((*arguments, "--max-kl", "0.01", "--target", "h200", "--export", "vllm,torchao")) == 0
    return out


def run(models: Path, out: Path, *more: str) -> int:
    """The exit status of an audit of the tiny Llama."""
    return main(("audit", str(models / "llama"), "--text", str(models / "text.txt"), "--out", str(out), *FEW, *more))


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "audit.json").read_text())


def test_an_audit_writes_its_answer(audited: Path) -> None:
    """audit.json keeps its schema and its budget, the page stands alone, and the exports are there."""
    content = read(audited)
    jsonschema.validate(content, json.loads((files("assay.precision.report") / "audit.schema.json").read_text()))
    chosen = content["recommended"]
    assert chosen["met"]
    assert 0 < chosen["measured"] <= 0.01
    assert chosen["bytes"] < content["untouched"]["bytes"]
    assert content["settings"]["budgets"] == {"error": 0.01}
    assert "<title>assay audit: llama</title>" in (audited / "report.html").read_text()
    assert sorted(path.name for path in (audited / "export").iterdir()) == ["torchao.json", "vllm.json", "vllm.txt"]
    assert not list(audited.rglob(".*"))


def test_a_resumed_audit_gives_the_same_answer(
    models: Path, audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --resume nothing is differentiated or measured again, and what is recommended is the same."""
    out = shutil.copytree(audited, tmp_path / "again")
    monkeypatch.setattr("assay.precision.auditing.Simulator", None)
    monkeypatch.setattr("assay.precision.auditing.Sensitivity", None)
    assert run(models, out, "--max-kl", "0.01", "--target", "h200", "--resume", "--export", "vllm,torchao") == 0
    out_text, err = capsys.readouterr()
    assert "of the errors were measured before" in err
    assert out_text.startswith("MET  llama audited on h200\n")
    assert read(out)["recommended"] == read(audited)["recommended"]


def test_a_checkpoint_is_written(models: Path, audited: Path, tmp_path: Path) -> None:
    """With --checkpoint there is a folder that says how it is quantised, with scales of each quantised linear."""
    out = shutil.copytree(audited, tmp_path / "whole")
    more = ("--formats", "bf16,fp8,w8a16,kv-fp8", "--max-kl", "0.01", "--target", "h200", "--checkpoint")
    assert run(models, out, *more) == 0
    content, folder = read(out), out / "export" / "checkpoint"
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    linears = [site for site in content["sites"] if site["place"] == "linear" and site["scheme"] in ("fp8", "w8a16")]
    assert linears
    assert {f"{site['name']}.weight_scale" for site in linears} <= set(load_file(folder / "model.safetensors"))


def test_an_interrupted_audit_goes_on(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured before the interruption is not measured again."""

    def stop(self: Audit, *budgets: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Audit, "recommend", stop)
        assert run(models, tmp_path / "out", "--target", "h200") == 130
    assert not (tmp_path / "out" / "audit.json").exists()
    assert run(models, tmp_path / "out", "--target", "h200", "--resume") == 0
    (reused,) = re.findall(r"(\d+) of the errors were measured before", capsys.readouterr().err)
    assert int(reused) >= 48


def test_a_budget_that_cannot_be_met_gives_1(
    models: Path, audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The closest assignment and the budgets that bind are told."""
    out = shutil.copytree(audited, tmp_path / "tight")
    assert run(models, out, "--max-kl", "1e-9", "--max-bytes", "30kB", "--target", "h200", "--resume") == 1
    said = capsys.readouterr().out
    assert said.startswith("NOT MET  ")
    assert "no assignment meets max_bytes and max_error together" in said
    assert "NOT kept" in said
    assert not read(out)["recommended"]["met"]


def test_without_a_budget_the_weights_are_halved(models: Path, audited: Path, tmp_path: Path) -> None:
    """Half of the bytes is the budget then, and it is told."""
    out = shutil.copytree(audited, tmp_path / "half")
    assert run(models, out, "--target", "h200", "--resume") == 0
    content = read(out)
    assert content["settings"]["budgets"] == {"bytes": content["untouched"]["bytes"] / 2}
    assert content["recommended"]["bytes"] <= content["untouched"]["bytes"] / 2


def test_two_assignments_are_compared(
    models: Path, audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An audit.json against an assignment: which is better, by how much, in words and in compare.json."""
    out = shutil.copytree(audited, tmp_path / "compared")
    (tmp_path / "rough.json").write_text('{"lm_head": "w4a16-g32", "model.layers.0.mlp.up_proj": "w4a16-g32"}')
    files_ = (str(tmp_path / "rough.json"), str(audited / "audit.json"))
    assert run(models, out, "--target", "h200", "--resume", "--compare", *files_) == 0
    said = capsys.readouterr().out
    found = json.loads((out / "compare.json").read_text())
    assert found["words"] in said
    assert [one["name"] for one in found["compared"]] == list(files_)
    errors = [one["measured"] for one in found["compared"]]
    if found["better"] is None:
        assert abs(errors[0] - errors[1]) <= found["noise_floor"]
    else:
        assert found["better"] == files_[errors.index(min(errors))]
        assert abs(errors[0] - errors[1]) > found["noise_floor"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("800MB", 8e8), ("3.2GB", 3.2e9), ("1.5GiB", 1.5 * 2**30), ("12345", 12345.0), ("2e9", 2e9), ("7 kb", 7e3)],
)
def test_sizes_are_read(text: str, size: float) -> None:
    """Decimal and binary prefixes, in any case."""
    assert _bytes(text) == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-bytes", "lots"), "--max-bytes 'lots'; expected a number of bytes, or 800MB"),
        (("--max-bytes", "-3GB"), "--max-bytes '-3GB'"),
        (("--max-kl", "-1"), "--max-kl -1.0; expected a number of at least 0"),
        (("--max-time", "nan"), "--max-time nan; expected"),
        (("--metric", "accuracy"), "expected metric 'kl', 'relative'"),
        (("--target", "h2000"), "expected a device, got 'h2000': did you mean h200"),
        (("--formats", "w4a61"), "expected a scheme, got 'w4a61': did you mean"),
        (("--formats", "fp8,mxfp4", "--target", "h100"), "--formats mxfp4: h100 has no fp4 products"),
        (("--formats", "fp8", "--target", "a100"), "--formats fp8: a100 has no fp8 products"),
        (("--export", "onnx"), "--export onnx; expected compressed-tensors, modelopt, torchao, vllm or all"),
        (("--sequences", "0"), "--sequences"),
        (("--sequence", "1000000"), "takes at most 2048 tokens, got sequence=1000000; choose fewer"),
        (("--compare", "nosuch.json", "nosuch.json"), "nosuch.json can't be read (No such file or directory)"),
    ],
)
def test_a_mistake_is_one_line(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], message: str
) -> None:
    """What is wrong, and how to mend it, before anything is computed or written."""
    assert run(models, tmp_path / "out", *arguments) == 2
    one_line(capsys, message)
    assert not (tmp_path / "out").exists()


def one_line(capsys: pytest.CaptureFixture[str], message: str) -> None:
    """What was said is one line with the message."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("assay: ")
    assert message in err


def without_text(folder: Path) -> None:
    (folder.parent / "text.txt").unlink()


def empty_text(folder: Path) -> None:
    (folder.parent / "text.txt").write_text(" \n")


def one_token(folder: Path) -> None:
    (folder.parent / "text.txt").write_text("a")


def binary_text(folder: Path) -> None:
    (folder.parent / "text.txt").write_bytes(b"\xff\xfe\x00")


def nan_weights(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights["model.layers.1.mlp.up_proj.weight"][0, :3].fill_(torch.nan))


def cut_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])


def other_tokenizer(folder: Path) -> None:
    def narrow(weights: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:100].clone()

    edit_weights(folder, narrow)
    edit_json(folder / "config.json", vocab_size=100)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_text, "text.txt can't be read (No such file or directory)"),
        (empty_text, "text.txt is empty; give a text"),
        (one_token, "gives 1 token; expected at least 2"),
        (binary_text, "isn't UTF-8 text"),
        (nan_weights, "model.layers.1.mlp.up_proj.weight holds 3 NaN and 0 infinite among 1536 values"),
        (cut_weights, "is no safetensors file, or is cut off"),
        (other_tokenizer, "the tokenizer isn't llama's: it gives token"),
        (no_tokenizer, "has no tokenizer"),
    ],
)
def test_bad_files_are_named_in_one_line(
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    message: str,
) -> None:
    """A text or a model that can't be audited is exit status 2 and one line that says why."""
    home = shutil.copytree(models, tmp_path / "home")
    damage(home / "llama")
    assert run(home, tmp_path / "out") == 2
    one_line(capsys, message)


def test_a_model_without_linears_is_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no format to choose in it."""
    (tmp_path / "a_model_of_mine.py").write_text("import torch\n\ndef make():\n    return torch.nn.Embedding(8, 8)\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = ("a_model_of_mine:make", "--text", str(models / "text.txt"), "--out", str(tmp_path / "out"))
    assert main(("audit", *target)) == 2
    one_line(capsys, "without linear layers")


@pytest.mark.parametrize("missing", ["--text", "--out"])
def test_text_and_folder_are_needed(models: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    """Without one of them the line names the option."""
    given = {"--text": str(models / "text.txt"), "--out": str(models / "out")}
    rest = [word for option, value in given.items() if option != missing for word in (option, value)]
    assert main(("audit", str(models / "llama"), *rest)) == 2
    one_line(capsys, f"Missing option '{missing}'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "expected a JSON object of site names to scheme names, or an audit.json"),
        ("{", "is no JSON"),
        ('{"lm_haed": "fp8"}', "expected a site of this model, got 'lm_haed': did you mean lm_head?"),
        ('{"lm_head": "nvfp4"}', "expected a scheme for lm_head of"),
    ],
)
def test_a_bad_assignment_is_one_line(
    models: Path, audited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    """A file that is no assignment, or one of another model, is named."""
    out = shutil.copytree(audited, tmp_path / "out")
    (tmp_path / "bad.json").write_text(content)
    bad = str(tmp_path / "bad.json")
    assert run(models, out, "--target", "h200", "--resume", "--compare", bad, bad) == 2
    one_line(capsys, message)


def test_each_stage_has_a_ticker_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new stage ends the ticker of the one before, with its own count of steps."""
    seen: list[tuple[str, int | str]] = []

    class Told(Ticker):
        def __init__(self, label: str, count: int, effort: float) -> None:
            super().__init__(label, count, effort)
            seen.append((label, count))

        def __exit__(self, *error: object) -> None:
            seen.append((self._label, "ended"))

    monkeypatch.setattr("assay.cli.audit.Ticker", Told)
    with Stages() as stages:
        for done in (1, 2):
            stages("looking", done, 2)
        stages("measuring", 1, 3)
    assert seen == [("looking", 2), ("looking", "ended"), ("measuring", 3), ("measuring", "ended")]
