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


def has(resident: list[int], size: int, grown: int) -> int:
    """What is left of so much."""
    resident[0] = size
    memory.trim_heap(grown)
    return resident[0]


def test_freed_memory_goes_back_where_a_process_has_grown_to_the_most_it_ever_had(resident: list[int]) -> None:
    assert has(resident, 40, grown=20) == 10
    assert has(resident, 60, grown=20) == 10
    assert has(resident, 60, grown=20) == 10


def test_freed_memory_stays_where_a_peak_is_as_it_is_or_little_was_taken(resident: list[int]) -> None:
    assert has(resident, 60, grown=20) == 10
    assert has(resident, 59, grown=20) == 59
    assert has(resident, 70, grown=70) == 70


def test_freed_memory_goes_back_whenever_that_is_asked_for(resident: list[int]) -> None:
    assert has(resident, 60, grown=0) == 10
    assert has(resident, 12, grown=0) == 10
