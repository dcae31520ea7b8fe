"""Errors of number formats and rounding: one class per thing that the caller can do about it."""

from assay.runtime.errors import AssayError


class UnknownFormat(AssayError, ValueError):
    """No number format has this name: pick one of `assay.formats.FORMATS`."""


class UnknownOption(AssayError, ValueError):
    """An option has none of its possible values: pick one of those listed in the message."""


class NotRepresentable(AssayError, ValueError):
    """The format has no such value: round first, or choose a format that has it."""


class InvalidCode(AssayError, ValueError):
    """A bit pattern is wider than the format: mask or unpack the codes first."""


class TooManyValues(AssayError, ValueError):
    """The format has too many values to list: draw bit patterns and `decode` them."""


class WrongDtype(AssayError, TypeError):
    """A tensor has another kind of dtype than is needed: convert it first."""
