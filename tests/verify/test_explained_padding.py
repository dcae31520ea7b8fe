"""Padding that a softmax counts, and loads beyond a row: the likely cause is named where a counterfactual shows it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.verify import examine
from assay.verify.explanation.explain import TAIL

from .unmasked_loads import clamped_softmax, masked_softmax, unmasked_softmax

ASKED: dict[str, Any] = {"dtype": "bfloat16", "effort": "quick", "layouts": ["contiguous"]}
WIDTHS: dict[str, Callable[[int], int]] = {
    "softmax_padding_to_power_of_two": lambda columns: 1 << max(columns - 1, 0).bit_length(),
    "softmax_padding_not_masked": lambda columns: -(-columns // 16) * 16,
    "softmax_padding_to_64": lambda columns: -(-columns // 64) * 64,
    "softmax_padding_to_128": lambda columns: -(-columns // 128) * 128,
}


@pytest.mark.parametrize("name", WIDTHS)
def test_padding_that_is_counted_is_named_with_its_width(name: str) -> None:
    """A softmax whose rows are loaded with zeros beyond their end, to a power of two or to whole tiles.

    Of whole tiles of 128 the numbers may be broken: a row of 64, at which a fault of ragged sizes is gone, is padded.
    """

    def softmax(x: Tensor) -> Tensor:
        columns = x.shape[-1]
        row = torch.nn.functional.pad(x.float(), (0, WIDTHS[name](columns) - columns))
        return torch.softmax(row, -1)[..., :columns].to(x.dtype)

    aspects = examine(softmax, "softmax", dtype="bfloat16", effort="quick").aspects
    aspect = aspects["numbers" if WIDTHS[name](64) > 64 and aspects["shapes"].status == "kept" else "shapes"]
    assert aspect.status == "broken"
    assert [found.name for found in aspect.explanations] == [name]


def test_padding_of_another_value_is_not_taken_for_zeros() -> None:
    """Ones beyond the end are none of these faults."""

    def softmax(x: Tensor) -> Tensor:
        row = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 64), value=1.0)
        return torch.softmax(row, -1)[..., : x.shape[-1]].to(x.dtype)

    aspect = examine(softmax, "softmax", dtype="bfloat16", effort="quick").aspects["shapes"]
    assert aspect.status == "broken"
    assert not [found for found in aspect.explanations if "padding" in found.name]


def test_a_load_without_a_mask_is_named_with_its_dimension() -> None:
    """At a whole tile of columns nothing is loaded out of bounds, and at one more it is again."""
    assert examine(masked_softmax, "softmax", **ASKED, examples=2, shapes={"R": [1, 3]}).outcome == "PASS"
    aspect = examine(unmasked_softmax, "softmax", **ASKED, every_aspect=False).aspects["shapes"]
    assert aspect.failure is not None
    assert "out of bounds" in aspect.failure.message
    (found,) = aspect.explanations
    assert found.name == TAIL
    assert found.description.startswith("a load is not masked along N: at N=")


def test_a_load_that_no_size_mends_is_not_put_down_to_a_tail() -> None:
    """One element too many at any size has no such cause."""
    verdict = examine(clamped_softmax, "softmax", **ASKED, every_aspect=False)
    assert verdict.failure is not None
    assert "out of bounds" in verdict.failure.message
    assert not [found for aspect in verdict.aspects.values() for found in aspect.explanations]
