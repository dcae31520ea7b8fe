"""Convolutions as products: every window of the input, a row, with the kernels, the rows of a weight [N, K].

K runs over the input's channels and the kernel's places, as a weight [N, C, ...] has them one after the other. Grouped
convolutions, depthwise ones among them, are products in groups: C is then the channels of one group.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from assay.precision.observation.operations import groups
from assay.precision.observation.tracer import Tracer

_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def convolution(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """torch.nn.functional.conv1d, conv2d and conv3d: input [B, G * C, ...] or [G * C, ...], weight [N, C, ...]."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    found = tracer.named(weight)
    if found is None:
        return func(*args, **kwargs)
    sides = weight.dim() - 2
    strides, dilations = (_each(given.get(name, 1), sides) for name in ("stride", "dilation"))
    whole = x if x.dim() == weight.dim() else x[None]
    padded = torch.nn.functional.pad(whole, _padding(given.get("padding", 0), weight.shape[2:], dilations))
    windows = _windows(padded, weight.shape[2:], strides, dilations)
    size = windows.shape[1:-1]
    out = tracer.product(
        weight.flatten(1),
        windows.flatten(1, -2),
        found,
        lambda a, w: groups.linear(a, w, bias),
        role="convolution",
    )
    out = torch.unflatten(out.mT, -1, size)
    return out if whole is x else out[0]


def transposed_convolution(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """torch.nn.functional.conv_transpose1d and 2d: input [B, G * C, ...], weight [G * C, N, ...]; every place of the
    input is a row, multiplied with the kernels, and the products are added where they overlap."""
    given = dict(zip(_TRANSPOSED, args, strict=False)) | kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    found = tracer.named(weight)
    sides = weight.dim() - 2
    if found is None or x.dim() != weight.dim() or sides > 2:
        return func(*args, **kwargs)
    kernel, length = (1, *weight.shape[2:])[-2:], (1, *x.shape[2:])[-2:]  # of one side: a picture of one row
    stride, padding, dilation, further = (
        (usual, *_each(given.get(name, usual), sides))[-2:]
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0))
    )
    size = tuple(
        (length[side] - 1) * stride[side] - 2 * padding[side] + dilation[side] * (kernel[side] - 1) + further[side] + 1
        for side in range(2)
    )
    kernels = weight.unflatten(0, (given.get("groups", 1), -1)).flatten(2).mT.flatten(0, 1)
    out = tracer.product(kernels, x.flatten(2).mT, found, groups.linear, role="convolution")
    folded = torch.nn.functional.fold(out.mT, size, kernel, dilation, padding, stride)
    folded = folded if sides == 2 else folded[:, :, 0]
    return folded if bias is None else folded + bias.reshape(-1, *[1] * sides)


def _each(value: Any, sides: int) -> tuple[int, ...]:
    """A number for each side of the kernel."""
    given = tuple(value) if isinstance(value, Sequence) else (value,)
    return given * sides if len(given) == 1 else given


def _padding(value: Any, kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Zeros before and after each side, the last side first, as `torch.nn.functional.pad` takes them."""
    if value == "valid":
        value = 0
    if value == "same":
        whole = [dilation * (length - 1) for length, dilation in zip(kernel, dilations, strict=True)]
        pairs = [(each // 2, each - each // 2) for each in whole]
    else:
        pairs = [(each, each) for each in _each(value, len(kernel))]
    return list(chain.from_iterable(reversed(pairs)))


def _windows(x: torch.Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> torch.Tensor:
    """Every window of x [B, C, ...] as a row: [B, ..., C * kernel]."""
    sides = len(kernel)
    for side in range(sides):
        reach = dilations[side] * (kernel[side] - 1) + 1
        x = x.unfold(2 + side, reach, strides[side])[..., :: dilations[side]]
    return x.permute(0, *range(2, 2 + sides), 1, *range(2 + sides, 2 + 2 * sides)).flatten(1 + sides)
