"""An offset that wraps around in 32 bits is called so, and no other fault is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.interpreter import SanitizerError, sanitized
from assay.verify import examine
from assay.verify.cases.layouts import place_in_memory
from tests.interpreter import faulty_kernels as kernels
from tests.zoo.conduct import softmax_offsets_of_32_bits, softmax_strides_ignored

WORDS = "an offset that wraps around in 32 bits"


def message(kernel: Any) -> str:
    """What is said of the layouts that a softmax fails in."""
    shapes = {"R": [3, 4], "N": [8]}
    verdict = examine(
        kernel, "softmax", dtype="float32", shapes=shapes, effort="quick", examples=0, layouts=("sliced", "far")
    )
    failure = verdict.aspects["layouts"].failure
    assert failure is not None
    return failure.message


def test_a_wrapped_offset_is_called_so() -> None:
    """Strides are honoured where they are small; a kernel that ignores them all has another fault."""
    assert WORDS in message(softmax_offsets_of_32_bits)
    assert WORDS not in message(softmax_strides_ignored)


def test_the_sanitizer_says_which_element_was_meant() -> None:
    """Of a Triton kernel whose row offsets are of 32 bits; with 64 it loads what it should."""
    pytest.importorskip("triton")
    x, y = place_in_memory(torch.arange(24.0).reshape(3, 8), "far", "cpu").tensor, torch.empty(3, 8)

    def run(wide: bool, x: Tensor = x) -> None:
        with sanitized([x, y]):
            kernels.rows_apart[(3,)](x, y, x.stride(0), N=8, WIDE=wide)

    run(wide=True)
    assert torch.equal(y, x)
    meant = 2 * x.stride(0)
    with pytest.raises(SanitizerError, match=f"element {meant} was meant, whose offset has wrapped around in 32 bits"):
        run(wide=False)
    with pytest.raises(SanitizerError) as near:
        run(wide=False, x=torch.zeros(2, 8))
    assert "wrapped" not in str(near.value)
