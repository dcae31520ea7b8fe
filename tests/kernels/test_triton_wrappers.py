"""What holds of every Triton kernel's wrapper and operator: wrong arguments, registration, compilation.

Attention's, whose arguments depend on one another, stand in its own tests.
"""

import importlib
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import Tensor

import assay.kernels.triton
from assay.kernels.triton.attention import attention_backward
from assay.kernels.triton.moe_route import moe_route_backward
from tests.kernels.planting import public_functions
from tests.kernels.triton_calls import CALLS, Call, check_operator

pytestmark = pytest.mark.usefixtures("interpreted")

EVERY = pytest.mark.parametrize("call", CALLS, ids=str)
# Those that are no operators of their name.
BACKWARD_CALLS = [
    Call(
        moe_route_backward,
        {"logits": torch.randn(5, 17), "dweights": torch.randn(5, 3)},
        {"top_k": 3},
        refused=(
            *(("dweights", torch.zeros(5, 2)), ("dweights", torch.zeros(4, 3)), ("dweights", torch.zeros(5, 3).half())),
            *(("top_k", 0), ("top_k", 18), ("scoring", "tanh")),
        ),
    ),
    Call(
        attention_backward,
        {
            "q": torch.randn(2, 4, 5, 8),
            "k": torch.randn(2, 2, 7, 8),
            "v": torch.randn(2, 2, 7, 8),
            "dout": torch.randn(2, 4, 5, 8),
        },
        refused=(
            *(("k", torch.zeros(2, 2, 7, 9)), ("v", torch.zeros(2, 2, 6, 8)), ("v", torch.zeros(2, 2, 7, 8).half())),
            *(("dout", torch.zeros(2, 4, 7, 8)), ("dout", torch.zeros(2, 4, 5, 9)), ("dout", torch.zeros(2, 2, 5, 8))),
            *(("dout", torch.zeros(2, 4, 5, 8).half()), ("causal", "left"), ("softcap", 0.0)),
            *(("window", window) for window in ((3,), 3, (1.5, 2), (-1, 2))),
        ),
    ),
]
ELSEWHERE = {
    "attention:attention",
    "attention_decode:attention_decode",
    "attention_varlen:attention_varlen",
    "attention_varlen:attention_varlen_backward",
    "mla_decode:mla_decode",
}


def test_every_kernel_is_called_wrongly() -> None:
    """The calls here are of every public function, but those whose own tests refuse their wrong arguments."""
    package = assay.kernels.triton
    called = {call.kernel for call in [*CALLS, *BACKWARD_CALLS]}
    others = {f"{package.__name__}.{name}" for name in ELSEWHERE}
    own = {f"{kernel.__module__}:{kernel.__name__}" for kernel in called}
    assert public_functions(Path(str(package.__file__)).parent) == own | others


@pytest.mark.parametrize("call", [*CALLS, *BACKWARD_CALLS], ids=str)
def test_a_wrong_argument_is_named(call: Call) -> None:
    """No tensor, a wrong dtype, shape, device or option raises an error that begins with the argument's name."""
    wrong = list(call.refused)
    for place, (name, tensor) in enumerate(call.tensors.items()):
        wrong += [(name, [[0.0]]), (name, None), (name, tensor.to(torch.complex64)), (name, tensor[None].clone())]
        wrong += [(name, torch.empty_like(tensor, device="meta"))] if place else []
    for name, parameter in signature(call.kernel).parameters.items():
        if parameter.annotation in ("float", "float | None"):
            wrong += [(name, value) for value in ("1", float("nan"), float("inf"), [1.0])]
    for name, value in wrong:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected "):
            call.kernel(**{**call.tensors, **call.options, name: value})


@EVERY
def test_the_operator_is_well_registered(call: Call) -> None:
    """Schema, fake implementation and compilation with dynamic shapes agree with the operator."""
    check_operator(call.kernel.__name__, list(call.tensors.values()), call.operator)


@EVERY
def test_compiled_code_gives_the_same_bits(call: Call) -> None:
    """torch.compile keeps the kernel whole, without a graph break."""
    torch.compiler.reset()  # `block` is compiled anew for each kernel, which torch does a few times only

    def block(*tensors: Tensor) -> list[Tensor]:
        results = call.kernel(*tensors, **call.options)
        return [result.clone() for result in (results if isinstance(results, tuple) else (results,))]

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*call.tensors.values()), block(*call.tensors.values()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", assay.kernels.triton._EARLIER_PATHS)
def test_a_kernel_whose_file_was_merged_keeps_its_import_path(name: str) -> None:
    """And `inspect`, which asks every module for its file, imports none of them."""
    module = importlib.import_module(f"assay.kernels.triton.{name}")
    assert not hasattr(module, "__file__")
    assert getattr(module, name).__module__ == f"assay.kernels.triton.{assay.kernels.triton._EARLIER_PATHS[name]}"
