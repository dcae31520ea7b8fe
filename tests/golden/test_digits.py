"""`evaluate(..., digits=)`: what is promised is reached, by no more work than it takes, and what cannot be ends."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from assay.golden import Golden, evaluate
from assay.golden.arithmetic import BallArithmetic, Exact
from assay.golden.evaluation.call import Call, bind
from assay.golden.inputs.recipe import recipe
from assay.golden.registry import spec
from tests.golden.drawing import Case
from tests.golden.enclosure import escapes, several

RNG = torch.Generator().manual_seed(11)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=RNG)


def full(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def only(golden: Golden | tuple[Golden, ...]) -> Golden:
    return several(golden)[0]


ORDINARY: dict[str, Case] = {
    "softmax": Case("softmax", (normal(40, 1000),), {}),
    "log_softmax": Case("log_softmax", (normal(2, 50),), {}),
    "layernorm": Case("layernorm", (normal(3, 64), normal(64), normal(64)), {}),
    "rmsnorm": Case("rmsnorm", (normal(3, 64), normal(64)), {}),
    "gelu": Case("gelu", (normal(4, 33),), {}),
    "gelu, tanh": Case("gelu", (normal(4, 33),), {"approximate": "tanh"}),
    "swiglu": Case("swiglu", (normal(4, 9), normal(4, 9)), {}),
    "gemm": Case("gemm", (normal(9, 300), normal(300, 7)), {}),
    "float64 gemm": Case("gemm", (normal(9, 30).double() / 3, normal(30, 7).double() / 7), {}),
    "attention": Case("attention", (normal(1, 2, 9, 8), normal(1, 1, 11, 8), normal(1, 1, 11, 5)),
                      {"causal": "bottom_right", "return_lse": True}),
    "moe": Case("moe", (normal(5, 6), normal(3, 8, 6), normal(3, 6, 4), torch.rand(5, 2, generator=RNG),
                        torch.tensor([[0, 1], [1, 1], [2, 0], [0, 2], [1, 2]]).int()), {}),
    "rope": Case("rope", (normal(2, 3, 2, 4), normal(3, 2).cos(), normal(3, 2).sin()), {}),
}  # fmt: skip


@pytest.mark.parametrize("digits", [10, 15, 20, 25, 29, 31, 50])
@pytest.mark.parametrize("name", ORDINARY)
def test_every_element_has_the_digits(name: str, digits: int) -> None:
    """radius <= 10^-digits |value| for every element, up to what a pair of float64 holds."""
    case = ORDINARY[name]
    for golden in several(evaluate(case.op, *case.tensors, digits=digits, **case.options)):
        assert bool((golden.radius <= golden.value.abs() * max(10.0**-digits, 2.0**-105)).all())


@pytest.mark.parametrize("name", [name for name in ORDINARY if name != "softmax"])
@pytest.mark.parametrize("digits", [12, 25])
def test_the_digits_are_right(name: str, digits: int) -> None:
    """What is claimed holds the exact result, by mpmath and by Arb."""
    assert escapes(ORDINARY[name], digits=digits, witness_digits=80) == []


class Record:
    """The sizes of the tensors that each arithmetic was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: dict[str, list[list[tuple[int, ...]]]] = {}
        under = Call.under

        def recorded(call: Call, arithmetic: Any) -> tuple[Golden, ...]:
            name = type(arithmetic).__name__
            self.shapes.setdefault(name, []).append([tuple(tensor.shape) for tensor in call.tensors.values()])
            return under(call, arithmetic)

        monkeypatch.setattr(Call, "under", recorded)


def test_only_the_rows_and_columns_that_need_it_are_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product of 64 by 64, the element that float64 and double-double leave open goes to Arb, alone."""
    a, b = normal(64, 64).double(), normal(64, 64).double()
    a[5] = 0
    a[5, :3] = torch.tensor([1e20, -1e20, 1e-20], dtype=torch.float64)
    b[:3, 9] = 1
    record = Record(monkeypatch)
    golden = only(evaluate("gemm", a, b, digits=25))
    assert golden.value[5, 9].item() == 1e-20
    assert record.shapes["Exact"] == [[(64, 64), (64, 64)]]
    assert set(map(tuple, record.shapes["Arb"])) == {((1, 64), (64, 1))}


def test_only_the_rows_that_need_it_are_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a softmax, whose columns hang together, the row whose small numbers float64 lacks."""
    x = normal(50, 8).double()
    x[17, 0], x[17, 1] = 0.0, -700.0
    record = Record(monkeypatch)
    evaluate("softmax", x, digits=25)
    assert record.shapes["Arb"][0] == [(1, 8)]


def test_what_float64_resolves_is_not_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten digits of an ordinary product need float64 alone, 25 digits double-double alone."""
    record = Record(monkeypatch)
    evaluate("gemm", normal(9, 30), normal(30, 9), digits=10)
    assert set(record.shapes) == {"BallArithmetic"}
    evaluate("gemm", normal(9, 30), normal(30, 9), digits=25)
    assert set(record.shapes) == {"BallArithmetic", "Exact"}


def test_missing_numbers_cost_no_second_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of NaN among resolved ones: float64 once; with many digits once more, and both in blocks."""
    x = normal(700, 400)
    x[3] = math.nan
    record = Record(monkeypatch)
    evaluate("softmax", x, digits=10)
    once = record.shapes["BallArithmetic"]
    assert sum(shapes[0][0] for shapes in once) == 700
    evaluate("softmax", x, digits=25)
    assert once[len(once) // 2 :] == once[: len(once) // 2]
    assert max(shapes[0][0] for shapes in once) < 700


def test_few_digits_of_a_cancelling_sum_take_more_than_float64() -> None:
    """Ten digits of 1e30 + 1/3 - 1e30."""
    a = torch.tensor([[1e30, 1 / 3, -1e30]], dtype=torch.float64)
    golden = only(evaluate("gemm", a, torch.ones(3, 1), digits=10))
    assert golden.value.item() == 1 / 3
    assert golden.radius.item() <= 1e-10 / 3


HOPELESS: dict[str, Case] = {
    "a constant row": Case("layernorm", (torch.full((1, 3), 0.1), torch.ones(3), torch.zeros(3)), {}),
    "log of one, from a sum": Case("logsumexp", (torch.tensor([[0.5, 0.5]]).log(),), {}),
    "gelu far out": Case("gelu", (torch.tensor([[-30.0, -38.0, -1e5]]),), {}),
    "sine of pi": Case("sin", (torch.tensor([[math.pi, 1e22]], dtype=torch.float64),), {}),
    "exp beyond": Case("exp", (torch.tensor([[-750.0, -1e5, 800.0, 1e5]]),), {}),
    "subnormal": Case("gemm", (full(1e-170, 1, 2), full(1e-150, 2, 1)), {}),
    "huge": Case("gemm", (full(1e200, 1, 2), full(1e150, 2, 1)), {}),
    "a log of nothing": Case("log", (torch.tensor([[-1.0, 0.0, 1.0, 2.0]]),), {}),
    "empty": Case("softmax", (torch.zeros(0, 5),), {}),
    "no columns": Case("softmax", (torch.zeros(2, 0),), {}),
    "nothing to add": Case("gemm", (torch.zeros(2, 0), torch.zeros(0, 3)), {}),
}


@pytest.mark.parametrize("name", HOPELESS)
@pytest.mark.parametrize("digits", [12, 25])
def test_what_cannot_be_resolved_ends(name: str, digits: int) -> None:
    """Zeros, underflow, overflow, poles: the certified radius that was reached is returned, and holds."""
    case = HOPELESS[name]
    assert escapes(case, digits=digits, witness_digits=1000) == []


def test_masks_and_missing_numbers_stay_what_they_are() -> None:
    """-inf in a row leaves the others their digits; NaN spoils its own row only."""
    x = torch.tensor([[-math.inf, 0.0, 1.0], [math.nan, 0.0, 1.0], [-math.inf, -math.inf, -math.inf], [3.0, 1.0, 2.0]])
    golden = only(evaluate("softmax", x, digits=25))
    assert golden.value[0, 0].item() == golden.radius[0, 0].item() == 0
    assert golden.value.isnan().any(-1).tolist() == [False, True, True, False]
    assert bool((golden.radius[[0, 3]] <= golden.value[[0, 3]] * 1e-25).all())


def test_blocks_change_nothing() -> None:
    """Rows evaluated in blocks, under whichever arithmetic, have the bits of rows evaluated together."""
    call = bind(spec("softmax"), (normal(700, 100),), {})
    for arithmetic in (Exact(), BallArithmetic()):
        whole, blocks = only(call.under(arithmetic)), only(call.in_blocks(arithmetic))
        assert bool((whole.value == blocks.value).all())
        assert blocks.value.shape == (700, 100)


def test_the_working_precision_is_left_as_it_was() -> None:
    """python-flint's precision belongs to the caller."""
    from flint import ctx

    with ctx.workdps(23):
        evaluate("gelu", normal(1, 3), digits=40)
        evaluate("gelu", normal(1, 3), digits=20)
        evaluate("gelu", normal(1, 3), round_to="bfloat16")
        assert ctx.dps == 23
        assert ctx.cap == 10


def test_a_symbol_in_an_expression_is_not_cut() -> None:
    """Columns packed in words, or sharing a scale, are evaluated together; plain ones apart."""
    sizes = {"M": 1, "K": 128, "N": 128}
    assert call_of("gemm_fp8", sizes, granularity="block").columns is None
    assert call_of("gemm_fp8", sizes, granularity="row").columns == "N"
    assert call_of("gemm_int4", {**sizes, "g": 32}, packing="awq").columns is None
    assert call_of("exp", {"R": 2, "N": 3}).columns == "N"


def call_of(op: str, sizes: dict[str, int], **options: Any) -> Call:
    """A call of an op on some tensors of these sizes."""
    inputs = recipe(op, sizes, options=options)
    return bind(inputs.definition, inputs.tensors(), inputs.options)


MEMORY = """
import resource, sys
import torch
from assay.golden import evaluate
length = int(sys.argv[1])
q, k, v = (torch.randn(1, 8, length, 64) for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
golden = evaluate("attention", q, k, v, causal="bottom_right")
assert bool(golden.radius.isfinite().all())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_attention_is_evaluated_in_bounded_memory() -> None:
    """8 heads of 2048 queries and keys, whose scores alone would take 256 MiB, take less than 178 MiB more."""
    run = subprocess.run([sys.executable, "-c", MEMORY, "2048"], capture_output=True, text=True, check=True)
    assert int(run.stdout) * 1024 < 178 * 2**20


def test_arb_is_the_last_tier() -> None:
    """Fifty digits are Arb's: the radius is what a pair of float64 leaves, not what double-double lost."""
    golden = only(evaluate("exp", normal(1, 5), digits=50))
    assert bool((golden.radius <= golden.value * 2.0**-106).all())
