"""An op whose definition is a PyTorch function: what asks of ops knows it as any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from assay.golden import Golden, define, define_torch, evaluate, spec, specs
from assay.golden.registry import _REGISTRY
from assay.verify import examine, examine_backward


@pytest.fixture(autouse=True)
def _ops_go_again() -> Iterator[None]:
    specs()  # the built-in ones, which are read once
    known = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(known)


def gated(x: Any, gate: Any, bias: float = 0.0) -> Any:
    return x * torch.sigmoid(gate + bias)


def gated_backward(x: Any, gate: Any, dy: Any, bias: float = 0.0) -> Any:
    opened = torch.sigmoid(gate + bias)
    return dy * opened, (dy * x).sum(-1, keepdim=True) * opened * (1.0 - opened)


def defined() -> None:
    define_torch("torch_gate", "x[R,N], gate[R,1] -> y[R,N]", rows="R", public=False)(gated)
    define_torch(
        "torch_gate_backward", "x[R,N], gate[R,1], dy[R,N] -> dx[R,N], dgate[R,1]", rows="R",
        gradient_of="torch_gate", public=False,
    )(gated_backward)  # fmt: skip


def test_its_golden_is_that_of_the_same_definition() -> None:
    defined()

    @define("plain_gate", "x[R,N], gate[R,1] -> y[R,N]", rows="R", public=False)
    def plain_gate(xp: Any, x: Any, gate: Any) -> Any:
        return x * xp.sigmoid(gate + 0.0)

    x, gate = torch.randn(5, 7), torch.randn(5, 1)
    one, other = evaluate("torch_gate", x, gate), evaluate("plain_gate", x, gate)
    assert isinstance(one, Golden)
    assert isinstance(other, Golden)
    assert torch.equal(one.value, other.value)
    assert bool((one.radius <= 2 * other.radius).all())
    assert spec("torch_gate").options["bias"].default == 0.0


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.evidence), "bfloat16"])
def test_kernels_are_held_against_it(dtype: str) -> None:
    defined()

    def honest(x: Any, gate: Any, *, bias: float) -> Any:
        return (x.float() * torch.sigmoid(gate.float() + bias)).to(x.dtype)

    def doubled(x: Any, gate: Any, *, bias: float) -> Any:
        return 2 * honest(x, gate, bias=bias)

    asked: dict[str, Any] = {"dtype": dtype, "effort": "quick", "examples": 3, "options": {"bias": [0.0, 1.0]}}
    assert examine(honest, "torch_gate", **asked).passed
    assert examine(doubled, "torch_gate", **asked, shrinking=False, every_aspect=False).outcome == "FAIL"


def test_its_gradient_is_another_such_function() -> None:
    defined()
    asked: dict[str, Any] = {"dtype": "float32", "effort": "quick", "examples": 3, "layouts": ["contiguous"]}
    assert examine_backward(lambda x, gate: gated(x, gate), "torch_gate", **asked).passed
    wrong = examine_backward(
        lambda x, gate: gated(x, gate.detach() + gate * 0), "torch_gate", **asked, shrinking=False, every_aspect=False
    )
    assert wrong.failed == ("backward",)
