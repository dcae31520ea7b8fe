"""Cotangents led back block by block: the products of the whole graph, with one block's values at a time."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.precision.auditing import Audit
from assay.precision.errors import BadModel
from assay.precision.prediction.backward import AGAIN, differentiate
from assay.precision.prediction.quadratic_form import Products
from tests.precision.test_batched_assignments import MODELS, audited


def products(found: Audit, *, blocks: bool, **more: Any) -> Products:
    chain = found.choice_evaluator.chain if blocks else None
    assert (chain is not None) is blocks
    given = found.model, found.batches, found.metric, found.observed
    return differentiate(*given, again=AGAIN, chain=chain, **more)


@pytest.mark.parametrize("kind", MODELS)
def test_block_by_block_gives_the_products_of_the_whole_graph(kind: str) -> None:
    found = audited(kind)
    whole, by_blocks = products(found, blocks=False), products(found, blocks=True)
    assert set(whole.keys) == set(by_blocks.keys)
    order = [by_blocks.keys.index(key) for key in whole.keys]
    assert whole.again is not None
    assert by_blocks.again is not None
    pairs = [(whole.sums, by_blocks.sums), (whole.squares, by_blocks.squares)]
    for one, other in (*pairs, *zip(whole.again, by_blocks.again, strict=True)):
        np.testing.assert_allclose(other[order], one, rtol=1e-4, atol=1e-6 * np.abs(one).max())


def test_autograd_holds_the_values_of_one_block() -> None:
    found, most = audited("llama"), {}
    for blocks in (False, True):
        held: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        sizes = []

        def keep(tensor: Tensor, held: Any = held, sizes: Any = sizes) -> Tensor:
            kept = tensor.detach()
            held[id(kept)] = kept
            sizes.append(sum(each.numel() for each in held.values()))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            products(found, blocks=blocks)
        most[blocks] = max(sizes)
    assert 0 < most[True] < 2 / 3 * most[False]


def test_a_model_that_changes_between_calls_is_refused() -> None:
    found = audited("llama")
    calls = found.choice_evaluator.chain.calls  # type: ignore[union-attr]
    changed = [
        each.clone() + 1 if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in calls[0][0].leaves
    ]
    assert any(one is not other for one, other in zip(changed, calls[0][0].leaves, strict=True))
    calls[0][0] = type(calls[0][0])(tuple(changed), calls[0][0].spec)
    with pytest.raises(BadModel, match="take out randomness"):
        products(found, blocks=True)
