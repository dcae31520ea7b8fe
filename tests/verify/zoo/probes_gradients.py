"""Inputs on which the faults of functions, losses and gradients show."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.reference.rows import FUNCTIONS

Make = Callable[..., Tensor]


def of_function(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """Numbers of every size, and the special ones."""
    for scale in (1.0, 3.0, 40.0, 1e-3, 1e-38, 1e4):
        yield (make(9, 300, scale=scale),)
    yield (make(3, 0),)
    special = make(2, 5)
    special[0] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -1.0])
    yield (special,)


def of_softmax(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """Rows of weights, and gradients of them."""
    for shape in ((5, 300), (1, 7), (17, 65), (0, 4)):
        yield torch.softmax(make(*shape).float(), 1).to(make(1).dtype), make(*shape)
    yield make(3, 130), make(3, 130, scale=30.0) + 100


def of_norm(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """x[R,N], weight[N], dy[R,N]; the third has a large mean, the last tiny numbers."""
    for (rows, columns), scale, mean in (((37, 77), 1.0, 0.0), ((6, 300), 1.0, 0.0), ((5, 40), 1.0, 300.0)):
        yield make(rows, columns, scale=scale) + mean, make(columns), make(rows, columns)
    yield make(4, 9, scale=1e-3), make(9), make(4, 9)


def of_swiglu(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """gate, up and dy."""
    for shape, scale in (((5, 77), 3.0), ((2, 300), 1.0), ((0, 3), 1.0)):
        yield make(*shape, scale=scale), make(*shape), make(*shape)
    for value in (math.inf, -math.inf, math.nan):
        gate = make(3, 9)
        gate[1, 2] = value
        yield gate, make(3, 9), make(3, 9)


def labelled(make: Make, options: dict[str, Any]) -> Iterator[tuple[Tensor, ...]]:
    """Logits and labels, some of them none; the third has no label at all, the last NaN where nothing is read."""
    none = options.get("ignore_index", -100)
    for tokens, classes, share in ((9, 130, 0.3), (5, 7, 0.0), (4, 6, 1.0), (17, 33, 0.5), (6, 40, 0.5)):
        target = torch.randint(0, classes, (tokens,))
        target[torch.rand(tokens) < share] = none
        logits = make(tokens, classes, scale=4.0)
        if (tokens, classes) == (17, 33):
            logits = logits + 100
        if (tokens, classes) == (6, 40):
            target[2] = none
            logits[2, 3] = math.nan
        yield logits, target


def of_attention(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """q, k, v and dout; the second has queries that see nothing."""
    for b, h, groups, queries, keys, d, dv in (
        (2, 4, 2, 9, 70, 16, 8), (1, 2, 1, 20, 9, 8, 5), (1, 6, 2, 5, 5, 8, 8), (1, 2, 2, 33, 33, 16, 16),
    ):  # fmt: skip
        q, k = make(b, h, queries, d, scale=1.5), make(b, groups, keys, d)
        yield q, k, make(b, groups, keys, dv), make(b, h, queries, dv)


def makers(make: Make, options: dict[str, Any]) -> dict[str, Callable[[], Iterator[tuple[Tensor, ...]]]]:
    """By spec."""
    return dict.fromkeys(FUNCTIONS, lambda: of_function(make)) | {
        "softmax_backward": lambda: of_softmax(make),
        "layernorm_backward": lambda: of_norm(make),
        "rmsnorm_backward": lambda: of_norm(make),
        "swiglu_backward": lambda: of_swiglu(make),
        "cross_entropy": lambda: labelled(make, options),
        "cross_entropy_backward": lambda: labelled(make, options),
        "attention_backward": lambda: of_attention(make),
    }
