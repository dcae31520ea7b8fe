"""Judging a case that is too large to be judged whole: samples of it against their goldens alone.

Where a sample breaks the contract, the first place along each axis that does is searched for.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

from assay.golden.evaluation.cutting import Cut
from assay.golden.signature import TensorSpec
from assay.verify.cases.case import Case
from assay.verify.comparison.error_map import summed
from assay.verify.comparison.oracle import Oracle, Values
from assay.verify.comparison.result import Result
from assay.verify.comparison.sampling import cuts_of
from assay.verify.findings import Difference, Failure

_COUNTS = {
    2**15: "signed 16 bits count no further",
    2**16: "16 bits count no further, nor the second and third dimension of a CUDA grid",
    2**31: "signed 32 bits count no further",
    2**32: "32 bits count no further",
}


def judge_samples(oracle: Oracle, case: Case, values: Values, outputs: tuple[torch.Tensor, ...]) -> Result:
    """The outputs of a large case, as far as samples of them show; the seed of the case chooses these."""
    result = Result(case, outputs=outputs)
    taken: list[Cut] = []
    for cut, part in cuts_of(case, values, outputs, random.Random(case.seed)):
        results = _judged(oracle, part, cut, values, outputs)
        taken.append(cut)
        result = replace(
            result,
            worst=max(result.worst, results.worst),
            judged=result.judged + results.judged,
            nonzero=result.nonzero + results.nonzero,
            unjudged=result.unjudged + results.unjudged,
            judged_of=result.judged_of + results.judged_of,
            left_out=result.left_out + results.left_out,
            unresolved=result.unresolved + results.unresolved,
            histogram=summed(result.histogram, results.histogram),
        )
        if results.failure is not None:
            failure = _located(results, results.failure, oracle, case, part, cut, values, outputs)
            return replace(result, failure=failure, sampled=f"{asked(case)}: {failure.message}")
    return replace(result, sampled=_in_words(case, taken))


def _judged(oracle: Oracle, case: Case, cut: Cut, values: Values, outputs: tuple[torch.Tensor, ...]) -> Result:
    """What a part of the case, as a case of its own, shows."""
    returns = case.signature.returns
    parts, sizes = cut.inputs(case.definition, case.signature, values)
    got = tuple(cut.of(tensor, output) for tensor, output in zip(returns, outputs, strict=True))
    besides = [tensor.name for tensor in returns if not cut.is_apart(tensor)]
    return oracle.judge(replace(case, sizes={**case.sizes, **sizes}), parts, got, besides)


def _located(
    result: Result,
    failure: Failure,
    oracle: Oracle,
    case: Case,
    part: Case,
    cut: Cut,
    values: Values,
    outputs: tuple[torch.Tensor, ...],
) -> Failure:
    """The failure of a sample as one of the whole case, and in words how far along each axis all is right."""
    returned = next(tensor for tensor in case.signature.returns if tensor.name == failure.output)
    words = [f"{failure.violations} of {failure.elements} sampled elements are outside of what the contract allows"]
    for axis, symbol in enumerate(returned.dims):
        indices = cut.index.get(symbol)
        if indices is None or result.ratio is None or len(indices) < 2:
            continue
        wrong = (result.ratio > 1).transpose(0, axis).reshape(len(indices), -1).any(1)
        bad, good = indices[wrong], indices[~wrong]
        if not len(bad) or not len(good):
            continue
        if int(good.max()) < int(bad.min()):
            low, high = int(good.max()), int(bad.min())
            while high - low > 1 and symbol in case.sizes and not case.definition.axes.tiling.get(symbol):
                middle = (low + high) // 2
                one = replace(cut, index={**cut.index, symbol: torch.tensor([middle])})
                low, high = (low, middle) if _judged(oracle, part, one, values, outputs).failure else (middle, high)
            words.append(
                f"right up to {symbol}={low}, wrong from {symbol}={high} on{_counted(case, returned, axis, high)}"
            )
        else:
            shown = [int(index) for index in bad[:4]]
            words.append(
                f"wrong at {symbol}={', '.join(map(str, shown))}{', ...' if len(bad) > 4 else ''}, right beside"
            )

    def whole(difference: Difference | None) -> Difference | None:
        return difference and replace(difference, index=cut.whole(returned, difference.index))

    return replace(
        failure,
        case=case,
        message="; ".join(words),
        index=cut.whole(returned, failure.index),
        greatest_absolute=whole(failure.greatest_absolute),
        greatest_relative=whole(failure.greatest_relative),
    )


def _counted(case: Case, returned: TensorSpec, axis: int, first: int) -> str:
    """What ends at a place along an axis, if it is what some integers count: places, or elements of a tensor."""
    symbol = returned.dims[axis]
    for number, words in _COUNTS.items():
        if first in (number - 1, number):
            return f": {words}"
    for tensor in (returned, *case.signature.tensors):
        if symbol in tensor.dims:
            index = tensor.dims.index(symbol)
            stride = math.prod(case.shape(tensor)[index + 1 :])
            for number, words in _COUNTS.items():
                if stride > 1 and first * stride <= number < (first + 1) * stride:
                    return f": there offsets in {tensor.name} pass {number:,}, and {words.partition(', nor')[0]}"
    return ""


def _in_words(case: Case, taken: list[Cut]) -> str:
    """What was judged: of each result how many places of how many, or why none."""
    said = []
    for tensor in case.signature.returns:
        cuts = [cut for cut in taken if cut.is_apart(tensor)]
        counts = [
            _count([cut.index.get(text) for cut in cuts], size)
            for text, size in zip(tensor.dims, case.shape(tensor), strict=True)
        ]
        why = "not judged: it can't be evaluated in parts, and is too large as a whole"
        said.append(f"{tensor.name}[{', '.join(counts)}] judged" if cuts else f"{tensor.name} {why}")
    return f"{asked(case)}: {', '.join(said)}; all of it watched"


def asked(case: Case) -> str:
    """The sizes of a case, and the options that aren't at their defaults."""
    defaults = {name: option.default for name, option in case.definition.options.items()}
    changed = {name: value for name, value in case.options.items() if value != defaults[name]}
    return ", ".join(f"{name}={value}" for name, value in {**case.sizes, **changed}.items())


def _count(indices: list[torch.Tensor | None], size: int) -> str:
    """How many places along a dimension some cut keeps, of how many; None keeps all."""
    kept = [index for index in indices if index is not None]
    if len(kept) < len(indices) or not kept:
        return str(size)
    result = len(torch.unique(torch.cat(kept)))
    return f"{result} of {size}" if result < size else str(size)
