"""The errors of `assay.compare`."""

from assay.runtime.errors import AssayError


class RecordingError(AssayError):
    """A run can't be recorded, or a folder isn't a recorded run."""


class CompareError(AssayError):
    """Two recorded runs can't be compared."""
