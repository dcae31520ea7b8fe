"""Faulty kernels that no fault model was made of: whole, in chunks, with running sums, in Triton.

Each has one fault, and says which fault models it is, if any. Explanations are measured on them
(benchmarks/verify/explanations.py, tests/verify/test_explain_others.py).
"""

from importlib.util import find_spec

from .attention import ATTENTION
from .entry import Other
from .later import LATER
from .pointwise import POINTWISE
from .products import PRODUCTS
from .rows import ROWS

if find_spec("triton"):
    from .interpreted import INTERPRETED
else:  # pragma: no cover
    INTERPRETED = ()

OTHERS: tuple[Other, ...] = (*ROWS, *POINTWISE, *PRODUCTS, *ATTENTION, *INTERPRETED, *LATER)

__all__ = ["OTHERS", "Other"]
