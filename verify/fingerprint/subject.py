"""The kernel under the probes: it is called with chosen numbers and returns float64 results."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from assay.formats.format import Format, format_named
from assay.golden.errors import ShapeError
from assay.golden.inputs.values import stored
from assay.verify.cases.case import Case, Inputs
from assay.verify.cases.layouts import place_in_memory
from assay.verify.examination.plan import Plan
from assay.verify.findings import Failure

Tensor = torch.Tensor

_BY_PRECISION = {8: "bfloat16", 11: "float16", 24: "float32", 53: "float64"}


class Unseen(Exception):
    """Raised if a probe can't be made with this kernel; the message says why."""


def in_bits(bits: int, *, is_operand: bool = False) -> str:
    """Return a precision in words, with the format that has it; 11 bits in operands are tf32's."""
    name = "tf32" if is_operand and bits == 11 else _BY_PRECISION.get(bits)
    return f"{bits} bits" + (f" ({name})" if name else "")


@dataclass(frozen=True)
class Subject:
    """A kernel as an implementation of a spec, with one value for each option."""

    plan: Plan

    @property
    def op(self) -> str:
        return self.plan.definition.name

    @property
    def options(self) -> dict[str, Any]:
        """Return all options, including defaults."""
        return self.plan.sampler.option_sets()[0]

    def case(self, sizes: Mapping[str, int]) -> Case:
        """Return a case of these sizes; the probe supplies the values."""
        sampler = self.plan.sampler
        plain = sampler.case(lambda values: values[0], style="small")
        whole = Case(self.op, dict(sizes), plain.dtypes, self.options, out_dtype=sampler.out_dtype)
        missing = [symbol for symbol in whole.signature.symbols if symbol not in sizes]
        return whole if not missing else self.case({**sizes, **dict.fromkeys(missing, 1)})

    def format_of(self, name: str) -> Format:
        """Return the format in which a tensor is stored."""
        return format_named(self.case({}).dtypes[name])

    @property
    def out(self) -> Format:
        """Return the format of the first result."""
        return format_named(self.case({}).result_dtypes[0])

    def call(self, sizes: Mapping[str, int], values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the float64 results for float64 ``values`` by tensor; other tensors are ones (scales) or zeros.

        Raise `Unseen` if the kernel fails, or if the tensor's format can't represent a value.
        """
        case = self.case(sizes)
        guarded = {}
        for tensor in case.signature.tensors:
            shape, dtype = case.shape(tensor), case.dtypes[tensor.name]
            wanted = values.get(tensor.name)
            if wanted is None:
                fill = 1.0 if tensor.role in ("scale", "weight") else 0.0
                wanted = torch.full(shape, fill, dtype=torch.float64)
            held = stored(wanted.double(), dtype)
            same = (held.double() == wanted) | wanted.isnan()
            if not bool(same.all()):
                raise Unseen(f"{dtype} has no {float(wanted[~same][0]):g}, which the probe needs in {tensor.name}")
            guarded[tensor.name] = place_in_memory(held, "contiguous", self.plan.harness.device)
        return self.run(case, Inputs(guarded, tuple(t.name for t in case.signature.tensors if t.keyword)))

    def run(self, case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return the float64 results of a call with tensors in memory."""
        try:
            outputs = self.plan.harness.call(case, inputs)
        except ShapeError as error:
            raise Unseen(str(error)) from None
        if isinstance(outputs, Failure):
            raise Unseen(f"the kernel fails on a probe ({outputs.kind}: {outputs.message})")
        return tuple(output.detach().cpu().double() for output in outputs)
