"""References as people write them, each with honest kernels in styles of their own and with faulty ones."""

from .entry import Case
from .rows import ACTIVATIONS, LOSSES, NORMS, REDUCTIONS
from .shapes import PRODUCTS, SEQUENCES, WINDOWS

CASES: tuple[Case, ...] = (*ACTIVATIONS, *NORMS, *REDUCTIONS, *LOSSES, *PRODUCTS, *WINDOWS, *SEQUENCES)
