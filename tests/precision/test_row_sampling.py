"""Which rows of a weight are looked at: a sample of a large one's, in the mean and the spread that all of them have."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.precision.auditing import audit
from assay.precision.prediction import row_sampling
from assay.precision.prediction.row_sampling import RowSample, RowSampler


def rows_of(looked: RowSample) -> tuple[Tensor, Tensor]:
    assert isinstance(looked.rows, Tensor)
    assert isinstance(looked.root_weights, Tensor)
    return looked.rows, looked.root_weights.flatten().double().square()


def skewed(rows: int = 2048) -> tuple[Tensor, Tensor]:
    """Sizes that a few rows have most of, and squares of products that go with them but for chance."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(rows, generator=generator, dtype=torch.float64).mul(2).exp()
    return sizes, sizes * torch.randn(rows, generator=generator, dtype=torch.float64).square()


def estimates(sizes: Tensor, squares: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Sums over all rows as 400 draws estimate them, and the standard errors that these tell."""
    sums, errors = [], []
    for batch in range(400):
        _, looked = RowSampler(batch, 4, 4).sample(sizes, "x")
        rows, weights = rows_of(looked)
        some = (squares[rows] * weights).reshape(-1, 1, 1)
        sums.append(float(some.sum()))
        errors.append(float(looked.variance(some)) ** 0.5)
    return np.array(sums), np.array(errors)


def test_a_sample_has_the_sum_of_all_rows_in_the_mean() -> None:
    sizes, squares = skewed()
    sums, errors = estimates(sizes, squares)
    whole = float(squares.sum())
    assert abs(sums.mean() - whole) < 4 * sums.std() / len(sums) ** 0.5
    assert 0.7 < np.sqrt(np.square(errors).mean()) / sums.std() < 1.4
    assert np.mean(np.abs(sums - whole) < 2 * errors) > 0.85


def test_rows_with_a_period_are_told_as_wide_as_they_are() -> None:
    squares = torch.arange(4096, dtype=torch.float64).remainder(128).mul(0.05).exp()
    sums, errors = estimates(torch.ones(4096), squares)
    assert abs(sums.mean() - float(squares.sum())) < 4 * sums.std() / len(sums) ** 0.5
    assert 0.7 < np.sqrt(np.square(errors).mean()) / sums.std() < 1.4


def test_sizes_that_say_nothing_cost_no_more_than_a_few_times_the_spread() -> None:
    sizes, _ = skewed()
    sums, _ = estimates(sizes, torch.ones(2048, dtype=torch.float64))
    assert abs(sums.mean() - 2048) < 4 * sums.std() / 400**0.5
    _, looked = RowSampler(0, 4, 4).sample(sizes, "x")
    assert float(rows_of(looked)[1].max()) <= 1.01 * 2048 / 64 / 0.25


def test_a_row_that_is_nearly_all_is_taken_for_certain() -> None:
    sizes = torch.ones(1024)
    sizes[17] = 1e6
    for batch in range(20):
        rows, weights = rows_of(RowSampler(batch, 4, 4).sample(sizes, "x")[1])
        assert float(weights[rows == 17]) == pytest.approx(1.0)
        assert len(rows) == 64


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_rows_of_no_size_are_drawn_alike(bad: float) -> None:
    step, looked = RowSampler(0, 4, 4).sample(torch.full((1024,), bad), "x")
    assert step == pytest.approx(16)
    torch.testing.assert_close(rows_of(looked)[1], torch.full((64,), 16.0, dtype=torch.float64), rtol=1e-5, atol=0)


def test_draws_are_the_same_every_time_and_others_elsewhere() -> None:
    sizes, own = skewed()[0], RowSampler(1, 4, 4, 7)
    drawn = [
        rows_of(each.sample(sizes, name)[1])[0].tolist()
        for each, name in (
            (own, "x"),
            (own, "x"),
            (replace(own, seed=8), "x"),
            (replace(own, batch=2), "x"),
            (own, "y"),
        )
    ]
    assert drawn[0] == drawn[1]
    assert all(drawn[0] != other for other in drawn[2:])


def test_small_weights_and_exact_ones_are_not_sampled() -> None:
    assert RowSampler(0, 4, 4).drawn(1023) == 0
    assert RowSampler(0, 4, 4).drawn(1024) == 64
    assert RowSampler(0, 4, 1).drawn(1024) == 128
    assert RowSampler(0, 1000, 4).drawn(1024) == 16
    assert RowSampler(0, 4, 4, exact=True).drawn(100_000) == 0


def test_a_weight_that_one_cotangent_meets_is_looked_at_whole() -> None:
    for exact, rows in ((True, 4096), (False, 800)):
        weight, seen = torch.zeros(rows, 8), set()
        for batch in range(4):
            own = RowSampler(batch, 4, 4, exact=exact).alone()
            for looked in own.parts(weight, 0, 1 << 20)[1]:
                seen |= set(range(rows)[looked.rows])
        assert seen == set(range(rows))


def test_what_is_predicted_from_a_sample_spreads_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over draws, predictions of sampled weights lie about those from all rows, without a lean, by the noise that is
    told of them beside the cotangents'; what isn't sampled has no more than these."""
    torch.manual_seed(0)
    wide = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 64))
    batches = [torch.randn(8, 16, 64) for _ in range(4)]
    formats = ["bf16", "fp8", "w8a16", "w4a16-g32", "w4a16-g32-asym", "w3a16-g32", "w-mxfp4", "w-nvfp4", "fp8-block"]
    off, own = [], []
    for seed in range(8):
        exact, found = (
            audit(wide, batches, "relative", formats, seed=seed, exact=each).predictor for each in (True, False)
        )
        for key in exact.form.keys:
            name, (kind, *_) = key
            if name == "2" or kind != "weight":
                assert found.form.noise([key]) == pytest.approx(exact.form.noise([key]), rel=1e-9)
                continue
            off.append(np.log(found.form.of([key]) / exact.form.of([key])))
            own.append(np.sqrt(found.form.noise([key]) - exact.form.noise([key])))
    assert len(off) == 64
    assert 0.7 < np.sqrt(np.mean(np.square(off) / np.square(own))) < 1.4
    assert abs(np.mean(off)) < 4 * np.mean(own) / 8
    assert np.mean(np.abs(off) < 2 * np.array(own)) > 0.85
    monkeypatch.setattr(row_sampling, "_LARGE", 1 << 20)
    again = audit(wide, batches, "relative", formats, seed=7).predictor
    assert np.array_equal(again.form.diagonal, exact.form.diagonal)
