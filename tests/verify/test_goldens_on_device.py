"""Verdicts whose goldens and tolerances a device evaluates, by a stand-in for one (`tests.golden.second_device`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.configs import table
from assay.golden.evaluation.device import evaluating_on
from assay.verify.examination import procedure
from tests.golden.second_device import DEVICE, SecondDevice
from tests.golden.test_device import not_left

from .examined import fails, failure_of, first, passes

LAYOUTS = ["contiguous"]
ROWS: dict[str, Any] = {"shapes": {"R": [1, 3], "N": [5, 33]}, "layouts": LAYOUTS}
SIZES = {"M": [1, 3], "K": [4, 20], "N": [2]}
PRODUCT: dict[str, Any] = {"tensors": "a[M,K], b[K,N] -> c[M,N]", "shapes": SIZES, "layouts": LAYOUTS}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, SecondDevice]:
    """The stand-ins that examinations used, by the device that each was asked for."""
    used: dict[str, SecondDevice] = {}

    @contextmanager
    def evaluating(device: str) -> Iterator[None]:
        used[device] = SecondDevice(table("cuda_functions")["ulps"])
        with used[device], evaluating_on(DEVICE, 0):
            yield

    monkeypatch.setattr(procedure, "evaluating_on", evaluating)
    return used


def honest(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


def truncating(x: Tensor) -> Tensor:
    """Return the softmax with its last bits cut off."""
    bits = torch.softmax(x.float(), -1).view(torch.int32) & -(1 << 16)
    return bits.view(torch.float32).to(x.dtype)


def reference(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a @ b)


def narrow(a: Tensor, b: Tensor) -> Tensor:
    """Return the same of operands in bfloat16."""
    return torch.tanh(a.bfloat16().float() @ b.bfloat16().float())


def test_verdicts_are_those_of_the_cpu(devices: dict[str, SecondDevice]) -> None:
    with not_left():
        passes(first(honest, dtype="bfloat16", **ROWS))
    assert devices["cpu"].operations > 0
    failure = failure_of(fails(first(truncating, dtype="bfloat16", **ROWS)))
    assert failure.kind == "contract"


def test_verdicts_of_a_reference_are_those_of_the_cpu(devices: dict[str, SecondDevice]) -> None:
    with not_left():
        passes(first(reference, reference, **PRODUCT))
    assert {"matmul", "tanh"} <= devices["cpu"].names
    assert failure_of(fails(first(narrow, reference, **PRODUCT))).kind == "contract"
