"""What readers are known to get wrong is told beforehand, or opened otherwise; what none reads is not written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from assay.precision.errors import CannotExport
from assay.precision.export import FORMATS, export, load_checkpoint, write_checkpoint
from assay.precision.export.configurations.compressed_tensors import quantization_config
from assay.precision.loading.quiet import quiet
from tests.precision.exported import subject

DENSE: dict[str, Any] = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
NOTE = "of several schemes transformers 5.23 reads only one right"


def layers(first: str, second: str) -> dict[str, str]:
    """A scheme at every linear of each layer."""
    return {name: first if "layers.0" in name else second for name in subject().weights(first)}


def wrong(model: Any, assignment: dict[str, str]) -> list[str]:
    """Linears whose weights aren't those that were stored, rounded to bfloat16 at most."""
    return [
        name
        for name, scheme in assignment.items()
        if not torch.equal(model.get_submodule(name).weight.bfloat16(), subject().stored(name, scheme).bfloat16())
    ]


def plainly(folder: Path) -> Any:
    """The checkpoint as transformers makes it dense."""
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **DENSE)


def test_linears_of_4_and_8_bits_are_read_each_by_its_own(tmp_path: Path) -> None:
    """With dequantize=True transformers reads those of 8 bits as 4, in silence: a note says so, and `load_checkpoint`
    with the same option gives what was stored."""
    made, assignment = subject(), layers("w4a16-g64", "w8a16")
    written = write_checkpoint(made.model, assignment, tmp_path / "out", sites=made.sites, fits=made.fits)
    assert any(NOTE in note for note in written.notes)
    assert wrong(plainly(tmp_path / "out"), assignment) == [name for name in assignment if "layers.1" in name]
    assert wrong(load_checkpoint(tmp_path / "out", **DENSE), assignment) == []
    assert wrong(load_checkpoint(tmp_path / "out"), assignment) == []


@pytest.mark.parametrize(("first", "second"), [("fp8", "nvfp4"), ("w4a16-g64", "mxfp4")])
def test_formats_that_transformers_refuses_together_are_opened(first: str, second: str, tmp_path: Path) -> None:
    made, assignment = subject(), layers(first, second)
    write_checkpoint(made.model, assignment, tmp_path / "out", sites=made.sites, fits=made.fits)
    assert wrong(load_checkpoint(tmp_path / "out", **DENSE), assignment) == []


def test_one_scheme_needs_no_note(tmp_path: Path) -> None:
    made, assignment = subject(), layers("w4a16-g64", "w4a16-g64")
    written = write_checkpoint(made.model, assignment, tmp_path / "out", sites=made.sites, fits=made.fits)
    assert not any(NOTE in note for note in written.notes)
    assert wrong(plainly(tmp_path / "out"), assignment) == []


def test_targets_of_linears_are_names_that_a_mapper_of_prefixes_maps() -> None:
    """vLLM puts other words before the names of targets, patterns aside: each linear is still in its own group, or
    ignored, by its new name."""
    content = quantization_config(layers("fp8", "w4a16-g64"), subject().sites).content

    def mapped(targets: list[str]) -> set[str]:
        return {f"language_model.{target}" for target in targets if not target.startswith("re:")}

    groups = {group["weights"]["num_bits"]: mapped(group["targets"]) for group in content["config_groups"].values()}
    for name, scheme in layers("fp8", "w4a16-g64").items():
        assert [bits for bits in groups if f"language_model.{name}" in groups[bits]] == [8 if scheme == "fp8" else 4]
    assert {"language_model.lm_head", "language_model.model.embed_tokens"} <= mapped(content["ignore"])


def test_nothing_is_written_that_nothing_reads(tmp_path: Path) -> None:
    made = subject()
    assert "modelopt" not in FORMATS
    with pytest.raises(CannotExport, match="expected formats of"):
        export(made.model, {"lm_head": "fp8"}, tmp_path / "out", ["modelopt"], sites=made.sites, fits=made.fits)
    export(made.model, layers("fp8-block", "w8a16"), tmp_path / "out", sites=made.sites, fits=made.fits)
    texts = [path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix in (".json", ".txt", ".py")]
    assert len(texts) > 4
    assert not any("FP8_PB_WO" in text or "modelopt" in text.lower() for text in texts)
    assert json.loads((tmp_path / "out" / "export.json").read_text())["assignment"] == layers("fp8-block", "w8a16")
