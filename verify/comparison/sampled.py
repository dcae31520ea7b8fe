"""Judging of cases that are too large to evaluate whole: samples are judged against goldens of their own.

Sampled are the first and last elements, those next to tile boundaries, unusual ones and random ones. If a sample breaks
the contract, the first wrong index along each axis is searched for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from assay.golden.evaluation.cutting import Axis, Cut, axes_of, cut
from assay.golden.evaluation.device import is_on_device
from assay.golden.registry import Tile
from assay.golden.signature import TensorSpec, dimension
from assay.verify.cases.case import Case
from assay.verify.comparison.oracle import Oracle, Values
from assay.verify.comparison.result import Result
from assay.verify.findings import Difference, Failure

Tensor = torch.Tensor
Blocks = dict[Axis, list[int]]
Masks = Sequence[Tensor] | None
"""Of each output, the elements that come from programs that ran; None: all."""

_MOST = 256  # the most blocks of an axis that are considered
_TILES = (16, 64, 128)
_COUNTED = (2**15, 2**16)  # the ends of signed and unsigned 16-bit counters
_NEIGHBOURS = (4, 1)  # neighbouring indices in a tile of a tiling rule; 1 if 4 are too much work
_PARTS = 6
_WORK = 2.0**25  # operations, and
_ELEMENTS = 2.0**20  # numbers of the tensors, that take about a sixth of a second each
_MORE_ON_DEVICE = (2.0**10, 2.0**4)  # times those where goldens are evaluated on a device; the CPU still compares
_TIME_LIMIT = 16.0  # the first part may take this many budgets if it can't be smaller, so that something is judged


def distinctive_positions(output: Tensor) -> list[tuple[int, ...]]:
    """Return the indices of the largest and least elements, and of the first and last NaN or infinity, and zero."""
    flat = output.detach().reshape(-1)
    if not flat.numel():
        return []
    if flat.is_floating_point() and flat.element_size() == 1:
        flat = flat.float()
    results = {int(flat.argmax()), int(flat.argmin())}
    for mask in (~flat.isfinite(), flat == 0):
        if bool(mask.any()):
            mask = mask.to(torch.uint8)
            results |= {int(mask.argmax()), flat.numel() - 1 - int(mask.flip(0).argmax())}
    shape = tuple(output.shape)
    return [tuple(int(index) for index in np.unravel_index(one, shape)) for one in sorted(results)]


def cuts_of(
    case: Case, values: Mapping[str, Tensor], outputs: tuple[Tensor, ...], chance: random.Random, ran: Masks = None
) -> Iterator[tuple[Cut, Case]]:
    """Yield parts of the case, each with the case under its options; of parts where ``ran`` is given.

    Their total work is bounded, so there may be none.
    """
    if _load(case, Cut()) <= 1:
        yield Cut(), case
        return
    strange = _strange(case, [_few(mask, chance) for mask in ran] if ran else list(map(distinctive_positions, outputs)))
    axes = axes_of(case.definition, case.signature, case.sizes, case.definition.row_axis(case.options))
    blocks = {axis: _blocks(axis, strange.get(axis.symbol, []), case.sizes[axis.symbol], chance) for axis in axes}
    parts, left = _parts(case, values, blocks, strange, chance), 1.0
    for index, (part, tile) in enumerate(parts):
        share = left / (len(parts) - index)
        result = _thinned(part, blocks, tile, share)
        load = _load(part, result)
        if load <= (_TIME_LIMIT if left == 1 else share):
            left -= load
            yield result, part


def _few(mask: Tensor, chance: random.Random) -> list[tuple[int, ...]]:
    """Return a few of the marked indices, in random order."""
    marked = mask.nonzero()
    return [tuple(map(int, marked[chance.randrange(len(marked))])) for _ in range(_PARTS if len(marked) else 0)]


def _strange(case: Case, positions: Sequence[Sequence[tuple[int, ...]]]) -> dict[str, list[int]]:
    """Return the indices of all results' ``positions``, by symbol, and for heads those of their groups too."""
    results: dict[str, list[int]] = {}
    for tensor, some in zip(case.signature.returns, positions, strict=True):
        for index in some:
            for text, position in zip(tensor.dims, index, strict=True):
                results.setdefault(text, []).append(position)
    for symbol, groups in case.definition.axes.groups.items():
        if symbol in results and groups in case.sizes:
            shared = case.sizes[symbol] // max(case.sizes[groups], 1)
            results.setdefault(groups, []).extend(position // shared for position in results[symbol])
    return results


def _blocks(axis: Axis, strange: list[int], size: int, chance: random.Random) -> list[int]:
    """Return blocks of an axis, the most informative first."""
    borders = [tile * times for tile in _TILES for times in (1, (size - 1) // tile)]
    beside = [index for border in (*borders, *_COUNTED) for index in (border, border - 1) if 0 < index < size]
    wanted = [axis.blocks - 1, 0, *(axis.block(index) for index in (*strange, *beside))]
    others = [chance.randrange(axis.blocks) for _ in range(_MOST)] if axis.blocks > _MOST else range(axis.blocks)
    return list(dict.fromkeys([*wanted, *others]))[:_MOST]


def _parts(
    case: Case,
    values: Mapping[str, Tensor],
    blocks: Blocks,
    strange: Mapping[str, list[int]],
    chance: random.Random,
) -> list[tuple[Case, Tile | None]]:
    """Return tiles along a symbol with a tiling rule, each with the case under its options; without such a symbol, the
    case.

    The cheapest come first, so that the work they leave goes to the others.
    """
    results: list[tuple[Case, Tile]] = []
    least: list[float] = []
    for symbol, part in case.definition.axes.tiling.items():
        size = case.sizes[symbol]
        middles = [size, 0, *strange.get(symbol, []), *(tile for tile in _TILES if tile < size)]
        middles += [chance.randrange(size) for _ in range(_PARTS)]
        for count in _NEIGHBOURS:
            firsts = dict.fromkeys(min(max(0, middle - count // 2), max(size - count, 0)) for middle in middles)
            alone = (part(first, min(count, size), case.sizes, case.options, values) for first in firsts)
            made = islice(filter(None, alone), _PARTS)
            results = [(replace(case, options=dict(tile.options)), tile) for tile in made]
            least = [_load(one, _thinned(one, blocks, tile, 0.0)) for one, tile in results]
            if results and sum(least) <= 1:
                break
    return [results[index] for index in sorted(range(len(results)), key=least.__getitem__)] or [(case, None)]


def _thinned(case: Case, blocks: Blocks, tile: Tile | None, most: float) -> Cut:
    """Return a cut of the first blocks of each axis, within ``most`` work: the costliest axis is halved until it
    fits."""

    def made(chosen: Blocks) -> Cut:
        indices = {axis: torch.tensor(sorted(some)) for axis, some in chosen.items()}
        return cut(case.definition, case.signature, case.sizes, indices, tile)

    while _load(case, result := made(blocks)) > most:
        fewer = [{**blocks, axis: some[: (len(some) + 1) // 2]} for axis, some in blocks.items() if len(some) > 1]
        if not fewer:
            break
        blocks = min(fewer, key=lambda some: (_load(case, made(some)), max(map(len, some.values()))))
    return result


def _load(case: Case, part: Cut) -> float:
    """Return the work of evaluating a part, relative to the budget of a case."""
    sizes = {**case.sizes, **{text: len(indices) for text, indices in part.index.items() if text in case.sizes}}

    def count(tensor: TensorSpec) -> int:
        return math.prod(
            len(part.index[text]) if text in part.index else dimension(text, sizes) for text in tensor.dims
        )

    for symbol in case.definition.axes.gathered:
        sizes[symbol] = min(
            sizes[symbol], sum(count(tensor) for tensor in case.signature.tensors if tensor.bound == symbol)
        )
    elements = sum(count(tensor) for tensor in (*case.signature.tensors, *case.signature.returns))
    more_work, more_elements = _MORE_ON_DEVICE if is_on_device() else (1.0, 1.0)
    return case.definition.cost(sizes) / (_WORK * more_work) + elements / (_ELEMENTS * more_elements)


_COUNTS = {
    2**15: "signed 16 bits count no further",
    2**16: "16 bits count no further, nor the second and third dimension of a CUDA grid",
    2**31: "signed 32 bits count no further",
    2**32: "32 bits count no further",
}


def judge_samples(
    oracle: Oracle, case: Case, values: Values, outputs: tuple[torch.Tensor, ...], ran: Masks = None
) -> Result:
    """Judge the outputs of a large case by samples, chosen by the seed of the case, and only elements that ``ran``
    marks."""
    result = Result(case, outputs=outputs)
    taken: list[Cut] = []
    for piece, part in cuts_of(case, values, outputs, random.Random(case.seed), ran):
        results = _judged(oracle, part, piece, values, outputs, ran)
        taken.append(piece)
        result = replace(result.counting(results), parts=(*result.parts, results))
        if results.failure is not None:
            failure = _located(results, results.failure, oracle, case, part, piece, values, outputs)
            return replace(result, failure=failure, sampled=f"{case_label(case)}: {failure.message}")
    if ran:
        words = f"{result.judged} elements judged that a few programs of each launch store"
        return replace(result, sampled=f"{case_label(case)}: {words}")
    return replace(result, sampled=_in_words(case, taken))


def _judged(
    oracle: Oracle, case: Case, cut: Cut, values: Values, outputs: tuple[torch.Tensor, ...], ran: Masks = None
) -> Result:
    """Return the result of judging a part of the case as a case of its own."""
    returns = case.signature.returns
    parts, sizes = cut.inputs(case.definition, case.signature, values)
    got = tuple(cut.of(tensor, output) for tensor, output in zip(returns, outputs, strict=True))
    besides = [tensor.name for tensor in returns if not cut.is_complete(tensor)]
    only = {tensor.name: cut.of(tensor, mask) for tensor, mask in zip(returns, ran, strict=True)} if ran else None
    return oracle.judge(replace(case, sizes={**case.sizes, **sizes}), parts, got, besides, only)


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
    """Return the failure of a sample as one of the whole case, with the first wrong index along each axis in words."""
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
                one = cut.at(case.definition, case.sizes, symbol, middle)
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
    """Return in words which integer limit (of indices or of a tensor's offsets) is passed at an index along an axis."""
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
    """Return in words how many indices of each result were judged, or why none."""
    said = []
    for tensor in case.signature.returns:
        cuts = [cut for cut in taken if cut.is_complete(tensor)]
        counts = [
            _count([cut.index.get(text) for cut in cuts], size)
            for text, size in zip(tensor.dims, case.shape(tensor), strict=True)
        ]
        why = "not judged: it can't be evaluated in parts, and is too large as a whole"
        said.append(f"{tensor.name}[{', '.join(counts)}] judged" if cuts else f"{tensor.name} {why}")
    return f"{case_label(case)}: {', '.join(said)}; all of it watched"


def case_label(case: Case) -> str:
    """Return the sizes of a case, and its options that differ from their defaults, as text."""
    defaults = {name: option.default for name, option in case.definition.options.items()}
    changed = {name: value for name, value in case.options.items() if value != defaults[name]}
    return ", ".join(f"{name}={value}" for name, value in {**case.sizes, **changed}.items())


def _count(indices: list[torch.Tensor | None], size: int) -> str:
    """Return how many indices along a dimension the cuts cover, as text; None covers all."""
    covered = [index for index in indices if index is not None]
    if len(covered) < len(indices) or not covered:
        return str(size)
    result = len(torch.unique(torch.cat(covered)))
    return f"{result} of {size}" if result < size else str(size)
