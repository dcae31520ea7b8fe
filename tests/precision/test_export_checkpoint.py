"""A quantised checkpoint: what transformers loads from it equals what was simulated, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from assay.precision.errors import CannotExport
from assay.precision.export import Written, write_checkpoint
from assay.precision.loading import bundled, load
from assay.precision.model.menu import Fits
from tests.precision.exported import Subject, loaded, logits, subject

EXACT = (
    "fp8",
    "fp8-tensor",
    "fp8-block",
    "w8a8",
    "w8a8-static",
    "w8a8-asym",
    "w8a16",
    "w4a16-g32",
    "w4a16-g128",
    "w4a16-g128-mse",
    "w4a16-g128-clip",
    "w3a16-g64",
    "w4a8-g128",
    "w4a8-fp8-g128",
)
"""Schemes whose weights transformers gives back in the dtype that it is asked for."""
BFLOAT16 = ("mxfp8", "mxfp6", "mxfp4", "w-mxfp4")
"""Schemes whose weights it gives back in bfloat16, which holds them."""
LAYER = "model.layers.{}.{}"


def write(made: Subject, assignment: dict[str, str], folder: Path, **options: Any) -> Written:
    """The checkpoint of an assignment."""
    return write_checkpoint(made.model, assignment, folder, sites=made.sites, fits=made.fits, **options)


def run(model: Any) -> torch.Tensor:
    """Logits of a loaded model, computed in float32 as the simulation computes them."""
    return logits(torch.nn.Module.float(model), {}, Fits({}), {})


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


@pytest.mark.parametrize("scheme", EXACT)
def test_what_is_loaded_is_what_was_simulated(scheme: str, tmp_path: Path) -> None:
    """Weights and logits of the loaded model equal the simulated ones in every bit."""
    assignment = subject().weights(scheme)
    write(subject(), assignment, tmp_path / "out")
    model = loaded(tmp_path / "out")
    for name in assignment:
        assert torch.equal(model.get_submodule(name).weight, subject().stored(name, scheme)), name
    assert torch.equal(run(model), subject().simulated(assignment))


@pytest.mark.parametrize("scheme", BFLOAT16)
def test_microscaled_weights_are_exact_in_bfloat16(scheme: str, tmp_path: Path) -> None:
    """Their values are those of the simulation though the library decompresses them to bfloat16; so are the logits."""
    assignment = subject().weights(scheme)
    write(subject(), assignment, tmp_path / "out")
    model = loaded(tmp_path / "out", torch.bfloat16)
    for name in assignment:
        assert torch.equal(model.get_submodule(name).weight.float(), subject().stored(name, scheme)), name
    assert torch.equal(run(model), subject().simulated(assignment))


@pytest.mark.parametrize("scheme", ["nvfp4", "w-nvfp4"])
def test_nvfp4_is_exact_but_for_the_loader_s_rounding(scheme: str, tmp_path: Path) -> None:
    """The loader rounds its values to bfloat16; with the stored ones in their place the logits are as simulated."""
    assignment = subject().weights(scheme)
    write(subject(), assignment, tmp_path / "out")
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


@pytest.mark.parametrize("scheme", ["w4a16-g64-asym", "w4a16-g32-asym"])
def test_zero_points_are_stored_packed(scheme: str, tmp_path: Path) -> None:
    """Asymmetric groups load by dequantize=True, rounded to their scales' bfloat16; a note says what else can't."""
    assignment = subject().weights(scheme)
    written = write(subject(), assignment, tmp_path / "out")
    from transformers import CompressedTensorsConfig

    model = loaded(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
    for name in assignment:
        assert torch.equal(model.get_submodule(name).weight, subject().stored(name, scheme).bfloat16().float()), name
        model.get_submodule(name).weight.data = subject().stored(name, scheme)
    assert torch.equal(run(model), subject().simulated(assignment))
    assert any("dequantize=True" in note for note in written.notes)


def test_a_mixed_assignment_is_loaded_as_simulated(tmp_path: Path) -> None:
    """Five schemes and FP8 caches in one checkpoint give the simulated logits in every bit, and no note on them."""
    written = write(subject(), mixed(), tmp_path / "out")
    assert written.held == mixed()
    assert torch.equal(run(loaded(tmp_path / "out")), subject().simulated(mixed()))
    assert not any("stay as it is" in note or "matches" in note for note in written.notes)


def test_loaded_in_bfloat16_logits_agree_to_its_rounding(tmp_path: Path) -> None:
    """As transformers loads it by itself, in the checkpoint's bfloat16, logits differ by the roundings alone."""
    assignment = subject().weights("w4a16-g64")
    write(subject(), assignment, tmp_path / "out")
    model = loaded(tmp_path / "out", "auto")
    assert model.dtype == torch.bfloat16
    exact = subject().simulated(assignment)
    difference = (logits(model, {}, Fits({}), {}).float() - exact).norm() / exact.norm()
    assert 0 < difference < 16 * 2.0**-8  # some twenty roundings on the way, each of 2^-9 of the norm at most


def test_what_is_not_held_is_noted_and_left_out(tmp_path: Path) -> None:
    """Stages, embeddings and the cache of one layer alone are named in notes; what is held simulates what is loaded."""
    assignment = {
        **subject().weights("fp8"),
        "model.embed_tokens": "w8a16",
        "model.layers.0.self_attn:kv_cache": "kv-fp8",
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
    """A linear that can't be stored as assigned is refused in one line, and nothing is written."""
    with pytest.raises(CannotExport, match=words) as caught:
        write(subject(), {name: scheme}, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_only_replaced_when_asked(tmp_path: Path) -> None:
    """Without overwrite the folder stays as it was; with it, it is replaced whole, and a note says so."""
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
    """If storing fails half-way, neither the folder nor a temporary one is there, and an old one is as it was."""
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
    """The tokenizer, generation settings and the config's fields are those of the source; weights keep its dtype."""
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
    """The library's own reading of the tensors is compared with the simulation before anything is written."""
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
