"""Choices judged on sequences that they were not made on, and what stands beside them."""

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.precision import Assignment, Audit, MeasuredError, audit, baselines
from assay.precision.errors import BadAssignment
from assay.precision.loading import Loaded, load
from assay.precision.prediction.calibration import Calibration, Measured
from assay.precision.prediction.measuring import Evaluator, evaluation_data
from tests.precision.small_models import FORMATS, made


def held_out(sequences: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(sequences, 8, 32, generator=generator)]


@pytest.fixture(scope="module")
def found() -> Audit:
    """The small model, chosen on 8 sequences and judged on 16 others."""
    model, batches = made()
    return audit(model, batches, "relative", FORMATS, check=held_out())


def test_what_is_reported_is_measured_on_the_held_out_sequences(found: Audit) -> None:
    chosen = found.recommend(max_bytes=found.cost({}).bytes / 2)
    alone = audit(found.model, held_out(), "relative", FORMATS)
    assert isinstance(chosen.measured, MeasuredError)
    assert len(chosen.measured.distances) == 16
    assert chosen.measured == pytest.approx(found.measure(chosen), rel=1e-12)
    assert chosen.measured == pytest.approx(alone.measure(chosen), rel=1e-6)
    assert chosen.measured != found.trial(chosen)
    assert chosen.measured.low < chosen.measured < chosen.measured.high


def test_the_held_out_sequences_change_no_choice(found: Audit) -> None:
    model, batches = made()
    other = audit(model, batches, "relative", FORMATS, check=[1000.0 * each for each in held_out()])
    one, two = ((dict(each.recommend(max_bytes=7776.0)), each.contribution("head", "fp8")) for each in (found, other))
    assert one == two


def test_a_budget_of_the_error_is_kept_where_nobody_looked(found: Audit) -> None:
    chosen = found.recommend(max_error=0.01)
    assert chosen.met
    assert chosen.measured <= 0.01
    assert found.trial(chosen) < 0.01


def test_a_choice_that_does_not_hold_is_told() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(8, 8, 32)]
    outliers = torch.randn(8, 8, 32)
    outliers[..., 0] *= 1e4
    found = audit(Wide(), batches, "relative", ["w8a8-static"], check=[outliers])
    chosen = found.recommend(max_error=0.1)
    assert found.trial(chosen) <= 0.1
    assert not chosen.met
    assert chosen.measured > 0.1
    assert "but not on the held-out data" in chosen.why


class Wide(torch.nn.Module):
    """Two linears, of which static scales clip what is larger than the calibration data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(32, 64), torch.nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


def test_simple_assignments_stand_beside_the_recommended_one(found: Audit) -> None:
    chosen = found.recommend(max_bytes=found.cost({}).bytes / 2)
    beside = baselines(found, chosen)
    names = [each.name for each in beside]
    for scheme in ("fp8", "w8a16", "w4a16-g32"):
        assert f"{scheme} at every linear" in names
        assert f"{scheme}, first and last layers kept" in names
    assert names[-1].startswith("bfloat16")
    assert beside[-1].measured == found.noise_floor
    assert [each.cost.bytes for each in beside[:-1]] == sorted(each.cost.bytes for each in beside[:-1])
    for each in beside[:-1]:
        assert each.measured == found.measure(each.assignment)
        assert each.difference.error == pytest.approx(each.measured - chosen.measured)
    kept = next(each for each in beside if each.name == "fp8, first and last layers kept")
    assert list(kept.assignment) == ["layers.1.proj"]


def test_a_simple_assignment_that_is_as_good_is_to_be_taken(found: Audit) -> None:
    poor = found.recommend(max_bytes=found.cost({}).bytes / 2)
    poor = type(poor)(dict.fromkeys(["layers.0.proj", "layers.1.proj"], "w4a16-g32"))
    poor.measured, poor.cost = found.measure(poor), found.cost(poor)
    instead = [each.name for each in baselines(found, poor) if each.instead]
    assert "w8a16 at every linear" in instead
    best = found.recommend(max_bytes=found.cost({}).bytes / 2)
    assert not [each.name for each in baselines(found, best) if each.instead and each.measured > 1.06 * best.measured]


def test_what_nobody_measured_has_nothing_beside_it(found: Audit) -> None:
    with pytest.raises(BadAssignment, match="expected an assignment that was measured"):
        baselines(found, Assignment({"head": "fp8"}))


@pytest.mark.parametrize(("sequences", "held"), [(64, 16), (24, 8), (8, 4), (3, 1), (1, 0)])
def test_a_share_of_the_text_is_held_out(stdlib_llama: Loaded, sequences: int, held: int) -> None:
    loaded = stdlib_llama
    text = (Path(__file__).parents[2] / "configs" / "models" / "held-out.txt").read_text()[:20_000]
    batches, check = loaded.parts(text, sequence=32, sequences=sequences)
    parts = [[tuple(row) for batch in part or () for row in batch["input_ids"].tolist()] for part in (batches, check)]
    assert [len(part) for part in parts] == [sequences - held, held]
    assert not set(parts[0]) & set(parts[1])
    whole = torch.cat([each["input_ids"] for each in loaded.batches(text, sequence=32, sequences=sequences)]).tolist()
    assert sorted(parts[0] + parts[1]) == sorted(map(tuple, whole))
    again = loaded.parts(text, sequence=32, sequences=sequences)[0]
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(batches, again, strict=True))


def test_another_text_may_judge(stdlib_llama: Loaded) -> None:
    """With a text of its own nothing of the first is held out, and a third as many sequences are judged on."""
    batches, check = stdlib_llama.parts("a few words " * 200, "other words " * 200, sequence=16, sequences=12)
    assert sum(len(batch["input_ids"]) for batch in batches) == 12
    assert sum(len(batch["input_ids"]) for batch in check or ()) == 4


def test_an_interval_promises_no_more_than_its_scores() -> None:
    draw = random.Random(0)

    def pairs(count: int) -> list[Measured]:
        return [Measured(1e-3, 1e-3 * math.exp(draw.gauss(0, 0.1)), 4.0) for _ in range(count)]

    assert Calibration.fit(pairs(19)).level == 0.95
    assert Calibration.fit(pairs(10)).level == pytest.approx(10 / 11)
    assert Calibration.fit(pairs(2)).level == 0.0


def test_a_pair_is_judged_by_what_the_others_fit() -> None:
    draw = random.Random(1)
    pairs = [Measured(1e-3, 1e-3 * math.exp(draw.gauss(0, 0.05)), 4.0) for _ in range(8)]
    for count in (3, 8):
        found = Calibration.fit([*pairs[:count], Measured(1e-3, 4e-3, 4.0)])
        assert found.interval(Measured(1e-3, 0.0, 4.0))[2] >= 3.6e-3


def test_a_simple_assignment_says_where_it_fits() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    found = audit(model, [torch.randn(8, 128)], "relative", ["w8a16", "w4a16-g128"], check=[torch.randn(8, 128)])
    found.calibrate(4)
    names = [each.name for each in baselines(found, found.recommend(max_bytes=found.cost({}).bytes / 2))]
    assert "w4a16-g128 (fits 1 of 2) at every linear" in names
    assert "w8a16 at every linear" in names


def test_what_is_learnt_is_predicted_as_it_was_measured() -> None:
    model, batches = made()
    found, one = audit(model, batches, "relative", FORMATS), {"layers.1.proj": "w4a16-g32"}
    found.calibrate(8)
    halved = replace(found.predictor, calibration=replace(found.predictor.calibration, scale=0.5))
    for predictor in (found.predictor, halved):
        measured = 1.3 * predictor.predict(one).error
        assert predictor.corrected(one, measured).predict(one).error == pytest.approx(measured, rel=1e-6)


def test_what_is_learnt_refits_the_interval() -> None:
    model, batches = made()
    found = audit(model, batches, "relative", FORMATS, check=held_out())
    found.calibrate(12)
    one = {"layers.1.proj": "w4a16-g32"}
    for _ in range(3):
        found.predictor = found.predictor.corrected(one, found.predictor.uncalibrated(one)[0] / 10**0.5)
    found.recommend(max_bytes=7776.0)
    assert found.predict(one).error == pytest.approx(found.trial(one), rel=0.05)
    for assignment, pair in found.measured:
        assert pair.predicted == found.predictor.uncalibrated(assignment)[0]
    assert found.predictor.calibration == Calibration.fit([pair for _, pair in found.measured], power=2.0)


def heavy(sequences: int, seed: int) -> Tensor:
    """Rows of a distribution of heavy tails: Student's t of five degrees of freedom."""
    return torch.from_numpy(np.random.default_rng(seed).standard_t(5, (sequences, 32))).float()


def test_an_interval_has_room_for_what_overruns_a_static_scale() -> None:
    """Held-out values beyond the largest that a static scale was taken from are clipped, and the error is up to nine
    times that of the data at hand: the intervals hold it, and without their room for it most don't; dynamic scales need
    none."""
    torch.manual_seed(0)
    model, inside = Wide(), []
    for seed in range(6):
        found = audit(
            model, [heavy(64, seed)], "relative", ["bf16", "w8a8", "w8a8-static"], check=[heavy(64, 100 + seed)]
        )
        static, dynamic = {"one": "w8a8-static"}, {"one": "w8a8"}
        predictions, error = [found.predict(static)], found.measure(static)
        found.predict(dynamic)
        assert found.predictor.others is not None
        known = found.predictor.others.saturation_cache
        assert not any(np.any(known[key]) for key in found.predictor.keys(dynamic) if key in known)
        known.update(dict.fromkeys(known, 0.0))
        predictions.append(found.predict(static))
        inside.append([each.low <= error <= each.high for each in predictions])
    room, none = map(sum, zip(*inside, strict=True))
    assert room >= 5
    assert none <= 3


def other(seed: int) -> list[Tensor]:
    """Sequences twice as long, whose values are a fifth as large."""
    return [0.2 * torch.randn(16, 16, 32, generator=torch.Generator().manual_seed(seed))]


def test_intervals_hold_over_other_sequences_where_they_are_calibrated() -> None:
    """Longer sequences with larger errors: what was calibrated elsewhere misses most of them, what was calibrated on
    others like them holds nine in ten, and the audit's own predictions stay as they were."""
    model, batches = made()
    found = audit(model, batches, "relative", FORMATS)
    drawn = [found.random_assignment(random.Random(draw), share) for share in (1.0, 0.3) for draw in range(10)]
    before = [found.predict(one) for one in drawn]
    there = found.predictor_over(other(1), further=16)
    part = evaluation_data(found.model, other(2), found.metric, "far")
    far = Evaluator(found.model, part, found.metric, found.observed)
    errors = [float(far.error(found.checked(one))) for one in drawn]
    pairs = list(zip(drawn, errors, strict=True))
    inside = [there.predict(one).low <= error <= there.predict(one).high for one, error in pairs]
    elsewhere = [each.low <= error <= each.high for each, error in zip(before, errors, strict=True)]
    assert sum(inside) >= 18
    assert sum(elsewhere) <= 10
    assert there.predict(drawn[0]).level == 0.95
    assert [found.predict(one) for one in drawn] == before


def test_no_luck_makes_an_interval_shorter_than_what_cotangents_leave_open() -> None:
    found = Calibration.fit([Measured(1e-3, 1e-3, 4.0, 0.04) for _ in range(20)])
    _, low, high = found.interval(Measured(1e-3, 0.0, 4.0, 0.04))
    assert low <= 1e-3 * math.exp(-1.96 * 0.2)
    assert high >= 1e-3 * math.exp(1.96 * 0.2)


def test_attention_is_known_worse_than_linears() -> None:
    loaded = load("stdlib-llama")
    batches = loaded.batches("a few words of text, " * 100, sequence=16, sequences=8)
    found = audit(loaded.model, batches, formats=("bf16", "a-fp8", "kv-fp8"))
    told = {
        site: found.predictor.calibration_point({site: scheme}, 0.0).effective
        for site, scheme in (
            ("model.layers.1.self_attn:kv_cache", "kv-fp8"),
            ("model.layers.1.self_attn:scores", "a-fp8"),
            ("model.layers.1.mlp.up_proj", "bf16"),
        )
    }
    cache, scores, linear = told.values()
    assert cache == scores == pytest.approx(0.25)
    assert 1.0 <= linear <= 2.0
