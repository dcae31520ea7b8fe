"""Column factors of AWQ and SmoothQuant, folded into what comes before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from assay.precision.errors import CannotExport
from assay.precision.export import load_checkpoint
from assay.precision.export.checkpoint.folding import folded
from assay.precision.observation.qparams import QParams
from assay.precision.schemes import SCHEMES
from tests.precision.exported import Subject, logits, subject

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def many_heads() -> Subject:
    """A model whose query heads have value heads of their own, so that o_proj's factors have a place."""
    return Subject(num_key_value_heads=2, num_hidden_layers=1)


def written(made: Subject, assignment: dict[str, str], folder: Path) -> Any:
    """What is loaded of a checkpoint whose unquantised weights are float32, so that folding rounds nothing else."""
    made.checkpoint(assignment, folder, dtype=torch.float32)
    return load_checkpoint(folder)


def distance(model: Any, made: Subject, assignment: dict[str, str]) -> tuple[float, float]:
    """How far the loaded logits are from those simulated, and how far these are from the unquantised ones."""
    with torch.no_grad():
        found, aim = logits(model, {}, QParams({}), {}), made.simulated(assignment)
        plain = made.simulated({})
    return float((found - aim).norm() / aim.norm()), float((plain - aim).norm() / aim.norm())


@pytest.mark.parametrize("name", [DOWN, "model.layers.0.self_attn.o_proj"])
def test_smoothing_is_folded_into_the_linear_before(name: str, many_heads: Subject, tmp_path: Path) -> None:
    off, moved = distance(
        written(many_heads, {name: "w8a8-smooth"}, tmp_path / "out"), many_heads, {name: "w8a8-smooth"}
    )
    assert off < 0.1 * moved  # a division more may tip an int8 code of the input


def test_factors_divide_the_scales_of_a_quantised_linear_before(many_heads: Subject, tmp_path: Path) -> None:
    stored = many_heads.fits.weight(
        DOWN, SCHEMES["w4a16-g64-awq"], many_heads.model.get_parameter(f"{DOWN}.weight").data
    )
    assert stored is not None
    assert stored.columns is not None
    assert len(stored.columns.unique()) > 100
    up = "model.layers.0.mlp.up_proj"
    tensors = []
    for number, below in enumerate(({}, {DOWN: "w4a16-g64-awq"})):
        out = tmp_path / str(number)
        many_heads.checkpoint({up: "w8a16", **below}, out)
        tensors.append(load_file(out / "model.safetensors"))
    plain, divided = tensors
    expected = (plain[f"{up}.weight_scale"].float() / stored.columns[:, None]).bfloat16()
    assert torch.equal(divided[f"{up}.weight_scale"], expected)
    assert torch.equal(plain[f"{up}.weight_packed"], divided[f"{up}.weight_packed"])


@pytest.mark.parametrize("size", [32, 64, 128])
def test_awq_alone_is_loaded_as_simulated(size: int, many_heads: Subject, tmp_path: Path) -> None:
    assignment = {DOWN: f"w4a16-g{size}-awq"}
    off, moved = distance(written(many_heads, assignment, tmp_path / "out"), many_heads, assignment)
    assert off < 1e-5
    assert off < 1e-2 * moved


def test_awq_everywhere_is_loaded_as_simulated(many_heads: Subject, tmp_path: Path) -> None:
    """All linears of a layer in AWQ: q, k and v share factors, so do gate and up, and scales of the linears that take
    factors are rounded to bfloat16 again, 2^-9 of a weight at most."""
    assignment = many_heads.weights("w4a16-g64-awq")
    off, moved = distance(written(many_heads, assignment, tmp_path / "out"), many_heads, assignment)
    assert off < 2.0**-8
    assert off < 0.1 * moved


def test_one_factor_of_all_goes_into_the_norm(many_heads: Subject) -> None:
    factors = torch.linspace(0.5, 2.0, 128)
    names = [f"model.layers.0.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
    found = folded(many_heads.model, dict.fromkeys(names, factors))
    norm = "model.layers.0.input_layernorm.weight"
    assert list(found.vectors) == [norm]
    assert torch.equal(found.vectors[norm], many_heads.model.get_parameter(norm) / factors)
    assert found.rows == {}


def test_a_head_with_factors_stays_and_the_others_are_stored(tmp_path: Path) -> None:
    made, chosen = subject(), {"lm_head": "w4a16-g32-awq", DOWN: "fp8"}
    with pytest.raises(CannotExport, match="lm_head: column factors need a norm before it"):
        made.checkpoint(chosen, tmp_path / "whole")
    written = made.checkpoint(chosen, tmp_path / "out", partial=True)
    assert written.held == {DOWN: "fp8"}
    assert any(
        "lm_head: stays as it is in the checkpoint: column factors need a norm" in note for note in written.notes
    )


def test_a_fold_is_checked_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, devices = Subject().model.to("meta"), set()

    class Asked(Exception):
        """The model was run."""

    def run(**inputs: torch.Tensor) -> None:
        devices.update(values.device.type for values in inputs.values())
        raise Asked

    monkeypatch.setattr(model, "forward", run)
    with pytest.raises(Asked):
        folded(model, {DOWN: torch.ones(256, device="meta")})
    assert devices == {"meta"}


def test_a_fold_that_changes_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Subject(num_hidden_layers=1)
    block = made.model.model.layers[0].mlp
    monkeypatch.setattr(
        block, "forward", lambda x: block.down_proj(block.act_fn(block.up_proj(x)) * block.gate_proj(x))
    )
    before = {name: values.clone() for name, values in made.model.named_parameters()}
    with pytest.raises(CannotExport, match="changes the model's output by"):
        folded(made.model, {DOWN: torch.linspace(0.5, 2.0, 256)})
    assert all(torch.equal(values, before[name]) for name, values in made.model.named_parameters())


def test_scales_that_rows_can_not_divide_are_refused(tmp_path: Path) -> None:
    for scheme in ("fp8-tensor", "mxfp8"):
        with pytest.raises(CannotExport, match=r"the scales of .*up_proj can't take its column factors"):
            subject().checkpoint({DOWN: "w8a8-smooth", "model.layers.0.mlp.up_proj": scheme}, tmp_path / "out")
