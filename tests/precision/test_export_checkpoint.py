"""A quantised checkpoint: what transformers loads from it equals what was simulated, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from assay.precision.errors import BadModel, CannotExport
from assay.precision.export import Written, load_checkpoint, packed_zero_points
from assay.precision.export.configurations.compressed_tensors import why_not
from assay.precision.loading import bundled, load
from assay.precision.observation.qparams import QParams
from assay.precision.schemes import SCHEMES
from tests.precision.exported import Subject, loaded, logits, subject

BFLOAT16 = ("mxfp8", "mxfp6", "mxfp4", "w-mxfp4")
"""Schemes whose weights transformers gives back in bfloat16, which holds them."""
NVFP4 = ("nvfp4", "w-nvfp4")
"""Schemes whose weights it gives back in bfloat16, rounded."""
STORED = {
    name: scheme.weight
    for name, scheme in SCHEMES.items()
    if "linear" in scheme.site_types
    and scheme.weight is not None
    and scheme.weight.per != "element"
    and scheme.weight.rule != "awq"
    and scheme.transform == "none"
    and why_not(scheme) is None
}
"""How linears' weights are stored in all schemes without column factors (test_export_folding has those)."""
EXACT = [name for name in STORED if name not in (*BFLOAT16, *NVFP4)]
"""Schemes whose weights it gives back in the dtype that it is asked for."""
LAYER = "model.layers.{}.{}"


def write(made: Subject, assignment: dict[str, str], folder: Path, **options: Any) -> Written:
    """The checkpoint of an assignment."""
    return made.checkpoint(assignment, folder, **options)


def run(model: Any) -> torch.Tensor:
    """Logits of a loaded model, computed in float32 as the simulation computes them."""
    return logits(torch.nn.Module.float(model), {}, QParams({}), {})


def mixed() -> dict[str, str]:
    """Five schemes, fused linears alike, and the caches."""
    attention, block = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    return {
        **{LAYER.format(0, f"self_attn.{name}"): "fp8" for name in attention},
        **{LAYER.format(1, f"mlp.{name}"): "w4a16-g128" for name in block},
        LAYER.format(0, "mlp.down_proj"): "w8a8",
        LAYER.format(1, "mlp.down_proj"): "w3a16-g64",
        LAYER.format(1, "self_attn.o_proj"): "fp8-block",
        **{LAYER.format(layer, "self_attn:kv_cache"): "kv-fp8" for layer in (0, 1)},
    }


def test_all_ways_to_store_a_weight_are_tried() -> None:
    assert {"w8a16", "w4a16-g32-asym", "w4a16-g128-asym", "w4a16-g64", "w3a16-g32", "w8a8-asym"} <= set(EXACT)
    assert {"fp8", "fp8-tensor", "fp8-block", "w4a8-g128", "w4a8-fp8-g128", "w4a16-g128-clip"} <= set(EXACT)
    assert len(STORED) == len(EXACT) + len(BFLOAT16) + len(NVFP4)


def check_bytes(written: Written, scheme: str) -> None:
    """Codes, scales and zero-points take the bits that a budget counts."""
    tensors, quantizer = load_file(written.path / "model.safetensors"), STORED[scheme]
    assert written.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert quantizer is not None
    for name in written.held:
        parts = {key: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.weight")}
        taken = 8 * sum(tensor.nbytes for key, tensor in parts.items() if not key.endswith("weight_shape"))
        assert taken == quantizer.bits(subject().sites[name].shape)


@pytest.mark.parametrize("scheme", [*EXACT, *BFLOAT16])
def test_what_is_loaded_is_what_was_simulated(scheme: str, tmp_path: Path) -> None:
    """Weights and logits of the loaded model equal the simulated ones in every bit, zero-points or not.

    In the checkpoint's own dtype weights are the simulated ones rounded once: their scales are bfloat16, or powers of
    two, whose weights bfloat16 holds.
    """
    assignment = subject().weights(scheme)
    check_bytes(write(subject(), assignment, tmp_path / "out"), scheme)
    own = load_checkpoint(tmp_path / "out", "auto")
    model = load_checkpoint(tmp_path / "out") if scheme in EXACT else loaded(tmp_path / "out", torch.bfloat16)
    for name in assignment:
        stored = subject().stored(name, scheme)
        assert torch.equal(model.get_submodule(name).weight.float(), stored), name
        assert torch.equal(own.get_submodule(name).weight, stored.bfloat16()), name
    assert torch.equal(run(model), subject().simulated(assignment))


@pytest.mark.parametrize("scheme", NVFP4)
def test_nvfp4_is_exact_but_for_the_loader_s_rounding(scheme: str, tmp_path: Path) -> None:
    assignment = subject().weights(scheme)
    check_bytes(write(subject(), assignment, tmp_path / "out"), scheme)
    model = loaded(tmp_path / "out", torch.bfloat16)
    torch.nn.Module.float(model)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name in assignment:
        stored, module = subject().stored(name, scheme), model.get_submodule(name)
        assert torch.equal(module.weight, stored.bfloat16().float()), name
        codes = unpacked(tensors[f"{name}.weight_packed"])
        scale = tensors[f"{name}.weight_scale"].float() / tensors[f"{name}.weight_global_scale"]
        module.weight.data = (codes.unflatten(1, (-1, 16)) * scale[..., None]).flatten(1)
        assert torch.equal(module.weight, stored), name
    assert torch.equal(run(model), subject().simulated(assignment))


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """E2M1 values [N, K] of bytes [N, K / 2], the low nibble first."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()
    return torch.where(nibbles > 7, -1.0, 1.0) * table[nibbles & 7]


def test_zero_points_load_beside_other_schemes(tmp_path: Path) -> None:
    assignment = mixed() | {
        LAYER.format(0, "self_attn.o_proj"): "w4a16-g64-asym",
        LAYER.format(1, "self_attn.o_proj"): "w4a16-g32-asym",
    }
    written = write(subject(), assignment, tmp_path / "out")
    assert any("load_checkpoint" in note for note in written.notes)
    assert torch.equal(run(load_checkpoint(tmp_path / "out")), subject().simulated(assignment))
    other = write(subject(), mixed(), tmp_path / "other")
    assert not any("zero-points are packed" in note for note in other.notes)


def test_a_table_that_the_head_shares_stays_as_it_is(tmp_path: Path) -> None:
    made = Subject(tie_word_embeddings=True, num_hidden_layers=1)
    linears = made.weights("w8a16")
    written = write(made, linears | {"model.embed_tokens": "fp8"}, tmp_path / "out")
    assert written.held == linears
    assert any(note.startswith("fp8 at model.embed_tokens: vLLM forms no product") for note in written.notes)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert not any("lm_head" in name for name in tensors)
    assert torch.equal(run(load_checkpoint(tmp_path / "out")), made.simulated(linears))


def test_caches_alone_are_a_checkpoint(tmp_path: Path) -> None:
    assignment = {LAYER.format(layer, "self_attn:kv_cache"): "kv-fp8" for layer in (0, 1)}
    written = write(subject(), assignment, tmp_path / "out")
    assert written.held == assignment
    assert torch.equal(run(load_checkpoint(tmp_path / "out")), subject().simulated(assignment))
    assert not torch.equal(subject().simulated(assignment), subject().simulated({}))


def test_a_model_that_is_not_quantised_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="isn't quantised"):
        load_checkpoint(bundled()["stdlib-llama"])
    with pytest.raises(BadModel, match=r"has no config\.json"):
        load_checkpoint(tmp_path)


def test_packed_zero_points_are_needed_for_them(tmp_path: Path) -> None:
    write(subject(), {"lm_head": "w4a16-g64-asym"}, tmp_path / "out")
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        loaded(tmp_path / "out")
    with packed_zero_points():
        loaded(tmp_path / "out")
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        loaded(tmp_path / "out")


def test_a_mixed_assignment_is_loaded_as_simulated(tmp_path: Path) -> None:
    written = write(subject(), mixed(), tmp_path / "out")
    assert written.held == mixed()
    assert torch.equal(run(loaded(tmp_path / "out")), subject().simulated(mixed()))
    assert not any("stay as it is" in note or "matches" in note for note in written.notes)


def test_loaded_in_bfloat16_logits_agree_to_its_rounding(tmp_path: Path) -> None:
    assignment = subject().weights("w4a16-g64")
    write(subject(), assignment, tmp_path / "out")
    model = loaded(tmp_path / "out", "auto")
    assert model.dtype == torch.bfloat16
    exact = subject().simulated(assignment)
    difference = (logits(model, {}, QParams({}), {}).float() - exact).norm() / exact.norm()
    assert 0 < difference < 16 * 2.0**-8  # some twenty roundings on the way, each of 2^-9 of the norm at most


def test_what_is_not_held_is_noted_and_left_out(tmp_path: Path) -> None:
    """Stages, embeddings and a cache that vLLM computes otherwise are named in notes; what is held simulates what is
    loaded."""
    assignment = {
        **subject().weights("fp8"),
        "model.embed_tokens": "fp8",
        "model.layers.0.self_attn:kv_cache": "kv-int4",
        "model.layers.1.self_attn:scores": "fp16",
    }
    written = write(subject(), assignment, tmp_path / "out")
    assert written.held == subject().weights("fp8")
    text = "\n".join(written.notes)
    for name in assignment.keys() - written.held.keys():
        assert name in text
    assert torch.equal(run(loaded(tmp_path / "out")), subject().simulated(written.held))


@pytest.mark.parametrize(
    ("name", "scheme", "words"),
    [
        ("lm_head", "e5m2", "no float8_e5m2"),
        ("lm_head", "w8a8-hadamard", "rotated"),
        ("lm_head", "w8a8-smooth", "column factors"),
        ("model.layers.0.self_attn.o_proj", "w8a8-smooth", "2 query heads share a value head"),
        ("model.layers.0.self_attn.q_proj", "w8a8-smooth", "q_proj, k_proj, v_proj take one input"),
    ],
)
def test_what_a_checkpoint_can_not_hold_is_refused(name: str, scheme: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match=words) as caught:
        write(subject(), {name: scheme}, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_fused_linears_have_one_scale_of_the_tensor(tmp_path: Path) -> None:
    for scheme, key in (("nvfp4", "weight_global_scale"), ("fp8-tensor", "weight_scale")):
        assignment = {LAYER.format(0, f"self_attn.{part}"): scheme for part in ("q_proj", "k_proj", "v_proj")}
        written = write(subject(), assignment, tmp_path / scheme)
        tensors = load_file(tmp_path / scheme / "model.safetensors")
        assert len({float(tensors[f"{name}.{key}"]) for name in assignment}) == 1
        assert not any("self_attn.qkv" in note for note in written.notes)
        apart = Subject.__new__(Subject)
        apart.model, apart.sites, apart.fits = subject().model, subject().sites, QParams(subject().seen)
        other = write(apart, assignment, tmp_path / f"{scheme} apart")
        (warning,) = [note for note in other.notes if "self_attn.qkv" in note]
        assert f"its 3 weights have a {key} each" in warning


def test_without_anything_to_quantise_there_is_no_checkpoint(tmp_path: Path) -> None:
    for assignment in ({}, {"model.layers.1.self_attn:scores": "fp16", "lm_head": "bf16"}):
        with pytest.raises(CannotExport, match="expected a linear or all KV caches to quantise"):
            write(subject(), assignment, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_only_replaced_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(CannotExport, match="overwrite=True"):
        write(subject(), {"lm_head": "fp8"}, out)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    written = write(subject(), {"lm_head": "fp8"}, out, overwrite=True)
    assert not (out / "mine.txt").exists()
    assert (out / "model.safetensors").exists()
    assert any("replaced" in note for note in written.notes)
    assert list(tmp_path.iterdir()) == [out]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(tensors: object, place: Path, **_: object) -> None:
        (place / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", fail)
    with pytest.raises(OSError, match="no space"):
        write(subject(), {"lm_head": "fp8"}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="no space"):
        write(subject(), {"lm_head": "fp8"}, tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_files_beside_the_weights_are_taken_over(tmp_path: Path) -> None:
    source = bundled()["stdlib-llama"]
    model = load("stdlib-llama").model
    made = Subject.of(model, torch.arange(32)[None] + 65)
    written = write(made, {"model.layers.0.mlp.down_proj": "w4a16-g64"}, tmp_path / "out", source=source)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (written.path / file).read_bytes() == (source / file).read_bytes()
    before = json.loads((source / "config.json").read_text())
    after = json.loads((written.path / "config.json").read_text())
    assert {key: value for key, value in after.items() if key != "quantization_config"} == before
    assert load_file(written.path / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    modes = {file.stat().st_mode for file in written.path.iterdir()}
    assert modes == {(tmp_path / "out" / "config.json").stat().st_mode}
    assert torch.equal(loaded(written.path).model.norm.weight, model.model.norm.weight)


def test_a_weight_that_is_read_back_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    read = compressor.decompress

    def off_by_one(tensors: Any, scheme: Any) -> Any:
        opened = read(tensors, scheme)
        opened["weight"][0, 0] += opened["weight_scale"][0, 0]
        return opened

    monkeypatch.setattr(compressor, "decompress", off_by_one)
    with pytest.raises(CannotExport, match="1 of 8192 values otherwise than simulated"):
        write(subject(), {"lm_head": "w4a16-g64"}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
