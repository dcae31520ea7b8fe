"""The definitions of the ops, one family a file.

In: an arithmetic ``xp: Arithmetic[N, Idx]``, tensors of its numbers ``N`` and whole numbers ``Idx``, and options. Out:
the results, in the same numbers. Who calls: `assay.golden.registry` imports every module here when a spec is first
asked for; `assay.golden.evaluation` runs a definition in the arithmetic that is wanted.
"""
