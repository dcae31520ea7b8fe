"""`export`: what it writes into a folder, what it leaves out, and that nobody loses files of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.precision.errors import CannotExport
from assay.precision.export import FORMATS, Exported, clear
from tests.precision.exported import subject

MINE = "a note of the user"
STACKS = ("compressed-tensors", "torchao", "vllm")
"""The targets whose files are looked at here."""


def fp8() -> dict[str, str]:
    """FP8 at every linear but the head."""
    return subject().weights("fp8")


def write(assignment: dict[str, str], out: Path, *formats: str, **options: Any) -> Exported:
    """The export of an assignment of the small Llama."""
    made = subject()
    return made.export(assignment, out, formats, **options)


def names(folder: Path) -> set[str]:
    """All files of a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_export_writes_a_file_for_each_format(tmp_path: Path) -> None:
    assignment = fp8() | {"model.layers.0.self_attn:scores": "fp16"}
    done = write(assignment, tmp_path / "out", *STACKS, checkpoint=True, target="a100")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in done.paths} | {"export.json"}
    assert {"vllm.json", "vllm.txt", "torchao.json", "torchao-transformers.json", "checkpoint"} <= {
        path.name for path in done.paths
    }
    assert {part.format: part.held for part in done.parts} == dict.fromkeys((*STACKS, "checkpoint"), fp8())
    every = ", ".join((*STACKS, "checkpoint"))
    assert any(note.startswith(f"{every}: fp16 at model.layers.0.self_attn:scores") for note in done.notes)
    assert any(note.startswith("lint: a100 has no fp8 products") for note in done.notes)
    content = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    config = json.loads((tmp_path / "out" / "checkpoint" / "config.json").read_text())
    assert config["quantization_config"] == content
    recorded = json.loads((tmp_path / "out" / "export.json").read_text())
    assert recorded["assignment"] == assignment
    assert recorded["notes"] == list(done.notes)
    assert {*recorded["files"], "export.json"} == names(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match="no float8_e5m2"):
        write({"lm_head": "e5m2"}, tmp_path / "out", checkpoint=True)
    assert set(STACKS) <= set(FORMATS)
    with pytest.raises(CannotExport, match="expected formats of"):
        write(fp8(), tmp_path / "out", "gptq")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("assignment", [{}, {"model.layers.0.self_attn:scores": "fp16", "model.embed_tokens": "fp8"}])
def test_what_expresses_nothing_is_not_written(assignment: dict[str, str], tmp_path: Path) -> None:
    done = write(assignment, tmp_path / "out", *STACKS, checkpoint=True)
    assert done.parts == ()
    every = ", ".join((*STACKS, "checkpoint"))
    assert f"{every}: can express nothing of this assignment, so nothing is written for it" in done.notes
    assert list(tmp_path.iterdir()) == []


def test_only_formats_that_express_something_are_written(tmp_path: Path) -> None:
    done = write({"model.layers.0.self_attn:kv_cache": "kv-fp8"}, tmp_path / "cache", *STACKS)
    assert names(tmp_path / "cache") == {"vllm.txt", "export.json"}
    assert [part.format for part in done.parts] == ["vllm"]
    assert "--kv-cache-dtype fp8_e4m3" in (tmp_path / "cache" / "vllm.txt").read_text()
    assert write({"lm_head": "e5m2"}, tmp_path / "wide", *STACKS).paths == ()
    mixed = write({"lm_head": "w8a16", **fp8()}, tmp_path / "mixed", "vllm", "torchao")
    assert {part.format: part.held for part in mixed.parts} == {
        "vllm": fp8(),
        "torchao": {"lm_head": "w8a16", **fp8()},
    }


def test_another_export_replaces_the_earlier_one_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(fp8(), out, "vllm", "torchao", checkpoint=True)
    (out / "mine.txt").write_text(MINE)
    (out / "checkpoint" / "mine.txt").write_text(MINE)
    before = names(out)
    with pytest.raises(CannotExport, match="overwrite=True"):
        write(subject().weights("w8a16"), out, "torchao")
    with pytest.raises(CannotExport, match="no float8_e5m2"):
        write({"lm_head": "e5m2"}, out, checkpoint=True, overwrite=True)
    assert names(out) == before
    write(subject().weights("w8a16"), out, "compressed-tensors", overwrite=True)
    assert names(out) == {"quantization_config.json", "export.json", "mine.txt", "checkpoint/mine.txt"}
    write({}, out, *STACKS, overwrite=True)
    assert names(out) == {"mine.txt", "checkpoint/mine.txt"}
    write(fp8(), out, checkpoint=True)
    assert {"checkpoint/model.safetensors", "checkpoint/mine.txt", "mine.txt"} <= names(out)


@pytest.mark.parametrize("name", ["torchao.json", "export.json", "checkpoint/config.json", "checkpoint"])
def test_a_file_of_the_user_in_the_way_is_kept(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text(MINE)
    with pytest.raises(CannotExport, match="exists and is of no export: move it away") as caught:
        write(fp8(), out, "torchao", checkpoint=True, overwrite=True)
    assert str(out / name) in str(caught.value)
    assert names(out) == {name}
    assert (out / name).read_text() == MINE


def test_what_was_exported_is_removed_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not clear(out)
    write(fp8(), out, "torchao", checkpoint=True)
    assert clear(out)
    assert not out.exists()
    write(fp8(), out, "torchao")
    (out / "mine.txt").write_text(MINE)
    assert clear(out)
    assert not clear(out)
    assert names(out) == {"mine.txt"}


def test_a_record_can_not_reach_outside(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(MINE)
    (tmp_path / "out").mkdir()
    outside = ["../mine.txt", str(tmp_path / "mine.txt")]
    (tmp_path / "out" / "export.json").write_text(json.dumps({"files": outside}))
    clear(tmp_path / "out")
    assert (tmp_path / "mine.txt").read_text() == MINE
