"""The question that an examination asks, with every setting checked before the kernel is first called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay.golden.inputs.values import format_or_integer
from assay.golden.registry import Spec, spec
from assay.precision.formats import format_named
from assay.verify.calls import Call
from assay.verify.contract import Contract, accumulator
from assay.verify.errors import SettingError
from assay.verify.frameworks import check_dtypes, check_framework, layouts_of
from assay.verify.inputs.cases import Case
from assay.verify.inputs.layouts import LAYOUTS
from assay.verify.inputs.sampler import Sampler
from assay.verify.trial import Bench


@dataclass(frozen=True)
class Question:
    """Does this kernel keep this contract, on the cases that this sampler draws?

    ``refusal`` says why the contract has no answer, where it hasn't.
    """

    kernel: str
    dtype: str
    definition: Spec
    bench: Bench
    sampler: Sampler
    examples: int
    refusal: str


def ask(
    kernel: Callable[..., Any],
    op: str,
    *,
    dtype: str | Mapping[str, str] | None = None,
    out_dtype: str | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    shapes: Mapping[str, Any] | None = None,
    contract: Contract | None = None,
    examples: int = 0,
    seed: int = 0,
    device: str = "cpu",
    framework: str = "torch",
    layouts: Sequence[str] = LAYOUTS,
    timeout: float = 30.0,
) -> Question:
    """The question of `assay.verify.examine`, whose settings these are, or its error: why it can't be asked."""
    definition = spec(op)
    if not callable(kernel):
        raise SettingError(f"kernel: expected a callable, got {type(kernel).__name__}")
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 0:
        raise SettingError(f"examples={examples!r}; expected a whole number of at least 0")
    check_device(device)
    check_framework(framework, device)
    if contract is not None and not isinstance(contract, Contract):
        raise SettingError(f"contract: expected a Contract, e.g. Contract(accumulate='float16'), got {contract!r}")
    for name, setting in (("options", options), ("shapes", shapes)):
        if setting is not None and not isinstance(setting, Mapping):
            raise SettingError(f"{name}: expected a mapping, e.g. {{'N': [64, 128]}}, got {setting!r}")
    if isinstance(layouts, str):
        raise SettingError(f"layouts={layouts!r}; expected a list of layouts")
    contract = contract or Contract()
    if out_dtype is not None:
        out_dtype = format_or_integer(out_dtype)
    sampler = Sampler(
        definition,
        _dtypes(definition, dtype),
        dict(options or {}),
        _sizes(shapes or {}),
        layouts_of(framework, layouts),
        seed,
        out_dtype,
    )
    sampler.check()
    first = sampler.case(lambda values: values[0], style="small")
    contract.model(definition, format_named(next(iter(first.dtypes.values()))))
    results = zip((tensor.name for tensor in first.signature.returns), first.result_dtypes, strict=True)
    check_dtypes(framework, {**first.dtypes, **dict(results)})
    call = Call(kernel, sampler.options, framework, timeout)
    return Question(
        kernel=getattr(kernel, "__qualname__", None) or getattr(kernel, "__name__", None) or repr(kernel),
        dtype=", ".join(dict.fromkeys(first.dtypes.values())),
        definition=definition,
        bench=Bench(call, contract, device),
        sampler=sampler,
        examples=examples,
        refusal=_refusal(contract, first),
    )


def check_device(device: str) -> None:
    """Raise `SettingError` for a device that this machine hasn't got."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"device={device!r} can't be used: {str(error).splitlines()[0]}") from None


def _dtypes(definition: Spec, dtype: str | Mapping[str, str] | None) -> str | dict[str, str]:
    """The dtype as given, its names checked."""
    tensors = definition.signature().tensors
    if dtype is None:
        free = [tensor.name for tensor in tensors if tensor.dtype is None]
        if free:
            raise SettingError(f"dtype: {definition.name} needs the dtype of {', '.join(free)}, e.g. dtype='bfloat16'")
        return "float8_e4m3fn"  # the op fixes every dtype; of those that may vary, fp8's, this is the default
    if not isinstance(dtype, Mapping):
        name = str(dtype).removeprefix("torch.")
        if _is_integer(name) and any(tensor.dtype is None for tensor in tensors):
            raise SettingError(f"dtype={name!r}; {definition.name} takes floating-point numbers")
        return name
    names = {tensor.name for tensor in tensors}
    for name, value in dtype.items():
        if name not in names:
            raise SettingError(f"dtype: {definition.name} has no tensor {name!r}; it has {', '.join(sorted(names))}")
        format_or_integer(str(value).removeprefix("torch."))
    if not dtype:
        raise SettingError("dtype={}; expected a name, or a name for each tensor")
    return {name: str(value).removeprefix("torch.") for name, value in dtype.items()}


def _is_integer(dtype: str) -> bool:
    return format_or_integer(dtype) in ("int32", "int64") or format_named(dtype).kind == "integer"


def _sizes(shapes: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Sizes as sequences; one whole number stands for itself."""
    return {symbol: [sizes] if isinstance(sizes, int) else sizes for symbol, sizes in shapes.items()}


def _refusal(contract: Contract, case: Case) -> str:
    """Why the contract says nothing about this case, if so."""
    takes = accumulator(contract.accumulate).inputs
    first = next(iter(case.dtypes.values()))
    if takes and first not in takes:
        return (
            f"the accumulator {contract.accumulate!r} takes {', '.join(takes)}; the contract says nothing about {first}"
        )
    return ""
