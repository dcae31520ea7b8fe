"""The definitions of the ops, one family a file.

A definition takes an arithmetic ``xp: Arithmetic[N, Idx]``, tensors of its numbers ``N`` and integers ``Idx``, and
options, and returns numbers of that arithmetic. `assay.golden.registry` imports every module here when a spec is first
used; `assay.golden.evaluation` evaluates a definition in an arithmetic.
"""
