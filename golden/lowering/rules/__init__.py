"""The lowering rules, by family."""

from assay.golden.lowering.rules import (
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
