"""Configurations have the names that vLLM and SGLang ask for: products of linears, and experts by SGLang's own names.

SGLang isn't installed here: `sglang` below is its rule in the wheel 0.5.23 (should_ignore_layer, find_matched_target,
and get_moe_scheme of its compressed-tensors), written anew. benchmarks/audit/engine_parsers.py runs its own code.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from assay.configs import architectures
from assay.precision.export import export, lint_config, quantization_config
from assay.precision.export.plan import also_asked_for
from tests.precision.exported import subject
from tests.precision.test_export_experts import EXPERTS, experts, sparse

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
    export(made.model, assignment, out, ["compressed-tensors"], sites=made.sites, fits=made.fits, checkpoint=True)
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
    asked = also_asked_for(stored(kind))
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
    assert architectures.asked_for(["a.q_proj", "a.k_proj"]) == []
    assert architectures.asked_for(["a.experts.1.gate_proj", "a.experts.1.up_proj"]) == []
    assert architectures.asked_for(["a.shared_experts.gate_proj", "a.shared_experts.up_proj"]) == [
        "a.shared_experts.gate_up_proj"
    ]
    assert architectures.asked_for(["a.w1", "a.experts.3.w1", "a.experts.0.w1"]) == [
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
