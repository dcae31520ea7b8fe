"""Test each kernel against its contract. Without a GPU they are interpreted; `--assay-device cuda` compiles them."""

import pytest
import torch
from kernels.rms_norm import rms_norm
from kernels.softmax import softmax

from assay.verify import Contract

ROWS = {"R": range(1, 40)}  # one program per row: more rows would only take time


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm(assay, dtype):
    options = {"eps": [1e-6, 1e-5]}
    assay.check(rms_norm, "rmsnorm", dtype=dtype, options=options, shapes=ROWS, contract=Contract(batch_invariant=True))


def test_softmax_agrees_with_torch():
    """Compare with torch, as most kernel tests do. It passes."""
    x = torch.randn(16, 256, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), atol=1e-2, rtol=1e-2)


def test_softmax(assay):
    """Examine the kernel. It fails: assay finds the bug and shrinks it to a row of a few elements."""
    assay.check(softmax, "softmax", dtype="bfloat16", shapes=ROWS)
