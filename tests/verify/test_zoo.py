"""The zoo itself: honest kernels agree with float64, and each faulty one differs from its twin."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from assay.verify.cases.layouts import with_layout
from tests.reference import reference
from tests.zoo import FAULTY, HANGING, HONEST, Entry, Faulty
from tests.zoo.probes import Probe, probes_of, same_bytes

from .usual import each_third

TWINS = {entry.name: entry for entry in HONEST}
RARE = "_kept_by_|_wrap-|_of_1[56]_bits"
LOOSE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
WRONG = {"contract", "exact", "nonfinite"}


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """Memory that torch hands out holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def call(entry: Entry, probe: Probe) -> tuple[Tensor, ...]:
    """The kernel's results as a tuple."""
    out = entry.kernel(*probe.inputs, **probe.options)
    return out if isinstance(out, tuple) else (out,)


def expected(entry: Entry, probe: Probe) -> tuple[Tensor, ...]:
    """The float64 results."""
    return reference(entry.spec)(*probe.inputs, **probe.options)


def half_ulps(got: Tensor, want: Tensor) -> float:
    """The largest error in half units in the last place of what should stand there; infinite for a wrong class."""
    if not got.dtype.is_floating_point:
        return 0.0 if torch.equal(got, want.to(got.dtype)) else torch.inf
    limits = torch.finfo(got.dtype)
    stored, y = want.to(got.dtype).double(), got.double()
    finite = stored.isfinite()
    if (
        not torch.equal(y[~finite].nan_to_num(nan=0.5), stored[~finite].nan_to_num(nan=0.5))
        or not y[finite].isfinite().all()
    ):
        return torch.inf
    binade = torch.exp2(torch.floor(torch.log2(want[finite].abs().clamp(min=limits.tiny))))
    errors = (y[finite] - want[finite]).abs() / (binade * limits.eps / 2)
    return float(errors.max()) if errors.numel() else 0.0


def symptoms(entry: Faulty, probe: Probe) -> set[str]:
    """The failure kinds that one call shows, judged by the honest twin's own error."""
    used = probe.copy()
    try:
        got = call(entry, used)
    except (ValueError, RuntimeError, IndexError):
        return {"crash"}
    seen = set()
    if not same_bytes(used, probe):
        seen |= {"input_mutated", "out_of_bounds_write"}
    honest, want = call(TWINS[entry.twin], probe), expected(entry, probe)
    if any(x.shape != y.shape for x, y in zip(got, honest, strict=True)):
        return seen | {"shape"}
    if any(x.dtype != y.dtype for x, y in zip(got, honest, strict=True)):
        return seen | {"dtype"}
    again = call(entry, probe.copy())
    if not all(torch.equal(x.double().nan_to_num(), y.double().nan_to_num()) for x, y in zip(got, again, strict=True)):
        seen |= {"nondeterministic"}
    for ours, theirs, exact in zip(got, honest, want, strict=True):
        if half_ulps(ours, exact) > 1.03 * max(half_ulps(theirs, exact), 1.0):
            seen |= WRONG
    return seen


@pytest.mark.parametrize("entry", each_third(HONEST), ids=lambda entry: entry.name)
def test_an_honest_kernel_agrees_with_float64(entry: Entry) -> None:
    """Values, classes, shapes and strides: the same as the plain float64 definition, and no input is touched."""
    for probe in probes_of(entry, 3):
        used = probe.copy()
        for got, want in zip(call(entry, used), expected(entry, probe), strict=True):
            assert got.shape == want.shape
            assert got.is_contiguous()
            loose, stored = LOOSE.get(got.dtype, 0.0), want.to(got.dtype)
            if got.dtype.itemsize == 1:  # codes: a quotient next to a midpoint may become either neighbour
                got, stored = got.double(), stored.double()
                assert float((got != stored).double().mean() if got.numel() else 0.0) < 0.05
                torch.testing.assert_close(got, stored, rtol=0.15, atol=1.0)
                continue
            share = 0.5 if entry.spec == "attention_backward" else 0.1  # there two stages are rounded, and cancel
            largest = float(stored[stored.isfinite()].abs().max()) if stored.isfinite().any() else 0.0
            torch.testing.assert_close(got, stored, rtol=loose, atol=share * loose * largest, equal_nan=True)
        assert same_bytes(used, probe)


@pytest.mark.usefixtures("uninitialised_is_nan")
@pytest.mark.parametrize(
    "entry", each_third(e for e in FAULTY if not re.search(RARE, e.name)), ids=lambda entry: entry.name
)
def test_a_fault_shows(entry: Faulty) -> None:
    """Some probe sets the faulty kernel apart from its twin, in one of the ways that its entry names."""
    assert any(symptoms(entry, probe) & set(entry.kinds) for probe in probes_of(entry, 20))


@pytest.mark.parametrize("entry", [e for e in FAULTY if "_kept_by_" in e.name], ids=lambda entry: entry.name)
def test_a_kept_answer_is_stale(entry: Faulty) -> None:
    """The same buffers with other data bring the answer of the call before."""
    inputs = [torch.randn(6, 6).to(getattr(torch, entry.examine["dtype"])) for _ in range(1 + (entry.spec == "gemm"))]
    before = entry.kernel(*inputs)
    inputs[0].copy_(torch.randn(6, 6))
    assert torch.equal(entry.kernel(*inputs), before)
    assert not torch.equal(TWINS[entry.twin].kernel(*inputs), before)


@pytest.mark.parametrize("entry", [e for e in FAULTY if "_wrap-" in e.name], ids=lambda entry: entry.name)
def test_wrapped_offsets_show_in_far_rows(entry: Faulty) -> None:
    """Right for rows side by side, wrong where an offset doesn't fit into 32 bits."""
    inputs = [torch.randn(6, 6).to(getattr(torch, entry.examine["dtype"])) for _ in range(1 + (entry.spec == "gemm"))]
    right = TWINS[entry.twin].kernel(*inputs)
    assert torch.equal(entry.kernel(*inputs), right)
    assert not torch.equal(entry.kernel(*[with_layout(x, "far", "cpu").tensor for x in inputs]), right)


LARGE = {
    "softmax": lambda rows: (torch.randn(rows, 3),),
    "gelu": lambda rows: (torch.randn(rows, 3),),
    "moe_route": lambda rows: (torch.randn(rows, 4),),
    "rmsnorm": lambda rows: (torch.randn(rows, 3), torch.ones(3)),
    "gemm": lambda rows: (torch.randn(rows, 2), torch.randn(2, 3)),
    "merge_states": lambda rows: tuple(torch.randn(rows, 1, 1) for _ in range(4)),
    "cross_entropy": lambda rows: (torch.randn(2, rows), torch.tensor([0, rows - 1])),
}


@pytest.mark.parametrize(
    "entry", each_third(e for e in FAULTY if re.search("_of_1[56]_bits", e.name)), ids=lambda e: e.name
)
def test_what_16_bits_do_not_count_is_wrong(entry: Faulty) -> None:
    """Right up to 32,767 rows or classes, and wrong beyond 65,536."""

    def is_right(rows: int) -> bool:
        torch.manual_seed(3)
        inputs = LARGE[entry.spec](rows)
        if entry.spec == "merge_states":
            inputs = tuple(x.squeeze(-1) if place % 2 else x for place, x in enumerate(inputs))
        results = [kernel(*inputs) for kernel in (entry.kernel, TWINS[entry.twin].kernel)]
        pairs = zip(*(out if isinstance(out, tuple) else (out,) for out in results), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    assert is_right(32_767)
    assert not is_right(65_600)


def test_the_tables_are_sound() -> None:
    """Names are unique, and a faulty kernel is examined as its twin is, but for the sizes that reveal it."""
    entries = (*HONEST, *FAULTY, *HANGING)
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in (*FAULTY, *HANGING):
        twin = TWINS[entry.twin]
        assert entry.spec == twin.spec
        assert entry.examine.items() >= twin.examine.items()
        assert entry.kernel is not twin.kernel
        assert entry.kinds
