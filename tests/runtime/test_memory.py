"""When freed memory goes back to the system."""

from types import SimpleNamespace

import pytest

from assay.runtime import memory


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the process is said to have in memory, which returning it cuts to 10."""
    now = [10]

    def malloc_trim(_pad: int) -> None:
        now[0] = 10

    monkeypatch.setattr(memory, "_LIBC", SimpleNamespace(malloc_trim=malloc_trim))
    monkeypatch.setattr(memory, "_resident", lambda: now[0])
    monkeypatch.setattr(memory._Heap, "resident", 0)
    monkeypatch.setattr(memory._Heap, "most", 0)
    return now


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (((40, 20, 10), (60, 20, 10), (60, 20, 10)), "returned if the process has grown, to the most it ever had"),
        (((60, 20, 10), (59, 20, 59), (70, 70, 70)), "kept below the former peak, and after little growth"),
        (((60, 0, 10), (12, 0, 10)), "always returned without a limit of growth"),
    ],
)
def test_freed_memory_is_returned_after_growth(
    resident: list[int], steps: tuple[tuple[int, int, int], ...], why: str
) -> None:
    """Each step has a resident size, the growth that is allowed, and the size afterwards."""
    for size, grown, left in steps:
        resident[0] = size
        memory.trim_heap(grown)
        assert resident[0] == left, why
