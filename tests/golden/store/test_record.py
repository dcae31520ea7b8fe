"""A record comes back bit for bit, and not one bit of its file can change unseen."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from assay.golden import evaluate
from assay.golden.errors import DamagedRecord, StoreError
from assay.golden.inputs.recipe import Recipe, recipe
from assay.golden.jobs.oracle import derive
from assay.golden.registry import specs
from assay.golden.store import Record, make_record, record_key
from tests.golden.store.sample import SPECIAL, bits, golden_of, record_of
from tests.golden.vectors.freeze import DEFINITIONS
from tests.golden.vectors.freeze import record_of as frozen_record

FROZEN = json.loads(DEFINITIONS.read_text(encoding="utf-8"))
ANY = st.floats(allow_nan=True, allow_infinity=True, width=64)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(ANY | st.sampled_from(SPECIAL), min_size=0, max_size=6),
    st.sampled_from((0.0, 2.0**-60, math.inf)),
    st.booleans(),
    st.sampled_from((None, 1, 30)),
)
def test_a_record_comes_back(values: list[float], radius: float, low: bool, digits: int | None) -> None:
    record = record_of(7, golden_of(values, radius, low), digits)
    again = Record.from_bytes(record.to_bytes(), "it")
    assert [bits(golden) for golden in again.goldens] == [bits(golden) for golden in record.goldens]
    assert again.goldens[0].value.shape == record.goldens[0].value.shape
    assert (again.recipe, again.digits, again.inputs) == (record.recipe, record.digits, record.inputs)
    assert (again.key, again.versions) == (record.key, record.versions)
    assert again.to_bytes() == record.to_bytes()


def test_a_made_record_holds_the_golden() -> None:
    inputs = recipe(
        "attention",
        {"B": 1, "H": 2, "Hkv": 1, "Sq": 2, "Sk": 3, "D": 4, "Dv": 4},
        "bfloat16",
        options={"sinks": True, "return_lse": True, "window": (1, 0)},
        seed=5,
    )
    expected = evaluate(
        "attention", *inputs.tensors(), sinks=inputs.keywords()["sinks"], return_lse=True, window=(1, 0)
    )
    assert isinstance(expected, tuple)
    record = make_record(inputs)
    again = Record.from_bytes(record.to_bytes(), "it")
    assert [bits(golden) for golden in again.goldens] == [bits(golden) for golden in expected]
    assert record.key == record_key(inputs) == again.key


@pytest.mark.parametrize("name", specs())
def test_every_spec_can_be_stored(name: str) -> None:
    for case in FROZEN[name]["cases"]:
        record = frozen_record(Recipe.from_json(json.dumps(case["recipe"])).to_json())
        assert not derive(record).fault
        again = Record.from_bytes(record.to_bytes(), "it")
        for one, other in zip(again.goldens, record.goldens, strict=True):
            for mine, theirs in zip(vars(one).values(), vars(other).values(), strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
                    assert mine.numpy().tobytes() == theirs.contiguous().numpy().tobytes()


def test_digits_are_stored() -> None:
    inputs = recipe("softmax", {"R": 2, "N": 3})
    record = make_record(inputs, 30)
    (golden,) = Record.from_bytes(record.to_bytes(), "it").goldens
    assert golden.low is not None
    assert float(golden.radius.max()) < 1e-30
    assert record.key == record_key(inputs, 30) != record_key(inputs)


def test_every_flipped_bit_is_found() -> None:
    data = record_of(3, golden_of(SPECIAL)).to_bytes()
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            with pytest.raises(DamagedRecord, match=r"^record no\. 3 is damaged: "):
                Record.from_bytes(bytes(changed), "record no. 3")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_record_cut_short_or_longer_is_found(data: st.DataObject) -> None:
    whole = record_of(3).to_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    for changed in (whole[:cut], whole + data.draw(st.binary(min_size=1, max_size=9)), data.draw(st.binary())):
        with pytest.raises(DamagedRecord):
            Record.from_bytes(changed, "it")


def test_the_key_hangs_on_all_that_determines_the_answer() -> None:
    sizes = {"R": 1, "N": 3}
    recipes = [
        recipe("softmax", sizes),
        recipe("softmax", sizes, seed=1),
        recipe("softmax", {"R": 3, "N": 1}),
        recipe("softmax", sizes, "bfloat16"),
        recipe("softmax", sizes, values="wide"),
        recipe("silu", sizes),
    ]
    keys = [record_key(each) for each in recipes] + [record_key(recipes[0], 20), record_key(recipes[0], 30)]
    record = record_of(0)
    for name in ("definition", "inputs", "torch"):
        other = Record(record.recipe, None, record.goldens, {**record.versions, name: "another"}, record.inputs)
        keys.append(other.key)
    assert keys.pop() == keys[0] == record.key
    assert len(set(keys)) == len(keys)


def test_equal_bits_are_stored_once() -> None:
    same, signs = golden_of([1.0, 2.0, 3.0], 0.0), golden_of([0.0, -0.0, 0.0], 0.0)
    assert {name: array.size for name, array in load(record_of(1, same).to_bytes()).items()} == {
        "0.value": 3,
        "0.radius": 1,
    }
    assert load(record_of(1, signs).to_bytes())["0.value"].size == 3


def test_inputs_are_not_stored() -> None:
    assert len(make_record(recipe("gemm", {"M": 1, "K": 10_000, "N": 1})).to_bytes()) < 2048


def test_a_later_format_is_not_called_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.golden.store.record.FORMAT", 2)
    data = record_of(1).to_bytes()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="it has format 2, and this version of assay reads format 1") as caught:
        Record.from_bytes(data, "it")
    assert not isinstance(caught.value, DamagedRecord)


def test_the_metadata_is_readable_json() -> None:
    data = record_of(4, digits=20).to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    content = json.loads(header["__metadata__"]["assay"])
    assert content["recipe"]["spec"] == "softmax"
    assert (content["recipe"]["seed"], content["digits"]) == (4, 20)
    assert {"assay", "torch", "definition", "inputs"} <= set(content["versions"])
