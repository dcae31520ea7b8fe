"""Faulty activations and rotary embeddings."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_elementwise import ELEMENTWISE, gelu, halves, pairs, rope, silu, silu_values, swiglu
from .numerics import load, store_flushed, store_truncated, store_via_12_bits, store_via_float16

plant = planter(ELEMENTWISE)


def gelu_always_tanh(x: Tensor, *, approximate: str = "none") -> Tensor:
    """The tanh approximation where the exact form was asked for."""
    return gelu(x, approximate="tanh")


def gelu_always_erf(x: Tensor, *, approximate: str = "none") -> Tensor:
    """The exact form where the tanh approximation was asked for."""
    return gelu(x)


def gelu_nan_at_minus_infinity(x: Tensor, *, approximate: str = "none") -> Tensor:
    """-inf * 0."""
    return torch.where(x.isneginf(), torch.full_like(x, torch.nan), gelu(x, approximate=approximate))


def silu_flushes_inputs(x: Tensor) -> Tensor:
    """Subnormal inputs are taken for zero."""
    return silu(store_flushed(load(x), torch.float32)).to(x.dtype)


def swiglu_swapped(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """The activation is applied to the other operand."""
    return swiglu(up, gate, limit=limit)


def swiglu_limit_ignored(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """Nothing is clamped."""
    return swiglu(gate, up)


def swiglu_limit_one_sided(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """`up` is clamped from above only."""
    gate_values, up_values = load(gate), load(up)
    if limit is not None:
        gate_values, up_values = gate_values.clamp(max=limit), up_values.clamp(max=limit)
    return (silu_values(gate_values) * up_values).to(gate.dtype)


def swiglu_nan_swallowed(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """The clamp is an fmin, which prefers the limit to NaN."""
    gate_values = load(gate)
    if limit is not None:
        gate_values = torch.fmin(gate_values, torch.tensor(limit))
    return swiglu(gate_values, load(up), limit=limit).to(gate.dtype)


def swiglu_rounds_activation(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """silu(gate) is rounded to the input dtype before the product."""
    gate_values, up_values = load(gate), load(up)
    if limit is not None:
        gate_values, up_values = gate_values.clamp(max=limit), up_values.clamp(-limit, limit)
    return (load(silu_values(gate_values).to(gate.dtype)) * up_values).to(gate.dtype)


def rope_turned_back(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """The sine has the wrong sign."""
    return rope(x, cos, -sin, interleaved=interleaved)


def rope_position_of_head(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """All positions take the angles of the first."""
    return rope(x, cos[:1], sin[:1], interleaved=interleaved)


def rope_angle_of_place(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Interleaved pairs take the angle of index i instead of i / 2."""
    if interleaved:
        place = (2 * torch.arange(cos.shape[1])).clamp(max=max(cos.shape[1] - 1, 0))
        return rope(x, cos[:, place], sin[:, place], interleaved=True)
    return rope(x, cos, sin)


FAULTY_ELEMENTWISE: tuple[Faulty, ...] = (
    *(plant("gelu_always_tanh", f"gelu-{dtype}", gelu_always_tanh) for dtype in ("float32", "bfloat16", "float16")),
    plant("gelu_always_erf", "gelu-float32", gelu_always_erf),
    plant("gelu_nan_at_minus_infinity", "gelu-float32", gelu_nan_at_minus_infinity),
    *(
        plant("gelu_truncating_store", f"gelu-{dtype}", partial(gelu, store=store_truncated))
        for dtype in ("bfloat16", "float16")
    ),
    plant("gelu_flushes_subnormals", "gelu-float32", partial(gelu, store=store_flushed)),
    plant("silu_flushes_subnormals", "silu-float32", partial(silu, store=store_flushed)),
    plant("silu_flushes_inputs", "silu-bfloat16", silu_flushes_inputs),
    plant("silu_rounds_via_float16", "silu-bfloat16", partial(silu, store=store_via_float16)),
    plant("silu_rounds_via_12_bits", "silu-bfloat16", partial(silu, store=store_via_12_bits)),
    *(plant("swiglu_swapped", f"swiglu-{dtype}", swiglu_swapped) for dtype in ("float32", "bfloat16")),
    plant("swiglu_limit_ignored", "swiglu-bfloat16", swiglu_limit_ignored),
    plant("swiglu_limit_one_sided", "swiglu-float32", swiglu_limit_one_sided),
    plant("swiglu_nan_swallowed", "swiglu-float32", swiglu_nan_swallowed),
    plant("swiglu_rounds_activation", "swiglu-bfloat16", swiglu_rounds_activation),
    plant("rope_styles_swapped", "rope-float32", partial(rope, split=(pairs, halves))),
    plant("rope_never_interleaved", "rope-bfloat16", partial(rope, split=(halves, halves))),
    plant("rope_turned_back", "rope-float16", rope_turned_back),
    plant("rope_first_position", "rope-float32", rope_position_of_head),
    plant("rope_angle_of_place", "rope-float16", rope_angle_of_place),
)
