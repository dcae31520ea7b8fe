"""Claim and counter-claim: honest kernels are accepted, and copies of them with one fault each are rejected.

Both are examined with default settings; the faulty ones with the default number of examples, the honest ones, most of
whose cost is in fuzzing, with fewer (``./dev bench zoo`` runs them with all). A usual run takes every 72nd kernel;
``./dev test -m "slow or evidence" tests/verify/test_claims.py`` takes all.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from assay.verify import examine
from tests.zoo import FAULTY, HONEST, Entry, Faulty

from .examined import failure_of, passes, quick

pytestmark = pytest.mark.slow

_USUAL, _FIRST = 72, 12


def entries(table: Sequence[Any]) -> list[Any]:
    """The table's entries as parameters, most of them for a run that asks for more evidence."""
    return [
        pytest.param(entry, id=entry.name, marks=[] if place % _USUAL == _FIRST else [pytest.mark.evidence])
        for place, entry in enumerate(table)
    ]


@pytest.mark.parametrize("entry", entries(HONEST))
def test_an_honest_kernel_is_accepted(entry: Entry) -> None:
    passes(examine(entry.kernel, entry.spec, examples=10, **entry.examine))


@pytest.mark.parametrize("entry", entries(FAULTY))
def test_a_faulty_kernel_is_rejected(entry: Faulty) -> None:
    verdict = examine(entry.kernel, entry.spec, strict=True, every_aspect=False, **entry.examine)
    assert verdict.outcome == "FAIL", str(verdict)
    assert failure_of(verdict).kind in entry.kinds


def test_torch_softmax_is_accepted() -> None:
    """200 examples of torch's softmax pass; how long that takes is for `./dev bench examine` to tell."""
    verdict = quick(lambda x: torch.softmax(x, -1), dtype="bfloat16", examples=200)
    assert verdict.passed
    assert verdict.phases["fuzz"] == 200
