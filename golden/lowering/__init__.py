"""References as definitions: a PyTorch function or module is traced by a dispatch mode and lowered to an arithmetic.

In: a function of tensors, and a text that names its tensors and results. Out: a `Spec`, whose definition runs the
function on tensors of an arithmetic's numbers. Called by `assay.verify` for a reference in place of an op's name, and
by the registry for names that say a reference.

1. `spec` makes the spec and the definition: numbers become tensors, the reference is called, its results numbers;
2. `dispatch` sees every ATen operation of that call: lowering rules compute, views share memory, in-place operations
   write, all else is decomposed by PyTorch until it has a rule;
3. `rules` hold the lowering rules, `rule_table` the table of them, `tensor` the traced tensor;
4. `frameworks` finds out whether a reference is written with JAX (`jaxpr`, `jax_primitives`) or NumPy (`numpy_arrays`);
5. `examples` derives the text from example inputs, where there is none.
"""

from assay.golden.lowering import rules
from assay.golden.lowering.examples import Example, example_of
from assay.golden.lowering.spec import named, reference_spec

__all__ = ["Example", "example_of", "named", "reference_spec", "rules"]
