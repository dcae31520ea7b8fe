"""What the sanitizer finds in planted faults, and that it says nothing of their honest twins."""

import contextlib

import numpy as np
import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.interpreter import SanitizerError, faithful, sanitized
from assay.kernels.triton.gemm import gemm
from assay.verify import examine
from assay.verify.harness.call import PoisonedMemory
from tests.interpreter import faulty_kernels as kernels

X = torch.arange(100, dtype=torch.float32) + 1


def found(launch) -> SanitizerError | None:
    """The finding of a launch, None for nothing."""
    with contextlib.suppress(SanitizerError), sanitized() as sanitizer:
        launch()
    return sanitizer.finding


def run_double(loaded: int, stored: int, y: torch.Tensor | None = None) -> SanitizerError | None:
    y = torch.zeros(100) if y is None else y
    return found(lambda: kernels.double[(4,)](X, y, 100, LOADED=loaded, STORED=stored, BLOCK=32))


def test_loads_and_stores_out_of_bounds_are_named():
    assert run_double(0, 0) is None
    load, store = run_double(3, 0), run_double(0, 5)
    assert (load.kind, load.tensor, load.index, load.program) == ("crash", "x_ptr", 100, (3, 0, 0))
    assert (store.kind, store.tensor, store.index) == ("out_of_bounds_write", "y_ptr", 100)
    assert str(load) == (
        "loads element 100 of x_ptr, out of bounds: its memory holds elements 0 to 99 (in program (3, 0, 0) of double)"
    )


def test_a_store_out_of_bounds_is_not_made():
    memory = torch.zeros(128)
    with pytest.raises(SanitizerError), sanitized([memory[:100]]):
        kernels.double[(4,)](X, memory[:100], 100, LOADED=0, STORED=5, BLOCK=32)
    assert not memory[100:].any()


def test_an_element_before_the_tensor_is_out_of_bounds():
    def run(first: int) -> SanitizerError | None:
        return found(lambda: kernels.shifted[(4,)](X, torch.zeros(100), 100, FIRST=first, BLOCK=32))

    assert run(0) is None
    assert run(-1).index == -1


def test_of_a_view_the_storage_counts_unless_the_tensor_is_named():
    """A view may be read to the end of its storage; a tensor that is given to the sanitizer only within itself."""
    memory = torch.zeros(128)
    assert run_double(0, 28, memory[:100]) is None
    with pytest.raises(SanitizerError, match="element 100 of y_ptr"), sanitized([memory[:100]]):
        kernels.double[(4,)](X, memory[:100], 100, LOADED=0, STORED=28, BLOCK=32)


def test_tensors_named_in_one_storage_are_told_apart():
    memory = torch.arange(256, dtype=torch.float32)
    named = [memory[:100], memory[100:228]]
    with pytest.raises(SanitizerError, match="element 100 of x_ptr"), sanitized(named):
        kernels.double[(4,)](named[0], named[1], 100, LOADED=1, STORED=0, BLOCK=32)
    with sanitized(named):
        kernels.double[(1,)](memory[5:100], named[1], 100, LOADED=0, STORED=0, BLOCK=128)
    with pytest.raises(SanitizerError, match="of x_ptr, which program"), sanitized([memory[:64], memory[1:65]]):
        kernels.double[(2,)](memory[:64], memory[1:65], 64, LOADED=0, STORED=0, BLOCK=32)


def test_an_access_counts_for_the_tensor_its_pointer_comes_from():
    memory = torch.arange(128, dtype=torch.float32)
    first, second = memory[:64], memory[64:]
    with pytest.raises(SanitizerError, match="element 64 of x_ptr"), sanitized([first.clone()]):
        kernels.from_either[(1,)](first.clone(), second, torch.zeros(128), 66, BLOCK=128)
    z = torch.zeros(64)
    assert found(lambda: kernels.from_either[(1,)](first, second, z, 64, BLOCK=64)) is None
    assert torch.equal(z, torch.where(torch.arange(64) % 2 == 0, first, second))


def test_empty_tensors_and_masked_lanes_are_no_access():
    empty = torch.zeros(0)
    assert found(lambda: kernels.double[(1,)](empty, empty, 0, LOADED=0, STORED=0, BLOCK=32)) is None
    assert found(lambda: kernels.double[(1,)](empty, empty, 0, LOADED=1, STORED=0, BLOCK=32)).index == 0


def test_descriptors_are_checked():
    x, y = torch.ones(6, 16), torch.zeros(6, 16)
    right = TensorDescriptor(x, [6, 16], [16, 1], [4, 16])
    wrong = TensorDescriptor(x, [8, 16], [16, 1], [4, 16])
    assert found(lambda: kernels.by_descriptor[(2,)](right, y, 96, ROWS=4, N=16)) is None
    assert torch.equal(x, y)
    assert found(lambda: kernels.by_descriptor[(2,)](wrong, y, 96, ROWS=4, N=16)).tensor == "x_desc"


def test_two_programs_that_store_other_values_race():
    def run(width: int) -> SanitizerError | None:
        return found(lambda: kernels.wide_rows[(4,)](torch.ones(4, 32), torch.zeros(4, 32), ROWS=4, N=32, WIDTH=width))

    assert run(32) is None
    race = run(64)
    assert (race.kind, race.tensor, race.index, race.program) == ("nondeterministic", "y_ptr", 32, (1, 0, 0))
    assert "program (0, 0, 0) has stored to" in str(race)


def test_programs_that_store_the_same_bits_do_not_race():
    work, y = torch.zeros(32), torch.zeros(32)
    assert found(lambda: kernels.halves[(4,)](X[:32], work, y, FILLED=32, BLOCK=32)) is None
    assert torch.equal(y, X[:32])


def test_a_load_of_what_another_program_stores_is_a_race():
    def run(ahead: int, programs: int) -> SanitizerError | None:
        n = 25 * programs
        return found(lambda: kernels.in_place[(programs,)](X[:n].clone(), n, AHEAD=ahead, BLOCK=32))

    assert run(0, 4) is None
    assert run(1, 1) is None
    stored_after, far_ahead = run(1, 4), run(32, 4)
    assert (stored_after.kind, stored_after.index) == ("nondeterministic", 32)
    assert far_ahead.kind == "nondeterministic"


def test_adding_without_atomics_is_a_race():
    x = torch.ones(128)

    def run(atomic: bool) -> SanitizerError | None:
        return found(lambda: kernels.total[(4,)](x, torch.zeros(1), ATOMIC=atomic, BLOCK=32))

    assert run(True) is None
    assert run(False).kind == "nondeterministic"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_atomics_of_16_bits_are_atomics(dtype: torch.dtype):
    x, y = torch.ones(128, dtype=dtype), torch.zeros(1, dtype=dtype)
    assert found(lambda: kernels.total[(4,)](x, y, ATOMIC=True, BLOCK=32)) is None
    assert float(y) == 128


def test_atomics_that_acquire_and_release_order_programs():
    """The last to count may read what all stored before they counted, but not where the counter is relaxed."""
    x = torch.arange(128, dtype=torch.float32)

    def run(semantic: str) -> SanitizerError | None:
        part, count, y = torch.zeros(4), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        return found(lambda: kernels.last_one_adds[(4,)](x, part, count, y, SEM=semantic, N=4, BLOCK=32))

    assert run("acq_rel") is None
    assert run("relaxed").tensor == "part_ptr"
    assert run("release") is not None


def test_a_lock_orders_programs():
    x, lock = torch.ones(128), torch.zeros(1, dtype=torch.int32)

    def run(locks: bool) -> SanitizerError | None:
        return found(lambda: kernels.locked[(4,)](x, lock, torch.zeros(32), LOCKS=locks, BLOCK=32))

    assert run(True) is None
    assert run(False).tensor == "y_ptr"


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_lock_orders_programs_that_share_it(groups: int):
    """Locks in one tensor, each for its own rows, as in layer norm's backward pass; another's lock orders nothing."""
    x = torch.arange(48, dtype=torch.float32).reshape(6, 8) + 1

    def add(locks: int, y: torch.Tensor) -> SanitizerError | None:
        lock = torch.zeros(6, dtype=torch.int32)
        return found(lambda: kernels.locked_groups[(6,)](x, lock, y, LOCKS=locks, GROUPS=groups, N=8))

    def add_or_store(locks: int, y: torch.Tensor) -> SanitizerError | None:
        lock, count = torch.zeros(2, 6, dtype=torch.int32)
        return found(lambda: kernels.locked_rows[(6,)](x, y, lock, count, LOCKS=locks, GROUPS=groups, N=8))

    for run, fresh in ((add, torch.zeros), (add_or_store, torch.empty)):
        y = fresh(groups, 8)
        assert run(groups, y) is None
        assert torch.equal(y, torch.stack([x[group::groups].sum(0) for group in range(groups)]))
        assert run(6, fresh(groups, 8)).kind == "nondeterministic"


def test_a_store_that_changes_nothing_races_with_no_load():
    """Whichever comes first; with a store of other bits, a load after a change, or in fresh memory it does."""

    def run(x: float, writer: int, work: torch.Tensor | None = None) -> SanitizerError | None:
        work = torch.zeros(1) if work is None else work
        return found(lambda: kernels.passed_on[(2,)](torch.full((1,), x), work, torch.zeros(1), WRITER=writer))

    for writer in (0, 1):
        assert run(0.0, writer) is None
        assert run(1.0, writer).tensor == "work_ptr"
    for values in ([0.0, 1.0], [1.0, 0.0], [1.0, 1.0, 0.0]):
        race = found(lambda x=values: kernels.last_wins[(len(x),)](torch.tensor(x), torch.zeros(1)))
        assert (race.tensor, race.program) == ("y_ptr", (len(values) - 1, 0, 0))

    def into_fresh_memory() -> None:
        work = torch.empty(1)
        kernels.passed_on[(2,)](torch.full((1,), work.item()), work, torch.zeros(1), WRITER=0)

    assert found(into_fresh_memory).tensor == "work_ptr"


def test_bytes_of_one_word_race_and_neighbours_do_not():
    x = torch.full((1,), 77, dtype=torch.int8)

    def run(first: int, y: torch.Tensor) -> SanitizerError | None:
        return found(lambda: kernels.bytes_and_words[(2,)](x, y, FIRST=first))

    for dtype in (torch.int8, torch.int32):
        assert run(4, torch.zeros(8, dtype=dtype)) is None
        assert run(3, torch.zeros(8, dtype=dtype)).index == 3


def test_memory_that_nobody_has_written_is_not_read():
    def run(make, filled: int) -> SanitizerError | None:
        return found(lambda: kernels.halves[(1,)](torch.ones(32), make(), torch.empty(32), FILLED=filled, BLOCK=32))

    assert run(lambda: torch.empty(32), 32) is None
    unwritten = run(lambda: torch.empty(32), 20)
    assert (unwritten.kind, unwritten.tensor, unwritten.index) == ("unwritten_output", "work_ptr", 20)
    assert run(lambda: torch.ones(32).new_empty(32), 20) is not None
    assert run(lambda: torch.zeros(32), 20) is None
    assert run(lambda: torch.empty(32).fill_(1.0), 20) is None
    assert run(lambda: torch.ones(32).clone(), 20) is None


def test_a_part_that_torch_writes_is_written():
    def half_filled() -> torch.Tensor:
        work = torch.empty(2, 16)
        work[1, ::2] = 5.0
        return work

    error = found(lambda: kernels.halves[(1,)](torch.ones(32), half_filled(), torch.empty(32), FILLED=16, BLOCK=32))
    assert error.index == 17


def test_memory_written_behind_torchs_back_counts_as_written():
    """Bytes that have changed since the allocation were written by somebody, as through NumPy."""

    def filled_by_numpy() -> torch.Tensor:
        work = torch.empty(32)
        work.numpy()[:] = np.where(work.numpy() == 3.0, 4.0, 3.0)
        return work

    error = found(lambda: kernels.halves[(1,)](torch.ones(32), filled_by_numpy(), torch.empty(32), FILLED=1, BLOCK=32))
    assert error is None


def test_an_atomic_sum_into_fresh_memory_is_found():
    x = torch.ones(128)
    error = found(lambda: kernels.total[(4,)](x, torch.empty(1), ATOMIC=True, BLOCK=32))
    assert (error.kind, error.tensor) == ("unwritten_output", "y_ptr")
    assert found(lambda: kernels.total[(4,)](x, torch.empty(1).zero_(), ATOMIC=True, BLOCK=32)) is None


def test_allocations_inside_of_operators_and_of_poisoned_memory_are_watched():
    a = torch.ones(17, 19)
    with sanitized() as sanitizer:
        assert torch.equal(gemm(a, a.T.contiguous()), torch.full((17, 17), 19.0))
        assert sanitizer.launches == 1
    with faithful(), PoisonedMemory("nan"), pytest.raises(SanitizerError, match="nobody"), sanitized():
        kernels.halves[(1,)](torch.ones(32), torch.empty(32), torch.empty(32), FILLED=20, BLOCK=32)
    with faithful(), PoisonedMemory("nan"), sanitized():
        kernels.halves[(1,)](torch.ones(32), torch.empty(32), torch.empty(32), FILLED=32, BLOCK=32)


def test_nothing_is_checked_outside():
    assert run_double(3, 0) is not None
    with faithful():
        kernels.double[(4,)](X, torch.zeros(128), 100, LOADED=3, STORED=0, BLOCK=32)
    with pytest.raises(SanitizerError), faithful(sanitize=True):
        kernels.double[(4,)](X, torch.zeros(128), 100, LOADED=3, STORED=0, BLOCK=32)


def softmax(x: torch.Tensor, *, masked: bool) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        kernels.softmax[(x.shape[0],)](x, y, x.shape[1], MASKED=masked, BLOCK=block)
    return y


SMALL = {"dtype": "float32", "shapes": {"R": [1, 3], "N": [5, 8]}, "examples": 4}


def test_examine_sanitizes_by_itself():
    assert examine(lambda x: softmax(x, masked=True), "softmax", **SMALL).passed
    failure = examine(lambda x: softmax(x, masked=False), "softmax", **SMALL).failure
    assert failure.kind == "crash"
    assert "loads element 5 of x_ptr, out of bounds" in failure.message


def test_a_finding_that_the_kernel_swallows_is_still_one():
    def with_fallback(x: torch.Tensor) -> torch.Tensor:
        try:
            return softmax(x, masked=False)
        except Exception:
            return x.softmax(1)

    assert examine(with_fallback, "softmax", **SMALL).failure.kind == "crash"
