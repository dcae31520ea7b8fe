"""Matrix products that are written into a matrix which is there, or added to it."""

import pytest
import torch
from torch import Tensor

from assay.kernels.triton.gemm import _gemm_kernel, write_product
from assay.kernels.triton.gemm_described import _gemm_described_kernel, is_described
from assay.kernels.triton.linear_cross_entropy import linear_cross_entropy_backward

pytestmark = pytest.mark.usefixtures("interpreted")

LYING = pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)], ids=str)
SIZES = pytest.mark.parametrize(("m", "k", "n"), [(200, 72, 136), (40, 392, 136), (72, 40, 16), (72, 0, 40)], ids=str)
"""With whole and other blocks, with K in parts, with few columns, and with nothing to add."""


def lying(rows: int, columns: int, dtype: torch.dtype, turned: bool) -> Tensor:
    return torch.randn(columns, rows).to(dtype).t() if turned else torch.randn(rows, columns).to(dtype)


@SIZES
@LYING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_is_written_or_added(m: int, k: int, n: int, turned: tuple[bool, bool], dtype: torch.dtype) -> None:
    """Into a matrix of another dtype that lies in a wider one, whose other places stay."""
    a, b = lying(m, k, dtype, turned[0]), lying(k, n, dtype, turned[1])
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    whole = torch.full((m, n + 8), 7.0)
    c = whole[:, 3 : n + 3]
    c.copy_(torch.randn(m, n))
    before = c.clone()
    for add in (True, False):
        write_product(a, b, c, add=add)
        right = exact + before.double() if add else exact
        assert bool(((c.double() - right).abs() <= (k + 2) * 2**-23 * (size + before.abs())).all())
    assert bool((whole[:, :3] == 7.0).all() and (whole[:, n + 3 :] == 7.0).all())


def test_operands_of_16_bits_are_copied_by_descriptors_either_way_round() -> None:
    """Both may lie along the side that isn't summed over."""
    for turned in ((False, False), (True, False), (False, True), (True, True)):
        a, b = lying(80, 72, torch.bfloat16, turned[0]), lying(72, 64, torch.bfloat16, turned[1])
        assert is_described(a, b)
        assert not is_described(a.float(), b.float())


@pytest.mark.parametrize("kernel", [_gemm_kernel, _gemm_described_kernel], ids=lambda kernel: kernel.base_fn.__name__)
def test_a_tuner_that_times_an_added_product_leaves_the_sum(kernel: object) -> None:
    """What a timed launch added is taken back; a product that is only written is not copied for it."""
    c = torch.randn(4, 4)
    before = c.clone()
    for _ in range(2):
        kernel.pre_hook({"c_ptr": c, "ACCUMULATE": True})  # type: ignore[attr-defined]
        c += 1.0
        kernel.post_hook({"c_ptr": c, "ACCUMULATE": True}, exception=None)  # type: ignore[attr-defined]
        assert torch.equal(c, before)
    kernel.pre_hook({"c_ptr": c, "ACCUMULATE": True}, reset_only=True)  # type: ignore[attr-defined]
    kernel.pre_hook({"c_ptr": c, "ACCUMULATE": False})  # type: ignore[attr-defined]
    c += 1.0
    kernel.post_hook({"c_ptr": c, "ACCUMULATE": False}, exception=None)  # type: ignore[attr-defined]
    assert torch.equal(c, before + 1.0)


@pytest.mark.parametrize("tokens", [0, 1, 64, 130, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weights_gradient_is_the_sum_over_chunks(tokens: int, dtype: torch.dtype) -> None:
    """Of none, one and several chunks of tokens; that of one token after whole ones counts, too."""
    x, weight = torch.randn(tokens, 64).to(dtype), torch.randn(136, 64).to(dtype)
    target = torch.arange(tokens) % 136
    dx, dweight = linear_cross_entropy_backward(x, weight, target, reduction="sum")
    logits = (x.double() @ weight.double().t()).to(dtype).double()
    grown = (logits.softmax(-1) - torch.nn.functional.one_hot(target, 136)).to(dtype).double()
    tolerance = {"rtol": 2e-5, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(dweight.double(), grown.t() @ x.double(), **tolerance)
    torch.testing.assert_close(dx.double(), grown @ weight.double(), **tolerance)
