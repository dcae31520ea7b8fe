"""A fault model: one known fault, as the smallest alteration of a right definition that has it.

An alteration is of one of these kinds; a fault model may combine them:

| field        | altered                                                                                    |
|--------------|--------------------------------------------------------------------------------------------|
| `options` | the options that the right definition is evaluated with                                    |
| `inputs` | the tensors, before it                                                                     |
| `arithmetic` | operations of the arithmetic that it is written in: a mixin, whose ``self.case`` is the call |
| `definition` | the definition itself                                                                      |
| `results` | the results, after it                                                                      |
| `store` | how results become numbers of their dtype                                                  |
| `side_effects` | what a call does beside its mathematics: what it keeps, reads again or overwrites          |

All but the last two are written in the operations of `assay.golden.arithmetic`, so that a fault has a radius under a
contract as the right definition has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from assay.golden.registry import Fault, Spec
from assay.runtime.errors import SettingError, unknown
from assay.verify.cases.case import Case
from assay.verify.contract import Contract

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Kernel = Callable[..., Any]

FAMILIES = (
    "mask",
    "rescale",
    "tail",
    "scale",
    "heads",
    "formula",
    "packing",
    "routing",
    "loss",
    "accumulator",
    "precision",
    "store",
    "special values",
    "unwritten",
    "layout",
    "state",
)


@dataclass(frozen=True)
class FaultModel:
    """A known fault.

    ``specs`` are the names of the ops that it is one of, or tell it by an op's facts (`ops`); so do ops themselves,
    which name it among their `Spec.faults`, or, where none of their results would show it, in `Spec.exempt`.
    ``description`` says what is wrong in the words of who writes kernels, ``origin`` where it was seen (an issue, or
    "common slip"), ``needs`` the input that reveals it where not any does. ``applies`` tells by the options and dtypes
    of a call whether it can have the fault. ``contract`` are the fields of the looser contract that a kernel with the
    fault does keep, which then is what explains it; ``like`` are other arithmetics with the same fault, whose errors
    may be spread otherwise. ``emulated``: the fault shows in what a float32 evaluation gives (overflow, cancellation, a
    rounding on the way), so that explanations compare with that. ``crashes``: on some inputs
    a kernel with the fault raises; of any other fault that is a mistake in the fault itself, and catches nothing.
    """

    name: str
    family: str
    description: str
    specs: tuple[str, ...] | Callable[[Spec], bool]
    origin: str = "common slip"
    needs: str = "any ordinary input"
    applies: Callable[[Case], bool] | None = None
    options: Callable[[dict[str, Any], Case], dict[str, Any]] | None = None
    inputs: Callable[[Tensors, Case], Tensors] | None = None
    arithmetic: type | None = None
    definition: Callable[..., Any] | None = None
    results: Callable[[Any, tuple[Any, ...], Case], tuple[Any, ...]] | None = None
    store: Callable[[Tensor, str], Tensor] | None = None
    side_effects: Callable[[Kernel], Kernel] | None = None
    contract: Mapping[str, Any] = field(default_factory=dict)
    like: tuple[type, ...] = ()
    emulated: bool = False
    crashes: bool = False

    def shows(self, kind: str) -> bool:
        """Whether a failure of this kind is the fault's own."""
        return self.crashes or kind != "crash"

    def loosened(self, contract: Contract) -> Contract:
        """The contract with the fields that a kernel with this fault keeps instead."""
        changed = dict(self.contract)
        if "stages" in changed:
            changed["stages"] = {**(contract.stages or {}), **changed["stages"]}
        return replace(contract, **changed)

    def concerns(self, case: Case) -> bool:
        """Whether a kernel called like this can have the fault."""
        return self.is_of(case.definition) and (self.applies is None or self.applies(case))

    def is_of(self, op: Spec) -> bool:
        """Whether kernels of an op can have the fault."""
        if self.name in op.exempt or self.name in op.faults:
            return self.name in op.faults
        return self.specs(op) if callable(self.specs) else op.name in self.specs


def of_file(fault: Fault, op: Spec) -> FaultModel:
    """The fault model that stands in the file of its op."""
    if fault.family not in FAMILIES:
        raise SettingError(f"{op.name}: fault {fault.name!r}: {unknown('family', fault.family, FAMILIES)}")
    return FaultModel(
        fault.name,
        fault.family,
        fault.description,
        (op.name,),
        fault.origin,
        fault.needs,
        definition=fault.definition,
        emulated=fault.emulated,
    )
