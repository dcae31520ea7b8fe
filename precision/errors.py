"""Errors of the audit of a model, one class for each thing that the caller can fix."""

from assay.runtime.errors import AssayError


class UnknownScheme(AssayError, ValueError):
    """The name of no scheme of the audit."""


class WrongShape(AssayError, ValueError):
    """A tensor of a shape that a scheme does not support."""


class UnknownModel(AssayError, ValueError):
    """Nothing to audit has this name: give a bundled model, a directory, `package.module:factory` or a file."""


class BadModel(AssayError, ValueError):
    """A model that can't be audited as it is: damaged or incomplete files, weights that aren't finite, no linears."""


class UntrustedModel(AssayError, ValueError):
    """Loading would run code that comes with the model: convert it to safetensors, or pass `trust=True`."""


class BadText(AssayError, ValueError):
    """A text that gives no tokens, or not those of the model: give another text or the model's own tokenizer."""


class NoData(AssayError, ValueError):
    """Calibration data without a sequence."""


class BadAssignment(AssayError, ValueError):
    """An assignment names a site that the model lacks, or a scheme that the site does not support."""


class UnknownDevice(AssayError, ValueError):
    """No device of `configs/devices.toml` or engine of `configs/engines.toml` has this name: see the message."""


class CannotExport(AssayError, ValueError):
    """The export format does not support the request, or a file is in the way: the message says which and why."""
