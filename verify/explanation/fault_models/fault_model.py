"""A fault model: one known fault, as the smallest alteration of a right definition that has it.

An alteration is of one of these kinds; a fault model may combine them:

| field          | altered                                                                             |
|----------------|-------------------------------------------------------------------------------------|
| `options`      | the options with which the right definition is evaluated                            |
| `inputs`       | the tensors, before the definition                                                  |
| `arithmetic`   | operations of the definition's arithmetic: a mixin, whose ``self.case`` is the call |
| `definition`   | the definition itself                                                               |
| `results`      | the results, after the definition                                                   |
| `store`        | the conversion of results to their dtype                                            |
| `side_effects` | effects of a call besides its results: data kept, read again or overwritten         |

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

    ``specs`` are the names of the ops that can have it, or a predicate on an op (`ops`). An op may also list the fault
    in `Spec.faults`, or exclude it by `Spec.exempt` if none of its results would show it. ``description`` states the
    fault in a kernel author's words, ``origin`` where it was seen (an issue, or "common slip"), and ``needs`` the input
    that reveals it, if not every input does. ``applies`` decides by a call's options and dtypes whether it can have the
    fault. ``contract`` holds the fields of the looser contract that a kernel with the fault keeps, and which then
    explains it; ``like`` are other arithmetics with the same fault, whose errors may be distributed differently.
    ``emulated``: the fault shows in float32 evaluations (overflow, cancellation, an intermediate rounding), and
    explanations compare with these, also of a fault with a looser ``contract``. ``sometimes``: a library decides at
    each call whether it computes so, and calls that keep the contract say nothing. ``crashes``: a kernel with the fault
    raises on some inputs; if any other fault raises, the fault model is wrong and nothing is caught.
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
    sometimes: bool = False
    crashes: bool = False

    @property
    def is_looser(self) -> bool:
        """Return whether explanations judge by the looser contract, not by results of the fault itself."""
        return bool(self.contract) and not self.emulated

    def shows(self, kind: str) -> bool:
        """Return whether a failure of this kind can be the fault's effect."""
        return self.crashes or kind != "crash"

    def loosened(self, contract: Contract) -> Contract:
        """Return the contract with the fields that a kernel with this fault keeps."""
        changed = dict(self.contract)
        if "stages" in changed:
            changed["stages"] = {**(contract.stages or {}), **changed["stages"]}
        return replace(contract, **changed)

    def concerns(self, case: Case) -> bool:
        """Return whether a kernel can have the fault in such a call."""
        return self.is_of(case.definition) and (self.applies is None or self.applies(case))

    def is_of(self, op: Spec) -> bool:
        """Return whether kernels of an op can have the fault."""
        if self.name in op.exempt or self.name in op.faults:
            return self.name in op.faults
        return self.specs(op) if callable(self.specs) else op.name in self.specs


def of_file(fault: Fault, op: Spec) -> FaultModel:
    """Return the fault model of a fault that the op's file defines."""
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
