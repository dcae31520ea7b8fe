"""Layouts: the same values wherever they lie in memory, and no write beside or into an input goes unseen."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.interpreter import SanitizerError, sanitized
from assay.verify.cases.case import Case, build, contents
from assay.verify.cases.layouts import LAYOUTS, Guarded, tied_axes, with_layout
from tests.interpreter import faulty_kernels as kernels
from tests.zoo.conduct import softmax_offsets_of_32_bits, softmax_strides_ignored

from .examined import quick

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip
SHAPES = ((), (1,), (7,), (0,), (3, 5), (1, 5), (5, 1), (0, 4), (4, 0), (2, 3, 4), (2, 1, 3, 4))


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor whose elements are 1, 2, ... as far as the dtype tells them apart."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) % 100 + 1).reshape(shape).to(dtype)


NEAR = tuple(layout for layout in LAYOUTS if layout != "far")


def tied(values: Tensor, layout: str) -> Tensor:
    """Values that are equal along the axes that the layout makes one."""
    for axis in tied_axes(layout, values.shape):
        values = values.narrow(axis, 0, 1).expand(values.shape)
    return values


def overwrite(placed: Guarded, place_in_buffer: int) -> str | None:
    """What damage is found after one element of the buffer got another value."""
    line = placed.buffer if placed.buffer.dim() == 1 else placed.buffer[0]
    line.view(torch.uint8)[place_in_buffer * placed.buffer.element_size()] ^= 0x41
    return placed.damage()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_the_values(layout: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        values = tied(numbered(shape, dtype), layout)
        placed = with_layout(values, layout, "cpu")
        assert placed.tensor.shape == values.shape
        assert placed.tensor.dtype == dtype
        assert torch.equal(placed.tensor.double(), values.double()), shape
        assert placed.damage() is None


STRIDES = {
    "contiguous": ((12, 4, 1), 0),
    "transposed": ((12, 1, 3), 0),
    "sliced": ((21, 7, 1), 0),
    "offset": ((12, 4, 1), 1),
    "strided": ((24, 8, 2), 0),
    "expanded": ((0, 4, 1), 0),
}


@pytest.mark.parametrize("layout", STRIDES)
def test_a_layout_has_the_strides_that_it_promises(layout: str) -> None:
    """Of a [2,3,4]: axes swapped, rows padded, an odd first element, every second element, one row for all."""
    tensor, plain = (
        with_layout(tied(numbered((2, 3, 4)), name), name, "cpu").tensor for name in (layout, "contiguous")
    )
    assert (tensor.stride(), tensor.storage_offset() - plain.storage_offset()) == STRIDES[layout]
    assert tensor.is_contiguous() == (layout in ("contiguous", "offset"))


def test_a_far_tensor_lies_beyond_32_bits() -> None:
    """Row number and stride fit into 32 bits, their product from the third row on doesn't; a wrapped offset is read.

    What was written beside a row or into one is told apart, and the memory used is that of the rows.
    """
    placed = with_layout(numbered((2, 3, 4)), "far", "cpu")
    tensor = placed.tensor
    assert tensor.stride() == (4, 2**30 + 4096, 1)
    assert 2 * tensor.stride(1) > 2**31 > tensor.stride(1)
    wrapped = 2 * tensor.stride(1) - 2**32 + tensor.storage_offset()
    assert tensor.as_strided((1,), (1,), wrapped).item() == 0
    assert placed.damage() is None
    assert overwrite(placed, 0) == overwrite(placed, -1) == "out_of_bounds_write"
    again = with_layout(numbered((2, 3, 4)), "far", "cpu")
    again.tensor[1, 2, 3] = -1
    assert again.damage() == "input_mutated"


@pytest.mark.parametrize("shape", [(7,), (), (2, 5), (3, 0), (300, 4)])
def test_what_cannot_lie_far_is_contiguous(shape: tuple[int, ...]) -> None:
    """A vector, too few rows to reach beyond 32 bits, no elements, and more rows than address space is taken for."""
    assert with_layout(numbered(shape), "far", "cpu").tensor.is_contiguous()


def test_an_expanded_tensor_has_one_row_for_all() -> None:
    """The first axis longer than one, never the last, has stride 0; a case's values are drawn to match."""
    assert with_layout(numbered((1, 4, 5)), "expanded", "cpu").tensor.stride()[1] == 0
    assert tied_axes("expanded", (5,)) == tied_axes("expanded", (1, 5)) == tied_axes("expanded", ()) == ()
    assert tied_axes("sliced", (4, 5)) == ()
    case = Case("softmax", {"R": 4, "N": 5}, {"x": "float32"}, layouts={"x": "expanded"})
    tensor = build(case).guarded["x"].tensor
    assert tensor.stride() == (0, 1)
    assert torch.equal(tensor, contents(case, case.signature.tensors[0]))
    assert len(tensor[0].unique()) == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", NEAR)
def test_a_write_beside_the_elements_and_a_changed_one_are_found(layout: str, dtype: torch.dtype) -> None:
    """Just before the first, just after the last, and at both ends of the buffer; the first and the last themselves."""
    for shape in ((3, 5), (7,), (), (0, 4)):
        values = tied(numbered(shape, dtype), layout)
        tensor = with_layout(values, layout, "cpu").tensor
        first, steps = tensor.storage_offset(), zip(shape, tensor.stride(), strict=True)
        last = first + sum((n - 1) * s for n, s in steps) if values.numel() else first - 1
        beside, elements = (0, first - 1, last + 1, -1), (first, last) if values.numel() else ()
        for where in (*beside, *elements):
            placed = with_layout(values, layout, "cpu")
            kind = "input_mutated" if where in elements else "out_of_bounds_write"
            assert overwrite(placed, where % placed.buffer.numel()) == kind, (shape, where)


@pytest.mark.parametrize(("layout", "gap"), [("sliced", 5), ("sliced", 7), ("strided", 1), ("strided", 9)])
def test_a_write_into_a_gap_is_found(layout: str, gap: int) -> None:
    placed = with_layout(numbered((3, 5)), layout, "cpu")
    assert overwrite(placed, placed.tensor.storage_offset() + gap) == "out_of_bounds_write"


def test_a_stray_write_outweighs_a_mutation_and_bytes_are_compared() -> None:
    placed = with_layout(numbered((3, 5)), "contiguous", "cpu")
    placed.tensor.copy_(placed.tensor.clone())
    assert placed.damage() is None
    placed.tensor[0, 0] = 9
    assert overwrite(placed, 0) == "out_of_bounds_write"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_refilling_keeps_the_memory(layout: str) -> None:
    """Other values in the same place: same address and strides, no damage, and a later mutation is still found."""
    placed = with_layout(tied(numbered((3, 5)), layout), layout, "cpu")
    values = tied(numbered((3, 5)) * 2, layout)
    other = placed.refill(values)
    assert other.tensor.data_ptr() == placed.tensor.data_ptr()
    assert other.tensor.stride() == placed.tensor.stride()
    assert torch.equal(other.tensor, values)
    assert other.damage() is None
    other.tensor[0, 0] += 1
    assert other.damage() == "input_mutated"


@pytest.mark.parametrize(
    ("op", "sizes", "dtypes"),
    [
        ("softmax", {"R": 3, "N": 5}, {"x": "bfloat16"}),
        ("gemm_int8", {"M": 2, "K": 3, "N": 4}, {"a": "int8", "b": "int8", "scale_a": "float32", "scale_b": "float32"}),
        (
            "gemm_fp8",
            {"M": 2, "K": 3, "N": 4},
            {"a": "float8_e4m3fn", "b": "float8_e5m2", "scale_a": "float32", "scale_b": "float32"},
        ),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_case_names_the_input_that_was_damaged(op: str, sizes: Any, dtypes: dict[str, str], layout: str) -> None:
    case = Case(op, sizes, dtypes, layouts=dict.fromkeys(dtypes, layout))
    assert build(case).damage() is None
    for name in dtypes:
        inputs = build(case)
        overwrite(inputs.guarded[name], 1)
        assert inputs.damage() == (name, "out_of_bounds_write")


WORDS = "an offset that wraps around in 32 bits"


def message(kernel: Any) -> str:
    """What is said of the layouts that a softmax fails in."""
    shapes = {"R": [3, 4], "N": [8]}
    verdict = quick(kernel, shapes=shapes, layouts=("sliced", "far"), shrinking=True)
    failure = verdict.aspects["layouts"].failure
    return failure.message


def test_a_wrapped_offset_is_called_so() -> None:
    assert WORDS in message(softmax_offsets_of_32_bits)
    assert WORDS not in message(softmax_strides_ignored)


def test_the_sanitizer_says_which_element_was_meant() -> None:
    """Of a Triton kernel whose row offsets are of 32 bits; with 64 it loads what it should."""
    pytest.importorskip("triton")
    x, y = with_layout(torch.arange(24.0).reshape(3, 8), "far", "cpu").tensor, torch.empty(3, 8)

    def run(wide: bool, x: Tensor = x) -> None:
        with sanitized([x, y]):
            kernels.rows_apart[(3,)](x, y, x.stride(0), N=8, WIDE=wide)

    run(wide=True)
    assert torch.equal(y, x)
    meant = 2 * x.stride(0)
    with pytest.raises(SanitizerError, match=f"element {meant} was meant, whose offset has wrapped around in 32 bits"):
        run(wide=False)
    with pytest.raises(SanitizerError) as near:
        run(wide=False, x=torch.zeros(2, 8))
    assert "wrapped" not in str(near.value)
