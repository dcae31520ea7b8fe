"""What `assay audit` refuses: mistakes in options, bad models, texts and assignments, in one line each."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from assay.cli.audit_options import lacking
from assay.precision.export import FORMATS, Exported, Part
from assay.precision.loading.pretrained import from_directory
from tests.cli.audits import line
from tests.precision.tiny_models import edit_json, edit_weights


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-bytes", "lots"), "--max-bytes 'lots'; expected a number of bytes, or 800MB"),
        (("--max-bytes", "-3GB"), "--max-bytes '-3GB'"),
        (("--max-memory", "much"), "--max-memory 'much'; expected a number of bytes, or 800MB"),
        (("--max-kl", "-1"), "--max-kl -1; expected a number above 0"),
        (("--max-kl", "0"), "--max-kl 0; expected a number above 0"),
        (("--max-bytes", "0"), "--max-bytes 0; expected a number above 0"),
        (("--max-time", "nan"), "--max-time nan; expected"),
        (("--metric", "accuracy"), "expected metric 'kl', 'relative'"),
        (("--target", "h2000"), "unknown device or engine 'h2000'; did you mean 'h200'"),
        (("--formats", "w4a61"), "unknown scheme 'w4a61'; did you mean"),
        (("--formats", "fp8,mxfp4", "--target", "h100"), "--formats mxfp4: h100 has no fp4 products"),
        (("--formats", "fp8", "--target", "a100"), "--formats fp8: a100 has no fp8 products"),
        (("--export", "onnx"), f"--export onnx; expected {', '.join(FORMATS)} or all"),
        (("--sequences", "0"), "--sequences"),
        (("--sequence", "1000000"), "takes at most 2048 tokens, got sequence=1000000; choose fewer"),
        (("--compare", "a", "b", "--export", "all"), "--compare writes no exports; leave --export"),
        (("--compare", "nosuch.json", "nosuch.json"), "nosuch.json: can't be read (No such file or directory)"),
    ],
)
def test_a_mistake_is_one_line(
    models: Path, tmp_path: Path, one_line: Callable[..., None], arguments: Sequence[str], message: str
) -> None:
    one_line(line(models, tmp_path / "out", *arguments), message)
    assert not (tmp_path / "out").exists()


def test_an_interpreter_without_docstrings_is_one_line(
    models: Path, tmp_path: Path, one_line: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_directory, "__doc__", None)
    one_line(line(models, tmp_path / "out"), "run python without -OO")


def text_of(content: bytes | None) -> Callable[[Path], None]:
    """Return a function that replaces the text, or removes it."""

    def damage(folder: Path) -> None:
        path = folder.parent / "text.txt"
        path.unlink()
        if content is not None:
            path.write_bytes(content)

    return damage


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
        (text_of(None), "text.txt: can't be read (No such file or directory)"),
        (text_of(b" \n"), "text.txt is empty; give a text"),
        (text_of(b"a"), "gives 1 token; expected at least 2"),
        (text_of(b"\xff\xfe\x00"), "byte 0 is no UTF-8"),
        (nan_weights, "model.layers.1.mlp.up_proj.weight holds 3 NaN and 0 infinite among 1536 values"),
        (cut_weights, "is no safetensors file, or is cut off"),
        (other_tokenizer, "the tokenizer isn't llama's: it gives token"),
        (no_tokenizer, "has no tokenizer"),
    ],
)
def test_bad_files_are_named_in_one_line(
    models: Path, tmp_path: Path, one_line: Callable[..., None], damage: Callable[[Path], None], message: str
) -> None:
    home = shutil.copytree(models, tmp_path / "home")
    damage(home / "llama")
    one_line(line(home, tmp_path / "out"), message)


def test_a_model_without_linears_is_refused(
    models: Path, tmp_path: Path, one_line: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_model_of_mine.py").write_text("import torch\n\ndef make():\n    return torch.nn.Embedding(8, 8)\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = ("a_model_of_mine:make", "--text", str(models / "text.txt"), "--out", str(tmp_path / "out"))
    one_line(("audit", *target), "without linear, convolutional or recurrent layers")


@pytest.mark.parametrize("missing", ["--text", "--out"])
def test_text_and_folder_are_needed(models: Path, one_line: Callable[..., None], missing: str) -> None:
    given = {"--text": str(models / "text.txt"), "--out": str(models / "out")}
    rest = [word for option, value in given.items() if option != missing for word in (option, value)]
    one_line(("audit", str(models / "llama"), *rest), f"Missing option '{missing}'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "expected a JSON object of site names to scheme names, or an audit.json"),
        ("{", "is no JSON"),
        ('{"lm_haed": "fp8"}', "bad.json: expected a site of this model, got 'lm_haed': did you mean lm_head?"),
        ('{"lm_head": "nvfp4"}', "expected a scheme for lm_head of"),
    ],
)
def test_a_bad_assignment_is_named_in_one_line(
    models: Path, audited: Path, again: Path, tmp_path: Path, one_line: Callable[..., None], content: str, message: str
) -> None:
    """Of two files, the one that is no assignment, or one of another model."""
    (tmp_path / "bad.json").write_text(content)
    files = (str(audited / "audit.json"), str(tmp_path / "bad.json"))
    one_line(line(models, again, "--target", "h200", "--compare", *files), message)


def test_code_of_a_model_is_allowed_by_the_option_of_the_command(
    models: Path, tmp_path: Path, one_line: Callable[..., None]
) -> None:
    home = shutil.copytree(models, tmp_path / "home")
    edit_json(home / "llama" / "config.json", auto_map={"AutoModel": "code.Model"})
    one_line(line(home, tmp_path / "out"), "allow it by --trust, or give")


def test_exports_that_are_not_as_requested_are_reported() -> None:
    exported = Exported((Part("torchao", (), {"a": "fp8"}), Part("checkpoint", (), {"a": "fp8"}, 70_000)), ())
    first, second = lacking(exported, ["torchao", "vllm"], 60e3, lambda held: 5e4 * len(held))
    assert first == "--export vllm wrote nothing: it can express nothing of this assignment"
    assert second.startswith("checkpoint: weights of 70 kB exceed --max-bytes of 60 kB")
    assert lacking(exported, ["torchao"], None, lambda held: 1e9) == []
