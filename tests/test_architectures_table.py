"""What modules are by their names, as configs/architectures.toml has it."""

import pytest

from assay.configs import architectures


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv"),
        ("bert.encoder.layer.1.attention.self.query", "bert.encoder.layer.1.attention.self.qkv"),
        ("transformer.layer.1.attention.v_lin", "transformer.layer.1.attention.qkv"),
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up"),
        ("model.layers.0.block_sparse_moe.experts.3.w2", "model.layers.0.block_sparse_moe.experts"),
        ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts"),
        ("model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.o_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_what_is_one_product_has_one_unit(name: str, unit: str) -> None:
    assert architectures.unit_of(name) == unit


def test_experts_are_told_by_layer_and_number() -> None:
    """The module of the experts and the number of one come from its name, a shared expert is none of them, and a
    name that all have leaves the number out."""
    name = "model.layers.2.mlp.experts.17.w1"
    assert architectures.expert_of(name) == ("model.layers.2.mlp.experts", "17")
    assert architectures.experts_of(name) == architectures.experts_of("model.layers.2.mlp.experts")
    assert architectures.any_expert(name) == "model.layers.2.mlp.experts.*.w1"
    assert architectures.without_expert(name) == "model.layers.2.mlp.experts.w1"
    shared = "model.layers.2.mlp.shared_experts.up_proj"
    assert architectures.expert_of(shared) is None
    assert architectures.experts_of(shared) == ""
    assert not architectures.in_experts(shared)


@pytest.mark.parametrize(
    ("asked", "yes", "no"),
    [
        (architectures.gives_logits, "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        (architectures.gives_logits, "lm_head", "model.layers.0.score_mod"),
        (architectures.is_split, "bert.encoder.layer.0.attention.output.dense", "bert.pooler.dense"),
        (architectures.is_attention, "model.layers.0.self_attn", "model.attention.gate"),
        (architectures.is_cross, "decoder.block.0.layer.1.EncDecAttention", "decoder.block.0.layer.0.SelfAttention"),
        (architectures.quantised_by_gguf, "blk.0.ffn_gate.weight", "blk.0.ffn_gate_inp.weight"),
    ],
)
def test_a_part_is_told_from_its_neighbour(asked: object, yes: str, no: str) -> None:
    assert callable(asked)
    assert asked(yes)
    assert not asked(no)


def test_every_fused_product_is_of_one_unit() -> None:
    for fused, parts in architectures.fused().items():
        units = {architectures.unit_of(f"mlp.{part}") for part in parts}
        assert len(units) == 1
        assert architectures.fused_name(units.pop()) == f"mlp.{fused}"
    assert architectures.fused_name("model.layers.0.mlp.experts") is None
