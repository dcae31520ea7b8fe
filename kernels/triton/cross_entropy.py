"""Cross-entropy of logits [T,V] and its gradient, with label smoothing, softcap and z-loss, row by row.

The operator saves the maximum m_i and the sum of exponentials l_i of each row for the gradient, which then reads the
row once. They are two numbers because one, the log-sum-exp in float32, has too few digits for large logits. Without
them a row that is longer than a block is read twice. One program reduces the losses of all tokens, in one order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import (
    FLOAT32,
    FLOATING,
    INTEGERS,
    check,
    check_choice,
    check_numbers,
    check_positive,
)
from assay.kernels.triton.online_softmax import finite_shift
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid

INT64 = (torch.int64,)
REDUCTIONS = ("mean", "sum", "none")
_BLOCK_T = 1024


@triton.jit
def _softcapped(x, softcap):
    # c tanh(x / c), with one exponential.
    if softcap is not None:
        x = softcap - 2.0 * softcap / (tl.exp(x * (2.0 / softcap)) + 1.0)
    return x


@triton.jit
def _load_logits(ptrs, mask, softcap):
    """Return softcapped logits, -inf where masked."""
    x = _softcapped(tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), softcap)
    return tl.where(mask, x, -float("inf"))


@triton.jit
def _row_stats(
    x_rows,
    row_mask,
    N,
    stride,
    softcap,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """Return maximum, sum of exponentials and sum of each row's softcapped logits, and their last block."""
    m_i = tl.full([ROWS_PER_PROGRAM], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
    total = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
    x = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, BLOCK_N if SINGLE_PASS else N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        mask = row_mask & (columns < N)
        x = _load_logits(x_rows + columns * stride, mask, softcap)
        m_new = tl.maximum(m_i, tl.max(x, axis=1))
        shift = tl.where(m_new == float("inf"), 0.0, finite_shift(m_new))  # so that the sum becomes inf, not NaN
        l_i = l_i * tl.exp(m_i - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        m_i = m_new
        total += tl.sum(tl.where(mask, x, 0.0), axis=1)
    return m_i, l_i, total, x


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R", "ignore_index"])
def _loss_kernel(
    x_ptr,
    target_ptr,
    loss_ptr,
    stats_ptr,
    R,
    N,
    x_strides,
    stride_target,
    ignore_index,
    smoothing,
    confidence,
    softcap,
    z_loss,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """loss[R] of logits x[R,N]; stats[2,R] = m_i, l_i of each row, or None. confidence = 1 - smoothing."""
    rows = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    row_mask = rows < R
    target = tl.load(target_ptr + rows * stride_target, mask=row_mask, other=0)
    valid = row_mask & (target != ignore_index)
    x_rows = x_ptr + rows * x_strides[0]
    m_i, l_i, total, _ = _row_stats(
        x_rows[:, None], row_mask[:, None], N, x_strides[1], softcap, ROWS_PER_PROGRAM, BLOCK_N, SINGLE_PASS
    )
    label_mask = valid & (target >= 0) & (target < N)
    label = _softcapped(tl.load(x_rows + target * x_strides[1], mask=label_mask, other=0.0).to(tl.float32), softcap)
    loss = tl.log(l_i) - (label - m_i)
    if SMOOTHING:
        loss = loss * confidence + (tl.log(l_i) - (total / N - m_i)) * smoothing
    if Z_LOSS:
        lse = m_i + tl.log(l_i)
        loss += lse * lse * z_loss
    tl.store(loss_ptr + rows, tl.where(valid, loss, 0.0), mask=row_mask)
    if stats_ptr is not None:
        tl.store(stats_ptr + rows, m_i, mask=row_mask)
        tl.store(stats_ptr + R + rows, l_i, mask=row_mask)


@triton.jit(do_not_specialize=["R", "ignore_index"])
def _reduce_kernel(
    loss_ptr, target_ptr, result_ptr, R, stride_target, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum of loss[R], or the mean over targets that aren't ignored; one program."""
    total = tl.zeros([BLOCK], tl.float32)
    num_valid = tl.zeros([BLOCK], tl.float32)
    for start in range(0, R, BLOCK):
        rows = start + tl.arange(0, BLOCK).to(tl.int64)
        total += tl.load(loss_ptr + rows, mask=rows < R, other=0.0)
        if MEAN:
            target = tl.load(target_ptr + rows * stride_target, mask=rows < R, other=ignore_index)
            num_valid += (target != ignore_index).to(tl.float32)
    loss = tl.sum(total, axis=0)
    if MEAN:
        loss = loss / tl.sum(num_valid, axis=0)
    tl.store(result_ptr, loss)


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R", "ignore_index"])
def _gradient_kernel(
    x_ptr,
    target_ptr,
    dloss_ptr,
    num_valid_ptr,
    stats_ptr,
    dx_ptr,
    R,
    N,
    x_strides,
    stride_target,
    stride_dloss,
    dx_strides,
    ignore_index,
    smoothing_per_class,
    confidence,
    softcap,
    z_loss,
    Z_LOSS: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """dx[R,N] from dloss[R]; num_valid[] divides it. smoothing_per_class = smoothing / N."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    row_mask = rows < R
    target = tl.load(target_ptr + rows * stride_target, mask=row_mask, other=0)
    dloss = tl.load(dloss_ptr + rows * stride_dloss, mask=row_mask, other=0.0)
    num_valid = tl.load(num_valid_ptr)
    x_rows = x_ptr + rows * x_strides[0]
    dx_rows = dx_ptr + rows * dx_strides[0]
    if stats_ptr is None:
        m_i, l_i, _, x = _row_stats(x_rows, row_mask, N, x_strides[1], softcap, ROWS_PER_PROGRAM, BLOCK_N, SINGLE_PASS)
        m_i, l_i = m_i[:, None], l_i[:, None]
    else:
        m_i = tl.load(stats_ptr + rows, mask=row_mask, other=0.0)
        l_i = tl.load(stats_ptr + R + rows, mask=row_mask, other=1.0)
    for start in range(0, BLOCK_N if SINGLE_PASS else N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        mask = row_mask & (columns < N)
        if not SINGLE_PASS or stats_ptr is not None:  # else _row_stats has loaded the only block
            x = _load_logits(x_rows + columns * x_strides[1], mask, softcap)
        dx = tl.exp(x - m_i) / l_i
        if Z_LOSS:
            dx += dx * ((m_i + tl.log(l_i)) * (2.0 * z_loss))
        dx = tl.where(columns == target, dx - confidence, dx) - smoothing_per_class
        dx = dx / num_valid * dloss
        if softcap is not None:
            # 1 - tanh^2(x / c) = 4 e / (1 + e)^2 with e = exp(-2 |x| / c), which neither overflows nor cancels.
            raw = tl.load(x_rows + columns * x_strides[1], mask=mask, other=0.0).to(tl.float32)
            e = tl.exp(-2.0 * tl.abs(raw) / softcap)
            dx = dx * (4.0 * e / ((1.0 + e) * (1.0 + e)))
        dx = tl.where(target != ignore_index, dx, 0.0)
        tl.store(dx_rows + columns * dx_strides[1], dx.to(dx_ptr.dtype.element_ty), mask=mask)


class LossOptions(NamedTuple):
    """The options of `cross_entropy`, in the order in which its operators take them."""

    ignore_index: int
    label_smoothing: float
    reduction: str
    softcap: float | None
    z_loss: float

    def check(self, name: str, classes: int) -> None:
        """Raise TypeError or ValueError unless the options are right and ``name`` has classes."""
        if classes == 0:
            raise ValueError(f"{name}: expected one class or more, got 0")
        if not isinstance(self.ignore_index, INTEGERS):
            raise TypeError(f"ignore_index: expected a whole number, got {self.ignore_index!r}")
        check_numbers(label_smoothing=self.label_smoothing, minimum=0.0, maximum=1.0)
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_positive("softcap", self.softcap)
        check_numbers(z_loss=self.z_loss)


def token_losses(logits: Tensor, target: Tensor, loss: Tensor, stats: Tensor | None, options: LossOptions) -> None:
    """Write each token's loss into ``loss`` float32[T], and m_i and l_i of its row into ``stats`` float32[2,T], both
    contiguous."""
    smoothing, z_loss = options.label_smoothing, options.z_loss
    if len(target):
        _loss_kernel[grid](
            *(logits, target, loss, stats, *logits.shape, logits.stride(), *target.stride()),
            *(options.ignore_index, smoothing, 1.0 - smoothing, options.softcap, z_loss),
            *(smoothing != 0.0, z_loss != 0.0),
        )


def reduce_losses(loss: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Return the losses [T], their sum [], or their mean [] over tokens that aren't ignored."""
    if options.reduction == "none":
        return loss
    result = loss.new_empty(())
    _reduce_kernel[(1,)](
        *(loss, target, result, len(loss), *target.stride(), options.ignore_index),
        MEAN=options.reduction == "mean",
        BLOCK=_BLOCK_T,
    )
    return result


def token_gradients(target: Tensor, dloss: Tensor | None, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return the gradient of each token's loss [T], and its divisor float32[]: the tokens that "mean" counts, or 1."""
    one = torch.ones((), dtype=torch.float32, device=target.device)
    dlosses = (one if dloss is None else dloss).expand(target.shape)
    if options.reduction != "mean":
        return dlosses, one
    return dlosses, (target != options.ignore_index).sum(dtype=torch.float32).clamp(min=1.0)


def logit_gradients(
    logits: Tensor, target: Tensor, dlosses: Tensor, num_valid: Tensor, stats: Tensor | None, options: LossOptions
) -> Tensor:
    """Return dlogits in the logits' dtype, from `token_gradients` and the stats of `token_losses`."""
    smoothing, z_loss = options.label_smoothing, options.z_loss
    dlogits = logits.new_empty(logits.shape)
    if dlogits.numel():
        _gradient_kernel[grid](
            *(logits, target, dlosses, num_valid, stats, dlogits, *logits.shape),
            *(logits.stride(), *target.stride(), *dlosses.stride(), dlogits.stride()),
            *(options.ignore_index, smoothing / logits.shape[1], 1.0 - smoothing, options.softcap, z_loss),
            z_loss != 0.0,
        )
    return dlogits


def empty_loss(logits: Tensor, target: Tensor, *options: object) -> Tensor:
    """Return a new tensor of the loss's shape and dtype."""
    shape = target.shape if LossOptions(*options).reduction == "none" else ()  # type: ignore[arg-type]
    return logits.new_empty(shape, dtype=torch.float32)


@custom_op(
    "assay::cross_entropy",
    lambda logits, *rest: (empty_loss(logits, *rest), logits.new_empty((2, len(logits)), dtype=torch.float32)),
)
def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the stats of each row, which have no gradient."""
    options = LossOptions(ignore_index, label_smoothing, reduction, softcap, z_loss)
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    stats = loss.new_empty((2, len(logits)))
    token_losses(logits, target, loss, stats, options)
    return reduce_losses(loss, target, options), stats


@custom_op("assay::cross_entropy_backward", lambda logits, *rest: logits.new_empty(logits.shape))
def _cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor | None,
    stats: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    z_loss: float,
) -> Tensor:
    options = LossOptions(ignore_index, label_smoothing, reduction, softcap, z_loss)
    return logit_gradients(logits, target, *token_gradients(target, dloss, options), stats, options)


def options_of(saved: Any) -> tuple[Any, ...]:
    """Return the options from what `differentiate` saved of a call."""
    return tuple(getattr(saved, name) for name in LossOptions._fields)


differentiate(
    "assay::cross_entropy",
    lambda saved, dloss, _: _cross_entropy_backward(
        saved.logits, saved.target, dloss, saved.last_result, *options_of(saved)
    ),
    saves="logits target last_result",
)


@replayed
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
    """Return -(1 - s) log p_label - s mean log p + z lse^2 of each token, p = softmax(logits[T,V]); 0 if it is ignored.

    logits are float32, bfloat16 or float16, target[T] is int64: 0 to V - 1 or ``ignore_index``. s: ``label_smoothing``,
    from 0 to 1. ``softcap`` c: the logits are c tanh(logits / c). z: ``z_loss``; lse is the log-sum-exp. ``reduction``:
    "none" gives float32[T], "sum" float32[], and "mean" that over the tokens that aren't ignored, NaN where all are.
    Raises TypeError or ValueError, naming the argument, for another dtype, shape, device or option.
    """
    options = LossOptions(ignore_index, label_smoothing, reduction, softcap, z_loss)
    check(logits=(logits, FLOATING, "T V"), target=(target, INT64, "T"))
    options.check("logits", logits.shape[1])
    loss, _ = _cross_entropy(logits, target, *options)
    return loss


@replayed
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
    """Return dlogits[T,V] of `cross_entropy` in the logits' dtype, from the gradient dloss of its result.

    dloss is float32, [T] for the reduction "none", else []; 1 where left out. Raises as `cross_entropy` does.
    """
    options = LossOptions(ignore_index, label_smoothing, reduction, softcap, z_loss)
    check_choice("reduction", reduction, REDUCTIONS)
    gradient = {} if dloss is None else {"dloss": (dloss, FLOAT32, "T" if reduction == "none" else "")}
    check(logits=(logits, FLOATING, "T V"), target=(target, INT64, "T"), **gradient)
    options.check("logits", logits.shape[1])
    return _cross_entropy_backward(logits, target, dloss, None, *options)
