"""Tuning: which configuration of a kernel is the fastest of those that keep its contract.

In: a kernel, and choices: keywords of its own, or configurations of its autotuner. Out: a record of every candidate
with the reason why it was dropped, the front of speed against error, and a winner for each bucket of shapes.
"""

from assay.bench.tuning.choice import Choice, pinned
from assay.bench.tuning.record import tuned

__all__ = ["Choice", "pinned", "tuned"]
