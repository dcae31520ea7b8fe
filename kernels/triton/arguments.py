"""Argument checks of the kernels: each error names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT32 = (torch.float32,)
INT32 = (torch.int32,)
_SCALE_BLOCK = 128  # rows and columns of a block of FP8 weights with one scale
INTEGERS = (int, torch.SymInt)
_NUMBERS = (*INTEGERS, float, torch.SymFloat)


def check(**arguments: tuple[Tensor, Sequence[torch.dtype | str], str]) -> None:
    """Raise TypeError or ValueError unless every argument is a tensor of its dtypes and shape, all on one device.

    An argument is (tensor, dtypes, shape). A dtype may be the name of another argument, for the dtype of that one. A
    shape is a string of sizes, "M K 4": a letter stands for the same number wherever it occurs.
    """
    for name, (tensor, dtypes, _) in arguments.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        allowed = [arguments[dtype][0].dtype if isinstance(dtype, str) else dtype for dtype in dtypes]
        if tensor.dtype not in allowed:
            raise TypeError(f"{name}: expected {' or '.join(map(_name, allowed))}, got {_name(tensor.dtype)}")
    sizes: dict[str, int] = {}
    for name, (tensor, _, shape) in arguments.items():
        check_shape(name, tensor, [int(size) if size.isdigit() else sizes.get(size, size) for size in shape.split()])
        sizes |= zip(shape.split(), tensor.shape, strict=True)
    first, (reference, _, _) = next(iter(arguments.items()))
    for name, (tensor, _, _) in arguments.items():
        if tensor.device != reference.device:
            raise ValueError(f"{name}: expected device {reference.device}, as {first}'s, got {tensor.device}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | str]) -> None:
    """Raise ValueError unless ``tensor`` has ``shape``; a letter matches any size."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_numbers(*, minimum: float = -math.inf, maximum: float = math.inf, **numbers: float) -> None:
    """Raise TypeError or ValueError unless every number is finite, and from ``minimum`` to ``maximum``."""
    for name, number in numbers.items():
        bounds = f" from {minimum:g} to {maximum:g}"
        if maximum == math.inf:
            bounds = f" of at least {minimum:g}" if minimum > -math.inf else ""
        if not isinstance(number, _NUMBERS):
            raise TypeError(f"{name}: expected a number{bounds}, got {number!r}")
        if not (-math.inf < number < math.inf and minimum <= number <= maximum):
            raise ValueError(f"{name}: expected a finite number{bounds}, got {number!r}")


def check_positive(name: str, value: float | None) -> None:
    """Raise TypeError or ValueError unless ``value`` is None or a positive, finite number."""
    if value is not None and not isinstance(value, _NUMBERS):
        raise TypeError(f"{name}: expected None or a positive number, got {value!r}")
    if value is not None and not 0.0 < value < math.inf:
        raise ValueError(f"{name}: expected None or a positive, finite number, got {value!r}")


def check_sm_scale(scale: float | None, head_dim: int) -> float:
    """Return the scale of attention scores, 1 / sqrt(head_dim) for None. Raise as `check_numbers`."""
    if scale is None:
        return 1.0 / math.sqrt(max(head_dim, 1))
    check_numbers(scale=scale)
    return scale


def check_heads(heads: int, keys: str, key_heads: int, max_head_dim: int, **head_dims: int) -> None:
    """Raise ValueError unless ``key_heads``, those of the argument ``keys``, divide q's ``heads``, and each of the
    arguments in ``head_dims`` has at most ``max_head_dim``."""
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"{keys}: expected a number of heads that divides q's {heads}, got {key_heads}")
    for name, head_dim in head_dims.items():
        if head_dim > max_head_dim:
            raise ValueError(f"{name}: expected heads of at most {max_head_dim}, got {head_dim}")


def check_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, max_head_dim: int
) -> None:
    """Raise TypeError or ValueError unless these suit `attention_decode`."""
    check(
        q=(q, FLOATING, "B H D"),
        k_cache=(k_cache, ("q", *FP8), "P page Hkv D"),
        v_cache=(v_cache, ("k_cache",), "P page Hkv D"),
        block_table=(block_table, INT32, "B max_pages"),
        seq_lens=(seq_lens, INT32, "B"),
    )
    check_heads(q.shape[1], "k_cache", k_cache.shape[2], max_head_dim, q=q.shape[2])


def check_mla(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_dim: int,
    max_rope_dim: int,
) -> None:
    """Raise TypeError or ValueError unless these suit `mla_decode`, q and q_rope with at most these columns."""
    check(
        q=(q, FLOATING, "B H D"),
        q_rope=(q_rope, ("q",), "B H Dr"),
        cache=(cache, ("q",), "P page D"),
        rope_cache=(rope_cache, ("q",), "P page Dr"),
        block_table=(block_table, INT32, "B max_pages"),
        seq_lens=(seq_lens, INT32, "B"),
    )
    for name, tensor, limit in (("q", q, max_dim), ("q_rope", q_rope, max_rope_dim)):
        if tensor.shape[2] > limit:
            raise ValueError(f"{name}: expected at most {limit} columns, got {tensor.shape[2]}")


def check_moe(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    **others: tuple[Tensor, Sequence[torch.dtype | str], str],
) -> None:
    """Raise TypeError or ValueError unless these suit `moe`, and the others `check`."""
    check(
        x=(x, FLOATING, "T D"),
        w_down=(w_down, ("x",), "E D F"),
        w_gate_up=(w_gate_up, ("x",), "E 2F D"),
        ids=(ids, INT32, "T k"),
        weights=(weights, FLOAT32, "T k"),
        **others,
    )
    check_shape("w_gate_up", w_gate_up, ("E", 2 * w_down.shape[2], "D"))


def check_moe_fp8(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scale_gate_up: Tensor,
    scale_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    granularity: str,
    **others: tuple[Tensor, Sequence[torch.dtype | str], str],
) -> int:
    """Return the rows of weights that share a scale: 1 by channel, 128 (and as many columns) by block.

    Raise TypeError or ValueError unless these suit `moe_fp8`, and the others `check`.
    """
    check_choice("granularity", granularity, ("channel", "block"))
    check(
        x=(x, FLOATING, "T D"),
        w_down=(w_down, FP8[:1], "E D F"),
        w_gate_up=(w_gate_up, FP8[:1], "E 2F D"),
        scale_gate_up=(scale_gate_up, FLOAT32, "E N K"),
        scale_down=(scale_down, FLOAT32, "E M L"),
        ids=(ids, INT32, "T k"),
        weights=(weights, FLOAT32, "T k"),
        **others,
    )
    experts, d, f = w_down.shape
    check_shape("w_gate_up", w_gate_up, ("E", 2 * f, "D"))
    block = 1 if granularity == "channel" else _SCALE_BLOCK
    for name, scale, n, k in (("scale_gate_up", scale_gate_up, 2 * f, d), ("scale_down", scale_down, d, f)):
        check_shape(name, scale, (experts, -(-n // block), 1 if block == 1 else -(-k // block)))
    return block


def check_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, packing: str) -> None:
    """Raise TypeError or ValueError unless these suit `gemm_int4`."""
    check_choice("packing", packing, ("plain", "awq", "gptq"))
    words = (torch.uint8 if packing == "plain" else torch.int32,)
    check(
        x=(x, FLOATING, "M K"),
        scales=(scales, ("x",), "K/g N"),
        qweight=(qweight, words, "K/p N/q"),
        zeros=(zeros, words, "K/g N/r"),
    )
    k, (groups, n) = x.shape[1], scales.shape
    if k % groups if groups else k:
        raise ValueError(f"scales: expected a number of rows that divides K={k}, got {groups}")
    per_k, per_n, per_zero = {"plain": (2, 1, 1), "awq": (1, 8, 8), "gptq": (8, 1, 8)}[packing]
    if k % per_k:
        raise ValueError(f"x: expected K to be a multiple of {per_k}, as packing={packing!r} needs, got K={k}")
    if n % per_zero:
        raise ValueError(f"scales: expected N to be a multiple of {per_zero}, as packing={packing!r} needs, got N={n}")
    check_shape("qweight", qweight, (k // per_k, n // per_n))
    check_shape("zeros", zeros, (groups, n // per_zero))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
