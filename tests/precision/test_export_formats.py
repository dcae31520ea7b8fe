"""Configurations for serving stacks: each is read by the library's own classes and says what it leaves out.

What MLX is given: a program that calls mlx_lm, whose predicate has the assignment.
"""

import json
import runpy
import shlex
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from assay.precision.errors import CannotExport, UnknownScheme
from assay.precision.export import command_line, fqn_to_config, online_config, quantization_config
from assay.precision.export.configurations.torchao import for_transformers
from assay.precision.export.plan import matches, targets_of
from assay.precision.observation.sites import Site
from assay.precision.schemes import SCHEMES
from tests.precision.exported import subject

LINEARS = [name for name, scheme in SCHEMES.items() if "linear" in scheme.site_types and scheme.weight is not None]
QUANTISED = [name for name in LINEARS if SCHEMES[name].weight.per != "element"]  # type: ignore[union-attr]
ELEMENTS = {"int3", "int4", "int8", "float4_e2m1fn", "float6_e2m3fn", "float8_e4m3fn"}
"""What a type and a number of bits mean to engines that read compressed-tensors."""


def many_layers(count: int = 12) -> dict[str, Site]:
    """Sites of a model of more than ten layers, so that layers.1 begins the name of layers.11."""
    sites = {"model.embed_tokens": Site("model.embed_tokens", "embedding", "embedding", (64, 128))}
    for layer in range(count):
        base = f"model.layers.{layer}"
        for unit, parts in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
            for part in parts:
                name = f"{base}.{unit.partition('.')[0]}.{part}_proj"
                sites[name] = Site(name, "linear", "linear", (128, 128), f"{base}.{unit}")
        for last in ("self_attn.o_proj", "mlp.down_proj"):
            sites[f"{base}.{last}"] = Site(f"{base}.{last}", "linear", "linear", (128, 128))
        cache = f"{base}.self_attn:kv_cache"
        sites[cache] = Site(cache, "kv_cache", "kv_cache")
        norm = f"{base}.input_layernorm:input"
        sites[norm] = Site(norm, "activation", "input")
    sites["lm_head"] = Site("lm_head", "linear", "linear", (64, 128))
    return sites


def chosen(sites: dict[str, Site], part: str, scheme: str, layers: range) -> dict[str, str]:
    """A scheme at the linears whose name holds ``part``, in these layers."""
    return {name: scheme for name, site in sites.items() if site.shape and part in name and number(name) in layers}


def number(name: str) -> int:
    """The layer of a name; -1 without one."""
    found = [word for word in name.split(".") if word.isdigit()]
    return int(found[0]) if found else -1


@pytest.mark.parametrize("scheme", QUANTISED)
def test_compressed_tensors_accepts_every_scheme_it_has_words_for(scheme: str) -> None:
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig

    recipe = quantization_config({"lm_head": scheme}, subject().sites)
    config = QuantizationConfig.model_validate(json.loads(json.dumps(recipe.content)))
    row = SCHEMES[scheme]
    formats = {quantizer.format for quantizer in (row.weight, row.activation) if quantizer is not None}
    if row.transform == "hadamard" or not formats <= ELEMENTS:
        assert config.config_groups == {}
        assert any(note.startswith(f"{scheme} at lm_head: ") for note in recipe.notes)
        return
    group = config.config_groups["group_000"]
    assert not isinstance(group, list)
    assert recipe.notes == ()
    assert group.targets == ["lm_head"]
    # The library would store 4-bit codes below inputs of 8 bits a byte each; engines read them packed.
    expected = "pack-quantized" if scheme.startswith("w4a8") else infer_module_format(torch.nn.Linear, group).value
    assert group.format == expected == config.format


def test_arguments_are_those_of_the_library_s_presets() -> None:
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    presets = {
        "fp8": "FP8_DYNAMIC",
        "fp8-tensor": "FP8",
        "fp8-block": "FP8_BLOCK",
        "w8a8": "W8A8",
        "w4a16-g128": "W4A16",
        "w4a16-g128-asym": "W4A16_ASYM",
        "w4a8-fp8-g128": "W4AFP8",
        "w3a16-g128": "W3A16",
        "mxfp8": "MXFP8",
        "mxfp4": "MXFP4",
        "w-mxfp4": "MXFP4A16",
        "nvfp4": "NVFP4",
        "w-nvfp4": "NVFP4A16",
    }
    fields = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "scale_dtype")
    for scheme, preset in presets.items():
        group = quantization_config({"lm_head": scheme}, subject().sites).content["config_groups"]["group_000"]
        ours, theirs = QuantizationScheme.model_validate(group), preset_name_to_scheme(preset, ["lm_head"])
        for mine, other in ((ours.weights, theirs.weights), (ours.input_activations, theirs.input_activations)):
            assert (mine is None) == (other is None), scheme
            if mine is not None and other is not None:
                assert [getattr(mine, f) for f in fields] == [getattr(other, f) for f in fields], scheme


def test_groups_are_disjoint_numbered_and_cover_the_assignment() -> None:
    sites = many_layers()
    assignment = {
        **chosen(sites, "self_attn", "fp8", range(2)),
        **chosen(sites, "mlp", "w4a16-g128", range(1, 11)),
        **chosen(sites, "self_attn", "w8a8", range(10, 12)),
    }
    content = quantization_config(assignment, sites).content
    assert list(content["config_groups"]) == ["group_000", "group_001", "group_002"]
    assert content["format"] == "mixed-precision"
    found = {
        name: [
            group
            for group, entry in content["config_groups"].items()
            if any(matches(t, name) for t in entry["targets"])
        ]
        for name, site in sites.items()
        if site.shape
    }
    assert all(len(groups) == (name in assignment) for name, groups in found.items())
    assert all(any(matches(target, name) for target in content["ignore"]) == (name not in assignment) for name in found)
    by_group: dict[str, set[str]] = {}
    for name, groups in found.items():
        by_group.setdefault("".join(groups), set()).add(assignment.get(name, ""))
    assert all(len(schemes) == 1 for schemes in by_group.values())


def test_transformers_reads_the_groups_as_meant() -> None:
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    from tests.precision.exported import Subject

    made = Subject()
    assignment = {"lm_head": "fp8", **{name: "w4a16-g64" for name in made.weights("w4a16-g64") if "layers.1" in name}}
    config = QuantizationConfig.model_validate(quantization_config(assignment, made.sites).content)
    apply_quantization_config(made.model, config, show_progress=False)
    for name, module in made.model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        bits = None if scheme is None else scheme.weights.num_bits
        assert bits == {"fp8": 8, "w4a16-g64": 4, None: None}[assignment.get(name)], name


@pytest.mark.parametrize(
    ("names", "targets"),
    [
        (["lm_head"], ["lm_head"]),
        (["a.layers.1.x", "a.layers.11.x"], ["a.layers.1.x", "a.layers.11.x"]),
        (["a.layers.1.experts.0.x", "a.layers.11.experts.0.x"], [r"re:a\.layers\.(1|11)\.experts\.0\.x$"]),
        (["a.1.experts.4.x", "a.2.experts.5.x"], ["a.1.experts.4.x", "a.2.experts.5.x"]),
        (["a.layers.1.x", "b.layers.2.x"], ["a.layers.1.x", "b.layers.2.x"]),
        (["a.0.e.1.x", "a.0.e.2.x"], [r"a.0.e.1.x", "a.0.e.2.x"]),
    ],
)
def test_targets_match_their_names_only(names: list[str], targets: list[str]) -> None:
    found = targets_of(names)
    others = [
        *(f"{name}_more" for name in names),
        *(f"{name}.more" for name in names),
        "a.layers.111.x",
        "a.layers.12.x",
    ]
    assert sorted(name for name in names if any(matches(target, name) for target in found)) == sorted(names)
    assert not any(matches(target, name) for target in found for name in others)
    if len(names) < 2 or "e" not in names[0].split("."):
        assert found == targets


def caches(sites: dict[str, Site], scheme: str = "kv-fp8") -> dict[str, str]:
    """A scheme at every KV cache."""
    return {name: scheme for name, site in sites.items() if site.type == "kv_cache"}


@pytest.mark.parametrize("scheme", QUANTISED)
def test_torchao_reads_its_configuration_again(scheme: str) -> None:
    from torchao.core.config import config_from_dict, config_to_dict
    from torchao.quantization import FqnToConfig

    recipe = fqn_to_config({"lm_head": scheme}, subject().sites)
    read = config_from_dict(json.loads(json.dumps(recipe.content)))
    assert isinstance(read, FqnToConfig)
    assert read.fqn_to_config == read.module_fqn_to_config
    assert (read.fqn_to_config["lm_head"] is None) == any(
        note.startswith(f"{scheme} at lm_head") for note in recipe.notes
    )
    assert read.fqn_to_config["model.layers.0.self_attn.qkv_proj"] is None
    again = config_to_dict(read)
    assert contained(recipe.content, again)
    assert isinstance(config_from_dict(again), FqnToConfig)


def contained(small: Any, large: Any) -> bool:
    """Whether a JSON value is another one with fields left out."""
    if isinstance(small, dict) and isinstance(large, dict):
        return all(key in large and contained(value, large[key]) for key, value in small.items())
    return bool(small == large)


def test_torchao_quantises_as_configured() -> None:
    from torchao.core.config import config_from_dict
    from torchao.quantization import quantize_

    from tests.precision.exported import Subject

    made = Subject()
    assignment = {
        "lm_head": "w8a16",
        "model.layers.0.mlp.down_proj": "w4a16-g64",
        "model.layers.1.mlp.down_proj": "w8a8",
    }
    recipe = fqn_to_config(assignment, made.sites)
    config = config_from_dict(recipe.content)
    quantize_(made.model, config, filter_fn=None)
    changed = {
        name
        for name, module in made.model.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module.weight.data) is not torch.Tensor
    }
    assert changed == set(assignment)


def test_fused_names_are_written_where_their_linears_agree() -> None:
    sites = many_layers(1)
    assignment = {**chosen(sites, "self_attn", "fp8", range(1)), "model.layers.0.mlp.gate_proj": "w8a8"}
    recipe = fqn_to_config(assignment, sites)
    table = recipe.content["_data"]["fqn_to_config"]
    assert table["model.layers.0.self_attn.qkv_proj"] == table["model.layers.0.self_attn.q_proj"] is not None
    assert "model.layers.0.mlp.gate_up_proj" not in table
    assert any("gate_up_proj" in note for note in recipe.notes)
    online = online_config(assignment, sites)
    assert online.content["targets"]["model.layers.0.self_attn.qkv_proj"] == "fp8_per_channel"


def test_the_command_line_holds_the_online_recipe() -> None:
    sites = many_layers(3)
    assignment = {
        **chosen(sites, "self_attn", "fp8", range(3)),
        **chosen(sites, "mlp", "mxfp4", range(1, 3)),
        **caches(sites),
    }
    del assignment["model.layers.1.self_attn:kv_cache"]
    words = shlex.split(command_line("some/model", assignment, sites))
    assert words[:3] == ["vllm", "serve", "some/model"]
    config = json.loads(words[words.index("--quantization-config") + 1])
    assert config == online_config(assignment, sites).content
    assert set(config["targets"].values()) == {"fp8_per_channel", "mxfp4"}
    found = {
        name: [short for target, short in config["targets"].items() if matches(target, name)]
        for name, site in sites.items()
        if site.shape
    }
    words_of = {"fp8": ["fp8_per_channel"], "mxfp4": ["mxfp4"], "": []}
    assert all(shorts == words_of[assignment.get(name, "")] for name, shorts in found.items())
    assert words[-4:] == ["--kv-cache-dtype", "fp8_e4m3", "--kv-cache-dtype-skip-layers", "1"]


def test_layers_whose_cache_stays_are_told_by_their_number() -> None:
    sites = {
        name: Site(name, "kv_cache", "kv_cache")
        for name in (f"model.layers.{layer}.self_attn:kv_cache" for layer in (3, 7, 11))
    }
    words = shlex.split(command_line("some/model", dict.fromkeys(list(sites)[:1], "kv-fp8"), sites))
    assert words[-3:] == ["--kv-cache-dtype-skip-layers", "7", "11"]


@pytest.mark.parametrize("recipe_of", [quantization_config, fqn_to_config, online_config])
def test_what_no_format_has_a_place_for_is_noted(recipe_of: Any) -> None:
    sites = many_layers(4)
    norms = {name: "fp16" for name, site in sites.items() if site.type == "activation"}
    odd = {"model.embed_tokens": "w8a16", "model.layers.0.self_attn:kv_cache": "kv-int8", "lm_head": "fp16"}
    notes = recipe_of({**norms, **odd, "model.layers.0.mlp.down_proj": "fp8"}, sites).notes
    named = [note for note in notes if note.startswith("fp16 at model.layers.0.input_layernorm:input and 4 more: ")]
    assert len(named) == 1
    assert any("w8a16 at model.embed_tokens: " in note for note in notes)
    assert not any("down_proj" in note or "\n" in note for note in notes)
    assert any("kv_cache" in note for note in notes) == (recipe_of is not online_config)


def test_a_reason_is_told_once_for_all_formats() -> None:
    sites = many_layers(5)
    schemes = ("w3a16-g32", "w4a16-g32", "w4a16-g64", "w4a16-g128", "w8a16")
    assignment = {f"model.layers.{layer}.mlp.down_proj": scheme for layer, scheme in enumerate(schemes)}
    (note,) = online_config(assignment, sites).notes
    where = "w3a16-g32, w4a16-g32, w4a16-g64 and 2 more formats at model.layers.0.mlp.down_proj and 4 more: "
    assert note.startswith(where)


def test_a_site_or_a_scheme_that_there_is_not_is_refused() -> None:
    with pytest.raises(CannotExport, match=r"expected sites of the model, got 'model\.nothing'"):
        quantization_config({"model.nothing": "fp8"}, subject().sites)
    with pytest.raises(UnknownScheme, match="fp8"):
        quantization_config({"lm_head": "fp88"}, subject().sites)


def test_transformers_reads_its_file_of_torchao() -> None:
    from torchao.core.config import config_from_dict

    recipe = fqn_to_config({"lm_head": "fp8"}, subject().sites)
    read = transformers.TorchAoConfig.from_dict(json.loads(json.dumps(for_transformers(recipe.content))))
    assert read.quant_type == config_from_dict(recipe.content)


def test_the_table_of_torchao_is_ordered() -> None:
    table = fqn_to_config({"lm_head": "fp8"}, subject().sites).content["_data"]["fqn_to_config"]
    linears = [name for name, site in subject().sites.items() if site.shape]
    assert list(OrderedDict(table))[: len(linears)] == linears


QUERY, DOWN, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"


def test_the_program_converts_each_layer_as_assigned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assignment = {QUERY: "w4a16-g64-asym", DOWN: "w-mxfp4", UP: "w-nvfp4", "lm_head": "w4a16-g32-asym"}
    made = subject()
    done = made.export(assignment, tmp_path / "out", ["mlx"], source="some/model")
    assert done.parts[0].held == assignment
    assert done.notes == ()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    stand_in = ModuleType("mlx_lm")
    stand_in.convert = lambda *places, **options: calls.append((places, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlx_lm", stand_in)
    runpy.run_path(str(tmp_path / "out" / "mlx_convert.py"))
    ((places, options),) = calls
    assert places == ("some/model", "mlx_model")
    assert options["quantize"] is True
    assert options["q_group_size"] == 32
    found = {name: options["quant_predicate"](name, None) for name in made.sites}
    assert {name: each for name, each in found.items() if each is not False} == {
        QUERY: {"group_size": 64, "bits": 4, "mode": "affine"},
        DOWN: {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        UP: {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        "lm_head": {"group_size": 32, "bits": 4, "mode": "affine"},
    }


@pytest.mark.parametrize("scheme", ["w4a16-g64", "w4a16-g64-awq", "w8a16", "fp8", "mxfp4", "q4_0", "nf4-g64"])
def test_what_mlx_has_not_is_noted(scheme: str, tmp_path: Path) -> None:
    made = subject()
    done = made.export({QUERY: scheme}, tmp_path / "out", ["mlx"])
    assert done.parts == ()
    assert done.notes[0].startswith(f"mlx: {scheme} at {QUERY}: MLX has groups of integers with a bias")
