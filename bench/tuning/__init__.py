"""Finds the fastest configuration of a kernel that keeps its contract: `assay tune`.

In: a kernel, and choices: values of its keywords, or configurations of its autotuner. Out: a record of every candidate
with the reason why it was dropped, the Pareto front of speed and error, and a winner for each bucket of shapes.
"""

from assay.bench.tuning.choice import Choice, pinned
from assay.bench.tuning.record import tuned

__all__ = ["Choice", "pinned", "tuned"]
