"""Problems of kernel benchmarks: a reference, inputs and sizes, read from the files of each format.

In: a problem's path, and a solution's. Out: a `Problem` and an `Answer`. Called by `assay.judge`.
"""
