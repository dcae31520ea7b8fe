"""Routers: how many experts they pick, and assignments under which they pick others, without a promised interval."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.precision.advice.routers import flip_share, routers_of
from assay.precision.auditing import Audit, advise, audit, reliability
from assay.precision.observation.operations import traced
from assay.precision.observation.running import call, evaluating
from assay.precision.prediction.calibration import Calibration, Measured
from assay.precision.prediction.simulation import Simulator
from assay.precision.report import content_of, page, summary
from assay.precision.schemes import SCHEMES
from tests.precision import traps
from tests.precision.reported import asked

SIZE, EXPERTS = 32, 4


class Mixture(torch.nn.Module):
    skips = False  # Whether experts without tokens don't run

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(SIZE, EXPERTS)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(SIZE, SIZE) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, picked = self.gate(flat).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            index, place = torch.where(picked == number)
            if self.skips and not len(index):
                continue
            output = output.index_add(0, index, expert(flat[index]).tanh() * weights[index, place, None])
        return output.view_as(x)


class Mixtures(torch.nn.Module):
    """Like Mixtral without attention: layers of a norm and a mixture around a residual, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.Linear(SIZE, SIZE)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(SIZE) for _ in range(2)])
        self.layers = torch.nn.ModuleList([Mixture() for _ in range(2)])
        self.head = torch.nn.Linear(SIZE, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def audited(*, tied: bool) -> Audit:
    """An audit of a mixture whose first expert always comes first; the second is one of two near a tie, or the same."""
    torch.manual_seed(0)
    model, batches = Mixtures(), list(torch.randn(4, 4, 32, SIZE))
    with torch.no_grad():
        for layer in (each for each in model.modules() if isinstance(each, Mixture)):
            layer.gate.bias.copy_(torch.tensor([4.0, 0.0, 0.0 if tied else -40.0, -40.0]))
            if tied:
                layer.gate.weight[2] = layer.gate.weight[1] + 0.02 * torch.randn(SIZE)
    found = audit(model, batches, "kl", formats=("bf16", "fp8", "mxfp4"))
    found.calibrate()
    return found


@pytest.fixture(scope="module")
def near() -> Audit:
    return audited(tied=True)


@pytest.fixture(scope="module")
def wide() -> Audit:
    return audited(tied=False)


class Recorder(Simulator):
    """A simulation that keeps the logits of the routers."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.logits: list[Tensor] = []

    def linear(self, name: str, *rest: Any) -> Tensor:
        output = super().linear(name, *rest)
        if name.endswith("gate"):
            self.logits.append(output.flatten(0, -2))
        return output


def flips(found: Audit, assignment: dict[str, str]) -> tuple[float, float]:
    """The share of changed choices, and the root mean square change of the margins, in a simulated run."""
    runs = []
    for chosen in ({}, {site: SCHEMES[scheme] for site, scheme in assignment.items()}):
        recorder = Recorder(chosen, found.fits, {})
        with torch.no_grad(), evaluating(found.model), traced(found.model, recorder):
            for batch in found.batches:
                call(found.model, batch)
        runs.append(torch.cat(recorder.logits))
    order = runs[0].topk(3, -1).indices
    margins = [logits.gather(-1, order[:, 1:2]) - logits.gather(-1, order[:, 2:]) for logits in runs]
    picked = [logits.topk(2, -1).indices.sort(-1).values for logits in runs]
    changed = (picked[0] != picked[1]).any(-1).double().mean()
    return float(changed), float((margins[1] - margins[0]).square().mean().sqrt())


def of_flips(reasons: Sequence[str]) -> list[str]:
    return [reason for reason in reasons if "choices of experts" in reason]


def several(found: Audit) -> list[dict[str, str]]:
    """Assignments that nothing was fitted to, from dense to single."""
    return [
        found.random_assignment(random.Random(f"{share} {draw}"), share)
        for share in (1.0, 0.3, 0.1)
        for draw in range(4)
    ]


@pytest.fixture(scope="module")
def mixtral() -> Audit:
    found = traps.clean("stdlib-mixtral")
    found.calibrate(6)
    return found


def test_flip_share() -> None:
    assert flip_share(torch.tensor([10.0]), 1.0) < 1e-20
    assert flip_share(torch.tensor([0.0, 10.0]), 1.0) == pytest.approx(0.25)
    assert flip_share(torch.tensor([0.0]), 0.0) == 0.0


def test_how_many_experts_are_picked_is_counted(mixtral: Audit) -> None:
    routers = routers_of(mixtral.observed)
    assert [router.top for router in routers] == [2, 2, 2, 2]
    assert all(bool((router.margins >= 0).all()) for router in routers)


def test_routing_noise_is_predicted(mixtral: Audit) -> None:
    routing = mixtral.routing
    assert routing is not None
    everywhere = {str(site): "bf16" for site in mixtral.sites}
    share, noise = flips(mixtral, everywhere)
    assert noise / 1.5 < routing.noise(mixtral.predictor.keys(everywhere)) < noise * 1.5
    assert share / 3 < routing.flips(mixtral.predictor.keys(everywhere)) < share * 3


def test_experts_that_are_modules_are_counted_those_that_never_ran_too() -> None:
    torch.manual_seed(0)
    model = Mixture()
    model.skips = True
    with torch.no_grad():
        model.gate.bias[3] = -100.0
    found = audit(model, list(torch.randn(3, 4, 8, SIZE)), "relative", formats=("bf16", "fp8"))
    (router,) = routers_of(found.observed)
    assert (router.top, router.tokens) == (2, 96)
    unseen = [finding for finding in advise(found) if finding.kind == "unseen_expert"]
    assert [(finding.site, finding.numbers["expert"]) for finding in unseen] == [("experts", 3)]
    found.calibrate(6)
    chosen = found.recommend(max_bytes=0.3 * found.cost({}).bytes)
    assert any(site.startswith("experts") for site in chosen)
    assert "go by what was measured" in chosen.why
    assert "expert 3 of experts" in chosen.why
    untouched = found.recommend(max_bytes=2 * found.cost({}).bytes)
    assert untouched.why == "no budget binds: the model as it is keeps them"


def test_flips_make_an_assignment_unreliable(mixtral: Audit) -> None:
    everywhere = {str(site): "mxfp4" for site in mixtral.sites if "mxfp4" in mixtral.menu(site)}
    assert any("choices of experts" in reason for reason in reliability(mixtral, everywhere))
    one = reliability(mixtral, {"lm_head": "bf16"})
    assert not any("choices of experts" in reason for reason in one)


def test_a_router_near_a_tie_is_told(near: Audit) -> None:
    count = 0
    for assignment in several(near):
        if (share := flips(near, assignment)[0]) < 0.02:
            continue
        (reason,) = of_flips(reliability(near, assignment))
        assert share / 2 < float(reason.split(" %")[0]) / 100 < share * 2
        count += 1
    assert count >= 3


def test_a_router_with_wide_margins_is_not_told(wide: Audit) -> None:
    for assignment in several(wide):
        assert flips(wide, assignment)[0] == 0
        assert of_flips(reliability(wide, assignment)) == []
        assert wide.predict(assignment).level >= 0.95


def test_no_interval_is_promised_that_flips_break(near: Audit) -> None:
    broken = 0
    for assignment in several(near):
        prediction = near.predict(assignment)
        if near.trial(assignment) > 3 * prediction.error:
            broken += 1
            assert prediction.level == 0
            assert "its interval is a guess" in " ".join(of_flips(reliability(near, assignment)))
    assert broken >= 1
    dense = near.random_assignment(random.Random(3))
    assert near.predict(dense).level >= 0.95
    assert "a guess" not in " ".join(reliability(near, dense))


def test_flips_stand_in_record_terminal_and_page(near: Audit) -> None:
    chosen = near.recommend(max_bytes=0.3 * near.cost({}).bytes)
    (reason,) = of_flips(reliability(near, chosen))
    content = content_of(near, chosen, near.pareto(3), [], **asked(near))
    told = reason.removesuffix(".")
    assert told in content["recommended"]["why"]
    assert told in " ".join(summary(content).split())
    assert told.partition(", as the routers")[0] in page(content)


def test_flips_are_counted_over_the_sequences_that_are_predicted_for(near: Audit) -> None:
    keys = near.predictor.keys(near.checked({"layers.0.experts.0": "mxfp4", "into": "mxfp4"}))
    here, twice = near.predictor, near.predictor_over([*near.batches, *near.batches])
    far = near.predictor_over([0.01 * batch for batch in near.batches])  # nearly one token, away from the tie
    assert here.flips is not None
    assert twice.flips is not None
    assert far.flips is not None
    assert twice.flips(keys) == pytest.approx(2 * here.flips(keys), rel=0.2)
    assert far.flips(keys) < 0.1 * here.flips(keys)


def test_no_interval_is_judged_by_errors_that_flips_make() -> None:
    """A pair that flips raise a hundredfold makes the intervals of others no longer and has no part in their level, and
    one that few flips could explain is a score like any other."""
    draw = random.Random(0)

    def pair(ratio: float, flips: float) -> Measured:
        return Measured(1e-3, 1e-3 * ratio, 4.0, flips=flips)

    usual = [pair(math.exp(draw.gauss(0, 0.1)), 0.0) for _ in range(24)]
    flipped = [pair(each, 100.0) for each in (100.0, 110.0, 90.0, 105.0)]
    without, beside, unexplained = (
        Calibration.fit([*usual, *some]) for some in ([], flipped, [*flipped, pair(100.0, 0.1)])
    )
    steady = pair(1.0, 0.0)
    assert beside.level == without.level == 0.95
    assert beside.interval(steady)[2] == pytest.approx(without.interval(steady)[2], rel=0.1)
    assert beside.level_of(flipped[0]) == 0
    assert Calibration.fit([*usual[:9], *flipped]).level == pytest.approx(0.9)
    assert (beside.unscored, unexplained.unscored) == (4, 4)
    assert unexplained.quantile > 2 * beside.quantile


def test_as_many_more_are_measured_as_have_no_score(near: Audit) -> None:
    calibration = near.predictor.calibration
    assert calibration.unscored > 0
    assert len(near.measured) > 20
    assert calibration.level == 0.95
