"""Every kind of store keeps records, hands them out whole, and names what is damaged."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from assay.golden.errors import DamagedRecord, MissingRecord, StoreError
from assay.golden.store import Store
from tests.golden.store.sample import bits, file_of, golden_of, read_file, record_of, write_file


def damage(store: Store, key: str, place: int = -1) -> None:
    data = bytearray(read_file(store, file_of(key)))
    data[place] ^= 1
    write_file(store, file_of(key), bytes(data))


def test_what_is_put_is_got(store: Store) -> None:
    records = [record_of(seed) for seed in range(4)]
    assert not store.exists
    assert [record.key in store for record in records] == [False] * 4
    assert list(store.keys()) == []
    assert [store.put(record) for record in records] == [record.key for record in records]
    assert store.exists
    assert list(store.keys()) == sorted(record.key for record in records)
    for record in records:
        assert record.key in store
        assert bits(store.get(record.key).goldens[0]) == bits(record.goldens[0])
    assert list(store.damage()) == []
    assert "no key at all" not in store
    with pytest.raises(MissingRecord, match=f"^record {'0' * 64} in .*: there is none; build the campaign"):
        store.get("0" * 64)


def test_a_valid_record_is_never_written_again(store: Store) -> None:
    first, second = record_of(1, golden_of([1.0])), record_of(1, golden_of([2.0]))
    assert store.put(first) == store.put(second)
    assert store.get(first.key).goldens[0].value.item() == 1.0


def test_a_damaged_record_is_named_and_replaced(store: Store) -> None:
    record, other = record_of(1), record_of(2)
    store.put(record)
    store.put(other)
    damage(store, record.key)
    assert record.key in store
    with pytest.raises(DamagedRecord, match=f"^record {record.key} in .* is damaged: "):
        store.get(record.key)
    assert [key for key, message in store.damage() if key in message] == [record.key]
    store.put(record)
    assert list(store.damage()) == []


def test_a_record_in_the_place_of_another_is_damage(store: Store) -> None:
    record, other = record_of(1), record_of(2)
    store.put(record)
    write_file(store, file_of(other.key), read_file(store, file_of(record.key)))
    with pytest.raises(DamagedRecord, match=f"{other.key} in .* it holds record {record.key}"):
        store.get(other.key)
    assert [key for key, _ in store.damage()] == [other.key]


def test_a_record_can_be_discarded(store: Store) -> None:
    key = store.put(record_of(1))
    store.discard(key)
    store.discard(key)
    assert key not in store
    assert list(store.keys()) == []


def test_files_that_are_no_records_are_left_alone(store: Store) -> None:
    key = store.put(record_of(1))
    folder = file_of(key).rpartition("/")[0]
    for name in (
        f"{folder}/.tmp-1-ab",
        f"{folder}/notes.txt",
        "records/zzz/x.safetensors",
        f"records/{key}.safetensors",
    ):
        write_file(store, name, b"half a rec")
    assert list(store.keys()) == [key]
    assert list(store.damage()) == []


def test_manifests(store: Store) -> None:
    content: dict[str, Any] = {"records": ["ab", "cd"], "count": 2, "share": 0.1, "ν": [None, True, {"x": {}}]}
    store.write_manifest("first", {"old": 1})
    store.write_manifest("first", content)
    store.write_manifest("second.v2", {})
    assert store.manifest("first") == content
    assert list(store.manifests()) == ["first", "second.v2"]
    data = read_file(store, "manifests/first.json")
    for changed in (
        data.replace(b'"count": 2', b'"count": 3'),
        data.replace(b" ", b"\t", 1),
        data[:-9],
        b"[]",
        b"\xff",
    ):
        write_file(store, "manifests/first.json", changed)
        with pytest.raises(DamagedRecord, match=r"^manifest first in .* is damaged: "):
            store.manifest("first")
    with pytest.raises(MissingRecord, match=r"manifest third in .*: there is none; it has: first, second\.v2"):
        store.manifest("third")
    with pytest.raises(StoreError, match="expected a manifest's name of letters"):
        store.write_manifest("../up", {})


def test_a_store_travels_to_another_process(store: Store) -> None:
    key = store.put(record_of(1))
    again = pickle.loads(pickle.dumps(store))
    assert again.get(key).key == key
    assert (again.url, again.options) == (store.url, store.options)


def test_two_stores_see_each_other(store: Store) -> None:
    other = Store(store.url, store.options)
    assert list(other.keys()) == list(store.keys()) == []
    key = store.put(record_of(1))
    assert key in other
    assert list(other.keys()) == [key]
    other.discard(key)
    assert key not in store
    assert list(store.keys()) == []


def test_old_temporary_files_are_swept(new_store: Callable[[str], Store]) -> None:
    import os

    for kind in ("disk", "renaming"):
        store = new_store(kind)
        store.put(record_of(1))
        root = store.url.removeprefix("renaming://")
        for name, age in (("old", 90_000), ("young", 3_600)):
            path = f"{root}/records/.tmp-{name}"
            with open(path, "wb"):
                os.utime(path, (os.path.getmtime(path) - age,) * 2)
        store.sweep()
        assert [os.path.exists(f"{root}/records/.tmp-{name}") for name in ("old", "young")] == [False, True]
