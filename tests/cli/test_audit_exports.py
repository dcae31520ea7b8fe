"""What `assay audit` exports: of this run alone, with its own bytes, and never in place of the user's files."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from assay.precision.errors import CannotExport
from assay.precision.units import format_bytes
from tests.cli.audits import read, run


def test_a_checkpoint_is_written(models: Path, again: Path) -> None:
    more = ("--formats", "fp8,w8a16,kv-fp8", "--max-kl", "0.01", "--target", "h200", "--checkpoint")
    assert run(models, again, *more) == 0
    content, folder = read(again), again / "export" / "checkpoint"
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    linears = [site for site in content["sites"] if site["place"] == "linear" and site["scheme"] in ("fp8", "w8a16")]
    assert linears
    assert {f"{site['name']}.weight_scale" for site in linears} <= set(load_file(folder / "model.safetensors"))
    loaded = content["exports"][-1]["loaded"]
    assert loaded["agrees"] is True
    assert loaded["error"] == pytest.approx(loaded["simulated"], rel=0.05)
    assert loaded["words"] in (again / "report.html").read_text()


def test_the_bytes_of_a_checkpoint_are_told(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No stack loads a quantised table of embeddings, so it keeps its format where something is exported; the summary
    has the bytes on disk, within 2 % of what the budget counts."""
    out = tmp_path / "out"
    assert run(models, out, "--formats", "w8a16", "--max-bytes", "48kB", "--checkpoint") == 0
    content = read(out)
    chosen, (part,) = content["recommended"], content["exports"]
    assert "model.embed_tokens" not in chosen["assignment"]
    assert content["settings"]["fixed"] == ["model.embed_tokens"]
    assert part["sites"] == len(chosen["assignment"]) > 0
    file = out / "export" / "checkpoint" / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert part["bytes"] == file.stat().st_size - header <= 48e3
    assert part["bytes"] == pytest.approx(chosen["bytes"], rel=0.02)
    said = capsys.readouterr().out
    assert f"  exported    checkpoint: weights {format_bytes(part['bytes'])}; " in said
    assert "  kept        embedding tables keep their format because something is exported" in said
    assert "embedding tables keep their format because" in (out / "report.html").read_text()


def test_exports_are_those_of_the_run(models: Path, again: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under another budget in the same folder, files that this run doesn't write go; the user's own stay."""
    (again / "export" / "mine.txt").write_text("a note of the user")
    more = ("--max-bytes", "45kB", "--target", "h200")
    assert run(models, again, *more, "--export", "compressed-tensors") == 0
    found = {path.name for path in (again / "export").iterdir()}
    assert found == {"export.json", "mine.txt", "quantization_config.json"}
    of = json.loads((again / "export" / "export.json").read_text())["assignment"]
    assert of == read(again)["recommended"]["assignment"]
    capsys.readouterr()
    assert run(models, again, *more) == 0
    assert "what an earlier audit exported" in capsys.readouterr().err
    assert [path.name for path in (again / "export").iterdir()] == ["mine.txt"]
    assert read(again)["exports"] == []


def test_a_refused_export_leaves_no_earlier_one(
    models: Path, again: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a checkpoint can't be written, the report is, and what an earlier run exported goes: it is of another. The
    exit status says that something is missing."""

    def refuse(*_: object, **__: object) -> None:
        raise CannotExport("no place for it")

    monkeypatch.setattr("assay.precision.export.exporting.write_checkpoint", refuse)
    assert run(models, again, "--max-bytes", "45kB", "--target", "h200", "--checkpoint") == 1
    said, err = capsys.readouterr()
    assert "budget      bytes of at most 45 kB" in said
    assert err.endswith("assay: checkpoint: not written: no place for it\n")
    assert not (again / "export").exists()
    assert read(again)["settings"]["budgets"] == {"bytes": 45e3}


def test_a_file_of_the_user_is_never_replaced(models: Path, again: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(again / "export")
    (again / "audit.json").unlink()
    (again / "export").mkdir()
    (again / "export" / "torchao.json").write_text("{}")
    more = ("--max-kl", "0.01", "--target", "h200", "--export", "torchao")
    assert run(models, again, *more) == 2
    said, err = capsys.readouterr()
    assert said.startswith("MET  llama")
    assert err.endswith("torchao.json exists and is of no export: move it away, or give another folder\n")
    assert (again / "export" / "torchao.json").read_text() == "{}"
    assert read(again)["exports"] == []
