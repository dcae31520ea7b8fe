"""Lint: what a serving stack would do in silence is said in a line, and what is sound is not."""

from typing import Any

import pytest
import torch

from assay.precision.export import lint, lint_config, lint_scales, quantization_config
from assay.precision.observation.sites import Site
from tests.precision.test_export_formats import chosen, many_layers

SITES = many_layers()
SOUND = {**chosen(SITES, "self_attn", "fp8", range(12)), **chosen(SITES, "mlp", "w4a16-g128", range(3))}


def config(assignment: dict[str, str]) -> dict[str, Any]:
    """The configuration of an assignment."""
    return quantization_config(assignment, SITES).content


def test_a_sound_assignment_has_no_warning() -> None:
    assert lint(SOUND, SITES, "h200") == []
    assert lint_config(config(SOUND), SOUND, SITES) == []
    assert lint({}, SITES, "a100") == []


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"])
@pytest.mark.parametrize("other", ["w8a8", None])
def test_fused_linears_that_disagree_are_found(part: str, other: str | None) -> None:
    assignment = dict(SOUND)
    name = next(
        name
        for name in SITES
        if name.endswith(f"layers.2.{'mlp' if 'p_' in part or 'g' in part else 'self_attn'}.{part}")
    )
    if other is None:
        del assignment[name]
    else:
        assignment[name] = other
    (warning,) = lint(assignment, SITES)
    assert SITES[name].unit in warning
    assert f"{part} {other or 'as it is'}" in warning


def test_scales_that_fused_linears_would_share_are_found() -> None:
    names = [f"model.layers.4.self_attn.{part}_proj" for part in "qkv"]

    def scales(key: str, *values: float) -> dict[str, torch.Tensor]:
        return {f"{name}.{key}": torch.tensor([value]) for name, value in zip(names, values, strict=True)}

    (warning,) = lint_scales(scales("weight_global_scale", 1, 1, 2), SITES)
    assert warning == (
        "model.layers.4.self_attn.qkv: its 3 weights have a weight_global_scale each, of which vLLM takes the largest "
        "for all"
    )
    (warning,) = lint_scales(scales("weight_scale", 1, 3, 1), SITES)
    assert "vLLM rounds all to one" in warning
    assert lint_scales(scales("weight_scale", 2, 2, 2) | scales("weight_global_scale", 3, 3, 3), SITES) == []
    rows = {f"{name}.weight_scale": torch.arange(1.0, 129.0)[:, None] for name in names}
    assert lint_scales(rows, SITES) == []
    assert lint_scales({"model.layers.4.self_attn.o_proj.weight_scale": torch.ones(1)}, SITES) == []


def test_formats_that_the_device_lacks_are_found() -> None:
    (warning,) = lint(SOUND, SITES, "a100")
    assert warning == (
        "a100 has no fp8 products: fp8 runs in bf16, at model.layers.0.self_attn.q_proj and 47 more: not what was "
        "simulated"
    )


def test_a_device_without_microscaling_is_found() -> None:
    assignment = chosen(SITES, "mlp", "mxfp8", range(2))
    (warning,) = lint(assignment, SITES, "h200")
    assert warning.startswith("h200 has no scales in its products: mxfp8 runs in bf16, at ")
    assert lint(assignment, SITES, "b200") == []
    assert lint(chosen(SITES, "mlp", "nvfp4", range(2)), SITES, "b200") == []
    assert lint(chosen(SITES, "mlp", "w-mxfp4", range(2)), SITES, "a100") == []


def test_a_tied_weight_is_named() -> None:
    sites = {**SITES, "lm_head": Site("lm_head", "linear", "linear", (64, 128), tied="model.embed_tokens")}
    (warning,) = lint({"model.embed_tokens": "w8a16"}, sites)
    assert warning.startswith("lm_head: shares its weight with model.embed_tokens")
    assert lint(SOUND, sites) == []


def edited(**changes: Any) -> list[str]:
    """Warnings about the sound configuration with the first group, or the config itself, changed."""
    content = config(SOUND)
    for key, value in changes.items():
        where = content["config_groups"]["group_000"] if key == "targets" else content
        where[key] = value
    return lint_config(content, SOUND, SITES)


def test_a_pattern_without_an_end_is_found() -> None:
    sites = many_layers()
    assignment = chosen(sites, "o_proj", "fp8", range(1, 2))
    content = quantization_config(assignment, sites).content
    assert content["config_groups"]["group_000"]["targets"] == ["model.layers.1.self_attn.o_proj"]
    content["config_groups"]["group_000"]["targets"] = [r"re:model\.layers\.1.*o_proj"]
    content["ignore"] = []
    found = lint_config(content, assignment, sites)
    assert any("end it with $" in warning for warning in found)
    for layer in (10, 11):
        assert any(f"model.layers.{layer}.self_attn.o_proj: " in w and "is to stay as it is" in w for w in found)
    assert not any("layers.2." in warning for warning in found)


def test_linears_that_no_group_matches_are_found() -> None:
    found = edited(targets=[r"re:transformer\.h\.[0-9]+\.attn\.(q|k|v|o)_proj$"])
    silent = [warning for warning in found if "would silently stay as it is instead of fp8" in warning]
    assert len(silent) == 48
    assert any("matches no linear of the model" in warning for warning in found)


def test_linears_that_are_targeted_and_ignored_are_found() -> None:
    found = edited(ignore=["model.layers.3.self_attn.q_proj"])
    (warning,) = [warning for warning in found if "layers.3" in warning]
    assert (
        warning == "model.layers.3.self_attn.q_proj: would silently stay as it is instead of fp8, since it is ignored"
    )


def test_groups_that_overlap_or_sort_otherwise_are_found() -> None:
    content = config(SOUND)
    content["config_groups"]["group_001"]["targets"].append("model.layers.0.self_attn.q_proj")
    found = lint_config(content, SOUND, SITES)
    assert found == ["model.layers.0.self_attn.q_proj: stands in group_000 and group_001; engines take one of them"]
    first, second = content["config_groups"].values()
    content["config_groups"] = {"group_2": first, "group_10": second}
    assert any("number them with zeros in front" in warning for warning in lint_config(content, SOUND, SITES))


def test_a_class_as_target_is_understood() -> None:
    assignment = {name: "fp8" for name, site in SITES.items() if site.type == "linear"}
    content = config(assignment)
    content["config_groups"]["group_000"]["targets"] = ["Linear"]
    assert lint_config(content, assignment, SITES) == []
    del assignment["lm_head"]
    content["ignore"] = []
    assert [w.partition(":")[0] for w in lint_config(content, assignment, SITES)] == ["lm_head"]
