"""Judge one region of one run: on the inputs that it had, against the definition in ball arithmetic.

Two levels. *Proved*: an element is outside of what every computation that keeps the contract can give. *Typical*: the
region's errors are many times those of the same definition run by PyTorch in the run's own dtypes; worst-case bounds of
16-bit composites are too wide for most faults, and what rounding does on average is known much more closely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assay.compare import definitions
from assay.compare.runs.run import INPUTS, OUTPUTS, Run, Slot
from assay.compare.structure import Parameter, Plan
from assay.formats.format import format_named
from assay.golden.arithmetic import BallArithmetic
from assay.golden.arithmetic.model import EVALUATION
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering.choices import Answered
from assay.golden.lowering.spec import STAGES, Definition
from assay.golden.registry import Spec
from assay.verify.comparison.judge import judge, tolerance
from assay.verify.contract import Contract

TYPICAL = 8.0
"""Times the root mean square of PyTorch's own error from which on a 16-bit region is beyond what its dtype explains.

Other orders of sums and other places of rounding change it less: latent attention of honest runs in bfloat16 came to 5,
other regions hardly beyond 1."""
_UNPROVED, _TYPICAL_WIDE = ("gated_delta_rule",), 30.0
"""Definitions without a ball evaluation, a recurrence whose balls grow with each step: these are judged by typical
errors alone, of float32 too, where orders of sums (chunks or steps) differ by more."""
_NUMBERS = 1 << 22  # numbers of a block of tokens, which bounds memory
_IN_FLOAT32 = (definitions.log_softmax, definitions.router_logits)
"""Definitions whose results are float32 where they say so; others' may be stored in the run's own dtype."""
_SPEC = Spec("region", definitions.total, "x[T] -> y[T]", stages=STAGES)


@dataclass(frozen=True)
class Evidence:
    """A region's data in one run, by output: ``given`` what it gave, ``golden`` what the definition gives for the
    inputs that it had, [tokens, features] in float64; ``ratio`` errors over the contract's tolerance; ``typical`` the
    errors of PyTorch in the run's dtypes. ``others()``: what other modules of the layer gave, and
    ``parameter(name)`` the run's own parameters of the region's module, for a search."""

    plan: Plan
    inputs: list[list[Tensor]]
    given: list[Tensor]
    golden: list[Tensor]
    ratio: list[Tensor]
    typical: list[Tensor]
    others: Callable[[], Mapping[str, Tensor]] = dict
    parameter: Callable[[str], Tensor | None] = lambda name: None

    @cached_property
    def errors(self) -> list[Tensor]:
        """What was given less the golden, by output."""
        return [given.double() - golden for given, golden in zip(self.given, self.golden, strict=True)]

    @cached_property
    def proved(self) -> float:
        """The largest error over the contract's tolerance: above 1 the contract is broken."""
        return max((float(ratio.max()) for ratio in self.ratio if ratio.numel()), default=0.0)

    @cached_property
    def excess(self) -> list[Tensor]:
        """The root mean square of each token's errors over that of PyTorch's own, or of half a unit in the last
        place."""
        results = []
        for given, golden, error, typical in zip(self.given, self.golden, self.errors, self.typical, strict=True):
            half = golden.abs() * torch.finfo(given.dtype).eps / 4
            usual = torch.maximum(_root(typical), _root(half))
            usual = torch.maximum(usual, usual.median())  # a token without typical errors of its own is like the others
            results.append(_root(error) / usual.clamp(min=1e-300))
        return results

    @property
    def times(self) -> float:
        """The largest excess of 16-bit outputs, and of what has no proof; 0 for wider ones, whose proof is sharp."""
        shown = [
            float(excess.max())
            for given, excess in zip(self.given, self.excess, strict=True)
            if self._limit(given) < math.inf and excess.numel()
        ]
        return max(shown, default=0.0)

    def _limit(self, given: Tensor) -> float:
        """Return the excess above which an output is beyond."""
        if given.dtype.itemsize <= 2:
            return TYPICAL
        return _TYPICAL_WIDE if self.plan.definition in _UNPROVED else math.inf

    @property
    def is_beyond(self) -> bool:
        """Whether the region is beyond its bound on either level."""
        return any(bool(mask.any()) for mask in self.wrong)

    @property
    def wrong(self) -> list[Tensor]:
        """Masks of the tokens [T] that are beyond, by output."""
        masks = []
        for given, ratio, excess in zip(self.given, self.ratio, self.excess, strict=True):
            masks.append((ratio > 1).any(-1) | (excess > self._limit(given)))
        return masks


def _root(values: Tensor) -> Tensor:
    """Return the root mean square of each token."""
    return values.double().pow(2).mean(-1).sqrt() if values.shape[-1] else values.new_zeros(len(values)).double()


class Missing(Exception):
    """A region's inputs or outputs are not in the run."""


def inputs_of(plan: Plan, run: Run, weights: Run | None = None) -> list[list[Tensor]]:
    """Return the tensors that a region took: one list for all sequences if its tokens are independent, else one a
    sequence.

    ``weights``: the run whose parameters count (default: its own). Raises `Missing`.
    """
    parameters = {
        each: (weights or run).parameter(each.module, each.name) for each in plan.inputs if type(each) is Parameter
    }
    calls: list[list[Tensor]] = []
    for index in [None] if plan.whole else range(len(run.sequences)):
        tensors: list[Tensor] = []
        for each in plan.inputs:
            value: Tensor | None
            if isinstance(each, Slot):
                value = run.whole(each) if index is None else run.sequence(each, index)
            else:
                value = each if isinstance(each, Tensor) else parameters[each]
            if value is None:
                raise Missing(f"{each} was not recorded for all tokens")
            tensors.append(value)
        calls.append(tensors)
    return calls


def outputs_of(plan: Plan, run: Run) -> list[Tensor]:
    """Return what a region gave for all sequences. Raises `Missing`."""
    results = [run.whole(slot) for slot in plan.outputs]
    if any(result is None for result in results):
        raise Missing("what it gives was not recorded for all tokens")
    return [result for result in results if result is not None]


def evidence_of(plan: Plan, run: Run, contract: Contract, weights: Run | None = None) -> Evidence:
    """Judge a region of a run. Raises `Missing`."""
    calls, given = inputs_of(plan, run, weights), outputs_of(plan, run)
    function = getattr(definitions, plan.definition)
    golden, ratio, typical = ([torch.empty(0)] * len(given) for _ in range(3))
    done = 0
    for tensors in calls:
        length = next(len(each) for each, what in zip(tensors, plan.inputs, strict=True) if isinstance(what, Slot))
        for block in _blocks(length, tensors, plan):
            part = [_cut(each, what, block, plan) for each, what in zip(tensors, plan.inputs, strict=True)]
            some = [each[done + block.start : done + block.stop] for each in given]
            results = _judged(function, part, plan.options, some, contract, run.main_dtype)
            for output, (value, ratios, errors) in enumerate(results):
                for into, new in ((golden, value), (ratio, ratios), (typical, errors)):
                    into[output] = new if not into[output].numel() else torch.cat([into[output], new])
        done += length
    return Evidence(
        plan, calls, given, golden, ratio, typical, partial(_others, plan, run), partial(_parameter, plan, run)
    )


def _parameter(plan: Plan, run: Run, name: str) -> Tensor | None:
    """Return another parameter of the module whose weight a region takes, or that gives its outputs."""
    weight = next((each.module for each in plan.inputs if isinstance(each, Parameter)), plan.outputs[0].module)
    return run.parameter(weight, name)


def _others(plan: Plan, run: Run) -> dict[str, Tensor]:
    """Return what the modules of a region's layer took and gave, by words."""
    layer = ".".join(plan.name.split(".")[:2])
    results = {}
    for name, events in run.calls[0].events.items():
        if not name.startswith(f"{layer}.") or name.endswith((".rotary", ".cache")) or not events:
            continue
        for side in (INPUTS, OUTPUTS):
            for key in events[0][side]:
                slot = Slot(name, side, key)
                values = run.whole(slot)
                if values is not None and values.is_floating_point() and slot not in plan.outputs:
                    results[str(slot)] = values
    return results


def _blocks(length: int, tensors: Sequence[Tensor], plan: Plan) -> list[slice]:
    if not plan.whole:
        return [slice(0, length)]
    widest = max(each.shape[-1] for each in tensors if each.dim())
    step = max(_NUMBERS // max(widest, 1), 16)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _cut(tensor: Tensor, what: Any, block: slice, plan: Plan) -> Tensor:
    return tensor[block] if isinstance(what, Slot) and plan.whole else tensor


def _judged(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    options: Any,
    given: Sequence[Tensor],
    contract: Contract,
    main: torch.dtype,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return golden, ratios and PyTorch's own errors of each output of one call."""
    if function.__name__ in _UNPROVED:
        wide = [each.double() if each.is_floating_point() else each for each in tensors]
        golden = function(*wide, **options)
        errors = function(*tensors, **options).double() - golden
        return [(golden, torch.zeros_like(golden), errors)]
    allowed = balls(function, tensors, options, contract)
    exact = [golden_of(each) for each in evaluated(function, tensors, options, BallArithmetic(EVALUATION))]
    own = _typical(function, tensors, options, [each.value for each in exact])
    results = []
    for got, value, permitted, eager in zip(given, exact, allowed, own, strict=True):
        shape = (len(got), -1)
        promised = eager.dtype if function in _IN_FLOAT32 else min(main, eager.dtype, key=_bytes)
        promised = max(got.dtype, promised, key=_bytes)
        format = format_named(str(promised).removeprefix("torch."))
        judgement = judge(got, tolerance(_shaped(value, got), _shaped(permitted, got), format, contract))
        golden = value.value.double().reshape(shape)
        ratio = torch.where(judgement.broken, judgement.ratio.clamp(min=1.0 + 1e-9), judgement.ratio.clamp(max=1.0))
        results.append((golden, ratio.reshape(shape), eager.double().reshape(shape) - golden))
    return results


def _bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _typical(
    function: Callable[..., Any], tensors: Sequence[Tensor], options: Any, exact: Sequence[Tensor]
) -> list[Tensor]:
    """Return what PyTorch gives in the tensors' dtypes, of the forms that honest code has the one with larger
    errors."""
    forms = [tree_leaves(function(*tensors, **options))]
    if function is definitions.attention:
        forms.append([definitions.stepwise_attention(*tensors, **options)])
    return max(
        forms,
        key=lambda results: float(sum((r.double() - e).pow(2).sum() for r, e in zip(results, exact, strict=True))),
    )


def _shaped(golden: Any, like: Tensor) -> Any:
    return type(golden)(golden.value.reshape(like.shape), golden.radius.reshape(like.shape))


def balls(function: Callable[..., Any], tensors: Sequence[Tensor], options: Any, contract: Contract) -> list[Any]:
    """Return what a contract allows of a definition on these tensors, as balls."""
    narrow = next((each.dtype for each in tensors if each.is_floating_point()), torch.float32)
    model = contract.model(_SPEC, format_named(str(narrow).removeprefix("torch.")))
    return [golden_of(each) for each in evaluated(function, tensors, options, BallArithmetic(model))]


def evaluated(function: Callable[..., Any], tensors: Sequence[Tensor], options: Any, xp: Any) -> tuple[Any, ...]:
    """Return a definition's results as numbers of an arithmetic."""
    numbers = [
        xp.exact(each.double()) if each.is_floating_point() else xp.integers(each.to(torch.int64)) for each in tensors
    ]
    definition = Definition(function.__name__, (function,))
    with xp.precision():
        results = definition(xp, *numbers, dtypes=[each.dtype for each in tensors], choices=Answered(), **options)
    return results if isinstance(results, tuple) else (results,)


def in_float64(plan: Plan, tensors: Sequence[Tensor], options: Any = None) -> list[Tensor]:
    """Return a definition's results evaluated by PyTorch in float64."""
    function = getattr(definitions, plan.definition)
    wide = [each.double() if each.is_floating_point() else each for each in tensors]
    chosen = dict(plan.options if options is None else options)
    if "dtype" in chosen:
        chosen["dtype"] = "float64"
    return [each.reshape(len(each), -1) for each in tree_leaves(function(*wide, **chosen))]
