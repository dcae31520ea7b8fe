"""An export that is loaded again has the error that was simulated, and one that was damaged is told.

What readers are known to get wrong is told beforehand, or opened otherwise; what none reads is not written.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from assay.precision.auditing import Audit, audit
from assay.precision.errors import CannotExport
from assay.precision.export import FORMATS, Part, export, load_checkpoint, reloaded
from assay.precision.export.configurations.compressed_tensors import quantization_config
from assay.precision.loading import load
from assay.precision.loading.quiet import quiet
from tests.precision.exported import IDS, subject

TEXT = Path(__file__).resolve().parents[2] / "configs" / "models" / "held-out.txt"
ASSIGNMENT = {
    "model.layers.0.self_attn.o_proj": "fp8",
    "model.layers.0.mlp.down_proj": "w8a16",
    "model.layers.0.self_attn:kv_cache": "kv-fp8",
}


@pytest.fixture(scope="module")
def audited() -> Audit:
    return audit(subject().model, [{"input_ids": IDS}], formats=["fp8", "w8a16", "kv-fp8"])


STACKS = {
    "torchao": ("w4a16-g32-asym", "int4", "int2"),
    "gguf": ("q4_0-q8_0", "=q4_0", "=q8_0"),
    "mlx": ("w4a16-g32-asym", "'bits': 4", "'bits': 2"),
}
"""Schemes, and a word of the file with what it is damaged to."""


@cache
def llama() -> Audit:
    """The bundled Llama."""
    loaded = load("stdlib-llama")
    batches = loaded.batches(TEXT, sequence=48, sequences=4)
    return audit(loaded.model, batches, formats=[scheme for scheme, *_ in STACKS.values()], bits=16)


@pytest.fixture
def folder(audited: Audit, tmp_path: Path) -> Path:
    """An exported checkpoint of an assignment of linears."""
    sites = {str(site): site for site in audited.sites}
    given = {name: scheme for name, scheme in ASSIGNMENT.items() if name in sites}
    assert len(given) >= 2
    export(audited.model, given, tmp_path / "out", [], sites=sites, fits=audited.fits, checkpoint=True)
    return tmp_path / "out" / "checkpoint"


def test_a_checkpoint_has_the_error_that_was_simulated(audited: Audit, folder: Path) -> None:
    """Loaded by transformers it gives what the simulation gives, up to what rounding to bfloat16 makes of it; caches,
    which its reader leaves as they are, don't count."""
    found = reloaded(audited, Part("checkpoint", (folder,), ASSIGNMENT))
    assert found is not None
    linears = {name: scheme for name, scheme in ASSIGNMENT.items() if not name.endswith("kv_cache")}
    assert found.simulated == audited.measure(linears) > 0
    assert found.error == pytest.approx(found.simulated, rel=0.05)
    assert found.agrees
    assert found.words.startswith("loaded by transformers ")
    assert "disagree" not in found.words


def test_a_damaged_checkpoint_is_told(audited: Audit, folder: Path) -> None:
    """Scales twice as large as they were written are a disagreement in words; a file that can't be read is refused
    with the reader's reason."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors = {name: 2 * each if name.endswith("weight_scale") else each for name, each in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
    found = reloaded(audited, Part("checkpoint", (folder,), ASSIGNMENT))
    assert found is not None
    assert not found.agrees
    assert found.words.endswith("they disagree by more than rounding to bfloat16 makes of it")
    (folder / "config.json").write_text("{}")
    refused = reloaded(audited, Part("checkpoint", (folder,), ASSIGNMENT))
    assert refused is not None
    assert refused.error is None
    assert not refused.agrees
    assert "refuses it: " in refused.words


@pytest.mark.parametrize("stack", ["torchao", "gguf", "mlx"])
def test_what_torchao_llama_cpp_and_mlx_read_is_measured(stack: str, tmp_path: Path) -> None:
    """By their own code each gives the error that was simulated, and another where the file says another thing; MLX,
    whose scales are its own, gives a little more, which is told."""
    made, (scheme, _, _) = llama(), STACKS[stack]
    sites = {str(site): site for site in made.sites}
    assignment = {name: scheme for name, site in sites.items() if site.type == "linear" and scheme in made.menu(name)}
    assert len(assignment) > 20
    (part,) = export(made.model, assignment, tmp_path, [stack], sites=sites, fits=made.fits).parts
    found = reloaded(made, part)
    assert found is not None
    assert found.agrees == (stack != "mlx"), found.words
    assert found.error == pytest.approx(found.simulated, rel=0.25)
    _, old, new = STACKS[stack]
    text = part.paths[0].read_text()
    assert old in text
    part.paths[0].write_text(text.replace(old, new))
    other = reloaded(made, part)
    assert other is not None
    assert not other.agrees
    assert other.error is not None
    assert other.error > 2 * found.error or found.error > 2 * other.error


def test_what_nothing_here_reads_is_not_measured(audited: Audit) -> None:
    assert reloaded(audited, Part("vllm", (Path("vllm.json"),), {})) is None


def test_a_reader_s_refusal_is_told(audited: Audit, tmp_path: Path) -> None:
    sites = {str(site): site for site in audited.sites}
    chosen = {"model.layers.0.self_attn.o_proj": "fp8"}
    (part,) = export(audited.model, chosen, tmp_path, ["torchao"], sites=sites, fits=audited.fits).parts
    found = reloaded(audited, part)
    assert found is not None
    assert found.error is None
    assert "refuses it: Float8 dynamic quantization requires CUDA" in found.words


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
    written = made.checkpoint(assignment, tmp_path / "out")
    assert any(NOTE in note for note in written.notes)
    assert wrong(plainly(tmp_path / "out"), assignment) == [name for name in assignment if "layers.1" in name]
    assert wrong(load_checkpoint(tmp_path / "out", **DENSE), assignment) == []
    assert wrong(load_checkpoint(tmp_path / "out"), assignment) == []


@pytest.mark.parametrize(("first", "second"), [("fp8", "nvfp4"), ("w4a16-g64", "mxfp4")])
def test_formats_that_transformers_refuses_together_are_opened(first: str, second: str, tmp_path: Path) -> None:
    made, assignment = subject(), layers(first, second)
    made.checkpoint(assignment, tmp_path / "out")
    assert wrong(load_checkpoint(tmp_path / "out", **DENSE), assignment) == []


def test_one_scheme_needs_no_note(tmp_path: Path) -> None:
    made, assignment = subject(), layers("w4a16-g64", "w4a16-g64")
    written = made.checkpoint(assignment, tmp_path / "out")
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
        made.export({"lm_head": "fp8"}, tmp_path / "out", ["modelopt"])
    made.export(layers("fp8-block", "w8a16"), tmp_path / "out")
    texts = [path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix in (".json", ".txt", ".py")]
    assert len(texts) > 4
    assert not any("FP8_PB_WO" in text or "modelopt" in text.lower() for text in texts)
    assert json.loads((tmp_path / "out" / "export.json").read_text())["assignment"] == layers("fp8-block", "w8a16")
