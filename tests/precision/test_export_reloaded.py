"""A checkpoint that is loaded again has the error that was simulated, and one that was damaged is told."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from assay.precision.auditing import Audit, audit
from assay.precision.export import export, reloaded
from tests.precision.exported import IDS, subject

ASSIGNMENT = {
    "model.layers.0.self_attn.o_proj": "fp8",
    "model.layers.0.mlp.down_proj": "w8a16",
    "model.layers.0.self_attn:kv_cache": "kv-fp8",
}


@pytest.fixture(scope="module")
def audited() -> Audit:
    return audit(subject().model, [{"input_ids": IDS}], formats=["fp8", "w8a16", "kv-fp8"])


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
    found = reloaded(audited, folder, ASSIGNMENT)
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
    found = reloaded(audited, folder, ASSIGNMENT)
    assert not found.agrees
    assert found.words.endswith("they disagree by more than rounding to bfloat16 makes of it")
    (folder / "config.json").write_text("{}")
    refused = reloaded(audited, folder, ASSIGNMENT)
    assert refused.error is None
    assert not refused.agrees
    assert "refuses it: " in refused.words
