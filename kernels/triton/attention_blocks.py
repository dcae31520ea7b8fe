"""What attention and its gradients share: tiles of rows, which blocks of them a mask leaves, and the weights again.

Tiles are of dense sequences, or of sequences of several lengths that are laid end to end.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))  # scores are multiplied by it, so that an exponential is one exp2
_PART = tl.constexpr(32)  # columns of float32 that a thread holds at once
_STARTS = tl.constexpr(128)  # of sequences, looked through at once


@triton.jit
def load_rows(source, start, in_rows, in_columns, CUT: tl.constexpr, COLUMNS_CUT: tl.constexpr):
    """A tile of rows from ``start`` on, zero outside. A source is a descriptor, its batch and head; or pointers."""
    DESCRIBED: tl.constexpr = len(source) == 3
    if DESCRIBED:
        tile = source[0].load([source[1], source[2], start, 0])
        tile = tl.reshape(tile, [tile.shape[2], tile.shape[3]])
    else:
        ptrs = source[0] + start.to(tl.int64) * source[1]
        if CUT:
            tile = tl.load(ptrs, mask=in_rows[:, None] & in_columns, other=0.0)
        elif COLUMNS_CUT:
            tile = tl.load(ptrs, mask=in_columns, other=0.0)
        else:
            tile = tl.load(ptrs)
    return tile


@triton.jit
def dot_rows(a, b, again, start, in_rows, CUT: tl.constexpr):
    """a b^T of rows a[M,D] and b[N,D], summed in float32; ``again`` is None but for float32.

    Threads form float32's products themselves, and would hold more of whole rows than they have registers. So the rows
    come from memory again, a part of their columns at a time: ``again`` is pointers [M,1] to those of a, the stride of
    their columns, which there are, and what they are multiplied by, or None; pointers [N,1] to the first tile of b's,
    and the strides of rows and columns; and D.
    """
    if again is None:
        s = tl.dot(a, tl.trans(b), input_precision="ieee")
    else:
        a_ptrs, a_stride, in_a, sign, b_ptrs, b_row_stride, b_stride, WIDTH = again
        PART: tl.constexpr = min(a.shape[1], _PART)
        b_ptrs += start.to(tl.int64) * b_row_stride
        s = tl.zeros([a.shape[0], b.shape[0]], tl.float32)
        for first in tl.range(0, WIDTH, PART, num_stages=1):
            column = first + tl.arange(0, PART).to(tl.int64)[None, :]
            inside = column < WIDTH
            part = tl.load(a_ptrs + column * a_stride, mask=in_a & inside, other=0.0)
            if sign is not None:
                part = part * sign
            of_b = (in_rows[:, None] & inside) if CUT else inside
            other = tl.load(b_ptrs + column * b_stride, mask=of_b, other=0.0)
            s = tl.dot(part, tl.trans(other), s, input_precision="ieee")
    return s


@triton.jit
def tiles_in_all(places, starts, BLOCK: tl.constexpr):
    """How many tiles there are of all places; of sequences end to end there may be some too many, see `of_sequence`."""
    if starts[0] is None:
        tiles = tl.cdiv(places, BLOCK)
    else:
        tiles = places // BLOCK + starts[2]
    return tiles


@triton.jit
def of_sequence(tile, places, others, starts, GROUP, BLOCK: tl.constexpr):
    """The sequence that a tile is of: its first place and its length among the places that tiles are made of, the same
    among the others, and the tile's number within it. ``places`` and ``others`` are how many a dense sequence has.

    ``starts``: those of sequences end to end among the places and among the others, which lie on the device, how many
    sequences there are, and both strides; or None first. The tiles of a sequence of GROUP rows a place begin at number
    start * GROUP // BLOCK + its own number: there are always enough, and one too many at most.
    """
    first, other_first = 0, 0
    starts_ptr, others_ptr, SEQUENCES, stride, other_stride = starts
    if starts_ptr is not None:
        sequence = tl.full([], -1, tl.int32)
        for begin in tl.range(0, SEQUENCES, _STARTS):
            number = begin + tl.arange(0, _STARTS)
            start = tl.load(starts_ptr + number * stride, mask=number < SEQUENCES, other=0).to(tl.int64)
            begun = (start * GROUP // BLOCK + number <= tile) & (number < SEQUENCES)
            sequence += tl.sum(begun.to(tl.int32))
        first = tl.load(starts_ptr + sequence * stride)
        other_first = tl.load(others_ptr + sequence * other_stride)
        places = tl.load(starts_ptr + (sequence + 1) * stride) - first
        others = tl.load(others_ptr + (sequence + 1) * other_stride) - other_first
        tile -= first.to(tl.int64) * GROUP // BLOCK + sequence
    return first, places, other_first, others, tile


@triton.jit
def visible(place, lowest, highest):
    """Which of the places [N] each row of a tile sees; bounds are a number or [M,1], and there may be no lower one."""
    seen = place[None, :] <= highest
    if lowest is not None:
        seen = seen & (place[None, :] >= lowest)
    return seen


@triton.jit
def span_seen(earliest, latest, first_seen, last_seen, size, BLOCK: tl.constexpr):
    """Which blocks of ``size`` places the rows ``earliest`` to ``latest`` see: row i those from i + first_seen to
    i + last_seen, each bound None where there is none.

    Returns the first block, how many the mask's left side cuts through, how many it cuts through on both sides (or the
    end of the places does), and how many every row sees entirely. `block_after` counts in that order.
    """
    some_from, all_from, some_to, all_to = 0, 0, size, size  # places that some row sees, or that all rows see
    if first_seen is not None:
        some_from = tl.maximum(earliest + first_seen, 0)
        all_from = tl.maximum(latest + first_seen, 0)
    if last_seen is not None:
        some_to = tl.maximum(tl.minimum(latest + last_seen + 1, size), 0)
        all_to = tl.maximum(tl.minimum(earliest + last_seen + 1, size), 0)
    begin = some_from // BLOCK
    end = tl.maximum(tl.cdiv(some_to, BLOCK), begin)
    whole_begin = tl.minimum(tl.cdiv(all_from, BLOCK), end)
    whole = tl.maximum(all_to // BLOCK - whole_begin, 0)
    return begin, whole_begin - begin, end - begin - whole, whole


@triton.jit
def block_after(count, span):
    """The block that is added after ``count`` others: first those that the mask cuts through, on both sides."""
    begin, before, cuts, whole = span
    block = begin + count + tl.where(count >= before, whole, 0)
    return tl.where(count >= cuts, begin + before + count - cuts, block)


@triton.jit
def weights_again(s, lse, slope, distance, scales):
    """The softmax's weights from products s and the log-sum-exps of their rows, as they were in the forward pass.

    ``scales`` are the scale, 2 log2(e) scale / softcap, and the softcap; all but the second, slopes and log-sum-exps
    are in units of log2(e).
    """
    scale, tanh_scale, cap = scales
    if cap is not None:
        s = cap - 2.0 * cap / (tl.exp2(s * tanh_scale) + 1.0)
    else:
        s = s * scale
    if slope is not None:
        s = s - slope * distance
    return tl.exp2(s - lse)


@triton.jit
def before_softcap(ds, s, scales):
    """The gradient of a score before its softcap, from that after it: times 1 - tanh^2."""
    _, tanh_scale, cap = scales
    if cap is not None:
        part = 1.0 / (tl.exp2(s * tanh_scale) + 1.0)
        ds = ds * (4.0 * part * (1.0 - part))
    return ds
