"""Roles of a model's modules, by their names: the rules of configs/architectures.toml, which only this module reads."""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from assay.configs import table


@cache
def _row(name: str) -> Any:
    return table("architectures")[name]


def _any(words: Iterable[str]) -> str:
    return f"({'|'.join(map(re.escape, words))})"


@cache
def _pattern(rule: str) -> re.Pattern[str]:
    experts = _row("experts")
    match rule:
        case "number":
            return re.compile(rf"({experts}\.)\d+")
        case "one":
            return re.compile(rf"(\b{experts}\.)\d+\.")
        case "of one":
            return re.compile(rf"^(.*\b{experts})\.(\d+)\.")
        case "below":
            return re.compile(rf"(.*\b{experts})(\.|$)")
        case "unit":
            return re.compile(rf"{experts}(\.\d+)?(\.\w+)?$")
        case "logits":
            return re.compile(rf"(^|\.){_any((*_row('heads'), *_row('gates')))}$")
        case _:
            return re.compile(rf"{_any(_row('products')[rule])}$")


def unit_of(name: str) -> str:
    """Return the name of the unit whose linears share one scheme.

    q, k and v, gate and up, and a layer's experts are one matrix product each in engines: the unit of
    "layers.0.self_attn.q_proj" is "layers.0.self_attn.qkv". Any other linear is its own unit.
    """
    for label in ("experts", *_row("products")):
        if match := _pattern("unit" if label == "experts" else label).search(name):
            return name[: match.start()] + label
    return name


def any_expert(name: str) -> str:
    """Return the name with "*" for the numbers of experts, which is the same for all experts of a layer."""
    return _pattern("number").sub(r"\1*", name)


def without_expert(name: str) -> str:
    """Return a parameter's name without the expert's number: the name of a parameter that holds all experts."""
    return _pattern("one").sub(r"\1", name)


def expert_of(name: str) -> tuple[str, str] | None:
    """Return the module of a layer's experts and the number of the expert that a module belongs to; None if none."""
    match = _pattern("of one").match(name)
    return (match[1], match[2]) if match else None


def experts_of(name: str) -> str:
    """Return the module of a layer's experts that a name is or belongs to; empty for others."""
    match = _pattern("below").match(name)
    return match[1] if match else ""


def in_experts(name: str) -> bool:
    return _row("experts") in name.split(".")


def gives_logits(name: str) -> bool:
    """Return whether a linear's outputs are logits: of a head, or of a router."""
    return _pattern("logits").search(name) is not None


def is_split(name: str) -> bool:
    """Return whether a linear's K is split over the ranks of tensor parallelism."""
    return name.endswith(tuple(_row("split")))


def is_attention(name: str) -> bool:
    """Return whether a softmax in a module of this name is attention's."""
    return any(word in name.rpartition(".")[2] for word in _row("attention"))


def is_cross(name: str) -> bool:
    """Return whether the module is cross-attention, over an encoder's output."""
    return any(word in name.lower() for word in _row("cross"))


def fused() -> dict[str, list[str]]:
    """Return the names of vLLM and SGLang for fused linears, and their parts in order."""
    return dict(_row("fused"))


def fused_name(unit: str) -> str | None:
    """Return vLLM's name for the fused linears of a unit (`unit_of`); None if it has none."""
    head, _, last = unit.rpartition(".")
    return f"{head}.{last}_proj" if f"{last}_proj" in fused() else None


def products_of(names: Collection[str]) -> dict[str, list[str]]:
    """Return the fused linears of vLLM and SGLang, without experts, with their parts, if all are in ``names``."""
    results = {}
    for together, parts in fused().items():
        for name in names:
            head, _, last = name.rpartition(".")
            members = [f"{head}.{part}" for part in parts]
            if last == parts[0] and not in_experts(name) and all(member in names for member in members):
                results[f"{head}.{together}"] = members
    return results


def lookup_names(names: Collection[str]) -> list[str]:
    """Return further names that vLLM and SGLang look up in a configuration that treats all ``names`` alike.

    They are fused linears, which SGLang maps to their parts only for some models, and the first expert of each layer,
    by the engines' own names and by SGLang's aliases.
    """
    served: Mapping[str, str] = _row("lookups")
    first = [name for name in names if (result := expert_of(name)) is not None and result[1] == "0"]
    parts = (name.rpartition(".") for name in first)
    return [*products_of(names), *first, *(f"{head}.{served[last]}" for head, _, last in parts if last in served)]


def norms_before(block: str) -> list[str]:
    """Return the possible names, within a block, of the norm whose output feeds ``block``, the likeliest first."""
    return list(_row("norms").get(block.rpartition(".")[2], ()))


def producers() -> Mapping[str, str]:
    """Return, by last name parts, the linear of the same block whose output channels are a linear's input channels."""
    result: Mapping[str, str] = _row("producers")
    return result


def gguf_type(kind: str) -> str:
    """Return gguf's name of a model type of transformers; its separators may differ."""
    return str(_row("gguf")["names"].get(kind, kind))


def quantised_by_gguf(tensor: str) -> bool:
    """Return whether llama-quantize applies a requested type to a GGUF tensor of two or more dimensions."""
    return tensor.endswith(".weight") and not any(part in tensor for part in _row("gguf")["unquantised"])
