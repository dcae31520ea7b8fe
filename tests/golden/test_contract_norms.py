"""The default contract's radius holds honest float32 kernels of the norms' family, of gates, sums and embeddings."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.golden import honest_norms
from tests.golden.allowance import Call, Kernels, by_thirds, report, rows, used_along_rows

SOME = ("normal", "wide", "descending", "large mean", "cancelling", "lognormal", "subnormal", "huge", "zeros")


def added(kind: str, n: int) -> Iterator[Call]:
    yield (rows(kind, 3, n), rows("normal", 3, n, seed=1), rows("normal", 1, n)[0], rows(kind, 1, n, seed=1)[0]), {}


def grouped(kind: str, n: int) -> Iterator[Call]:
    for groups in (1, 2):
        x = rows(kind, 8, n).reshape(2, 4, n)
        yield (x, rows("normal", 1, 4)[0], rows("normal", 1, 4, seed=1)[0]), {"groups": groups}


def clamped(kind: str, n: int) -> Iterator[Call]:
    for clamp in ("sum", "maximum"):
        yield (rows(kind, 3, n),), {"clamp": clamp}


def gated(kind: str, n: int) -> Iterator[Call]:
    gate = rows("wide", 3, n, seed=1)
    yield (rows(kind, 3, n), rows("normal", 1, n)[0], gate), {"activation": "silu", "gate_first": n % 2 == 0}
    yield (gate, rows("normal", 1, n)[0], rows(kind, 3, n)), {"activation": "sigmoid", "gate_first": n % 2 == 1}


def squashed(kind: str, n: int) -> Iterator[Call]:
    for alpha in (0.5, 3.1):
        affine = rows("normal", 1, n)[0], rows(kind, 1, n, seed=1)[0]
        yield (rows(kind, 3, n), torch.tensor([alpha]), *affine), {}


def opened(kind: str, n: int) -> Iterator[Call]:
    for approximate in ("none", "tanh"):
        yield (rows(kind, 3, n), rows("lognormal", 3, n)), {"approximate": approximate}


def halves(kind: str, n: int) -> Iterator[Call]:
    yield (rows(kind, 3, 2 * n),), {"approximate": "tanh"}


def one(kind: str, n: int) -> Iterator[Call]:
    yield (rows(kind, 3, n),), {}


def running(kind: str, n: int) -> Iterator[Call]:
    for reverse, exclusive in ((False, False), (True, False), (False, True)):
        yield (rows(kind, 3, n),), {"reverse": reverse, "exclusive": exclusive}


def looked_up(kind: str, n: int) -> Iterator[Call]:
    yield (torch.zeros(3, n), torch.tensor([2, 0, 2, 2, 0, 2]), rows(kind, 6, n)), {}


def turned(kind: str, n: int) -> Iterator[Call]:
    angles = rows("normal", 1, n)
    for interleaved in (False, True):
        gradient = rows(kind, 3, 2 * n).reshape(1, 1, 3, 2 * n)
        yield (angles.cos(), angles.sin(), gradient), {"interleaved": interleaved}


OPS: dict[str, tuple[Kernels, Callable[[str, int], Iterator[Call]]]] = {
    "add_layernorm": (honest_norms.add_layernorms, added),
    "group_norm": (honest_norms.group_norms, grouped),
    "l2norm": (honest_norms.l2norms, clamped),
    "gated_rmsnorm": (honest_norms.gated_rmsnorms, gated),
    "dynamic_tanh": (honest_norms.dynamic_tanhs, squashed),
    "geglu": (honest_norms.geglus, opened),
    "gelu_and_mul": (honest_norms.gelu_and_muls, halves),
    "logsigmoid": (honest_norms.logsigmoids, one),
    "cumsum": (honest_norms.cumsums, running),
    "embedding_backward": (honest_norms.embedding_backwards, looked_up),
    "rope_backward": (honest_norms.rope_backwards, turned),
}


@by_thirds
@pytest.mark.parametrize("op", OPS)
def test_honest_kernels_keep_the_contract(op: str, third: slice, record_property: Any) -> None:
    """Any order of summation, any formula in use, functions as bad as allowed: within the radius."""
    kernels, calls = OPS[op]
    report(op, used_along_rows(op, kernels, calls, SOME[third]), record_property)
