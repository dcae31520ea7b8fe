"""Checking a store: whatever has become of a record is found and named, and a good store is found good."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.golden import define
from assay.golden.errors import StoreError
from assay.golden.inputs.recipe import recipe
from assay.golden.jobs.build import read_plan
from assay.golden.jobs.check import Findings, check
from assay.golden.store import Record, Store, make_record
from tests.golden.jobs.here import SMALL, built

ALL = 1000
EARLIER = Path(__file__).resolve().parents[1] / "vectors" / "store"  # written before stores lost their locks


@pytest.fixture
def store(tmp_path: Path) -> Store:
    built(tmp_path)
    return Store(str(tmp_path))


def named(found: Findings) -> dict[str, str]:
    return {problem.where: problem.message for problem in found.problems}


def test_a_good_store_is_good(store: Store) -> None:
    found = check(store, sample=ALL)
    assert (found.records, found.derived, found.elements, found.problems) == (7, 7, 3 * 6 + 3 * 10 + 4, ())
    assert (found.too_large, found.outdated) == (0, 0)


def test_a_store_of_an_earlier_version_still_counts(tmp_path: Path) -> None:
    shutil.copytree(EARLIER, tmp_path / "store")
    store = Store(str(tmp_path / "store"))
    found = check(store, sample=ALL)
    assert (found.records, found.derived, found.outdated, found.problems) == (3, 3, 0, ())
    (name,) = store.manifests()
    built(tmp_path / "again", read_plan(store, name).campaign.text)
    assert list(Store(str(tmp_path / "again")).keys()) == list(store.keys())


def test_a_sample_is_of_every_spec(store: Store) -> None:
    assert check(store, sample=2).derived == 2
    assert check(store, sample=2).elements in (6 + 4, 10 + 4)
    assert check(store, sample=0).derived == 0


def test_every_flipped_byte_is_named(store: Store) -> None:
    key = next(store.keys())
    path = next(Path(store.url).glob(f"records/*/{key}*"))
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :])
        assert set(named(check(store, sample=0))) == {key}, place
    path.write_bytes(data[:-1])
    assert set(named(check(store, sample=0))) == {key}


def signed(store: Store, change: Callable[[Record], Record]) -> str:
    key = next(key for key in store.keys() if store.get(key).recipe.spec == "softmax")  # noqa: SIM118 - a Store is no dict
    changed = change(store.get(key))
    store.discard(key)
    assert store.put(changed) == key
    assert list(store.damage()) == []
    return key


def with_golden(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Record], Record]:

    def change(record: Record) -> Record:
        golden = record.goldens[0]
        parts = {name: part(getattr(golden, name)) for name, part in changes.items()}
        return replace(record, goldens=(replace(golden, **parts),))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            with_golden(value=lambda x: x * torch.tensor([[1], [1 + 1e-9]], dtype=x.dtype)),
            r"is wrong: y\[1, 0\] is 0\.\d+ ± .*, but mpmath has 0\.\d+",
        ),
        (with_golden(radius=torch.zeros_like), r"is wrong: y\[0, 0\]"),
        (with_golden(value=lambda x: x * torch.nan), r"is wrong: y\[0, 0\] is nan"),
        (with_golden(radius=torch.neg), r"is wrong: y\[0, 0\] has the radius -"),
        (with_golden(value=lambda x: x[:1], radius=lambda x: x[:1]), r"is wrong: y has the shape"),
        (lambda record: replace(record, inputs="0" * 64), "its inputs come out differently on this machine"),
    ],
    ids=["value", "radius", "nan", "negative", "shape", "inputs"],
)
def test_a_wrong_record_with_right_checksums_is_found(
    store: Store, change: Callable[[Record], Record], message: str
) -> None:
    key = signed(store, change)
    problems = check(store, sample=ALL).problems
    assert [problem.where for problem in problems] == [key]
    assert re.search(message, str(problems[0]))


def test_a_missing_record_is_named(store: Store) -> None:
    key = list(store.keys())[3]
    store.discard(key)
    assert named(check(store, sample=0)) == {key: "is missing; build it again"}


def test_an_interrupted_build_is_told_of_once(store: Store) -> None:
    manifest = store.manifest("campaign")
    store.write_manifest("campaign", manifest | {"finished": False, "text": SMALL.replace("seeds = 3", "seeds = 50")})
    message = "its build was interrupted, and 94 records are missing; run it again"
    assert named(check(store, sample=0)) == {"campaign campaign": message}


def test_a_failed_task_is_told_of(store: Store) -> None:
    key = next(store.keys())
    store.discard(key)
    store.write_manifest("campaign", store.manifest("campaign") | {"failed": [{"key": key, "message": "poison"}]})
    assert named(check(store, sample=0)) == {key: "failed when it was built: poison"}


def test_a_damaged_manifest_is_named(store: Store) -> None:
    path = Path(store.url) / "manifests" / "campaign.json"
    good = store.manifest("campaign")
    path.write_bytes(path.read_bytes().replace(b"softmax", b"softmin"))
    assert "manifest campaign" in named(check(store, sample=0))
    store.write_manifest("campaign", {"something": "else"})
    assert "isn't that of a build" in named(check(store, sample=0))["manifest campaign"]
    store.write_manifest("campaign", good | {"text": SMALL.replace("softmax", "softmin")})
    assert "unknown spec 'softmin'" in named(check(store, sample=0))["manifest campaign"]


@pytest.mark.parametrize("name", ["own", "no_such_module:own"])
def test_a_record_of_an_unknown_spec_is_named(store: Store, name: str) -> None:
    record = store.get(next(store.keys()))
    other = store.put(replace(record, recipe=replace(record.recipe, spec=name), versions=dict(record.versions)))
    assert "--ops MODULE" in named(check(store, sample=0))[other]


def test_an_odd_record_is_named_and_the_others_checked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record = store.get(next(store.keys()))
    undrawable = store.put(replace(record, recipe=replace(record.recipe, values={"x": "no such"})))
    with monkeypatch.context() as patch:
        patch.setattr("assay.golden.store.record.FORMAT", 2)
        later = store.put(replace(record, digits=15))
    found = check(store, sample=ALL)
    assert (found.records, found.derived) == (9, 7)
    assert set(named(found)) == {undrawable, later}
    assert "unknown distribution 'no such'" in named(found)[undrawable]
    assert "it has format 2" in named(found)[later]
    assert list(store.damage()) == []


def test_a_spec_of_ones_own_is_derived_whatever_its_name(tmp_path: Path) -> None:
    define("attention_mine", "x[R,N] -> y[R,N]", rows="R", columns="N", public=False)(lambda xp, x: x * x)
    made = Store(str(tmp_path / "own"))
    made.put(make_record(recipe("attention_mine", {"R": 9, "N": 700})))
    found = check(made, sample=ALL)
    assert (found.derived, found.elements, found.problems) == (1, 1, ())


def test_a_record_that_is_removed_meanwhile_is_no_problem(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, derived = list(store.keys()), list[str]()
    real = Store.get

    def get(self: Store, key: str) -> Record:
        derived.append(key)
        if derived.count(key) == 2:
            self.discard(key)
        return real(self, key)

    monkeypatch.setattr(Store, "get", get)
    store._files.delete("manifests/campaign.json")
    found = check(store, sample=ALL)
    assert (found.records, found.derived, found.problems) == (len(keys), 0, ())


def test_an_outdated_record_is_counted(store: Store) -> None:
    record = store.get(next(store.keys()))
    store.put(replace(record, versions={**record.versions, "definition": "0"}))
    found = check(store, sample=ALL)
    assert (found.records, found.derived, found.outdated, found.problems) == (8, 7, 1, ())


def test_where_nothing_is_nothing_is_checked(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is nothing; build a campaign first"):
        check(Store(str(tmp_path / "none")))
