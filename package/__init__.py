"""Numerical verification of machine-learning kernels, and precision audits of models.

Each floor is a package of its own; `import assay` loads none and gives the version.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    """``__version__``, which the installed distribution says, read when accessed."""
    if name != "__version__":
        raise AttributeError(f"module 'assay' has no attribute {name!r}")
    from importlib.metadata import version

    return version("kernel-assay")
