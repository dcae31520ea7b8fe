"""Two runs of one model: `record` writes what each did, `compare` says who is right and what makes the difference.

In: a running model of PyTorch, and the folders that `record` wrote. Out: a `Report`. Called by users, and by
`assay compare`.
"""

from typing import TYPE_CHECKING

from assay.runtime.modules import lazy

if TYPE_CHECKING:
    from assay.compare.comparing import compare
    from assay.compare.report import Region, Report
    from assay.compare.runs.recording import record

__all__ = ["Region", "Report", "compare", "record"]

__getattr__, __dir__ = lazy(__name__)
