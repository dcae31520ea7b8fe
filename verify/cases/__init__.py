"""Cases: what one call of a kernel is given.

In: a spec, the settings of an examination, a seed. Out: a `Case`, one line of JSON, and the tensors that it builds, in
guarded memory. Called by `examination` (which cases to try) and `execution` (the tensors themselves).
"""
