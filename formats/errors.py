"""Errors of number formats and rounding: one class per possible remedy."""

from assay.runtime.errors import AssayError


class UnknownFormat(AssayError, ValueError):
    """No number format has this name: pick one of `assay.formats.FORMATS`."""


class UnknownOption(AssayError, ValueError):
    """An option has an invalid value: use one of those in the message."""


class NotRepresentable(AssayError, ValueError):
    """The format has no such value: round first, or choose a format that has it."""


class InvalidCode(AssayError, ValueError):
    """A bit pattern is wider than the format: mask or unpack the codes first."""


class TooManyValues(AssayError, ValueError):
    """The format has too many values to list: draw bit patterns and `decode` them."""


class WrongDtype(AssayError, TypeError):
    """A tensor has the wrong kind of dtype: convert it first."""
