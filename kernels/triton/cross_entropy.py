"""Cross-entropy of logits and labels, and its gradient, with smoothing, a cap of the logits and the z-loss.

The operator leaves each row's level, its maximum and sum of exponentials (`online_softmax`), to the gradient, which
then reads the row once: two numbers, since one, their log-sum-exp in float32, has too few digits for large logits.
Without them a row that is longer than a block is read twice. Tokens are reduced by one program, in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, REDUCTIONS, check, check_choice, check_loss_options
from assay.kernels.triton.online_softmax import finite_shift
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid

INT64 = (torch.int64,)
_BLOCK_T = 1024
_LABELLED = "T V"


@triton.jit
def _capped(x, softcap):
    if softcap is not None:
        x = softcap - 2.0 * softcap / (tl.exp(x * (2.0 / softcap)) + 1.0)
    return x


@triton.jit
def _logits(ptrs, kept, softcap):
    """Capped logits, -inf outside."""
    x = _capped(tl.load(ptrs, mask=kept, other=0.0).to(tl.float32), softcap)
    return tl.where(kept, x, -float("inf"))


@triton.jit
def _level(
    x_rows, inside, N, stride, softcap, ROWS_PER_PROGRAM: tl.constexpr, BLOCK_N: tl.constexpr, SINGLE_PASS: tl.constexpr
):
    """Maximum, sum of exponentials and sum of each row's capped logits, and the last block of them."""
    m_i = tl.full([ROWS_PER_PROGRAM], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
    total = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
    x = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, BLOCK_N if SINGLE_PASS else N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        kept = inside & (columns < N)
        x = _logits(x_rows + columns * stride, kept, softcap)
        m_new = tl.maximum(m_i, tl.max(x, axis=1))
        shift = tl.where(m_new == float("inf"), 0.0, finite_shift(m_new))  # the sum is infinite then, not NaN
        l_i = l_i * tl.exp(m_i - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        m_i = m_new
        total += tl.sum(tl.where(kept, x, 0.0), axis=1)
    return m_i, l_i, total, x


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R", "ignored"])
def _loss_kernel(
    x_ptr,
    target_ptr,
    loss_ptr,
    level_ptr,
    R,
    N,
    x_strides,
    stride_target,
    ignored,
    smoothing,
    rest,
    softcap,
    z_loss,
    SMOOTH: tl.constexpr,
    LEVEL: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    inside = rows < R
    target = tl.load(target_ptr + rows * stride_target, mask=inside, other=0)
    counted = inside & (target != ignored)
    x_rows = x_ptr + rows * x_strides[0]
    m_i, l_i, total, _ = _level(
        x_rows[:, None], inside[:, None], N, x_strides[1], softcap, ROWS_PER_PROGRAM, BLOCK_N, SINGLE_PASS
    )
    known = counted & (target >= 0) & (target < N)
    label = _capped(tl.load(x_rows + target * x_strides[1], mask=known, other=0.0).to(tl.float32), softcap)
    loss = tl.log(l_i) - (label - m_i)
    if SMOOTH:
        loss = loss * rest + (tl.log(l_i) - (total / N - m_i)) * smoothing
    if LEVEL:
        level = m_i + tl.log(l_i)
        loss += level * level * z_loss
    tl.store(loss_ptr + rows, tl.where(counted, loss, 0.0), mask=inside)
    if level_ptr is not None:
        tl.store(level_ptr + rows, m_i, mask=inside)
        tl.store(level_ptr + R + rows, l_i, mask=inside)


@triton.jit(do_not_specialize=["R", "ignored"])
def _reduce_kernel(loss_ptr, target_ptr, into_ptr, R, stride_target, ignored, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    counted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, R, BLOCK):
        rows = start + tl.arange(0, BLOCK).to(tl.int64)
        total += tl.load(loss_ptr + rows, mask=rows < R, other=0.0)
        if MEAN:
            target = tl.load(target_ptr + rows * stride_target, mask=rows < R, other=ignored)
            counted += (target != ignored).to(tl.float32)
    loss = tl.sum(total, axis=0)
    if MEAN:
        loss = loss / tl.sum(counted, axis=0)
    tl.store(into_ptr, loss)


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R", "ignored"])
def _gradient_kernel(
    x_ptr,
    target_ptr,
    upstream_ptr,
    count_ptr,
    level_ptr,
    dx_ptr,
    R,
    N,
    x_strides,
    stride_target,
    stride_upstream,
    dx_strides,
    ignored,
    share,
    rest,
    softcap,
    z_loss,
    LEVEL: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    inside = rows < R
    target = tl.load(target_ptr + rows * stride_target, mask=inside, other=0)
    upstream = tl.load(upstream_ptr + rows * stride_upstream, mask=inside, other=0.0)
    count = tl.load(count_ptr)
    x_rows = x_ptr + rows * x_strides[0]
    dx_rows = dx_ptr + rows * dx_strides[0]
    if level_ptr is None:
        m_i, l_i, _, x = _level(x_rows, inside, N, x_strides[1], softcap, ROWS_PER_PROGRAM, BLOCK_N, SINGLE_PASS)
        m_i, l_i = m_i[:, None], l_i[:, None]
    else:
        m_i = tl.load(level_ptr + rows, mask=inside, other=0.0)
        l_i = tl.load(level_ptr + R + rows, mask=inside, other=1.0)
    for start in range(0, BLOCK_N if SINGLE_PASS else N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        kept = inside & (columns < N)
        if not SINGLE_PASS or level_ptr is not None:
            x = _logits(x_rows + columns * x_strides[1], kept, softcap)
        dx = tl.exp(x - m_i) / l_i
        if LEVEL:
            dx += dx * ((m_i + tl.log(l_i)) * (2.0 * z_loss))
        dx = tl.where(columns == target, dx - rest, dx) - share
        dx = dx / count * upstream
        if softcap is not None:
            raw = tl.load(x_rows + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
            small = tl.exp(-2.0 * tl.abs(raw) / softcap)
            dx = dx * (4.0 * small / ((1.0 + small) * (1.0 + small)))
        dx = tl.where(target != ignored, dx, 0.0)
        tl.store(dx_rows + columns * dx_strides[1], dx.to(dx_ptr.dtype.element_ty), mask=kept)


def token_losses(
    logits: Tensor,
    target: Tensor,
    loss: Tensor,
    level: Tensor | None,
    ignored: int,
    smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> None:
    """Write the loss of each token into ``loss`` float32[T], and the maximum and sum of exponentials of its row into
    ``level`` float32[2,T], both contiguous."""
    if len(target):
        _loss_kernel[grid](
            *(logits, target, loss, level, *logits.shape, logits.stride(), *target.stride(), ignored, smoothing),
            *(1.0 - smoothing, softcap, z_loss, smoothing != 0.0, z_loss != 0.0),
        )


def reduced(loss: Tensor, target: Tensor, ignored: int, reduction: str) -> Tensor:
    """The mean over tokens that have a label, or the sum, of losses [T]: float32[]."""
    total = loss.new_empty(())
    mean = reduction == "mean"
    _reduce_kernel[(1,)](loss, target, total, len(loss), *target.stride(), ignored, MEAN=mean, BLOCK=_BLOCK_T)
    return total


def upstream_and_count(target: Tensor, dloss: Tensor | None, ignored: int, reduction: str) -> tuple[Tensor, Tensor]:
    """The gradient of each token's loss [T], and by how many it is divided: float32[]."""
    one = torch.ones((), dtype=torch.float32, device=target.device)
    upstream = (one if dloss is None else dloss).expand(target.shape)
    count = (target != ignored).sum(dtype=torch.float32).clamp(min=1.0) if reduction == "mean" else one
    return upstream, count


def logit_gradients(
    logits: Tensor,
    target: Tensor,
    upstream: Tensor,
    count: Tensor,
    level: Tensor | None,
    ignored: int,
    smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    """The gradient of the logits, in their dtype, from `upstream_and_count`, and the level from `token_losses`."""
    dlogits = logits.new_empty(logits.shape)
    if dlogits.numel():
        _gradient_kernel[grid](
            *(logits, target, upstream, count, level, dlogits, *logits.shape),
            *(logits.stride(), *target.stride(), *upstream.stride(), dlogits.stride()),
            *(ignored, smoothing / logits.shape[1], 1.0 - smoothing, softcap, z_loss, z_loss != 0.0),
        )
    return dlogits


def loss_shape(logits: Tensor, target: Tensor, ignored: int, smoothing: float, reduction: str, *rest: object) -> Tensor:
    """An empty loss."""
    return logits.new_empty(target.shape if reduction == "none" else (), dtype=torch.float32)


@custom_op(
    "assay::cross_entropy",
    lambda logits, *rest: (loss_shape(logits, *rest), logits.new_empty((2, len(logits)), dtype=torch.float32)),
)
def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignored: int,
    smoothing: float,
    reduction: str,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """The loss, and the level of each row, which is the gradient's alone and has none."""
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    level = loss.new_empty((2, len(logits)))
    token_losses(logits, target, loss, level, ignored, smoothing, softcap, z_loss)
    return loss if reduction == "none" else reduced(loss, target, ignored, reduction), level


@custom_op("assay::cross_entropy_backward", lambda logits, *rest: logits.new_empty(logits.shape))
def _cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor | None,
    level: Tensor | None,
    ignored: int,
    smoothing: float,
    reduction: str,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    upstream, count = upstream_and_count(target, dloss, ignored, reduction)
    return logit_gradients(logits, target, upstream, count, level, ignored, smoothing, softcap, z_loss)


def _gradient(saved, dloss, _):
    options = (saved.ignored, saved.smoothing, saved.reduction, saved.softcap, saved.z_loss)
    return _cross_entropy_backward(saved.logits, saved.target, dloss, saved.last_result, *options)


differentiate("assay::cross_entropy", _gradient, saves="logits target last_result")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """-(1 - s) log p_label - s mean log p + z lse^2 of each token, p = softmax(logits[T,V]); zero if it is ignored.

    logits are float32, bfloat16 or float16, target[T] is int64: 0 to V - 1 or ``ignore_index``. s: ``label_smoothing``,
    from 0 to 1. ``softcap`` c: the logits are c tanh(logits / c). z: ``z_loss``; lse is the log-sum-exp. ``reduction``:
    "none" gives float32[T], "sum" float32[], and "mean" that over the tokens that aren't ignored, NaN where all are.
    Raises TypeError or ValueError, naming the argument, for another dtype, shape, device or option.
    """
    check(logits=(logits, FLOATING, _LABELLED), target=(target, INT64, "T"))
    check_loss_options(logits.shape[1], "logits", ignore_index, label_smoothing, reduction, softcap, z_loss)
    loss, _ = _cross_entropy(logits, target, ignore_index, label_smoothing, reduction, softcap, z_loss)
    return loss


def cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """dlogits[T,V] of `cross_entropy`'s arguments, from the gradient dloss of its result, float32[] or [T]; of 1 where
    that is left out. It has the dtype of the logits. Raises as `cross_entropy` does.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    upstream = {} if dloss is None else {"dloss": (dloss, FLOAT32, "T" if reduction == "none" else "")}
    check(logits=(logits, FLOATING, _LABELLED), target=(target, INT64, "T"), **upstream)
    check_loss_options(logits.shape[1], "logits", ignore_index, label_smoothing, reduction, softcap, z_loss)
    return _cross_entropy_backward(
        logits, target, dloss, None, ignore_index, label_smoothing, reduction, softcap, z_loss
    )
