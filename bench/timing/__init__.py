"""Times kernels and judges timed calls, so that a kernel that was wrong while it was timed has no time."""

from assay.bench.timing.timed import Competitor, Timing, timed_and_judged

__all__ = ["Competitor", "Timing", "timed_and_judged"]
