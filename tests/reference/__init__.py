"""The ops in float64, written for plainness from the text of the interface, and apart from what is held against them.

Those are goldens (tests/golden/test_independent.py), the zoo's kernels (tests/verify/test_zoo.py) and the bundled
Triton kernels (tests/kernels).
"""

from collections.abc import Callable

from torch import Tensor

from . import attention, gradients, products, rows

__all__ = ["reference"]


def reference(op: str) -> Callable[..., tuple[Tensor, ...]]:
    """What gives an op's results in float64."""
    if op in rows.FUNCTIONS:
        return lambda x: (rows.FUNCTIONS[op](x.double()),)
    found = [vars(room)[op] for room in (rows, products, gradients, attention) if op in vars(room)]
    assert found, f"{op} has no independent formula: write one in tests/reference"
    formula: Callable[..., tuple[Tensor, ...]] = found[0]
    return formula
