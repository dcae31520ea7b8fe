"""Certified goldens: for every op the exact function of the tensors as stored, with a radius that holds it.

``evaluate(op, *tensors, **options)`` gives a `Golden`, ``specs()`` the names of the ops, ``spec(name)`` one of them,
and ``admissible(op, *tensors, chosen=..., **options)`` tells which of a kernel's choices are right.

Ops of one's own: ``define_torch`` registers a PyTorch function as one, ``define`` a definition over any arithmetic,
with options that ``choice``, ``flag`` and ``number`` make (or an `Option`), its `Reduction`, and faults that its
kernels have (`Fault`); docs/adding-an-op.md is the guide.
"""

from typing import TYPE_CHECKING

from assay.runtime.modules import lazy

if TYPE_CHECKING:
    from assay.golden.errors import DefinitionError, InputError, OptionError, ShapeError, UnknownSpec
    from assay.golden.evaluation import admissible, evaluate
    from assay.golden.evaluation.golden import Golden
    from assay.golden.lowering.spec import define_torch
    from assay.golden.options import Option, choice, flag, number
    from assay.golden.registry import Fault, Reduction, Spec, define, spec, specs

__all__ = [
    "DefinitionError",
    "Fault",
    "Golden",
    "InputError",
    "Option",
    "OptionError",
    "Reduction",
    "ShapeError",
    "Spec",
    "UnknownSpec",
    "admissible",
    "choice",
    "define",
    "define_torch",
    "evaluate",
    "flag",
    "number",
    "spec",
    "specs",
]

__getattr__, __dir__ = lazy(__name__)
