"""The lowering rules, by family."""

from assay.golden.lowering.rules import (
    comparisons,
    creation,
    elementwise,
    indexing,
    layers,
    linear_algebra,
    pooling,
    products,
    reductions,
    special_functions,
)

__all__ = [
    "comparisons",
    "creation",
    "elementwise",
    "indexing",
    "layers",
    "linear_algebra",
    "pooling",
    "products",
    "reductions",
    "special_functions",
]
