"""How often a running sum of exponentials may be rescaled is the contract's to say."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from assay.verify import Contract, examine
from assay.verify.contract import contract_from_table
from assay.verify.errors import ContractError
from tests.zoo.softmax import softmax_online


def decay_off(old: Tensor, new: Tensor) -> Tensor:
    """A rescaling whose exponential is two ulps too large, as it may be."""
    decay = torch.exp(old - new)
    return torch.where(decay > 0, torch.nextafter(torch.nextafter(decay, torch.tensor(math.inf)), decay + 1), decay)


@pytest.mark.parametrize(("block", "every", "outcome"), [(1, 16, "FAIL"), (1, 1, "WARN"), (16, 16, "PASS")])
def test_rescalings_count_once_a_block(block: int, every: int, outcome: str) -> None:
    """An online softmax whose rescalings are as far off as allowed keeps the contract that states its blocks.

    At every key, and always to one side, that is suspect, as rounding does no such thing.
    """
    kernel = partial(softmax_online, block=block, rescale=decay_off)
    shapes = {"R": range(1, 20), "N": range(1, 200 * block)}
    contract = Contract(rescale_every=every)
    verdict = examine(
        kernel, "softmax", dtype="float32", contract=contract, shapes=shapes, effort="quick", examples=4,
        shrinking=False, every_aspect=False,
    )  # fmt: skip
    assert verdict.outcome == outcome, str(verdict)


def test_a_number_of_keys_is_a_whole_one() -> None:
    """A contract's table states how many keys come before a rescaling; zero, halves and words are refused."""
    assert contract_from_table({"rescale_every": 64}) == Contract(rescale_every=64)
    for value in (0, -1, 0.5, True, "16"):
        with pytest.raises(ContractError, match="expected a whole number of at least 1"):
            contract_from_table({"rescale_every": value})
