"""Lint: what a serving stack would do in silence is said in a line, and what is sound is not.

Configurations have the names that vLLM and SGLang ask for: products of linears, and experts by SGLang's own names.

SGLang isn't installed here: `sglang` below is its rule in the wheel 0.5.23 (should_ignore_layer, find_matched_target,
and get_moe_scheme of its compressed-tensors), written anew. benchmarks/audit/engine_parsers.py runs its own code.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.configs import architectures
from assay.precision.export import lint, lint_config, lint_scales, quantization_config
from assay.precision.export.plan import lookup_targets
from assay.precision.observation.sites import Site
from tests.precision.exported import subject
from tests.precision.test_export_experts import EXPERTS, experts, sparse
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


SCHEMES = {"fp8": 8, "w4a16-g64": 4}
"""With the bits of their weights."""


def sglang(content: dict[str, Any], name: str) -> int | None:
    """Bits of the group of a linear, where SGLang's model tells no parts of products; None: it is left as it is.

    Raises ValueError as SGLang does, where it is neither ignored nor in a group.
    """

    def means(target: str, name: str) -> bool:
        return bool(re.match(target[3:], name)) if target.startswith("re:") else target == name

    if any(means(target, name) or name.endswith(f".{target}") for target in content["ignore"]):
        return None
    for group in content["config_groups"].values():
        if any(means(target, name) for target in group["targets"]):
            return int(group["weights"]["num_bits"])
    raise ValueError(f"Unable to find matching target for {name}")


def written(made: Any, assignment: dict[str, str], out: Path) -> dict[str, Any]:
    """The configuration of a checkpoint, which is the one that stands alone."""
    made.export(assignment, out, ["compressed-tensors"], checkpoint=True)
    content: dict[str, Any] = json.loads((out / "quantization_config.json").read_text())
    assert json.loads((out / "checkpoint" / "config.json").read_text())["quantization_config"] == content
    return content


def test_products_are_found_without_their_parts(tmp_path: Path) -> None:
    made = subject()
    first = {name: "fp8" for name in made.weights("fp8") if "layers.0" in name}
    content = written(made, {**first, "model.layers.1.mlp.down_proj": "w4a16-g64"}, tmp_path)
    for product in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        assert sglang(content, f"model.layers.0.{product}") == 8
        assert sglang(content, f"model.layers.1.{product}") == (4 if product == "mlp.down_proj" else None)
    for entry in (content["ignore"], content["config_groups"]["group_000"]["targets"]):
        entry[:] = [target for target in entry if "qkv" not in target]
    with pytest.raises(ValueError, match=r"Unable to find .*layers\.0\.self_attn\.qkv_proj"):
        sglang(content, "model.layers.0.self_attn.qkv_proj")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.qkv_proj"):
        sglang(content, "model.layers.1.self_attn.qkv_proj")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_found_by_the_names_that_sglang_asks_for(kind: str, scheme: str, tmp_path: Path) -> None:
    """Those of one layer have the scheme, those of the other stay, whatever the checkpoint calls their linears; their
    names in it, which vLLM asks for, are there as well."""
    made, (block, parts) = sparse(kind), EXPERTS[kind]
    content = written(made, {name: s for name, s in experts(made, scheme).items() if "layers.0" in name}, tmp_path)
    for part in {"gate_proj", "up_proj", "down_proj", *parts}:
        assert sglang(content, f"model.layers.0.{block}.experts.0.{part}") == SCHEMES[scheme]
        assert sglang(content, f"model.layers.1.{block}.experts.0.{part}") is None
    assert sglang(content, f"model.layers.0.{block}.gate") is None
    asked = lookup_targets(stored(kind))
    assert not any(target.startswith("re:") for target in asked)
    assert len(asked) == 2 * (6 if kind == "mixtral" else 3)
    mapped = {f"language_model.{target}" for target in content["config_groups"]["group_000"]["targets"]}
    assert {f"language_model.model.layers.0.{block}.experts.0.{part}" for part in parts} <= mapped
    if kind == "mixtral":
        for entry in (content["ignore"], content["config_groups"]["group_000"]["targets"]):
            entry[:] = [target for target in entry if "gate_proj" not in target]
        with pytest.raises(ValueError, match="Unable to find"):
            sglang(content, f"model.layers.0.{block}.experts.0.gate_proj")


def stored(kind: str) -> list[str]:
    """The linears of every expert, as the checkpoint calls them."""
    block, parts = EXPERTS[kind]
    return [f"model.layers.{layer}.{block}.experts.{e}.{part}" for layer in (0, 1) for e in range(4) for part in parts]


def test_only_whole_products_are_named() -> None:
    assert architectures.lookup_names(["a.q_proj", "a.k_proj"]) == []
    assert architectures.lookup_names(["a.experts.1.gate_proj", "a.experts.1.up_proj"]) == []
    assert architectures.lookup_names(["a.shared_experts.gate_proj", "a.shared_experts.up_proj"]) == [
        "a.shared_experts.gate_up_proj"
    ]
    assert architectures.lookup_names(["a.w1", "a.experts.3.w1", "a.experts.0.w1"]) == [
        "a.experts.0.w1",
        "a.experts.0.gate_proj",
    ]


def test_lint_takes_them_for_what_they_are() -> None:
    made = subject()
    assignment = made.weights("fp8")
    content = quantization_config(assignment, made.sites).content
    assert lint_config(content, assignment, made.sites) == []
    content["config_groups"]["group_000"]["targets"].append("model.layers.7.self_attn.qkv_proj")
    (line,) = lint_config(content, assignment, made.sites)
    assert "'model.layers.7.self_attn.qkv_proj' matches no linear of the model" in line
