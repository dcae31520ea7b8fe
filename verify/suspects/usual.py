"""What a campaign over a whole spec varies: the values of its options that are in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.golden.registry import spec

_OPTIONS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "attention": {
        "causal": ("none", "bottom_right", "top_left"),
        "scale": (None, 0.3),
        "window": (None, (7, 3)),
        "softcap": (None, 2.0),
        "alibi": (False, True),
        "sinks": (False, True),
        "return_lse": (False, True),
    },
    "attention_backward": {"causal": ("none", "bottom_right", "top_left"), "scale": (None, 0.3)},
    "attention_varlen": {"causal": ("none", "bottom_right"), "scale": (None, 0.3)},
    "attention_decode": {"scale": (None, 0.3), "k_scale": (1.0, 0.5), "v_scale": (1.0, 2.5)},
    "rmsnorm": {"offset": (0.0, 1.0)},
    "gelu": {"approximate": ("none", "tanh")},
    "swiglu": {"limit": (None, 1.5)},
    "rope": {"interleaved": (False, True)},
    "gemm_fp8": {"granularity": ("tensor", "row", "block")},
    "gemm_int4": {"packing": ("plain", "awq", "gptq")},
    "quantize_fp8": {"granularity": ("row", "tensor", "group128")},
    "quantize_int8": {"granularity": ("row", "tensor")},
    "quantize_int4": {"symmetric": (False, True)},
    "moe_route": {"top_k": (2, 1), "renormalize": (True, False), "scoring": ("softmax", "sigmoid")},
    "cross_entropy": {"label_smoothing": (0.0, 0.1), "reduction": ("mean", "sum", "none")},
    "cross_entropy_backward": {"label_smoothing": (0.0, 0.1), "reduction": ("mean", "sum", "none")},
}
_SHAPES: Mapping[str, Mapping[str, Sequence[int]]] = {"moe_route": {"E": (2, 4, 8, 17, 60, 64)}}


def usual(op: str) -> dict[str, Any]:
    """Settings of `examine` for a spec as a whole: a dtype, where it has one to choose, its options and sizes."""
    definition = spec(op)
    free = any(tensor.dtype is None for tensor in definition.tensors)
    return {
        "dtype": "bfloat16" if free else None,
        "options": {name: list(values) for name, values in _OPTIONS.get(op, {}).items()},
        "shapes": {name: list(sizes) for name, sizes in _SHAPES.get(op, {}).items()},
    }
