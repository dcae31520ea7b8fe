"""Timing kernels: every timed call may be judged, so no time is told of a kernel that was wrong while it was timed."""

from assay.bench.timing.timed import Competitor, Timing, timed_and_judged

__all__ = ["Competitor", "Timing", "timed_and_judged"]
