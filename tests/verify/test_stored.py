"""Stored goldens judge kernels: their cases are tried, and a store that holds something else is found out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.golden.errors import StoreError
from assay.golden.inputs.recipe import recipe
from assay.golden.store import Store, make_record
from assay.kernels.libraries.pytorch import softmax
from assay.verify import examine

from .examined import failure_of, quick

SIZES = {"R": 3, "N": 977}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Softmax in two dtypes, and another op."""
    made = Store(str(tmp_path / "store"))
    for dtype in ("float32", "bfloat16"):
        made.put(make_record(recipe("softmax", SIZES, dtype, values="large_mean", seed=5)))
    made.put(make_record(recipe("softmax", SIZES, "float32", seed=6), digits=25))
    made.put(make_record(recipe("silu", SIZES, "float32")))
    return made


def test_the_records_of_the_op_and_dtype_are_tried(store: Store) -> None:
    for count, settings in ((2, {}), (0, {"dtype": "float16"}), (0, {"shapes": {"N": [64]}})):
        verdict = quick(softmax, **{"goldens": store.url, **settings})
        assert verdict.passed
        assert verdict.phases["stored"] == count


def test_a_fault_that_only_a_stored_case_shows_is_found(store: Store) -> None:
    """A kernel that is wrong at 977 columns only, which nothing else draws and no constant names, fails."""
    kernel = lambda x: softmax(x) * (1.001 if 3 * x.shape[-1] == 2931 else 1.0)  # noqa: E731
    assert quick(kernel).passed
    assert failure_of(quick(kernel, goldens=store.url)).case.sizes == SIZES


def test_a_golden_that_is_not_the_definitions_is_refused(store: Store, tmp_path: Path) -> None:
    """A record that holds a kernel's output, however well sealed, is no golden: one line says so."""
    poisoned = Store(str(tmp_path / "poisoned"))
    record = make_record(recipe("softmax", SIZES, "float32"))
    golden = record.goldens[0]
    poisoned.put(replace(record, goldens=(replace(golden, value=golden.value * 1.001),)))
    with pytest.raises(StoreError, match=r"a stored golden is not what the definition gives; run assay golden check"):
        examine(softmax, "softmax", dtype="float32", effort="quick", examples=0, goldens=poisoned.url)


def examined(address: str) -> int:
    """How many stored cases an honest kernel passes."""
    verdict = quick(lambda x, weight: rmsnorm(x, weight), "rmsnorm", goldens=address)
    assert verdict.passed
    return verdict.phases["stored"]


def rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()).to(x.dtype)


def test_records_that_no_longer_count_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier definition gave, or one without an option added since, or another format holds, judges nobody."""
    made = Store(str(tmp_path / "store"))
    record = make_record(recipe("rmsnorm", SIZES, "float32"))
    golden = record.goldens[0]
    wrong = replace(record, goldens=(replace(golden, value=golden.value + 1.0),))
    made.put(replace(wrong, versions={**record.versions, "definition": "0"}))
    lacking = {name: value for name, value in record.recipe.options.items() if name != "offset"}
    made.put(replace(wrong, recipe=replace(record.recipe, options=lacking)))
    with monkeypatch.context() as patch:
        patch.setattr("assay.golden.store.record.FORMAT", 2)
        made.put(replace(wrong, digits=15))
    assert len(list(made.keys())) == 3
    assert examined(made.url) == 0
    made.put(record)
    assert examined(made.url) == 1, "a record that was put since the store was last read is not seen"


def test_a_record_of_other_inputs_is_refused(tmp_path: Path) -> None:
    made = Store(str(tmp_path / "store"))
    made.put(replace(make_record(recipe("rmsnorm", SIZES, "float32")), inputs="0" * 64))
    with pytest.raises(StoreError, match="its inputs come out differently on this machine"):
        examined(made.url)


def test_a_mistyped_store_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is nothing"):
        examined(str(tmp_path / "none"))
