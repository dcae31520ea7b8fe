"""Schemes: the names that an assignment uses, what each does to a site, and the sites it is for. Data."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from assay.precision.errors import UnknownScheme
from assay.precision.schemes.ggml import BlockType, block_types
from assay.precision.schemes.quantizer import Quantizer
from assay.runtime.errors import unknown

SiteType = Literal["linear", "embedding", "activation", "kv_cache", "accumulator", "all_reduce"]
Transform = Literal["none", "smooth", "hadamard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A sum over K in parts: each partial sum is rounded to ``partial``, each sum of them to ``total``."""

    parts: int = 0
    """Number of equal parts, as ranks of tensor parallelism; 0: parts of `length`."""
    length: int = 0
    partial: str = "float32"
    total: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the weight and the input of a site (or, without a weight, its values) are stored."""

    name: str
    site_types: frozenset[SiteType]
    weight: Quantizer | None = None
    activation: Quantizer | None = None
    queries: Quantizer | None = None
    """Of a KV cache: how the queries are stored, where attention multiplies in 8 bits."""
    transform: Transform = "none"
    """Before storing, columns of the weight are multiplied and those of the input divided by factors that balance their
    largest magnitudes ("smooth", arXiv:2211.10438), or both are rotated by a Hadamard matrix ("hadamard",
    arXiv:2404.00456); either leaves their product as it is."""
    split: Split | None = None
    compute: str = "bf16"
    """The arithmetic that a device's product runs in: a column of configs/devices.toml."""
    on_request: bool = False
    """Audited only if named."""


_TABLE: frozenset[SiteType] = frozenset({"linear", "embedding"})
_LINEAR: frozenset[SiteType] = frozenset({"linear"})
_ACTIVATION: frozenset[SiteType] = frozenset({"activation"})
_CACHE: frozenset[SiteType] = frozenset({"kv_cache"})
_SUMS: frozenset[SiteType] = frozenset({"accumulator"})
_RANKS: frozenset[SiteType] = frozenset({"all_reduce"})


def _linear(name: str, weight: Quantizer, activation: Quantizer | None = None, **rest: Any) -> Scheme:
    return Scheme(name=name, site_types=_LINEAR if activation else _TABLE, weight=weight, activation=activation, **rest)


def _cast(name: str, format: str) -> Scheme:
    stored = Quantizer(format=format)
    return Scheme(name=name, site_types=_TABLE | _ACTIVATION | _CACHE, weight=stored, activation=stored, compute=name)


def _groups(size: int, format: str = "int4", **rest: Any) -> Quantizer:
    return Quantizer(format=format, per="group", size=size, scale_format="bfloat16", **rest)


def _micro(format: str) -> Quantizer:
    return Quantizer(format=format, per="group", size=32, scale_format="float8_e8m0fnu")


def _blocks(kind: BlockType) -> Quantizer:
    return Quantizer(format=kind.name, per="group", size=kind.block, rule="output")


_E4M3, _E5M2, _E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
# Scales that a checkpoint holds are bfloat16 (or powers of two, or e4m3); those taken from the values at hand float32.
_FP8_CHANNEL = Quantizer(format=_E4M3, per="row", scale_format="bfloat16")
_INT8_CHANNEL = Quantizer(format="int8", per="row", scale_format="bfloat16")
_FP8_TOKEN = Quantizer(format=_E4M3, per="row")
_INT8_TOKEN = Quantizer(format="int8", per="row")
_FP8_STATIC = Quantizer(format=_E4M3, per="tensor", dynamic=False, scale_format="bfloat16")
_INT8_STATIC = Quantizer(format="int8", per="tensor", dynamic=False, scale_format="bfloat16")
_NVFP4 = Quantizer(format=_E2M1, per="group", size=16, scale_format="float8_e4m3fn")


_CASTS = [_cast("fp32", "float32"), _cast("tf32", "tf32"), _cast("bf16", "bfloat16"), _cast("fp16", "float16")]

_BOTH = [
    _linear("fp8", _FP8_CHANNEL, _FP8_TOKEN, compute="fp8"),
    _linear("fp8-tensor", replace(_FP8_STATIC, dynamic=True), _FP8_STATIC, compute="fp8"),
    _linear(
        "fp8-block",
        Quantizer(format=_E4M3, per="block", size=128, scale_format="bfloat16"),
        Quantizer(format=_E4M3, per="group", size=128),
        compute="fp8",
    ),
    _linear("e5m2", replace(_FP8_CHANNEL, format=_E5M2), replace(_FP8_TOKEN, format=_E5M2), compute="fp8"),
    _linear("w8a8", _INT8_CHANNEL, _INT8_TOKEN, compute="int8"),
    _linear("w8a8-static", _INT8_CHANNEL, _INT8_STATIC, compute="int8", on_request=True),
    _linear("w8a8-asym", _INT8_CHANNEL, replace(_INT8_TOKEN, symmetric=False), compute="int8", on_request=True),
    _linear("w8a8-smooth", _INT8_CHANNEL, _INT8_TOKEN, transform="smooth", compute="int8", on_request=True),
    _linear("w8a8-hadamard", _INT8_CHANNEL, _INT8_TOKEN, transform="hadamard", compute="int8", on_request=True),
    _linear("w4a8-g128", _groups(128), _INT8_TOKEN, compute="int8"),
    _linear("w4a8-fp8-g128", _groups(128), _FP8_TOKEN, compute="fp8", on_request=True),
    _linear("mxfp8", _micro(_E4M3), _micro(_E4M3), compute="fp8"),
    _linear("mxfp6", _micro("float6_e2m3fn"), _micro("float6_e2m3fn"), compute="fp6"),
    _linear("mxfp4", _micro(_E2M1), _micro(_E2M1), compute="fp4"),
    _linear("nvfp4", _NVFP4, _NVFP4, compute="fp4"),
    _linear("nvfp4-hadamard", _NVFP4, _NVFP4, transform="hadamard", compute="fp4", on_request=True),
]

_WEIGHT_ONLY = [
    _linear("w8a16", _INT8_CHANNEL),
    *(
        _linear(f"w4a16-g{size}{name}", _groups(size, **how))
        for size in (32, 64, 128)
        for name, how in (("", {}), ("-asym", {"symmetric": False}), ("-awq", {"symmetric": False, "rule": "awq"}))
    ),
    _linear("w4a16-g128-mse", _groups(128, rule="mse"), on_request=True),
    _linear("w4a16-g128-clip", _groups(128, rule="output"), on_request=True),
    *(_linear(f"w3a16-g{size}", _groups(size, "int3"), on_request=size > 32) for size in (32, 64, 128)),
    _linear("nf4-g64", Quantizer(format="nf4", per="group", size=64), on_request=True),
    _linear("w-mxfp4", _micro(_E2M1)),
    _linear("w-nvfp4", _NVFP4),
]

_GGML = [
    scheme
    for kind in block_types().values()
    if kind.weights
    for stored, other in ((_blocks(kind), block_types()[kind.activations]),)
    # No input of a table tells an importance, and none is rounded.
    for site_types in (_LINEAR if kind.importance == "required" else _TABLE,)
    for scheme in (
        Scheme(name=kind.name, site_types=site_types, weight=stored, on_request=True),
        Scheme(
            name=f"{kind.name}-{other.name}",
            site_types=site_types,
            weight=stored,
            activation=_blocks(other),
            compute="int8",
            on_request=True,
        ),
    )
]
"""Weights in ggml blocks, and with them the rounding of inputs in its CPU products."""

_VALUES = [
    Scheme(name="a-fp8", site_types=_ACTIVATION, activation=_FP8_TOKEN, compute="fp8"),
    Scheme(name="a-e5m2", site_types=_ACTIVATION, activation=Quantizer(format=_E5M2), compute="fp8", on_request=True),
    Scheme(name="a-int8", site_types=_ACTIVATION, activation=_INT8_TOKEN, compute="int8"),
    Scheme(name="kv-fp8", site_types=_CACHE, activation=_FP8_STATIC),
    # As vLLM's FlashAttention-3 has it: K, V and the rotated queries in E4M3, each with a scale of the tensor.
    Scheme(
        name="kv-fp8-q", site_types=_CACHE, activation=_FP8_STATIC, queries=_FP8_STATIC, compute="fp8", on_request=True
    ),
    Scheme(name="kv-int8", site_types=_CACHE, activation=_INT8_TOKEN),
    Scheme(name="kv-int4", site_types=_CACHE, activation=Quantizer(format="int4", per="row", symmetric=False)),
]

_REDUCTIONS = [
    Scheme(name=name, site_types=site_types, split=split, on_request=True)
    for name, site_types, split in (
        ("acc-fp16", _SUMS, Split(length=32, total="float16")),
        ("acc-bf16", _SUMS, Split(length=32, total="bfloat16")),
        ("tp2-bf16", _RANKS, Split(parts=2, partial="bfloat16", total="bfloat16")),
        ("tp8-bf16", _RANKS, Split(parts=8, partial="bfloat16", total="bfloat16")),
    )
]

SCHEMES = {scheme.name: scheme for scheme in [*_CASTS, *_BOTH, *_WEIGHT_ONLY, *_GGML, *_VALUES, *_REDUCTIONS]}
"""Every scheme by its name."""


DEFAULTS = tuple(name for name, scheme in SCHEMES.items() if not scheme.on_request)
"""The schemes that an audit includes by default."""


def scheme_named(name: str) -> Scheme:
    """Return the scheme of this name. Raises UnknownScheme with the nearest names."""
    if name in SCHEMES:
        return SCHEMES[name]
    raise UnknownScheme(unknown("scheme", name, SCHEMES))
