"""The rows of the table, by family."""

from assay.golden.reference.rows import (
    activations,
    attention,
    choices,
    creation,
    elementwise,
    indexing,
    linear_algebra,
    logic,
    losses,
    norms,
    polynomials,
    pooling,
    products,
    reductions,
    resampling,
    special,
)

__all__ = [
    "activations",
    "attention",
    "choices",
    "creation",
    "elementwise",
    "indexing",
    "linear_algebra",
    "logic",
    "losses",
    "norms",
    "polynomials",
    "pooling",
    "products",
    "reductions",
    "resampling",
    "special",
]
