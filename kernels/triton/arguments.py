"""Checks of a kernel's arguments: each error names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT32 = (torch.float32,)
INT32 = (torch.int32,)
REDUCTIONS = ("mean", "sum", "none")
_SIDE = 128  # of a block of FP8 weights with one scale
_WHOLE = (int, torch.SymInt)
_NUMBERS = (*_WHOLE, float, torch.SymFloat)


def check(**arguments: tuple[Tensor, Sequence[torch.dtype | str], str]) -> None:
    """Raise TypeError or ValueError unless every tensor has a dtype and the shape that stand beside it.

    A dtype may be an argument's name, for the dtype which that one has. A shape is sizes, "M K": a letter stands for
    one number wherever it comes. All tensors lie on the device of the first.
    """
    for name, (tensor, dtypes, _) in arguments.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        allowed = [arguments[dtype][0].dtype if isinstance(dtype, str) else dtype for dtype in dtypes]
        if tensor.dtype not in allowed:
            raise TypeError(f"{name}: expected {' or '.join(map(_short, allowed))}, got {_short(tensor.dtype)}")
    sizes: dict[str, int] = {}
    for name, (tensor, _, shape) in arguments.items():
        check_shape(name, tensor, [int(size) if size.isdigit() else sizes.get(size, size) for size in shape.split()])
        sizes |= zip(shape.split(), tensor.shape, strict=True)
    first, (other, _, _) = next(iter(arguments.items()))
    for name, (tensor, _, _) in arguments.items():
        if tensor.device != other.device:
            raise ValueError(f"{name}: expected device {other.device}, as {first}'s, got {tensor.device}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | str]) -> None:
    """Raise ValueError unless ``tensor`` has ``shape``; a size given by its letter may be anything."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_numbers(*, least: float = -math.inf, most: float = math.inf, **numbers: float) -> None:
    """Raise TypeError or ValueError unless every one of ``numbers`` is finite, and from ``least`` to ``most``."""
    for name, number in numbers.items():
        bounds = f" from {least:g} to {most:g}" if most < math.inf else f" of at least {least:g}" * (least > -math.inf)
        if not isinstance(number, _NUMBERS):
            raise TypeError(f"{name}: expected a number{bounds}, got {number!r}")
        if not (-math.inf < number < math.inf and least <= number <= most):
            raise ValueError(f"{name}: expected a finite number{bounds}, got {number!r}")


def check_cap(name: str, cap: float | None) -> None:
    """Raise TypeError or ValueError unless ``cap`` is None or a positive, finite number."""
    if cap is not None and not isinstance(cap, _NUMBERS):
        raise TypeError(f"{name}: expected None or a positive number, got {cap!r}")
    if cap is not None and not 0.0 < cap < math.inf:
        raise ValueError(f"{name}: expected None or a positive, finite number, got {cap!r}")


def checked_scale(scale: float | None, width: int) -> float:
    """The scale of scores of rows of ``width``: 1 / sqrt(width) for None. Raises TypeError or ValueError as
    `check_numbers`."""
    if scale is None:
        return 1.0 / math.sqrt(max(width, 1))
    check_numbers(scale=scale)
    return scale


def check_loss_options(
    classes: int,
    name: str,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    z_loss: float,
) -> None:
    """Raise TypeError or ValueError unless there are classes, and the options are what `cross_entropy` says."""
    if classes == 0:
        raise ValueError(f"{name}: expected one class or more, got 0")
    if not isinstance(ignore_index, _WHOLE):
        raise TypeError(f"ignore_index: expected a whole number, got {ignore_index!r}")
    check_numbers(label_smoothing=label_smoothing, least=0.0, most=1.0)
    check_choice("reduction", reduction, REDUCTIONS)
    check_cap("softcap", softcap)
    check_numbers(z_loss=z_loss)


def check_heads(heads: int, keys: str, key_heads: int, widest: int, **widths: int) -> None:
    """Raise ValueError unless q's ``heads`` share those of the argument ``keys`` evenly; or where any are too wide."""
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"{keys}: expected a number of heads that divides q's {heads}, got {key_heads}")
    for name, width in widths.items():
        if width > widest:
            raise ValueError(f"{name}: expected heads of at most {widest}, got {width}")


def check_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, widest: int
) -> None:
    """Raise TypeError or ValueError unless these are `attention_decode`'s arguments, heads of ``widest`` at most."""
    check(
        q=(q, FLOATING, "B H D"),
        k_cache=(k_cache, ("q", *FP8), "P page Hkv D"),
        v_cache=(v_cache, ("k_cache",), "P page Hkv D"),
        block_table=(block_table, INT32, "B max_pages"),
        seq_lens=(seq_lens, INT32, "B"),
    )
    check_heads(q.shape[1], "k_cache", k_cache.shape[2], widest, q=q.shape[2])


def check_latent(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    widest: int,
    widest_rope: int,
) -> None:
    """Raise TypeError or ValueError unless these are `mla_decode`'s arguments, of so many columns at most."""
    check(
        q=(q, FLOATING, "B H D"),
        q_rope=(q_rope, ("q",), "B H Dr"),
        cache=(cache, ("q",), "P page D"),
        rope_cache=(rope_cache, ("q",), "P page Dr"),
        block_table=(block_table, INT32, "B max_pages"),
        seq_lens=(seq_lens, INT32, "B"),
    )
    for name, tensor, most in (("q", q, widest), ("q_rope", q_rope, widest_rope)):
        if tensor.shape[2] > most:
            raise ValueError(f"{name}: expected at most {most} columns, got {tensor.shape[2]}")


def check_experts(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    **others: tuple[Tensor, Sequence[torch.dtype | str], str],
) -> None:
    """Raise TypeError or ValueError unless these are `moe`'s arguments, and others as `check` takes them."""
    check(
        x=(x, FLOATING, "T D"),
        w_down=(w_down, ("x",), "E D F"),
        w_gate_up=(w_gate_up, ("x",), "E 2F D"),
        ids=(ids, INT32, "T k"),
        weights=(weights, FLOAT32, "T k"),
        **others,
    )
    check_shape("w_gate_up", w_gate_up, ("E", 2 * w_down.shape[2], "D"))


def check_fp8_experts(
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
    """The side of a block of weights with one scale, 1 where those are rows.

    Raises TypeError or ValueError unless these are `moe_fp8`'s arguments, and others as `check` takes them.
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
    side = 1 if granularity == "channel" else _SIDE
    for name, scale, rows, inner in (("scale_gate_up", scale_gate_up, 2 * f, d), ("scale_down", scale_down, d, f)):
        check_shape(name, scale, (experts, -(-rows // side), 1 if side == 1 else -(-inner // side)))
    return side


def check_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, packing: str) -> None:
    """Raise TypeError or ValueError unless these are `gemm_int4`'s arguments, as its docstring has them."""
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


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
