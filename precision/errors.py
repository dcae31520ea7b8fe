"""What can go wrong in the audit of a model, one class per thing that the caller can mend."""

from assay.runtime.errors import AssayError


class UnknownScheme(AssayError, ValueError):
    """A name that stands for no scheme of the audit."""


class WrongShape(AssayError, ValueError):
    """A tensor whose shape a scheme can't take."""


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
    """An assignment names a site that the model lacks, or a scheme that may not stand there."""


class UnknownDevice(AssayError, ValueError):
    """No device of `configs/devices.toml` or engine of `configs/engines.toml` has this name: see the message."""


class CannotExport(AssayError, ValueError):
    """What was asked for has no place in an export format, or a file is in the way: the message says which and why."""
