"""The gradients of the Triton selective scan, against autograd in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.triton.selective_scan import selective_scan, selective_scan_backward

pytestmark = pytest.mark.usefixtures("interpreted")


def drawn(batch: int, channels: int, width: int, places: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The scan's tensors and dy, a and skip in float32."""
    draw = torch.Generator().manual_seed(places)
    along, across = (batch, channels, places), (batch, width, places)
    u, b, c, dy = (torch.randn(shape, generator=draw).to(dtype) for shape in (along, across, across, along))
    delta, rates = torch.rand(along, generator=draw).to(dtype), torch.rand(channels, width, generator=draw)
    return [u, delta, -3.0 * rates, b, c, torch.randn(channels, generator=draw), dy]


def scanned(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, *, softplus: bool) -> Tensor:
    """Place by place, as the recurrence is written."""
    step = F.softplus(delta) if softplus else delta
    state, seen = u.new_zeros((u.shape[0], *a.shape)), []
    for t in range(u.shape[2]):
        state = torch.exp(step[:, :, t, None] * a) * state + (step * u)[:, :, t, None] * b[:, None, :, t]
        seen.append((state * c[:, None, :, t]).sum(-1) + skip * u[:, :, t])
    return torch.stack(seen, -1)


def assert_right(tensors: list[Tensor], softplus: bool) -> None:
    """By autograd and called itself: within one rounding to 16 bits of the largest element, or in float32 within eight
    units of roundoff, 2^-24, times the root of the number of places, as roundings of sums over places add up."""
    *given, dy = tensors
    leaves = [x.detach().double().requires_grad_() for x in given]
    right = torch.autograd.grad(scanned(*leaves, softplus=softplus), leaves, dy.double())
    leaves = [x.detach().requires_grad_() for x in given]
    found = torch.autograd.grad(selective_scan(*leaves, softplus=softplus), leaves, dy)
    direct = selective_scan_backward(*given, dy, softplus=softplus)
    for own, other, expected, leaf in zip(found, direct, right, given, strict=True):
        assert own.dtype == leaf.dtype
        assert torch.equal(own, other)
        loose = max(2.0**-21 * math.sqrt(dy.shape[2]), torch.finfo(leaf.dtype).eps)
        loose *= max(float(expected.abs().max()), torch.finfo(torch.float32).tiny)
        torch.testing.assert_close(own.double(), expected, rtol=0.0, atol=loose)


@pytest.mark.parametrize("places", [1, 3, 15, 16, 17, 32, 33, 257, 259])
def test_sequences_of_any_length(places: int) -> None:
    """Shorter than a block of places, at its end and around it, and of many blocks; with softplus and without: of many
    blocks, for which an interpreter takes seconds, one sequence and one of the two."""
    many = places > 100
    for softplus in (places == 257,) if many else (False, True):
        assert_right(drawn(1 if many else 2, 3, 4, places), softplus)


@pytest.mark.parametrize(("channels", "width"), [(1, 1), (5, 3), (16, 16), (17, 5), (33, 20)])
def test_widths_that_are_no_power_of_two(channels: int, width: int) -> None:
    """However many channels and states: one tile of channels, and several."""
    assert_right(drawn(2, channels, width, 19), softplus=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_in_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """Sums over channels, places and sequences are in float32, and each gradient has its tensor's dtype."""
    assert_right(drawn(3, 18, 4, 35, dtype), softplus=True)


def test_every_tensor_may_have_a_dtype_of_its_own() -> None:
    """Each of u, delta, b and c decides alone; autograd hands dy over in u's."""
    u, delta, a, b, c, skip, dy = drawn(2, 3, 4, 18)
    assert_right([u.bfloat16(), delta.half(), a, b, c.half(), skip, dy.bfloat16()], softplus=False)
    assert_right([u, delta.bfloat16(), a, b.half(), c, skip, dy], softplus=True)


def test_any_strides() -> None:
    """Transposed, stepped and offset inputs, and such a gradient of the result, are read where they lie."""
    tensors = drawn(2, 17, 3, 18)
    turned = [x.mT.contiguous().mT if x.dim() > 1 else x for x in tensors]
    stepped = [torch.stack([torch.full_like(x, math.nan), x], -1)[..., 1] for x in tensors]
    right = selective_scan_backward(*tensors)
    for strided in (turned, stepped):
        for own, expected in zip(selective_scan_backward(*strided), right, strict=True):
            assert torch.equal(own, expected)


@pytest.mark.parametrize("place", range(4))
def test_nothing_to_scan(place: int) -> None:
    """Without sequences, channels, states or places, gradients are zero where there are any, but skip's."""
    sizes = [2, 3, 4, 5]
    sizes[place] = 0
    tensors = drawn(*sizes)
    found = selective_scan_backward(*tensors)
    assert [x.shape for x in found] == [x.shape for x in tensors[:6]]
    assert not any(x.any() for x in found[2:5])
    u, skip, dy = tensors[0], tensors[5], tensors[6]
    assert torch.equal(found[0], skip[:, None] * dy)
    torch.testing.assert_close(found[5], (u * dy).sum((0, 2)))


@pytest.mark.parametrize("places", [1, 3])
def test_rates_that_grow_do_not_meet_what_is_outside(places: int) -> None:
    """A decay that overflows before the beginning or behind the end, where softplus of zero would be a step too, meets
    nothing: gradients are finite and right."""
    tensors = drawn(1, 2, 2, places)
    tensors[1].fill_(-200.0)  # whose softplus is nearly zero
    tensors[1][..., 0] = 2.0
    tensors[2].fill_(130.0)
    assert_right(tensors, softplus=True)


def test_a_sequence_has_the_same_bits_alone() -> None:
    """What lies beside it in the batch changes none of its gradients but those of a and skip, which are sums."""
    tensors = drawn(3, 5, 4, 33)
    found = selective_scan_backward(*tensors)
    alone = selective_scan_backward(*(x[1:2] if x.dim() == 3 else x for x in tensors))
    for place in (0, 1, 3, 4):
        assert torch.equal(found[place][1:2], alone[place])
