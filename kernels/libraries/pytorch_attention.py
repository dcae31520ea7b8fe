"""PyTorch's attention kernels with the signatures of the specs, for `assay survey`.

`is_causal` is the top-left mask; "bottom_right" and windows are passed as masks, which the CPU's flash kernel and the
math backend both take, and ALiBi as a float32 bias. Tensors whose last stride isn't 1 are copied for the flash kernel.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Window = tuple[int, int] | None


def sdpa_math(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return _sdpa(SDPBackend.MATH, q, k, v, **options)


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **options: Any) -> Tensor:
    """The kernel takes one head size: the narrower of `k` and `v` is padded with zeros."""
    q, k, v, scale, width = _one_head_size(q, k, v, scale)
    q, k, v = (_unit_last_stride(t) for t in (q, k, v))
    return _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, scale=scale, **options)[..., :width]


def sdpa_flash_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: Window = None,
    return_lse: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operator behind the CPU's flash backend, the only one that returns the log-sum-exp.

    It takes masks in the query's dtype, and lengths of at least 1: with 0 it divides by zero and kills the process.
    """
    q, k, v, scale, width = _one_head_size(q, k, v, scale)
    q, k, v = (_unit_last_stride(t) for t in (q, k, v))
    mask, is_causal = _mask(q, k, causal, window, None)
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return (out[..., :width], lse) if return_lse else out[..., :width]


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    alibi: bool = False,
    slopes: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Uncompiled flex_attention, which materialises the scores; softcap, bias and mask are in its score function.

    It is traced even so. The tracer gives up after eight shapes, hence the raised limits; and it can't run inside a
    dispatch mode, so a mode that tracks allocations doesn't see this kernel's.
    """
    import torch._dynamo  # slow to import: seconds
    from torch.nn.attention import flex_attention as flex
    from torch.utils._python_dispatch import _disable_current_modes

    offset = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    shift = k.shape[2] - q.shape[2]
    left, right = window if window is not None else (k.shape[2] + q.shape[2], k.shape[2] + q.shape[2])
    if causal != "none":
        right = min(right, 0)
    masked = window is not None or causal != "none"

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            s = s - slopes[h] * (i + shift - j).abs()
        if masked:
            s = torch.where((j >= i + offset - left) & (j <= i + offset + right), s, float("-inf"))
        return s

    limits = torch._dynamo.config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20)
    with limits, _disable_current_modes(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        result: Any = flex.flex_attention(
            q,
            k,
            v,
            score_mod=score,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=flex.AuxRequest(lse=True) if return_lse else None,
        )
    out: Tensor = result[0] if return_lse else result
    return (out, result[1].lse) if return_lse else out


def _sdpa(
    backend: SDPBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: Window = None,
    alibi: bool = False,
    slopes: Tensor | None = None,
) -> Tensor:
    mask, is_causal = _mask(q, k, causal, window, slopes if alibi else None)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _mask(q: Tensor, k: Tensor, causal: str, window: Window, slopes: Tensor | None) -> tuple[Tensor | None, bool]:
    """Return the arguments `attn_mask` and `is_causal`."""
    if slopes is None and window is None:
        if causal == "none":
            return None, False
        if causal == "top_left":
            return None, True
    visible = _visible(q, k, causal, window)
    if slopes is None:
        return visible[None, None], False
    distance = _distance(q, k, k.shape[2] - q.shape[2]).abs()
    bias = -slopes.float()[:, None, None] * distance
    return bias.masked_fill(~visible, float("-inf"))[None], False


def _visible(q: Tensor, k: Tensor, causal: str, window: Window) -> Tensor:
    """Return which keys each query sees, bool[Sq, Sk]."""
    ahead = -_distance(q, k, 0 if causal == "top_left" else k.shape[2] - q.shape[2])
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if window is not None:
        visible &= (ahead >= -window[0]) & (ahead <= window[1])
    if causal != "none":
        visible &= ahead <= 0
    return visible


def _distance(q: Tensor, k: Tensor, offset: int) -> Tensor:
    """Return i + offset - j, int64[Sq, Sk]."""
    rows = torch.arange(q.shape[2], device=q.device)[:, None]
    return rows + offset - torch.arange(k.shape[2], device=q.device)


def _one_head_size(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None, int]:
    """Return q, k and v padded to one head size, the scale for the size before, and the width of `v`."""
    size, width = q.shape[-1], v.shape[-1]
    if size != width:
        wide = max(size, width)
        scale = size**-0.5 if scale is None and size else scale
        q, k, v = (F.pad(t, (0, wide - t.shape[-1])) for t in (q, k, v))
    return q, k, v, scale, width


def _unit_last_stride(x: Tensor) -> Tensor:
    """Copy if the last stride isn't 1; `contiguous` would keep that of a dimension of size one, which is checked."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
