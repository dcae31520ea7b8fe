"""Kernels with planted faults of memory, beside their honest twins: what a parameter switches."""

import triton
import triton.language as tl


@triton.jit
def double(x_ptr, y_ptr, n, LOADED: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr):
    """Honest with LOADED = STORED = 0: so many elements more are loaded and stored than there are."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n + LOADED, other=0.0)
    tl.store(y_ptr + i, 2 * x, mask=i < n + STORED)


@triton.jit
def shifted(x_ptr, y_ptr, n, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Honest with FIRST = 0; with -1 the first program begins before the tensor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i + FIRST, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def wide_rows(x_ptr, y_ptr, ROWS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """Honest with WIDTH = N: each program stores WIDTH elements at its row of N."""
    row, i = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * N + i, mask=row * N + i < ROWS * N, other=0.0)
    tl.store(y_ptr + row * N + i, x + row, mask=row * N + i < ROWS * N)


@triton.jit
def rows_apart(x_ptr, y_ptr, stride, N: tl.constexpr, WIDE: tl.constexpr):
    """Honest if WIDE: the row's offset may need more than 32 bits."""
    row, i = tl.program_id(0), tl.arange(0, N)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(y_ptr + row * N + i, tl.load(x_ptr + row * stride + i))


@triton.jit
def in_place(x_ptr, n, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Honest with AHEAD = 0: each element becomes twice the one so far ahead of it."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, 2 * tl.load(x_ptr + i + AHEAD, mask=i + AHEAD < n, other=0.0), mask=i < n)


@triton.jit
def total(x_ptr, y_ptr, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    """Honest if ATOMIC: all programs add into one place."""
    x = tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)))
    if ATOMIC:
        tl.atomic_add(y_ptr, x)
    else:
        tl.store(y_ptr, tl.load(y_ptr) + x)


@triton.jit
def last_one_adds(x_ptr, part_ptr, count_ptr, y_ptr, SEM: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Honest with SEM = "acq_rel": the program that counts last adds what all have stored."""
    program = tl.program_id(0)
    tl.store(part_ptr + program, tl.sum(tl.load(x_ptr + program * BLOCK + tl.arange(0, BLOCK))))
    if tl.atomic_add(count_ptr, 1, sem=SEM) == tl.num_programs(0) - 1:
        tl.store(y_ptr, tl.sum(tl.load(part_ptr + tl.arange(0, N))))
        tl.store(count_ptr, 0)


@triton.jit
def locked(x_ptr, lock_ptr, y_ptr, LOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Honest if LOCKS: programs add into one block, one after another."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + i)
    if LOCKS:
        while tl.atomic_cas(lock_ptr, 0, 1) == 1:
            pass
    tl.store(y_ptr + i, tl.load(y_ptr + i) + x)
    if LOCKS:
        tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def locked_rows(x_ptr, y_ptr, lock_ptr, count_ptr, LOCKS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr):
    """Honest with LOCKS = GROUPS: rows add into their group's sum under its lock, the first one stores.

    As in the backward pass of Triton's tutorial on layer norm.
    """
    row, i = tl.program_id(0), tl.arange(0, N)
    group = row % GROUPS
    total = tl.load(x_ptr + row * N + i)
    while tl.atomic_cas(lock_ptr + row % LOCKS, 0, 1) == 1:
        pass
    if tl.load(count_ptr + group) == 0:
        tl.atomic_xchg(count_ptr + group, 1)
    else:
        total += tl.load(y_ptr + group * N + i)
    tl.store(y_ptr + group * N + i, total)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + row % LOCKS, 0)


@triton.jit
def locked_groups(x_ptr, lock_ptr, y_ptr, LOCKS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr):
    """Honest with LOCKS = GROUPS: rows add into their group's sum under its lock."""
    row, i = tl.program_id(0), tl.arange(0, N)
    sums = y_ptr + row % GROUPS * N + i
    x = tl.load(x_ptr + row * N + i)
    while tl.atomic_cas(lock_ptr + row % LOCKS, 0, 1) == 1:
        pass
    tl.store(sums, tl.load(sums) + x)
    tl.atomic_xchg(lock_ptr + row % LOCKS, 0)


@triton.jit
def passed_on(x_ptr, work_ptr, y_ptr, WRITER: tl.constexpr):
    """A race where x holds other than what is in the workspace: one of two programs stores it, the other loads it."""
    if tl.program_id(0) == WRITER:
        tl.store(work_ptr, tl.load(x_ptr))
    else:
        tl.store(y_ptr, tl.load(work_ptr))


@triton.jit
def last_wins(x_ptr, y_ptr):
    """A race where elements of x differ: each program stores its own to one place."""
    tl.store(y_ptr, tl.load(x_ptr + tl.program_id(0)))


@triton.jit
def halves(x_ptr, work_ptr, y_ptr, FILLED: tl.constexpr, BLOCK: tl.constexpr):
    """Honest with FILLED = BLOCK: so many elements of a workspace are written before all are read."""
    i = tl.arange(0, BLOCK)
    tl.store(work_ptr + i, tl.load(x_ptr + i), mask=i < FILLED)
    tl.store(y_ptr + i, tl.load(work_ptr + i))


@triton.jit
def from_either(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    """Elements of two tensors by one block of pointers; honest where n is that of both."""
    i = tl.arange(0, BLOCK)
    pointers = tl.where(i % 2 == 0, x_ptr + i, y_ptr + i)
    tl.store(z_ptr + i, tl.load(pointers, mask=i < n, other=0.0))


@triton.jit
def by_descriptor(x_desc, y_ptr, n, ROWS: tl.constexpr, N: tl.constexpr):
    x = x_desc.load([tl.program_id(0) * ROWS, 0])
    at = tl.program_id(0) * ROWS * N + tl.arange(0, ROWS)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y_ptr + at, x, mask=at < n)


@triton.jit
def bytes_and_words(x_ptr, y_ptr, FIRST: tl.constexpr):
    """Program 0 stores a word, program 1 a byte of it or, from FIRST = 4 on, of another."""
    if tl.program_id(0) == 0:
        tl.store(y_ptr.to(tl.pointer_type(tl.int32)), 16909060)
    else:
        tl.store(y_ptr.to(tl.pointer_type(tl.int8)) + FIRST, tl.load(x_ptr))


@triton.jit
def softmax(x_ptr, y_ptr, N, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Honest if MASKED; else it loads to the end of its block, and puts right only what it computes."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    if MASKED:
        x = tl.load(x_ptr + row * N + i, mask=i < N, other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * N + i).to(tl.float32)
    x = tl.where(i < N, x, -float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * N + i, (e / tl.sum(e, axis=0)).to(y_ptr.dtype.element_ty), mask=i < N)
