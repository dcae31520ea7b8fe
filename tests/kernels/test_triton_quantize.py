"""The Triton quantisers against torch, bit for bit: both divide and round as IEEE 754 does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import quantize as module
from assay.kernels.triton.quantize import quantize_fp8, quantize_int4, quantize_int8
from assay.kernels.triton.rows import CONFIGS

pytestmark = pytest.mark.usefixtures("interpreted")

SHAPES = [(300, 33), (3, 5000), (2, 20001)]
LARGEST = {quantize_fp8: 448.0, quantize_int8: 127.0, quantize_int4: 7.0}


@dataclass(frozen=True)
class Quantizer:
    """A kernel with options, and the columns of a group: None for a row, 0 for the tensor."""

    kernel: Callable[..., tuple[Tensor, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    group: int | None = None

    def __str__(self) -> str:
        return " ".join([self.kernel.__name__, *map(str, self.options.values())])

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.kernel(x, **self.options)

    def expected(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.float()
        if self.group == 0:
            codes, scale, _ = self.of_group(x.reshape(1, -1))
            return codes.reshape(x.shape), scale.reshape(())
        groups = [self.of_group(group) for group in x.split(self.group or max(x.shape[1], 1), dim=1)]
        joined = tuple(torch.cat(results, dim=1) for results in zip(*groups, strict=True))
        return joined if self.kernel is quantize_int4 else joined[:2]

    def of_group(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scales and zero-points of rows that are one group each."""
        low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
        shifted = self.kernel is quantize_int4 and not self.options["symmetric"]
        scale = (high - low) / 15 if shifted else torch.maximum(high, -low) / LARGEST[self.kernel]
        scale[scale == 0] = 1
        if self.kernel is quantize_fp8:
            return (x / scale).to(torch.float8_e4m3fn), scale, scale
        codes = (x / scale).round()
        if self.kernel is quantize_int8:
            return codes.to(torch.int8), scale, scale
        zero = (-low / scale).round() if shifted else torch.full_like(scale, 8)
        return (codes + zero).clamp(0, 15).byte(), scale, zero.byte()

    def assert_right(self, x: Tensor) -> None:
        for result, expected in zip(self.run(x), self.expected(x), strict=True):
            assert result.dtype == expected.dtype
            assert result.shape == expected.shape
            assert torch.equal(result.float(), expected.float())


KERNELS = [
    *(Quantizer(quantize_fp8, {"granularity": name}, group) for name, group in (("row", None), ("group128", 128))),
    *(Quantizer(kernel, {"granularity": "tensor"}, 0) for kernel in (quantize_fp8, quantize_int8)),
    Quantizer(quantize_int8, {"granularity": "row"}),
    *(Quantizer(quantize_int4, {"symmetric": symmetric}, 128) for symmetric in (False, True)),
    Quantizer(quantize_int4, {"symmetric": False, "group": 2500}, 2500),
]
EVERY = pytest.mark.parametrize("kernel", KERNELS, ids=str)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@EVERY
def test_every_configuration(kernel: Quantizer, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For groups in one block and in several."""
    for autotuner in (module._quantize_kernel, module._amax_kernel):
        monkeypatch.setattr(autotuner, "configs", [config])
    for shape in SHAPES:
        kernel.assert_right(3 * torch.randn(shape))


@EVERY
def test_any_strides(kernel: Quantizer) -> None:
    """Transposed, sliced with a step, and expanded."""
    x = torch.randn(70, 290)
    for view in (x.t(), x[3:, ::2], x[:1].expand(40, 290), x[:, 1:2].expand(70, 9)):
        for dtype in (torch.float32, torch.bfloat16):
            kernel.assert_right(view.to(dtype))
        kernel.assert_right(view)


@EVERY
def test_groups_of_zeros_have_scale_one(kernel: Quantizer) -> None:
    """Alone and among other groups; so has an empty matrix. Groups of one sign include zero in their range."""
    x = torch.randn(5, 300)
    x[1] = 0
    x[2] = x[2].abs()
    x[3] = -x[3].abs()
    for view in (x, x[1:2], x[2:3], x[3:4], torch.full((2, 3), -0.0), 1e-45 * torch.ones(2, 300)):
        kernel.assert_right(view)
    codes, scale, *_ = kernel.run(torch.empty(3, 0))
    assert codes.shape == (3, 0)
    assert torch.equal(scale, torch.ones_like(scale))
    assert kernel.run(torch.empty(0, 5))[0].shape == (0, 5)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.group != 0], ids=str)
def test_a_row_is_the_same_in_any_batch(kernel: Quantizer) -> None:
    x = torch.randn(7, 5003)
    batch = kernel.run(x)
    for rows in (slice(2, 3), slice(2, 7)):
        assert all(
            torch.equal(result.float(), expected[rows].float())
            for result, expected in zip(kernel.run(x[rows]), batch, strict=True)
        )


def test_fp8_keeps_nan() -> None:
    """Scale and other codes of the row are as if it were zero."""
    x = torch.randn(4, 300)
    x[1, 7] = 0
    codes, scale = quantize_fp8(x)
    x[1, 7] = torch.nan
    codes_of_nan, scale_of_nan = quantize_fp8(x)
    assert torch.equal(scale_of_nan, scale)
    assert bool(codes_of_nan.float()[1, 7].isnan())
    codes, codes_of_nan = codes.float(), codes_of_nan.float()
    codes[1, 7] = codes_of_nan[1, 7] = 0
    assert torch.equal(codes_of_nan, codes)


def test_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 125.5]])
    assert quantize_int8(x)[0].tolist() == [[127, 0, 2, -2, 126]]
