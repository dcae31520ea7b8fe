"""Experts that a model holds in one parameter, exported by the names that its checkpoints have."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from assay.precision.errors import CannotExport
from assay.precision.export import lint, load_checkpoint, quantization_config, unstorable
from assay.precision.export.checkpoint.pieces import Piece, pieces_of, rows_of
from assay.precision.export.plan import matches
from assay.precision.loading.quiet import quiet
from assay.precision.schemes import SCHEMES, FakeQuantizer, Quantizer, store
from assay.precision.schemes.quantizer import scales_of
from tests.precision.exported import IDS, Subject

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "dtype": "bfloat16",
}
EXPERTS = {"mixtral": ("block_sparse_moe", ("w1", "w2", "w3")), "qwen": ("mlp", ("gate_proj", "down_proj", "up_proj"))}
"""What the block and its linears are called in checkpoints."""


@cache
def sparse(kind: str) -> Subject:
    """A small random mixture of four experts."""
    torch.manual_seed(2)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, intermediate_size=128, num_local_experts=4)
        model: Any = transformers.MixtralForCausalLM(config)
    else:
        more = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more))
    model = model.float().eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return Subject.of(model, IDS)


def experts(made: Subject, scheme: str) -> dict[str, str]:
    """The scheme at every parameter of experts."""
    return {name: scheme for name, site in made.sites.items() if site.role == "experts"}


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("scheme", ["fp8", "fp8-tensor", "fp8-block", "w8a16", "w4a16-g64", "mxfp4"])
def test_experts_are_loaded_as_simulated(kind: str, scheme: str, tmp_path: Path) -> None:
    made = sparse(kind)
    assignment = experts(made, scheme)
    written = made.checkpoint(assignment, tmp_path / "out")
    assert written.held == assignment
    with quiet():
        config = transformers.CompressedTensorsConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32, quantization_config=config, experts_implementation="eager"
        )
    for name in assignment:
        loaded = model.get_parameter(name).detach()
        for expert, weight in enumerate(made.model.get_parameter(name).detach()):
            stored = made.fits.weight(name, SCHEMES[scheme], weight, expert)
            assert stored is not None
            exact = stored(weight)
            assert torch.equal(loaded[expert], exact.bfloat16().float() if scheme.startswith("w") else exact)


@pytest.mark.parametrize("kind", EXPERTS)
def test_targets_are_the_names_of_checkpoints(kind: str, tmp_path: Path) -> None:
    made, (block, parts) = sparse(kind), EXPERTS[kind]
    assignment = {**experts(made, "fp8"), "model.layers.1.self_attn.o_proj": "w4a16-g64"}
    made.export(assignment, tmp_path, ["compressed-tensors"], checkpoint=True)
    content = json.loads((tmp_path / "quantization_config.json").read_text())
    assert json.loads((tmp_path / "checkpoint" / "config.json").read_text())["quantization_config"] == content
    fp8 = {f"model.layers.{layer}.{block}.experts.{e}.{p}" for layer in (0, 1) for e in range(4) for p in parts}
    with safe_open(tmp_path / "checkpoint" / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert {f"{name}.weight_scale" for name in fp8} <= stored
    modules = {key.rpartition(".")[0] for key in stored if "norm" not in key and "embed" not in key}
    groups = {group["weights"]["num_bits"]: group["targets"] for group in content["config_groups"].values()}
    for name in modules:
        assert any(matches(target, name) for target in groups[8]) == (name in fp8), name
        assert any(matches(target, name) for target in groups[4]) == (name == "model.layers.1.self_attn.o_proj"), name
        quantised = name in fp8 or name == "model.layers.1.self_attn.o_proj"
        assert any(matches(target, name) for target in content["ignore"]) != quantised, name
    assert f"model.layers.0.{block}.gate" in modules


def test_without_their_names_experts_are_noted() -> None:
    made = sparse("mixtral")
    recipe = quantization_config(experts(made, "fp8"), made.sites)
    assert recipe.content["config_groups"] == {}
    assert any("experts held in one parameter" in note for note in recipe.notes)


def test_experts_of_a_layer_that_disagree_are_found() -> None:
    made = sparse("mixtral")
    assert lint(experts(made, "fp8"), made.sites) == []
    assignment = {**experts(made, "fp8"), "model.layers.1.mlp.experts.down_proj": "w8a16"}
    (warning,) = lint(assignment, made.sites)
    assert warning.startswith("model.layers.1.mlp.experts: ")


def test_a_router_is_known_to_have_no_place() -> None:
    found = unstorable(sparse("mixtral").model, sparse("mixtral").sites)
    routers = [name for name in found if name.endswith("mlp.gate")]
    assert len(routers) == 2
    assert "it is a MixtralTopKRouter" in found[routers[0]]
    assert set(found) == {*routers, "model.embed_tokens"}


def test_experts_with_column_factors_may_stay_as_they_are(tmp_path: Path) -> None:
    made = sparse("mixtral")
    assignment = experts(made, "w4a16-g64-awq") | {"lm_head": "fp8"}
    written = made.checkpoint(assignment, tmp_path / "out", partial=True)
    assert written.held == {"lm_head": "fp8"}
    assert any("stays as it is in the checkpoint: experts share one input" in note for note in written.notes)


def test_column_factors_of_experts_are_refused(tmp_path: Path) -> None:
    made = sparse("mixtral")
    with pytest.raises(CannotExport, match="experts share one input"):
        made.checkpoint(experts(made, "w4a16-g64-awq"), tmp_path / "out")


def test_pieces_are_rows_in_order() -> None:
    made = sparse("mixtral")
    found = pieces_of(made.model, made.sites)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    base = "model.layers.1.block_sparse_moe.experts"
    assert Piece(f"{base}.2.w3", 2, 128, 256) in found[name]
    assert len(found[name]) == 8
    assert found["model.layers.0.mlp.gate"] == [Piece("model.layers.0.block_sparse_moe.gate", None, 0, 4)]


def test_some_rows_of_a_stored_weight_are_stored_alike() -> None:
    torch.manual_seed(4)
    weight = torch.randn(256, 128)
    for scheme in ("fp8", "fp8-tensor", "w4a16-g32-asym", "fp8-block", "nvfp4"):
        quantizer = SCHEMES[scheme].weight
        assert quantizer is not None
        whole = FakeQuantizer(quantizer, scales_of(weight, quantizer))
        part = rows_of("x", whole, 128, 256, 256)
        assert torch.equal(store(weight[128:], quantizer, part.scales), whole(weight)[128:]), scheme
    block = Quantizer(format="float8_e4m3fn", per="block", size=128)
    with pytest.raises(CannotExport, match="cut a block of 128"):
        rows_of("x", FakeQuantizer(block, scales_of(weight, block)), 64, 192, 256)


@pytest.mark.parametrize("others", [None, "fp8", "nvfp4"])
@pytest.mark.parametrize("scheme", ["fp8", "w8a8", "w4a16-g64-asym", "nvfp4", "mxfp4"])
def test_a_mixture_is_opened_as_simulated(scheme: str, others: str | None, tmp_path: Path) -> None:
    """`load_checkpoint` reads each expert and each linear by the group that it is in, whatever the others are stored
    as: weights are the simulated ones (NVFP4's in bfloat16), and linears round their inputs."""
    made = sparse("qwen")
    attention = {name: others for name in made.sites if others and name.endswith("proj") and "self_attn" in name}
    written = made.checkpoint(experts(made, scheme) | attention, tmp_path / "out")
    assert any("dequantize=True" in note for note in written.notes) == (others not in (None, scheme))
    model = load_checkpoint(tmp_path / "out")
    for name, chosen in written.held.items():
        key = name if made.sites[name].role == "experts" else f"{name}.weight"
        given, own = model.get_parameter(key).detach(), made.model.get_parameter(key).detach()
        for expert, weight in enumerate(own) if own.dim() == 3 else [(None, own)]:
            stored = made.fits.weight(name, SCHEMES[chosen], weight, expert)
            assert stored is not None
            exact = stored(weight)
            loaded = given if expert is None else given[expert]
            assert torch.equal(loaded, exact.bfloat16().float() if chosen == "nvfp4" else exact), name
    rounding = [module for module in model.modules() if getattr(module, "quantization_scheme", None) is not None]
    assert len(rounding) == len(attention)
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()
