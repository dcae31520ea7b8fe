"""A race tells the time of honest kernels, and none of one that is wrong in any call."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.bench.inspection.calls import Request, calls
from assay.bench.timing import Competitor, Timing, timed_and_judged
from assay.verify.settings import Settings

SETTINGS = Settings("softmax", dtype="float32")
SIZES = {"R": 64, "N": 200}
Kernel = Callable[[torch.Tensor], torch.Tensor]


def case_of(settings: Settings, sizes: dict[str, int]) -> Any:
    """The one case at these sizes."""
    return next(iter(calls(settings, Request((sizes,)))))


def raced(*kernels: Kernel, sizes: dict[str, int] = SIZES, settings: Settings = SETTINGS) -> list[Timing]:
    """What a short race shows of softmaxes."""
    entrants = [Competitor(getattr(kernel, "__name__", "kernel"), kernel, settings) for kernel in kernels]
    return timed_and_judged(entrants, case_of(settings, sizes), seconds=0.02, rounds=2, seed=7)


def honest(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def twice_the_work(x: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        x.exp()
    return torch.softmax(x, -1)


def late(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], calls_before: int = 6) -> Kernel:
    """A softmax that is right in its first calls."""
    count = iter(range(10**9))

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        return change(x, y) if next(count) >= calls_before else y

    return kernel


def one_wrong_row(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y[len(y) // 3] *= 1.001
    return y


def input_changed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[0, 0] += 1
    return y


def neighbour_overwritten(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
    return y


def raised(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of luck")


def test_honest_kernels_are_timed_and_compared() -> None:
    """An honest kernel has a time, accuracy and judged calls; one that does more work takes longer."""
    fast, slow = raced(honest, twice_the_work)
    for timing in (fast, slow):
        assert timing.outcome == "PASS", timing.why
        assert timing.judged >= 4
        assert len(timing.medians) == len(timing.baseline) == 2
        assert 0 < timing.worst <= 1
        assert 20 < timing.bits < 26
    assert slow.seconds > fast.seconds


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (one_wrong_row, "other bits"),
        (input_changed, "changed its input x"),
        (neighbour_overwritten, "wrote beyond its input x"),
        (raised, "out of luck"),
    ],
)
def test_what_goes_wrong_only_while_it_is_timed_has_no_time(change: Any, why: str) -> None:
    """A kernel that is right in its first calls, and wrong in later ones, is refused for what it then did."""
    for calls_before in (6, 8):  # the calls that no clock times are five
        (timing,) = raced(late(change, calls_before))
        assert timing.outcome == "FAIL"
        assert why in timing.why
        assert math.isnan(timing.seconds)


def test_a_remembered_result_is_wrong() -> None:
    """Whoever keeps a result by where its input lies is found out, since other numbers lie there in the next call."""
    known: dict[int, torch.Tensor] = {}

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return known.setdefault(x.data_ptr(), torch.softmax(x, -1))

    (timing,) = raced(kernel)
    assert timing.outcome == "FAIL"


def test_wrong_values_and_overwritten_memory_have_no_time() -> None:
    """What an examination would refuse at the case's sizes is refused before anything is timed."""

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1) * 1.001

    def overwrites(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        y.as_strided((y.numel() + 1,), (1,), y.storage_offset()).zero_()
        return y.copy_(torch.softmax(x, -1))

    def leaves_unwritten(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        y[:-1] = torch.softmax(x, -1)[:-1]
        return y

    for timing, why in zip(
        raced(wrong, overwrites, leaves_unwritten), ("contract", "out_of_bounds_write", "unwritten_output"), strict=True
    ):
        assert (timing.outcome, timing.why.partition(":")[0], timing.calls) == ("FAIL", why, 0)


def test_right_at_another_shape_is_not_right_at_the_timed_one() -> None:
    """A kernel that is right at sizes where it was checked, and not at those where it is timed, has no time there."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        y[:, 128:] = 0  # its only block
        return y

    assert raced(kernel, sizes={"R": 64, "N": 128})[0].outcome == "PASS"
    assert raced(kernel, sizes={"R": 64, "N": 130})[0].outcome == "FAIL"


def test_a_contract_that_allows_other_bits_is_judged_by_its_tolerance() -> None:
    """A kernel whose sums come out in another order each time passes where it promises no determinism."""
    generator = torch.Generator().manual_seed(1)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x.shape[-1], generator=generator)
        shifted = (x - x.amax(-1, keepdim=True)).exp()
        total = torch.zeros(len(x))
        for part in shifted[:, order].split(8, -1):
            total += part.sum(-1)
        return shifted / total[:, None]

    free = replace(SETTINGS, contract=replace(SETTINGS.contract, deterministic=False))
    assert raced(kernel, settings=free)[0].outcome == "PASS"
    assert raced(kernel)[0].outcome == "FAIL"


def test_interpreted_kernels_are_not_timed() -> None:
    """A Triton kernel on a CPU is run by an interpreter, so no time is told of it, and it isn't called wrong."""
    pytest.importorskip("triton")
    from assay.kernels.triton.softmax import softmax

    (timing,) = raced(softmax)
    assert (timing.outcome, timing.calls) == ("NOT TIMED", 0)
    assert "interpreter" in timing.why


def test_numpy_and_jax_kernels_are_timed() -> None:
    """Arrays of other frameworks see the new numbers of each call."""
    numpy = pytest.importorskip("numpy")

    def kernel(x: Any) -> Any:
        y = numpy.exp(x - x.max(-1, keepdims=True))
        return y / y.sum(-1, keepdims=True)

    (timing,) = raced(kernel, settings=Settings("softmax", dtype="float32", framework="numpy"))
    assert timing.outcome == "PASS", timing.why

    jax = pytest.importorskip("jax")
    (timing,) = raced(jax.jit(jax.nn.softmax), settings=Settings("softmax", dtype="float32", framework="jax"))
    assert timing.outcome == "PASS", timing.why


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Times that other tests disturb less."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
