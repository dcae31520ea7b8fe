"""References as people write them, each with honest kernels in styles of their own and with faulty ones."""

from . import activations, losses, norms, products, reductions, sequences, windows
from .entry import Case

CASES: tuple[Case, ...] = tuple(
    case for module in (activations, norms, reductions, losses, products, windows, sequences) for case in module.CASES
)
