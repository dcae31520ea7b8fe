"""Cotangents led back block by block: the products of the whole graph, with one block's values at a time."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.precision import audit
from assay.precision.auditing import Audit
from assay.precision.errors import BadModel
from assay.precision.prediction.backward import AGAIN, differentiate
from assay.precision.prediction.quadratic_form import Products
from tests.precision.test_batched_assignments import MODELS

FORMATS = ["bf16", "fp8", "w4a16-g32", "fp8-block", "kv-fp8", "a-fp8"]


def found_of(kind: str) -> Audit:
    """An audit of two batches, the first with padding."""
    torch.manual_seed(0)
    rows = torch.randint(0, 256, (6, 12))
    mask = torch.ones_like(rows)
    mask[1, 7:] = 0
    batches = [{"input_ids": rows[:4], "attention_mask": mask[:4]}, {"input_ids": rows[4:]}]
    return audit(MODELS[kind](), batches, formats=FORMATS)


def products(found: Audit, *, blocks: bool, **more: Any) -> Products:
    chain = found.choice_evaluator.chain if blocks else None
    assert (chain is not None) is blocks
    given = found.model, found.batches, found.metric, found.observed
    return differentiate(*given, again=AGAIN, chain=chain, **more)


@pytest.mark.parametrize("kind", MODELS)
def test_block_by_block_gives_the_products_of_the_whole_graph(kind: str) -> None:
    found = found_of(kind)
    whole, by_blocks = products(found, blocks=False), products(found, blocks=True)
    assert set(whole.keys) == set(by_blocks.keys)
    order = [by_blocks.keys.index(key) for key in whole.keys]
    for one, other in ((whole.sums, by_blocks.sums), (whole.squares, by_blocks.squares)):
        np.testing.assert_allclose(other[order], one, rtol=1e-4, atol=1e-6 * np.abs(one).max())
    assert whole.again is not None
    assert by_blocks.again is not None
    for one, other in zip(whole.again, by_blocks.again, strict=True):
        np.testing.assert_allclose(other[order], one, rtol=1e-4, atol=1e-6 * np.abs(one).max())


def test_autograd_holds_the_values_of_one_block() -> None:
    found, most = found_of("llama"), {}
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
    found = found_of("llama")
    calls = found.choice_evaluator.chain.calls  # type: ignore[union-attr]
    changed = [
        each.clone() + 1 if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in calls[0][0].leaves
    ]
    assert any(one is not other for one, other in zip(changed, calls[0][0].leaves, strict=True))
    calls[0][0] = type(calls[0][0])(tuple(changed), calls[0][0].spec)
    with pytest.raises(BadModel, match="take out randomness"):
        products(found, blocks=True)
