"""Configurations of serving stacks, one file each, which registers its target.

In: a `Request`. Out: a `Recipe` and its files. Called by `exporting`, for each requested target.
"""

from importlib import import_module
from pkgutil import iter_modules

from assay.precision.export.target import TARGETS

__all__ = ["TARGETS"]

for _module in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
