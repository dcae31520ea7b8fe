"""Tables of embeddings: predicted as measured, counted once, offered where they are loaded, exported as simulated.

What a checkpoint can hold: known beforehand, and left out with a note where that is asked for.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from assay.precision.auditing import Audit, audit
from assay.precision.export import load_checkpoint, unexportable, unstorable, verify_export
from assay.precision.export.configurations.mlx import layers_in
from assay.precision.observation.qparams import QParams
from assay.precision.schemes import SCHEMES
from assay.precision.targets import engines
from tests.precision.exported import IDS, Subject, loaded, logits, subject
from tests.precision.test_export_experts import sparse

TABLE, FORMATS = "model.embed_tokens", ["w8a16", "w4a16-g32", "w4a16-g32-asym", "w3a16-g32"]


def audited(**options: Any) -> Audit:
    """A small Llama, calibrated."""
    torch.manual_seed(0)
    made = Subject(**options)
    found = audit(made.model, [{"input_ids": torch.randint(0, 64, (16, 32))}], formats=FORMATS)
    found.calibrate(24)
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_the_error_of_a_table_is_predicted_as_measured(tied: bool) -> None:
    """Of each scheme at the table what is measured lies in the interval of what is predicted, and in no other scheme's
    far from it; a head that shares the weight goes with it, and its bytes count once."""
    found = audited(tie_word_embeddings=tied)
    assert set(found.menu(TABLE)) == set(FORMATS)
    predicted = {scheme: found.predict({TABLE: scheme}) for scheme in FORMATS}
    measured = {scheme: found.trial({TABLE: scheme}) for scheme in FORMATS}
    for scheme, each in predicted.items():
        assert 0 < each.low <= measured[scheme] <= each.high, scheme
    assert predicted["w8a16"].high < measured["w4a16-g32"] < predicted["w3a16-g32"].low
    plain, stored = found.cost({}).bytes, found.cost({TABLE: "w8a16"}).bytes
    bits = SCHEMES["w8a16"].weight
    assert bits is not None
    assert plain - stored == 64 * 128 * found.bits // 8 - bits.bits((64, 128)) // 8


def test_menus_are_those_of_the_engine() -> None:
    """vLLM has packed integers at the table of a Llama, none at one that is the head too, none at a Mixtral's; MLX has
    all of its own; SGLang none."""

    def menu(made: Subject, target: str, formats: list[str]) -> tuple[str, ...]:
        found = audit(made.model, [{"input_ids": IDS}], formats=formats, target=target)
        return found.menu(TABLE) if TABLE in found.sites else ()

    some = ["fp8", "w8a16", "w4a16-g32"]
    assert menu(subject(), "vllm@h200", some) == ("w8a16", "w4a16-g32")
    assert menu(Subject(tie_word_embeddings=True), "vllm@h200", some) == ()
    assert menu(sparse("mixtral"), "vllm@h200", some) == ()
    assert menu(subject(), "sglang@h200", some) == ()
    assert menu(Subject(tie_word_embeddings=True), "mlx", ["w4a16-g32-asym", "w-mxfp4"]) == (
        "w4a16-g32-asym",
        "w-mxfp4",
    )


def test_a_head_without_a_configuration_stays() -> None:
    for kind, menu in (("mixtral", ()), ("qwen", ("w8a16",))):
        made = sparse(kind)
        found = audit(made.model, [{"input_ids": IDS}], formats=["w8a16", "fp8-block"], target="sglang@h200")
        assert (found.menu("lm_head") if "lm_head" in found.sites else ()) == menu
        assert "fp8-block" in found.menu("model.layers.0.self_attn.o_proj")


@pytest.mark.parametrize("scheme", engines()["vllm"].schemes_by_kind["tables"])
def test_a_table_is_loaded_as_simulated(scheme: str, tmp_path: Path) -> None:
    """Packed as vLLM reads it, named and by its class; transformers reads back the stored weight, and computes what was
    simulated."""
    made, assignment = subject(), {TABLE: scheme, "model.layers.0.self_attn.o_proj": "w8a16", "lm_head": "w8a16"}
    written = made.checkpoint(assignment, tmp_path / "out")
    assert written.held == assignment
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {key.removeprefix(f"{TABLE}.") for key in tensors if TABLE in key} == {
        "weight_packed", "weight_scale", "weight_shape",
    }  # fmt: skip
    assert tensors[f"{TABLE}.weight_packed"].shape == (64, 128 * (8 if scheme == "w8a16" else 4) // 32)
    content = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = (group for group in content["config_groups"].values() if TABLE in group["targets"])
    assert group["targets"][-1] == "Embedding"
    assert TABLE not in content["ignore"]
    model = load_checkpoint(tmp_path / "out")
    assert torch.equal(model.get_submodule(TABLE).weight, made.stored(TABLE, scheme))
    from assay.precision.observation.qparams import QParams

    assert torch.equal(logits(model, {}, QParams({}), {}), made.simulated(assignment))


@pytest.mark.parametrize(
    ("kind", "scheme", "reason"),
    [
        ("llama", "fp8", "tables may have w8a16, w4a16-g32"),
        ("llama", "w4a16-g32-asym", "tables may have w8a16, w4a16-g32"),
        ("tied", "w8a16", "vLLM forms no product with a quantised table"),
        ("mixtral", "w8a16", "vLLM 0.33.0 loads quantised tables of llama, mistral, phi3"),
    ],
)
def test_what_no_engine_loads_stays_and_is_noted(kind: str, scheme: str, reason: str, tmp_path: Path) -> None:
    made = {"llama": subject, "tied": lambda: Subject(tie_word_embeddings=True), "mixtral": lambda: sparse("mixtral")}[
        kind
    ]()
    chosen = {TABLE: scheme, "model.layers.0.self_attn.o_proj": "fp8"}
    done = made.export(chosen, tmp_path / "out", ["compressed-tensors"], checkpoint=True)
    assert all(part.held == {"model.layers.0.self_attn.o_proj": "fp8"} for part in done.parts)
    assert any(f"{scheme} at {TABLE}: {reason}" in note for note in done.notes)
    assert [each.wrong for each in verify_export(tmp_path / "out")] == [(), ()]


def test_tables_are_left_from_the_start_where_an_export_has_none() -> None:
    made = subject()
    assert unexportable(made.model, made.sites, [], True) == [TABLE]
    assert unexportable(made.model, made.sites, ["compressed-tensors"], True, "vllm@h200") == []
    assert unexportable(made.model, made.sites, ["compressed-tensors", "vllm"], False, "vllm") == [TABLE]
    assert unexportable(made.model, made.sites, ["mlx"], False, "mlx") == []
    assert TABLE in unstorable(sparse("mixtral").model, sparse("mixtral").sites)


def test_mlx_and_the_record_hold_tables(tmp_path: Path) -> None:
    for tied in (False, True):
        made, out = Subject(tie_word_embeddings=tied, num_hidden_layers=1), tmp_path / str(tied)
        made.export({TABLE: "w4a16-g32-asym"}, out, ["mlx"])
        assert layers_in((out / "mlx_convert.py").read_text())[TABLE] == {"group_size": 32, "bits": 4, "mode": "affine"}
        assert [each.wrong for each in verify_export(out)] == [()]


LAYER = "model.layers.{}.{}"


def test_what_can_not_be_stored_may_stay_as_it_is(tmp_path: Path) -> None:
    """Partial: a linear without a place for its factors, and one that engines run with it, are left out with a note;
    the others are stored, and what is loaded equals what is said to be held."""
    o_proj, query, key = (LAYER.format(0, f"self_attn.{part}_proj") for part in "oqk")
    assignment = subject().weights("fp8") | {o_proj: "w8a8-smooth", query: "e5m2"}
    made = subject()
    written = made.checkpoint(assignment, tmp_path / "out", partial=True)
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
