"""Cases: the inputs and the protocol of one call of a kernel.

In: a spec, the settings of an examination, a seed. Out: a `Case`, one line of JSON, and the tensors that it builds, in
guarded memory. Called by `examination` (which cases to try) and `harness` (the tensors themselves).
"""
