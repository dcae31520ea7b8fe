"""What the modules of a model are, by their names: configs/architectures.toml, which nothing else reads."""

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
    """What takes one scheme together where q, k and v, gate and up, and a layer's experts are one product each: of
    "layers.0.self_attn.q_proj" "layers.0.self_attn.qkv"; a linear that is none of them is its own."""
    for label in ("experts", *_row("products")):
        if match := _pattern("unit" if label == "experts" else label).search(name):
            return name[: match.start()] + label
    return name


def any_expert(name: str) -> str:
    """A name with "*" for the numbers of experts: what is the same of each of a layer."""
    return _pattern("number").sub(r"\1*", name)


def without_expert(name: str) -> str:
    """A parameter's name without the number of its expert: what one that holds all of a layer's is called."""
    return _pattern("one").sub(r"\1", name)


def expert_of(name: str) -> tuple[str, str] | None:
    """The module of a layer's experts and the number of the one that a module lies in; None where it lies in none."""
    match = _pattern("of one").match(name)
    return (match[1], match[2]) if match else None


def experts_of(name: str) -> str:
    """The module of a layer's experts, of a name that is it or lies in it; empty for others."""
    match = _pattern("below").match(name)
    return match[1] if match else ""


def in_experts(name: str) -> bool:
    """Whether a module lies in the experts of a layer."""
    return _row("experts") in name.split(".")


def gives_logits(name: str) -> bool:
    """Whether a linear's outputs are logits: a head's, or those that experts are chosen by."""
    return _pattern("logits").search(name) is not None


def is_split(name: str) -> bool:
    """Whether a linear's K is split over the ranks of tensor parallelism."""
    return name.endswith(tuple(_row("split")))


def is_attention(name: str) -> bool:
    """Whether a softmax in a module of this name is attention's."""
    return any(word in name.rpartition(".")[2] for word in _row("attention"))


def is_cross(name: str) -> bool:
    """Whether attention is to what an encoder gave."""
    return any(word in name.lower() for word in _row("cross"))


def fused() -> dict[str, list[str]]:
    """Names of vLLM and SGLang for linears that they run as one, and their parts in order."""
    return dict(_row("fused"))


def fused_name(unit: str) -> str | None:
    """What vLLM calls the fused linears of a unit (`unit_of`); None where it isn't one of its usual ones."""
    head, _, last = unit.rpartition(".")
    return f"{head}.{last}_proj" if f"{last}_proj" in fused() else None


def products_of(names: Collection[str]) -> dict[str, list[str]]:
    """Names of vLLM and SGLang for linears that they run as one, experts aside, and those of their parts, where all of
    these are among ``names``."""
    results = {}
    for together, parts in fused().items():
        for name in names:
            head, _, last = name.rpartition(".")
            members = [f"{head}.{part}" for part in parts]
            if last == parts[0] and not in_experts(name) and all(member in names for member in members):
                results[f"{head}.{together}"] = members
    return results


def asked_for(names: Collection[str]) -> list[str]:
    """Names that vLLM and SGLang ask for where a configuration says the same of all these: the products that they make
    of linears, which SGLang maps to their parts for some models only, and of each layer's experts the first, by its own
    names and by those that SGLang takes them for."""
    served: Mapping[str, str] = _row("asked")
    first = [name for name in names if (result := expert_of(name)) is not None and result[1] == "0"]
    parts = (name.rpartition(".") for name in first)
    return [*products_of(names), *first, *(f"{head}.{served[last]}" for head, _, last in parts if last in served)]


def norms_before(block: str) -> list[str]:
    """Names, beside a block, that the norm whose output it takes may have, the likeliest first."""
    return list(_row("norms").get(block.rpartition(".")[2], ()))


def producers() -> Mapping[str, str]:
    """The linear of the same block whose output channels are a linear's input channels, by their last words."""
    result: Mapping[str, str] = _row("producers")
    return result


def gguf_type(kind: str) -> str:
    """What gguf calls a model type of transformers, in the same letters at least."""
    return str(_row("gguf")["names"].get(kind, kind))


def quantised_by_gguf(tensor: str) -> bool:
    """Whether llama-quantize gives a tensor of GGUF, of two or more dimensions, the type that it is told."""
    return tensor.endswith(".weight") and not any(part in tensor for part in _row("gguf")["unquantised"])
