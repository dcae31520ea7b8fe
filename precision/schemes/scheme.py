"""Schemes: the names that an assignment uses, what each does to a site, and where it may stand. Data."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from assay.precision.errors import UnknownScheme
from assay.precision.schemes.quantizer import Quantizer, Rule

__all__ = ["DEFAULTS", "SCHEMES", "Place", "Scheme", "Split", "scheme_named"]

Place = Literal["linear", "embedding", "activation", "kv_cache", "accumulator", "all_reduce"]
Transform = Literal["none", "smooth", "hadamard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A sum over K taken in parts: each partial sum is rounded to ``partial``, each sum of them to ``total``."""

    parts: int = 0
    """Number of equal parts, as ranks of tensor parallelism have it; 0: parts of `length`."""
    length: int = 0
    partial: str = "float32"
    total: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What happens to a site: how its weight and its input (or, where there is no weight, its values) are stored."""

    name: str
    places: frozenset[Place]
    weight: Quantizer | None = None
    activation: Quantizer | None = None
    transform: Transform = "none"
    """Before storing, columns of the weight are multiplied and those of the input divided by factors that balance their
    largest magnitudes ("smooth", arXiv:2211.10438), or both are rotated by a Hadamard matrix ("hadamard",
    arXiv:2404.00456); either leaves their product as it is."""
    split: Split | None = None
    compute: str = "bf16"
    """The arithmetic that a device's product runs in: a column of configs/devices.toml."""
    on_request: bool = False
    """Looked at only where it is asked for by name."""


def _linear(
    name: str,
    weight: Quantizer,
    activation: Quantizer | None = None,
    *,
    compute: str = "bf16",
    transform: Transform = "none",
    on_request: bool = False,
) -> Scheme:
    places: frozenset[Place] = frozenset({"linear"} if activation else {"linear", "embedding"})
    return Scheme(
        name=name,
        places=places,
        weight=weight,
        activation=activation,
        transform=transform,
        compute=compute,
        on_request=on_request,
    )


def _cast(name: str, format: str, compute: str) -> Scheme:
    places: frozenset[Place] = frozenset({"linear", "embedding", "activation", "kv_cache"})
    return Scheme(
        name=name, places=places, weight=Quantizer(format=format), activation=Quantizer(format=format), compute=compute
    )


def _int4(size: int, *, bits: int = 4, symmetric: bool = True, rule: Rule = "absmax") -> Quantizer:
    return Quantizer(
        format=f"int{bits}",
        per="group",
        size=size,
        symmetric=symmetric,
        scale_format="bfloat16",
        rule=rule,
    )


def _micro(format: str) -> Quantizer:
    return Quantizer(format=format, per="group", size=32, scale_format="float8_e8m0fnu")


_E4M3, _E5M2, _E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
# Scales that a checkpoint holds are bfloat16 (or powers of two, or e4m3); those taken from the values at hand float32.
_FP8_CHANNEL = Quantizer(format=_E4M3, per="row", scale_format="bfloat16")
_INT8_CHANNEL = Quantizer(format="int8", per="row", scale_format="bfloat16")
_FP8_TOKEN = Quantizer(format=_E4M3, per="row")
_INT8_TOKEN = Quantizer(format="int8", per="row")
_FP8_STATIC = Quantizer(format=_E4M3, per="tensor", dynamic=False, scale_format="bfloat16")
_INT8_STATIC = Quantizer(format="int8", per="tensor", dynamic=False, scale_format="bfloat16")
_NVFP4 = Quantizer(format=_E2M1, per="group", size=16, scale_format="float8_e4m3fn")


def _weight_only() -> list[Scheme]:
    rows = [_linear("w8a16", _INT8_CHANNEL)]
    for size in (32, 64, 128):
        rows += [
            _linear(f"w4a16-g{size}", _int4(size)),
            _linear(f"w4a16-g{size}-asym", _int4(size, symmetric=False)),
            _linear(f"w4a16-g{size}-awq", _int4(size, symmetric=False, rule="awq")),
        ]
    rows += [
        _linear("w4a16-g128-mse", _int4(128, rule="mse"), on_request=True),
        _linear("w4a16-g128-clip", _int4(128, rule="output"), on_request=True),
    ]
    rows += [_linear(f"w3a16-g{size}", _int4(size, bits=3), on_request=size > 32) for size in (32, 64, 128)]
    return [*rows, _linear("w-mxfp4", _micro(_E2M1)), _linear("w-nvfp4", _NVFP4)]


def _both() -> list[Scheme]:
    tensor = Quantizer(format=_E4M3, per="tensor", scale_format="bfloat16")
    block = Quantizer(format=_E4M3, per="block", size=128, scale_format="bfloat16")
    group = Quantizer(format=_E4M3, per="group", size=128)
    wide_channel = Quantizer(format=_E5M2, per="row", scale_format="bfloat16")
    wide_token = Quantizer(format=_E5M2, per="row")
    return [
        _linear("fp8", _FP8_CHANNEL, _FP8_TOKEN, compute="fp8"),
        _linear("fp8-tensor", tensor, _FP8_STATIC, compute="fp8"),
        _linear("fp8-block", block, group, compute="fp8"),
        _linear("e5m2", wide_channel, wide_token, compute="fp8"),
        _linear("w8a8", _INT8_CHANNEL, _INT8_TOKEN, compute="int8"),
        _linear("w8a8-static", _INT8_CHANNEL, _INT8_STATIC, compute="int8", on_request=True),
        _linear(
            "w8a8-asym",
            _INT8_CHANNEL,
            Quantizer(format="int8", per="row", symmetric=False),
            compute="int8",
            on_request=True,
        ),
        _linear("w8a8-smooth", _INT8_CHANNEL, _INT8_TOKEN, transform="smooth", compute="int8", on_request=True),
        _linear("w8a8-hadamard", _INT8_CHANNEL, _INT8_TOKEN, transform="hadamard", compute="int8", on_request=True),
        _linear("w4a8-g128", _int4(128), _INT8_TOKEN, compute="int8"),
        _linear("w4a8-fp8-g128", _int4(128), _FP8_TOKEN, compute="fp8", on_request=True),
        _linear("mxfp8", _micro(_E4M3), _micro(_E4M3), compute="fp8"),
        _linear("mxfp6", _micro("float6_e2m3fn"), _micro("float6_e2m3fn"), compute="fp6"),
        _linear("mxfp4", _micro(_E2M1), _micro(_E2M1), compute="fp4"),
        _linear("nvfp4", _NVFP4, _NVFP4, compute="fp4"),
        _linear("nvfp4-hadamard", _NVFP4, _NVFP4, transform="hadamard", compute="fp4", on_request=True),
    ]


def _values() -> list[Scheme]:
    activation: frozenset[Place] = frozenset({"activation"})
    cache: frozenset[Place] = frozenset({"kv_cache"})
    int4_row = Quantizer(format="int4", per="row", symmetric=False)
    return [
        Scheme(name="a-fp8", places=activation, activation=_FP8_TOKEN, compute="fp8"),
        Scheme(name="a-e5m2", places=activation, activation=Quantizer(format=_E5M2), compute="fp8", on_request=True),
        Scheme(name="a-int8", places=activation, activation=_INT8_TOKEN, compute="int8"),
        Scheme(name="kv-fp8", places=cache, activation=_FP8_STATIC),
        Scheme(name="kv-int8", places=cache, activation=_INT8_TOKEN),
        Scheme(name="kv-int4", places=cache, activation=int4_row),
    ]


def _sums() -> list[Scheme]:
    sums: frozenset[Place] = frozenset({"accumulator"})
    ranks: frozenset[Place] = frozenset({"all_reduce"})
    reduced = [
        Scheme(
            name=f"tp{n}-bf16",
            places=ranks,
            split=Split(parts=n, partial="bfloat16", total="bfloat16"),
            on_request=True,
        )
        for n in (2, 8)
    ]
    return [
        Scheme(name="acc-fp16", places=sums, split=Split(length=32, total="float16"), on_request=True),
        Scheme(name="acc-bf16", places=sums, split=Split(length=32, total="bfloat16"), on_request=True),
        *reduced,
    ]


_CASTS = [
    _cast("fp32", "float32", "fp32"),
    _cast("tf32", "tf32", "tf32"),
    _cast("bf16", "bfloat16", "bf16"),
    _cast("fp16", "float16", "fp16"),
]

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme for scheme in [*_CASTS, *_both(), *_weight_only(), *_values(), *_sums()]
}
"""Every scheme by its name."""


DEFAULTS = tuple(name for name, scheme in SCHEMES.items() if not scheme.on_request)
"""What an audit looks at where nothing else is asked for."""


def scheme_named(name: str) -> Scheme:
    """The scheme of this name. Raises UnknownScheme with the nearest names."""
    if name in SCHEMES:
        return SCHEMES[name]
    near = get_close_matches(name, SCHEMES)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(SCHEMES)}"
    raise UnknownScheme(f"expected a scheme, got {name!r}: {hint}")
