"""References that are written with JAX.

In: a function of JAX arrays. Out: the same function of torch tensors. `jaxpr` runs its jaxpr, equation by equation;
`primitives`, `gather` and `windows` are the table of what each primitive is in PyTorch. Called by `frameworks`.
"""

from assay.golden.lowering.jax import gather, windows  # their rules
from assay.golden.lowering.jax.jaxpr import from_jax

__all__ = ["from_jax", "gather", "windows"]
