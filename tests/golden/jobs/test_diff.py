"""Two stores told apart: what changed, by how much, and whether one of them must be wrong."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.golden.errors import StoreError
from assay.golden.evaluation.golden import Golden
from assay.golden.jobs.diff import (
    CONTRADICTION,
    DAMAGED,
    DEFINITION,
    DIGITS,
    FORMAT,
    LIBRARIES,
    ONLY_A,
    ONLY_B,
    VALUES,
    compare,
    differences,
)
from assay.golden.store import Record, Store
from tests.golden.jobs.here import SMALL, built


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Store, Store]:
    for name in ("a", "b"):
        built(tmp_path / name)
    return Store(str(tmp_path / "a")), Store(str(tmp_path / "b"))


def kinds(a: Store, b: Store) -> dict[str, int]:
    return dict(Counter(difference.kind for difference in differences(a, b)))


def change(store: Store, how: Callable[[Record], Record]) -> None:
    keys = store.keys()
    record = next(record for record in map(store.get, keys) if record.recipe.spec == "softmax")
    store.discard(record.key)
    store.put(how(record))


def moved(record: Record, radii: float) -> Record:
    golden = record.goldens[0]
    value = golden.value.clone()
    value[1, 2] += radii * golden.radius[1, 2]
    return replace(record, goldens=(replace(golden, value=value),))


def test_equal_stores_have_no_difference(stores: tuple[Store, Store]) -> None:
    assert kinds(*stores) == {}


def test_values_may_differ_within_their_radii(stores: tuple[Store, Store]) -> None:
    change(stores[1], lambda record: moved(record, 1.5))
    (found,) = differences(*stores)
    assert found.kind == VALUES
    assert found.message.startswith("largest change at [1, 2]: ")
    assert re.search(r"ulps of float64, 0\.7\d+ times both radii together$", found.message)


def test_balls_that_do_not_meet_contradict_each_other(stores: tuple[Store, Store]) -> None:
    change(stores[1], lambda record: moved(record, 2.5))
    (found,) = differences(*stores)
    assert found.kind == CONTRADICTION
    assert re.search(r"1\.2\d+ times both radii together; the balls don't meet, so one of them is", found.message)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        (lambda r: replace(r, versions={**r.versions, "torch": "9"}), LIBRARIES, "torch 2."),
        (lambda r: replace(moved(r, 9), versions={**r.versions, "definition": "7"}), DEFINITION, "definition 1 -> 7"),
        (lambda r: replace(r, digits=15), DIGITS, "digits float64 -> 15"),
        (lambda r: replace(moved(r, 99.0), digits=15), CONTRADICTION, "digits float64 -> 15"),
        (lambda r: replace(r, inputs="0" * 64), CONTRADICTION, "the inputs came out differently"),
    ],
    ids=["libraries", "definition", "digits", "digits and value", "inputs"],
)
def test_what_is_behind_a_difference_is_told(
    stores: tuple[Store, Store], how: Callable[[Record], Record], kind: str, message: str
) -> None:
    change(stores[1], how)
    (found,) = differences(*stores)
    assert (found.kind, message in found.message) == (kind, True)


def test_records_of_one_store_only_are_listed(tmp_path: Path) -> None:
    built(tmp_path / "a", SMALL.replace("seeds = 3", "seeds = [0, 1]"))
    built(tmp_path / "b", SMALL.replace("seeds = 3", "seeds = [1, 2, 3]"))
    assert kinds(Store(str(tmp_path / "a")), Store(str(tmp_path / "b"))) == {ONLY_A: 2, ONLY_B: 4}


@pytest.mark.parametrize("side", [0, 1])
def test_a_damaged_record_is_named(stores: tuple[Store, Store], side: int) -> None:
    path = next(Path(stores[side].url).glob("records/*/*"))
    path.write_bytes(path.read_bytes()[:-1])
    assert kinds(*stores) == {DAMAGED: 1}
    stores[1 - side].discard(path.name.partition(".")[0])
    assert kinds(*stores) == {DAMAGED: 1}


def golden(value: float, radius: float, low: float = 0.0) -> Golden:
    one, size, rest = (torch.tensor([number], dtype=torch.float64) for number in (value, radius, low))
    return Golden(one, size, rest)


@pytest.mark.parametrize(
    ("one", "two", "meets"),
    [
        (golden(1.0, 0.0), golden(1.0, 0.0), True),
        (golden(1.0, 0.0), golden(1.0 + 2**-52, 0.0), False),
        (golden(1.0, 0.1), golden(1.2, 0.11), True),
        (golden(1.0, 0.1), golden(1.2, 0.09), False),
        (golden(1.0, 1e-32, 1e-20), golden(1.0, 1e-32, 1.1e-20), False),
        (golden(1.0, 1e-16), golden(1.0, 1e-32, 5e-17), True),
        (golden(torch.nan, 0.0), golden(torch.nan, 0.0), True),
        (golden(torch.nan, 0.0), golden(1.0, 0.5), False),
        (golden(torch.inf, 0.0), golden(torch.inf, 0.0), True),
        (golden(torch.inf, 0.0), golden(-torch.inf, 0.0), False),
        (golden(1.0, torch.inf), golden(5.0, 0.0), True),
    ],
)
def test_whether_two_balls_meet(one: Golden, two: Golden, meets: bool) -> None:
    assert compare(one, two)[1] is meets
    assert compare(two, one)[1] is meets


def test_a_store_that_is_not_there_has_no_differences(stores: tuple[Store, Store], tmp_path: Path) -> None:
    none = Store(str(tmp_path / "none"))
    for pair in ((stores[0], none), (none, stores[0])):
        with pytest.raises(StoreError, match="there is nothing"):
            list(differences(*pair))


def test_a_record_of_another_format_is_named(stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = stores[1].keys()
    record = stores[1].get(next(keys))
    stores[1].discard(record.key)
    with monkeypatch.context() as patch:
        patch.setattr("assay.golden.store.record.FORMAT", 2)
        stores[1].put(record)
    assert kinds(*stores) == {FORMAT: 1}
