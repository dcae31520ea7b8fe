"""Any reference: a PyTorch function or module, evaluated in every arithmetic as an op's definition is.

In: a function of tensors, and a text of the tensors that it takes and gives. Out: a `Spec`, whose definition runs
the function on tensors that hold an arithmetic's numbers. Called by `assay.verify` where it is given a reference in
place of an op's name, and by the registry for names that say a reference.

1. `spec` makes the spec, and the definition: numbers become tensors, the reference is called, its results numbers;
2. `evaluation` sees every ATen operation of that call: lowering rules compute, views share memory, in-place
   operations write, all else is decomposed by PyTorch until it has a rule;
3. `rules` are the table: what each operation is in terms of the arithmetic; `tensor` is the tensor;
4. `examples` makes the text of the tensors of example inputs, where there is none.
"""

from assay.golden.lowering import rules
from assay.golden.lowering.examples import Example, example_of
from assay.golden.lowering.spec import named, reference_spec

__all__ = ["Example", "example_of", "named", "reference_spec", "rules"]
