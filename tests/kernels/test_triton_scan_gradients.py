"""The gradients of the Triton selective scan, against autograd in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.triton.selective_scan import selective_scan, selective_scan_backward

pytestmark = pytest.mark.usefixtures("interpreted")


def drawn(batch: int, channels: int, width: int, steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(steps)
    along, across = (batch, channels, steps), (batch, width, steps)
    u, b, c, dy = (torch.randn(shape, generator=draw).to(dtype) for shape in (along, across, across, along))
    delta, rates = torch.rand(along, generator=draw).to(dtype), torch.rand(channels, width, generator=draw)
    return [u, delta, -3.0 * rates, b, c, torch.randn(channels, generator=draw), dy]


def scanned(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, *, softplus: bool) -> Tensor:
    dt = F.softplus(delta) if softplus else delta
    state, y = u.new_zeros((u.shape[0], *a.shape)), []
    for t in range(u.shape[2]):
        state = torch.exp(dt[:, :, t, None] * a) * state + (dt * u)[:, :, t, None] * b[:, None, :, t]
        y.append((state * c[:, None, :, t]).sum(-1) + skip * u[:, :, t])
    return torch.stack(y, -1)


def assert_right(tensors: list[Tensor], softplus: bool) -> None:
    """By autograd and called itself: within one rounding to 16 bits of the largest element, or in float32 within eight
    units of roundoff, 2^-24, times the root of the number of steps, as roundings of sums over steps add up."""
    *inputs, dy = tensors
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    right = torch.autograd.grad(scanned(*leaves, softplus=softplus), leaves, dy.double())
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(selective_scan(*leaves, softplus=softplus), leaves, dy)
    direct = selective_scan_backward(*inputs, dy, softplus=softplus)
    for gradient, other, expected, leaf in zip(gradients, direct, right, inputs, strict=True):
        assert gradient.dtype == leaf.dtype
        assert torch.equal(gradient, other)
        atol = max(2.0**-21 * math.sqrt(dy.shape[2]), torch.finfo(leaf.dtype).eps)
        atol *= max(float(expected.abs().max()), torch.finfo(torch.float32).tiny)
        torch.testing.assert_close(gradient.double(), expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize("steps", [1, 3, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("softplus", [False, True])
def test_sequences_of_any_length(steps: int, softplus: bool) -> None:
    """Shorter than a chunk, one or two whole chunks, and one step more."""
    assert_right(drawn(2, 3, 4, steps), softplus)


@pytest.mark.parametrize(("steps", "softplus"), [(129, True), (131, False)])
def test_sequences_of_many_chunks(steps: int, softplus: bool) -> None:
    assert_right(drawn(1, 3, 4, steps), softplus)


@pytest.mark.parametrize(("channels", "width"), [(1, 1), (5, 3), (16, 16), (17, 5), (33, 20)])
def test_widths_that_are_no_power_of_two(channels: int, width: int) -> None:
    assert_right(drawn(2, channels, width, 19), softplus=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_in_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    assert_right(drawn(3, 18, 4, 35, dtype), softplus=True)


def test_every_tensor_may_have_a_dtype_of_its_own() -> None:
    """Autograd passes dy in u's."""
    u, delta, a, b, c, skip, dy = drawn(2, 3, 4, 18)
    assert_right([u.bfloat16(), delta.half(), a, b, c.half(), skip, dy.bfloat16()], softplus=False)
    assert_right([u, delta.bfloat16(), a, b.half(), c, skip, dy], softplus=True)


def test_any_strides() -> None:
    tensors = drawn(2, 17, 3, 18)
    transposed = [x.mT.contiguous().mT if x.dim() > 1 else x for x in tensors]
    stepped = [torch.stack([torch.full_like(x, math.nan), x], -1)[..., 1] for x in tensors]
    right = selective_scan_backward(*tensors)
    for strided in (transposed, stepped):
        assert all(map(torch.equal, selective_scan_backward(*strided), right))


@pytest.mark.parametrize("dimension", range(4))
def test_nothing_to_scan(dimension: int) -> None:
    """Without sequences, channels, states or steps only the gradients of u and skip can be other than zero."""
    tensors = drawn(*(0 if i == dimension else size for i, size in enumerate((2, 3, 4, 5))))
    gradients = selective_scan_backward(*tensors)
    assert [x.shape for x in gradients] == [x.shape for x in tensors[:6]]
    assert not any(x.any() for x in gradients[2:5])
    u, skip, dy = tensors[0], tensors[5], tensors[6]
    assert torch.equal(gradients[0], skip[:, None] * dy)
    torch.testing.assert_close(gradients[5], (u * dy).sum((0, 2)))


@pytest.mark.parametrize("steps", [1, 3])
def test_decays_that_overflow_outside_of_the_sequence(steps: int) -> None:
    """Before the first step or after the last, where softplus(0) would be a step too, they multiply no state."""
    tensors = drawn(1, 2, 2, steps)
    tensors[1].fill_(-200.0)  # whose softplus is nearly zero
    tensors[1][..., 0] = 2.0
    tensors[2].fill_(130.0)
    assert_right(tensors, softplus=True)


def test_a_sequence_has_the_same_bits_alone() -> None:
    """Those of a and skip are sums over the batch."""
    tensors = drawn(3, 5, 4, 33)
    batch = selective_scan_backward(*tensors)
    alone = selective_scan_backward(*(x[1:2] if x.dim() == 3 else x for x in tensors))
    assert all(torch.equal(batch[i][1:2], alone[i]) for i in (0, 1, 3, 4))
