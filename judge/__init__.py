"""Judges solutions of kernel benchmarks, each in a process of its own: numbers, sizes, speed and cheating.

In: the paths of a problem and a solution. Out: a `SolutionVerdict`. Called by `assay.verify.judge` and `assay judge`.
"""

TEMPORARY = "assay-solution-"
"""What the names of the folders begin with that solutions run in."""
