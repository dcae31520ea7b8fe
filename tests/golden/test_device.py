"""Goldens that are evaluated on a device hold the exact result, by the bounds that hold on the CPU.

There is no GPU here: `second_device` has its rules, another order of sums, and functions with NVIDIA's largest errors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.configs import table
from assay.golden import Golden, evaluate, spec, specs
from assay.golden.arithmetic import Arb, BallArithmetic
from assay.golden.arithmetic.ball_order import _EXPONENTIAL, _RELATIVE_TO_ONE, _SPREADS
from assay.golden.arithmetic.model import EVALUATION
from assay.golden.arithmetic.real import ONLY_ON_CPU, two_to
from assay.golden.evaluation.call import run
from assay.golden.evaluation.device import evaluating_on
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering.spec import reference_spec
from tests.golden.drawing import Case, cases
from tests.golden.enclosure import beyond, several
from tests.golden.second_device import DEVICE, SecondDevice

STATED: Mapping[str, float] = table("cuda_functions")["ulps"]
FROM_CORRECTLY_ROUNDED = 0.5  # ulps between that and the exact result
OF_OTHERS = {"rsqrt": ("sqrt",), "reciprocal": (), "softplus": ("exp", "log1p")}
"""Functions that `torch_function` makes of others and of IEEE operations."""
MORE = {"erfc": 4.0, **_RELATIVE_TO_ONE}
"""How many times the ulps of `EVALUATION` a function has in `ElementaryBalls.function`."""

few = settings(max_examples=2, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def device() -> Iterator[SecondDevice]:
    """The stand-in, on which calls of any size are evaluated."""
    with evaluating(SecondDevice(STATED)) as result:
        yield result


class evaluating:  # noqa: N801 - a context
    """Evaluate calls on a stand-in inside."""

    def __init__(self, device: SecondDevice, least: int = 0) -> None:
        self._contexts: list[AbstractContextManager[Any]] = [device, evaluating_on(DEVICE, least)]
        self._device = device

    def __enter__(self) -> SecondDevice:
        for context in self._contexts:
            context.__enter__()
        return self._device

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


@contextmanager
def not_left() -> Iterator[None]:
    """Fail if an evaluation inside left the device for the CPU."""
    records: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("assay.golden.evaluation.call")
    handler.emit = records.append  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert [record.getMessage() for record in records] == []


def goldens(case: Case) -> tuple[Golden, ...]:
    """Return the goldens of a case as an oracle evaluates them."""
    return tuple(map(golden_of, run(spec(case.op), BallArithmetic(), case.tensors, case.options)))


def disjoint(ours: Golden, theirs: Golden) -> bool:
    """Whether some element of two goldens of finite numbers can't have one exact result."""
    if not ours.value.is_floating_point():
        return not torch.equal(ours.value, theirs.value)
    finite = ours.value.isfinite() & theirs.value.isfinite()
    apart = (ours.value - theirs.value).abs() > ours.radius + theirs.radius
    return bool((finite & apart).any())


@pytest.mark.parametrize("op", specs())
def test_every_op_is_evaluated_on_the_device_and_agrees_with_the_cpu(op: str) -> None:
    @few
    @given(st.data())
    def agrees(data: st.DataObject) -> None:
        case = data.draw(cases(op))
        on_cpu = goldens(case)
        with evaluating(SecondDevice(STATED)) as device, not_left():
            here = goldens(case)
        assert device.operations or not any(tensor.numel() for tensor in case.tensors)
        assert not any(map(disjoint, on_cpu, here))

    agrees()


def drawn(op: str, *shapes: tuple[int, ...], **options: Any) -> Case:
    """Return a case of normal numbers in bfloat16."""
    generator = torch.Generator().manual_seed(3)
    return Case(op, tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes), options)


CASES = [
    drawn("gemm", (3, 40), (40, 4)),
    drawn("softmax", (3, 40)),
    drawn("log_softmax", (3, 40)),
    drawn("gelu", (2, 20), approximate="none"),
    drawn("gelu", (2, 20), approximate="tanh"),
    drawn("layernorm", (3, 40), (40,), (40,), eps=1e-5),
    drawn("attention", (1, 2, 3, 8), (1, 1, 5, 8), (1, 1, 5, 4), causal="bottom_right", softcap=2.0),
    drawn("attention_backward", (1, 1, 3, 4), (1, 1, 5, 4), (1, 1, 5, 4), (1, 1, 3, 4)),
]


def escapes(case: Case, device: SecondDevice) -> list[str]:
    """Return the elements whose exact result, by Arb, a golden of the device doesn't hold."""
    with evaluating(device), not_left():
        results = goldens(case)
    arb = Arb(60)
    return beyond(results, [(arb, run(spec(case.op), arb, case.tensors, dict(case.options)))])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.options.get('approximate', '')}")
def test_goldens_of_the_device_hold_the_exact_result(case: Case) -> None:
    assert escapes(case, SecondDevice(STATED)) == []


@pytest.mark.parametrize(
    ("case", "wrong"),
    [(CASES[1], {"exp": 1e4}), (CASES[3], {"erf": 200}), (CASES[0], {"mm": 1e4}), (CASES[6], {"tanh": 1e4})],
    ids=["exp", "erf", "products", "tanh"],
)
def test_a_device_less_exact_than_the_bounds_is_noticed(case: Case, wrong: Mapping[str, float]) -> None:
    assert escapes(case, SecondDevice({**STATED, **wrong})) != []


@pytest.mark.parametrize("name", sorted({*_SPREADS, *_EXPONENTIAL, "pow"} - {*OF_OTHERS, *ONLY_ON_CPU}))
def test_what_nvidia_states_is_within_the_bounds(name: str) -> None:
    """Every function that goldens use has a row, one that is made of others of them, or runs on the CPU."""
    most = 2 * EVALUATION.unit_roundoff * (STATED[name] + FROM_CORRECTLY_ROUNDED)
    assert most <= MORE.get(name, 1.0) * EVALUATION.function_error(name)


def test_functions_without_a_maximum_run_on_the_cpu(device: SecondDevice) -> None:
    op = reference_spec(lambda x: torch.lgamma(x) + torch.digamma(x), "x[N] -> y[N]", name="gammas")
    with not_left():
        (result,) = run(op, BallArithmetic(), [torch.rand(9) + 1], {})
    assert device.names >= {"add"}
    assert not device.names & {"lgamma", "digamma"}
    assert result.mid.device.type == "cpu"


def test_a_reference_is_evaluated_on_the_device(device: SecondDevice) -> None:
    def masked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scores = x @ w
        ahead = torch.arange(scores.shape[1])[None, :] > torch.arange(scores.shape[0])[:, None]
        return torch.softmax(scores.masked_fill(ahead, float("-inf")) + torch.tensor([0.5]), -1)

    x, w = torch.randn(4, 8), torch.randn(8, 5)
    op = reference_spec(masked, "x[M,K], w[K,N] -> y[M,N]", name="masked")
    with not_left():
        (here,) = map(golden_of, run(op, BallArithmetic(), [x, w], {}))
    assert {"matmul", "exp"} <= device.names
    with evaluating_on("cpu"):
        (on_cpu,) = map(golden_of, run(op, BallArithmetic(), [x, w], {}))
    assert not disjoint(here, on_cpu)


def test_small_calls_other_arithmetics_and_promised_bits_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[1]
    expected = goldens(case)
    with evaluating(SecondDevice(STATED), least=2 * 3 * 40 + 1) as device:
        assert torch.equal(goldens(case)[0].value, expected[0].value)
    with evaluating(device, least=2 * 3 * 40):
        (promised,) = several(evaluate("softmax", *case.tensors))
        run(spec("softmax"), Arb(40), case.tensors, {})
        assert device.operations == 0
        goldens(case)
        assert device.operations > 0
    assert torch.equal(promised.value, expected[0].value)
    assert torch.equal(promised.radius, expected[0].radius)
    monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "1")
    with evaluating(SecondDevice(STATED)) as emulating:
        goldens(case)
    assert emulating.operations == 0


def test_where_the_device_fails_the_cpu_evaluates() -> None:
    class Full(SecondDevice):
        def computed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name == "mm":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().computed(func, name, args, kwargs)

    case = CASES[0]
    words = r"gemm is evaluated on the CPU, since meta failed: CUDA out of memory"
    with evaluating(Full(STATED)), pytest.raises(AssertionError, match=words), not_left():
        (here,) = goldens(case)
    (expected,) = goldens(case)
    assert torch.equal(here.value, expected.value)
    assert torch.equal(here.radius, expected.radius)


def test_the_device_s_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an evaluation fails, as one on CUDA does here, which this build lacks."""
    released: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append("cuda"))
    (expected,) = goldens(CASES[0])
    with evaluating_on("cuda", 0):
        (here,) = goldens(CASES[0])
    assert released == ["cuda"]
    assert torch.equal(here.value, expected.value)


def test_powers_of_two_are_exact_in_their_whole_range() -> None:
    exponents = torch.arange(-1080, 1030)
    assert two_to(exponents).tolist() == [2.0**e if e < 1024 else torch.inf for e in exponents.tolist()]
