"""The error over the positions of long sequences."""

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.precision import audit
from assay.precision.errors import NoData
from assay.precision.prediction.measuring import steps
from tests.precision.tiny_models import MODELS


def ids(count: int, length: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(256, (count, length), generator=generator)}]


def test_the_curve_adds_up_to_the_error() -> None:
    torch.manual_seed(0)
    model, given = MODELS["llama"](), ids(8, 64)
    long = [{"input_ids": row[None]} for row in given[0]["input_ids"].reshape(2, 256)]
    found = audit(model, given, "kl", ["kv-int4"])
    one = {str(site): "kv-int4" for site in found.sites}
    curve = found.positions(one, long)
    whole = audit(model, long, "kl", ["kv-int4"]).measure(one)
    distances = np.sum([each.distances for each in curve.errors], 0)
    assert distances == pytest.approx(whole.distances, rel=1e-3)
    assert np.sum([each.weights for each in curve.errors]) == 2 * 256
    assert (curve.ends[-1], curve.base) == (256, 128)
    assert curve.growth.low <= curve.growth.ratio <= curve.growth.high


def test_steps_reach_the_length_without_a_sliver() -> None:
    assert steps(512)[-5:] == (128, 181, 256, 362, 512)
    assert steps(530)[-2:] == (362, 530)
    assert steps(5) == (5,)


def test_lengths_that_differ_have_no_curve() -> None:
    model, given = MODELS["llama"](), ids(2, 16)
    with pytest.raises(NoData, match=r"got lengths \[8, 16\]"):
        audit(model, given, "kl", ["kv-int4"]).positions({}, [*given, *ids(1, 8)])
