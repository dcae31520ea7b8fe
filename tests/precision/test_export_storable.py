"""What a checkpoint can hold: known beforehand, and left out with a note where that is asked for."""

from pathlib import Path

import torch

from assay.precision.export import unstorable, write_checkpoint
from assay.precision.observation.qparams import QParams
from tests.precision.exported import Subject, loaded, logits, subject

LAYER = "model.layers.{}.{}"


def test_what_can_not_be_stored_may_stay_as_it_is(tmp_path: Path) -> None:
    """Partial: a linear without a place for its factors, and one that engines run with it, are left out with a note;
    the others are stored, and what is loaded equals what is said to be held."""
    o_proj, query, key = (LAYER.format(0, f"self_attn.{part}_proj") for part in "oqk")
    assignment = subject().weights("fp8") | {o_proj: "w8a8-smooth", query: "e5m2"}
    made = subject()
    written = write_checkpoint(made.model, assignment, tmp_path / "out", sites=made.sites, fits=made.fits, partial=True)
    assert assignment.keys() - written.held.keys() == {o_proj, query, key, LAYER.format(0, "self_attn.v_proj")}
    text = "\n".join(written.notes)
    assert f"w8a8-smooth at {o_proj}: stays as it is in the checkpoint: 2 query heads share a value head" in text
    assert f"e5m2 at {query}: stays as it is in the checkpoint: compressed-tensors has no float8_e5m2" in text
    assert f"it is run as one with {query}" in text
    stored = torch.nn.Module.float(loaded(tmp_path / "out"))
    assert torch.equal(logits(stored, {}, QParams({}), {}), made.simulated(written.held))


def test_a_tied_table_and_head_are_told_beforehand() -> None:
    assert unstorable(subject().model, subject().sites) == {}
    tied = Subject(tie_word_embeddings=True)
    found = unstorable(tied.model, tied.sites)
    assert list(found) == ["model.embed_tokens", "lm_head"]
    assert all("shares its weight with" in reason for reason in found.values())
