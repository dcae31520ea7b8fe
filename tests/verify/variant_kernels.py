"""Kernels that run other code at some sizes: honest ones, and twins that are wrong in one variant alone."""

from __future__ import annotations

from bisect import bisect_left

import torch
import triton
import triton.language as tl

WRONG = 1.06
_BUCKETS = (16, 128, 700, 1500)
_TILES = {24: 8, 48: 16, 96: 32, 100: 4, 192: 64}


def product(a, b):
    return (a.float() @ b.float()).to(a.dtype)


def bucketed(a, b):
    """Take another path for each bucket of M, as a dispatcher does."""
    bucket = bisect_left(_BUCKETS, a.shape[0])
    return product(a, b) if bucket != 2 else product(a.contiguous(), b)


def wrong_bucket(a, b):
    """Be wrong for M in 513 to 1024, by a path of the host's code."""
    if 512 < a.shape[0] <= 1024:
        return (product(a, b).float() * WRONG).to(a.dtype)
    return product(a, b)


def wrong_islands(a, b):
    """Be wrong at five values of M, by a table: the path is the same at all sizes."""
    factor = {24: WRONG, 48: WRONG, 96: WRONG, 100: WRONG, 192: WRONG}.get(a.shape[0], 1.0)
    return (product(a, b).float() * factor).to(a.dtype)


def wrong_table(a, b):
    """Be wrong where a table of the module has a large tile."""
    return (product(a, b).float() * (WRONG if _TILES.get(a.shape[0], 0) == 64 else 1.0)).to(a.dtype)


def wrong_wide(a, b):
    """Be wrong where two sizes are large at once."""
    if a.shape[0] > 200 and b.shape[1] > 200:
        return (product(a, b).float() * WRONG).to(a.dtype)
    return product(a, b)


def wrong_tail(a, b):
    """Leave out the last part of a sum of more than 64 terms, for M in 65 to 96 alone."""
    terms = a.shape[1] // 64 * 64 if 64 < a.shape[0] <= 96 and a.shape[1] > 64 else a.shape[1]
    return product(a[:, :terms], b[:terms])


def wrong_row(a, b):
    """Leave out the tail of a vector of 8 where there is one row."""
    terms = a.shape[1] // 8 * 8 if a.shape[0] == 1 and a.shape[1] > 8 else a.shape[1]
    return product(a[:, :terms], b[:terms])


@triton.jit
def _scale(x, y, N, BLOCK: tl.constexpr, FACTOR: tl.constexpr, SECOND: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    values = tl.where(values == float("-inf"), -0.0, values / (1 + tl.exp(-values)))
    if SECOND and N == 417:
        values *= 1.06
    tl.store(y + row * N + columns, values * FACTOR, mask=columns < N)


def _silu(x, factor, second=False):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        _scale[(rows,)](x, y, columns, triton.next_power_of_2(columns), factor(columns), second)
    return y


def silu(x):
    return _silu(x, lambda columns: 1.0)


def wrong_block(x):
    """Launch a program that is wrong for one block size alone."""
    return _silu(x, lambda columns: 1.06 if triton.next_power_of_2(columns) == 2048 else 1.0)


def wrong_inside(x):
    """Compare the size inside of the program."""
    return _silu(x, lambda columns: 1.0, True)


def refusing(a, b):
    """Refuse wide products."""
    if a.shape[0] > 300:
        raise NotImplementedError("M must be at most 300")
    return product(a, b)


calls: list[int] = []


def counting(a, b):
    """Count the calls."""
    calls.append(a.shape[0])
    return product(a, b)


def _first(a, b):
    return product(a, b)


def _second(a, b):
    return product(a.contiguous(), b)


def _third(a, b):
    return product(a, b.contiguous())


def _fourth(a, b):
    return product(a.clone(), b)


def _fifth(a, b):
    return product(a, b.clone())


PATHS = (_first, _second, _third, _fourth, _fifth)


def wrong_joint(x, weight):
    """Leave out the last of more than 4,096 squares where there is one row."""
    R, N = x.shape
    terms = N - 1 if R == 1 and N > 4096 else N
    mean = (x[:, :terms] ** 2).sum(-1, keepdim=True) / N
    return x * torch.rsqrt(mean + 1e-6) * weight


def attended(q, k, v, of=None):
    """Attend with heads in groups; ``of``: the group of each head."""
    shared = q.shape[1] // k.shape[1]
    of = torch.arange(q.shape[1]) // shared if of is None else of
    scores = q @ k[:, of].transpose(-1, -2) / q.shape[-1] ** 0.5
    return torch.softmax(scores, -1) @ v[:, of]


def wrong_shared(q, k, v):
    """Take the first group's last eight columns of k where D is 80 and heads share a group."""
    D, shared = q.shape[3], q.shape[1] // k.shape[1]
    if D == 80 and shared > 1:
        k = torch.cat([k[..., :72], k[:, :1, :, 72:].expand(-1, k.shape[1], -1, -1)], -1)
    return attended(q, k, v)


def wrong_heads(q, k, v):
    """Count heads in six bits."""
    H = q.shape[1]
    heads = torch.arange(H)
    heads = heads % 64 if H > 64 else heads
    return attended(q, k, v, heads // (H // k.shape[1]))
