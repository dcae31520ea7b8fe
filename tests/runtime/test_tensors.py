"""Tensors as bytes: what comes out is what went in, and reading it runs nothing."""

import pickle

import pytest
import torch

from assay.runtime.tensors import pack, same_bits, same_numbers, unpack

NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2"
)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in NAMES.split()])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3)])
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    bits = torch.arange(2 * size * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = bits.view(dtype).as_strided(shape, [2] * len(shape)) if size else torch.empty(shape, dtype=dtype)
    _, found = unpack(pack(["odd", tensor]))
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert pack(found) == pack(tensor)


def test_lists_and_plain_values_come_with_them() -> None:
    one = torch.ones(2, requires_grad=True) * 2
    found = unpack(pack({"a": [one, (None, 1.5, "text", True)], "tensor": []}))
    assert found.pop("a")[1] == [None, 1.5, "text", True]
    assert found == {"tensor": []}
    (tensor,) = unpack(pack([one]))
    assert (tensor.requires_grad, tensor.tolist()) == (False, [2.0, 2.0])
    tensor += 1  # it may be written to


def test_nothing_else_is_read_or_written() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        pack([object()])
    with pytest.raises((ValueError, UnicodeDecodeError)):
        unpack(pickle.dumps([1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool])
def test_bits_and_numbers_are_compared(dtype: torch.dtype) -> None:
    """Views, single numbers and empty tensors too; zeros of other signs differ, NaNs of other bits are one number."""
    tensor = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(dtype)
    for view in (tensor, tensor.T, tensor[1, 1], tensor[:0]):
        assert same_bits(view, view.clone())
        assert same_numbers(view, view.clone())
    other = tensor.clone()
    other[0, 1] = 0
    assert not same_bits(tensor, other)
    assert not same_numbers(tensor, other)
    assert not same_bits(tensor, tensor[:1])
    if dtype.is_floating_point:
        assert not same_bits(tensor, (tensor.float() * -1).to(dtype))
        assert not same_numbers(tensor[:1, :1], (tensor[:1, :1].float() * -1).to(dtype))
    if dtype == torch.float32:
        nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
        assert not same_bits(nans[:1], nans[1:])
        assert same_numbers(nans[:1], nans[1:])
