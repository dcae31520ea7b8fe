"""What tests of Triton kernels share."""

from collections.abc import Iterator

import pytest
import torch

from assay.interpreter import faithful


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Triton kernels run in the faithful interpreter; random numbers are those of one seed."""
    torch.manual_seed(0)
    with faithful():
        yield
