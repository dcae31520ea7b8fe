"""Batch invariance: where it is promised, a row's bits may not depend on the rows beside it, nor on its place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.verify import Contract
from tests.zoo.attention import attention_rows
from tests.zoo.numerics import load
from tests.zoo.products import moe_by_expert
from tests.zoo.softmax import softmax_shifted

from .examined import failure_of, passes, quick

PROMISED = Contract(batch_invariant=True)


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Row sums, block of columns by block of columns, in an order that nothing but ``block`` decides."""
    total = torch.zeros(values.shape[0])
    for start in range(0, values.shape[1], block):
        part = torch.zeros(values.shape[0])
        for column in range(start, min(start + block, values.shape[1])):
            part = part + values[:, column]
        total = total + part
    return total


def rmsnorm_in_blocks(x: Tensor, weight: Tensor, block: Callable[[int], int]) -> Tensor:
    """An RMS norm whose blocks depend on the number of rows."""
    values = load(x)
    mean = in_blocks(values * values, block(x.shape[0])) / max(x.shape[1], 1)
    return (values * torch.rsqrt(mean + 1e-6)[:, None] * load(weight)).to(x.dtype)


def gemm_in_blocks(a: Tensor, b: Tensor, splits: Callable[[int], int]) -> Tensor:
    """A matrix product that is cut along K into so many parts."""
    products = load(a)[:, :, None] * load(b)[None]
    parts = splits(a.shape[0])
    width = max(1, -(-a.shape[1] // parts))
    total = torch.zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], width):
        part = torch.zeros_like(total)
        for k in range(start, min(start + width, a.shape[1])):
            part = part + products[:, k]
        total = total + part
    return total.to(a.dtype)


def softmax_of_sorted_rows(x: Tensor) -> Tensor:
    """Honest: rows are treated in another order, each by itself."""
    return torch.cat([softmax_shifted(row) for row in x.flip(0).split(1)] or [x]).flip(0) if len(x) else x.clone()


def rmsnorm_by_place(x: Tensor, weight: Tensor) -> Tensor:
    """Every other row is summed in another order."""
    even, odd = (rmsnorm_in_blocks(x, weight, lambda rows, size=size: size) for size in (4, 64))
    return torch.where((torch.arange(len(x)) % 2 == 0)[:, None], even, odd)


def rmsnorm_of_neighbours(x: Tensor, weight: Tensor) -> Tensor:
    """The largest element of the whole batch scales all rows, and is divided out again."""
    values = load(x)
    largest = values.abs().amax().clamp(min=1e-30) if x.numel() else torch.ones(())
    scale = torch.where(largest < 1e6, largest, 1.0) * 1.1  # beyond, quiet rows would vanish
    values = values / scale
    mean = values.square().mean(1, keepdim=True) * scale * scale
    return (values * scale * torch.rsqrt(mean + 1e-6) * load(weight)).to(x.dtype)


ORDINARY: dict[str, Any] = {"dtype": "float32", "shapes": {"N": [48, 79]}}  # enough terms for an order to show
VARIANT: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "order-by-batch": ("rmsnorm", lambda x, w: rmsnorm_in_blocks(x, w, lambda rows: 64 if rows > 8 else 4), ORDINARY),
    "order-by-parity": ("rmsnorm", lambda x, w: rmsnorm_in_blocks(x, w, lambda rows: 8 + rows % 2), ORDINARY),
    "place": ("rmsnorm", rmsnorm_by_place, ORDINARY),
    "split-k": (
        "gemm",
        lambda a, b: gemm_in_blocks(a, b, lambda rows: 1 if rows > 4 else 4),
        {"shapes": {"K": range(8, 65), "N": [1, 8]}},
    ),
    "neighbours": ("rmsnorm", rmsnorm_of_neighbours, {"dtype": "float32", "shapes": {"N": range(2, 80)}}),
}


@pytest.mark.parametrize(("op", "kernel", "settings"), VARIANT.values(), ids=VARIANT)
def test_a_row_that_depends_on_its_batch_is_found(
    op: str, kernel: Callable[..., Any], settings: dict[str, Any]
) -> None:
    """Reduction orders picked by the number of rows or the row's place, and scales of the whole batch, are variant.

    Without the promise it is no fault: every order is as good as another.
    """
    failure = failure_of(quick(kernel, op, contract=PROMISED, **settings))
    assert failure.kind == "batch_variant"
    assert "alone gives other bits" in failure.message
    passes(quick(kernel, op, **settings))


INVARIANT: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "fixed-order": ("rmsnorm", lambda x, w: rmsnorm_in_blocks(x, w, lambda rows: 16), ORDINARY),
    "fixed-split": (
        "gemm",
        lambda a, b: gemm_in_blocks(a, b, lambda rows: 3),
        {"dtype": "bfloat16", "shapes": {"K": range(1, 65)}},
    ),
    "row-by-row": ("softmax", softmax_of_sorted_rows, {"dtype": "float32"}),
}


@pytest.mark.parametrize(("op", "kernel", "settings"), INVARIANT.values(), ids=INVARIANT)
def test_an_invariant_kernel_keeps_its_promise(op: str, kernel: Callable[..., Any], settings: dict[str, Any]) -> None:
    passes(quick(kernel, op, contract=PROMISED, examples=5, **settings))


def test_the_batch_of_attention_and_of_experts_is_a_batch_too() -> None:
    """Rows of other ops are sequences and tokens: a kernel that looks at their number is found there as well."""

    def attention_by_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = attention_rows(q, k, v)
        return torch.nextafter(out, torch.zeros_like(out)) if len(q) > 1 else out

    def experts_by_batch(x: Tensor, *others: Tensor) -> Tensor:
        out = moe_by_expert(x, *others)
        return torch.nextafter(out, torch.zeros_like(out)) if len(x) > 1 else out

    small = {"B": [1, 3], "Hkv": [1], "H": [2], "Sq": [5], "Sk": [7], "D": [8], "Dv": [8]}
    few = {"T": [1, 7], "E": [2], "D": [4], "F": [4]}
    for kernel, op, shapes in ((attention_by_batch, "attention", small), (experts_by_batch, "moe", few)):
        failure = failure_of(quick(kernel, op, contract=PROMISED, shapes=shapes))
        assert failure.kind in ("batch_variant", "contract")
