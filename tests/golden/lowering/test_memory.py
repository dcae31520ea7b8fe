"""Views share memory, and writes in place reach all of them, as they do in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden.arithmetic import BallArithmetic
from assay.golden.errors import MissingOperation, Undecided
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering import reference_spec
from assay.golden.lowering.dispatch import Lowering

Step = Callable[[Any], Any]

VIEWS: dict[str, Step] = {
    "t": lambda x: x.t() if x.ndim == 2 else x,
    "flat": lambda x: x.contiguous().view(-1),
    "half": lambda x: x[: max(1, x.shape[0] // 2)] if x.ndim else x,
    "every other": lambda x: x[..., ::2] if x.ndim else x,
    "last": lambda x: x[-1] if x.ndim > 1 else x,
    "unsqueezed": lambda x: x.unsqueeze(0) if x.ndim < 4 else x,
    "squeezed": lambda x: x.squeeze(),
    "diagonal": lambda x: x.diagonal() if x.ndim == 2 else x,
    "chunk": lambda x: x.chunk(2, -1)[0] if x.ndim else x,
    "windows": lambda x: x.unfold(-1, min(2, x.shape[-1]), 1)[..., 0] if x.ndim else x,
    "flattened": lambda x: x.flatten(),
}
WRITES: dict[str, Step] = {
    "add": lambda x: x.add_(1.25),
    "mul": lambda x: x.mul_(-0.5),
    "zero": lambda x: x.zero_(),
    "fill": lambda x: x.fill_(3.5),
    "relu": lambda x: torch.relu_(x),
    "copy": lambda x: x.copy_(x.clone().flip(-1) if x.ndim else x.clone()),
    "masked": lambda x: x.masked_fill_(x > 0, 2.0),
    "index": lambda x: x.index_fill_(0, torch.tensor([0]), 7.0) if x.ndim else x,
    "out": lambda x: torch.mul(x.clone(), 2.0, out=x) if x.is_contiguous() else x.mul_(2.0),
    "set": lambda x: x.__setitem__(0, 0.75) if x.ndim else None,
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(sorted(VIEWS)), max_size=3), st.sampled_from(sorted(WRITES))), max_size=4
    )
)
def test_writes_reach_all_views(program: list[tuple[list[str], str]]) -> None:

    def reference(x: Any) -> Any:
        base = x.clone()
        views = [base]
        for path, write in program:
            view = base
            for name in path:
                view = VIEWS[name](view)
            WRITES[write](view)
            views.append(view)
        return torch.cat([view.reshape(-1) for view in views])

    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = reference(x)
    (ball,) = run(reference_spec(reference, f"x[A,B] -> y[{len(expected)}]"), BallArithmetic(), [x], {})
    golden = golden_of(ball)
    assert bool(((golden.value - expected).abs() <= golden.radius + 1e-15).all())


def test_inputs_and_constants_stay_as_they_were() -> None:
    constant = torch.ones(3)

    def reference(x: Any) -> Any:
        constant.add_(1.0)
        x.mul_(2.0)
        return x + constant

    x = torch.arange(3.0)
    for _ in range(2):
        (ball,) = run(reference_spec(reference, "x[A] -> y[A]"), BallArithmetic(), [x], {})
        assert golden_of(ball).value.tolist() == [2.0, 4.0, 6.0]
    assert constant.tolist() == [1.0, 1.0, 1.0]
    assert x.tolist() == [0.0, 1.0, 2.0]


def test_random_numbers_are_refused_by_name() -> None:
    layer = torch.nn.Dropout(0.5)
    x = torch.ones(3)
    with pytest.raises(MissingOperation, match=r"test_memory.py:\d+ in <lambda>: .*bernoulli.* draws random numbers"):
        run(reference_spec(lambda x: layer(x), "x[A] -> y[A]"), BallArithmetic(), [x], {})
    layer.eval()
    (ball,) = run(reference_spec(lambda x: layer(x), "x[A] -> y[A]"), BallArithmetic(), [x], {})
    assert golden_of(ball).value.tolist() == [1.0, 1.0, 1.0]


def test_an_operation_without_a_rule_is_named() -> None:
    with pytest.raises(MissingOperation, match=r"linalg_qr.default has neither a lowering rule.*write @rule"):
        run(reference_spec(lambda x: torch.linalg.qr(x)[0], "x[A,A] -> y[A,A]"), BallArithmetic(), [torch.eye(3)], {})


def test_answers_that_rounding_admits_are_all_taken() -> None:

    def reference(x: Any) -> Any:
        return x * 2.0 if bool((x.sum() - 0.6).abs() < 1e-17) else x * 3.0

    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    (ball,) = run(reference_spec(reference, "x[A] -> y[A]"), BallArithmetic(), [x], {})
    golden = golden_of(ball)
    for factor in (2.0, 3.0):
        assert bool(((golden.value - factor * x).abs() <= golden.radius).all())


def test_bits_of_known_numbers_are_read() -> None:
    codes = torch.tensor([0x38, 0xB8, 0x7F, 0x01], dtype=torch.uint8)
    with Lowering(BallArithmetic()) as ctx:
        found = codes.view(torch.float8_e4m3fn).float() * 2
    golden = golden_of(ctx.number(found))
    assert golden.value[[0, 1, 3]].tolist() == [2.0, -2.0, 2.0**-8]
    assert bool(golden.value[2].isnan())

    def bits_of_a_root(x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x).view(torch.int32).float()

    definition = reference_spec(bits_of_a_root, "x[T] -> y[T]")
    with pytest.raises(Undecided, match="that rounding leaves open"):
        run(definition, BallArithmetic(), (torch.tensor([2.0]),), {})
