"""Findings in order, the random control, and where a prediction is not to be trusted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.precision.advice import KINDS, Finding
from assay.precision.advice.detectors import ordered, random_control
from assay.precision.advice.routers import flip_share, routers_of
from assay.precision.auditing import Audit, advise, audit, reliability
from assay.precision.errors import BadAssignment
from assay.precision.loading import load
from assay.precision.observation.operations import traced
from assay.precision.observation.running import call, evaluating
from assay.precision.prediction.perturbations import perturbations_of
from assay.precision.prediction.simulation import Simulator
from assay.precision.schemes import SCHEMES
from tests.precision import traps
from tests.precision.tiny_models import MODELS
from tests.precision.traps import HELD_OUT


def small(name: str, *formats: str) -> Audit:
    loaded = load(name)
    return audit(loaded.model, loaded.batches(HELD_OUT, sequence=48, sequences=8, batch=4), formats=formats)


@pytest.fixture(scope="module")
def llama() -> Audit:
    return small("stdlib-llama", "bf16", "fp8", "w4a16-g128", "mxfp4")


@pytest.fixture(scope="module")
def mixtral() -> Audit:
    found = small("stdlib-mixtral", "bf16", "fp8", "mxfp4")
    found.calibrate(8)
    return found


def test_findings_come_in_order(llama: Audit) -> None:
    """What breaks a model comes first, then what a prediction can't see, then what costs most."""
    given = [Finding(kind, "site", "Words.", {}, "Remedy.", weight) for weight in (1.0, 2.0) for kind in KINDS]
    found = [(KINDS[finding.kind], -finding.weight) for finding in ordered(given)]
    assert found == sorted(found)
    assert ordered(given)[0] == Finding("nonfinite", "site", "Words.", {}, "Remedy.", 2.0)
    real = advise(llama)
    assert real == ordered(real)


def test_findings_are_sentences(llama: Audit) -> None:
    """Every finding names a site, says one sentence, and a remedy."""
    sites = set(map(str, llama.sites))
    for finding in advise(llama):
        assert finding.site in sites
        for words in (finding.words, finding.remedy):
            assert words[0].isupper() or words.split()[0] in SCHEMES
            assert words.endswith(".")
            assert "\n" not in words


def named(finding: Finding) -> set[str]:
    """The schemes that a finding's sentences and numbers name."""
    numbers = (value for key, value in finding.numbers.items() if key not in ("flips", "kind"))
    text = " ".join([finding.words, finding.remedy, *map(str, numbers)])
    return {word.rstrip("-") for word in re.findall(r"[a-z][a-z0-9-]*", text)} & set(SCHEMES)


@pytest.mark.parametrize(
    ("trap", "formats", "options"),
    [
        (None, ("fp8", "w8a8"), {}),
        (None, ("w4a16-g128", "fp8-tensor", "mxfp4"), {}),
        (traps.outlier_channel, ("w8a8", "fp8"), {"layer": 1, "channel": 17}),
        (traps.outlier_channel, ("w4a16-g32",), {"layer": 1, "channel": 17}),
        (traps.scaled_units, ("fp8", "fp8-tensor"), {"layer": 0, "units": list(range(100)), "factor": 2.0**-20}),
        (traps.scaled_units, ("fp16", "w8a16"), {"layer": 2, "units": [5], "factor": 2.0**20}),
        (traps.scaled_units, ("fp16",), {"layer": 2, "units": [5], "factor": 2.0**20}),
        (traps.key_channel, ("kv-int8",), {"layer": 2, "head": 1, "channel": 20}),
    ],
)
def test_findings_name_only_what_the_menu_has(
    trap: Callable[..., object] | None, formats: tuple[str, ...], options: dict[str, Any]
) -> None:
    loaded = load("stdlib-llama")
    model = loaded.model if trap is None else traps.planted(loaded.model, trap, **options)
    found = audit(model, loaded.batches(HELD_OUT, sequence=32, sequences=4, batch=4), formats=formats)
    findings = advise(found)
    assert findings
    for finding in findings:
        assert named(finding) <= set(found.menu(finding.site)), str(finding)


def test_what_overflows_is_replaced_by_what_the_menu_has() -> None:
    torch.manual_seed(0)
    model, values = torch.nn.Sequential(torch.nn.Linear(32, 8)), [torch.randn(8, 32) * 1e5]
    remedies = []
    for formats in (("fp16", "w4a16-g32", "w8a16"), ("fp16",)):
        (finding,) = [each for each in advise(audit(model, values, "relative", formats)) if each.kind == "overflow"]
        remedies.append(finding.remedy)
    assert remedies == ["Take w8a16 here, or leave it as it is.", "Leave it as it is."]


def test_a_pooler_is_said_to_feed_another_output() -> None:
    torch.manual_seed(0)
    model = MODELS["bert"]()
    batches = [{"input_ids": torch.randint(0, 256, (4, 16))} for _ in range(2)]
    dead = [finding for finding in advise(audit(model, batches, "relative", ["w8a16"])) if finding.kind == "dead"]
    assert [finding.site for finding in dead] == ["pooler.dense"]
    assert "doesn't reach" in dead[0].words
    assert "output that is compared" in dead[0].words
    assert "used" not in dead[0].words
    assert "leave the layer out" not in dead[0].remedy.lower()


def test_control_is_one_for_ordinary_weights(llama: Audit) -> None:
    sites = [str(site) for site in llama.sites if site.role == "linear" and str(site) != "lm_head"]
    control = random_control(llama.model, llama.batches, llama.predictor, dict.fromkeys(sites, ("w4a16-g128",)))
    (part,) = perturbations_of(SCHEMES["w4a16-g128"])
    ratios = torch.tensor([llama.predictor.form.of([(site, part)]) / control.of([(site, part)]) for site in sites])
    assert 0.8 < float(ratios.median()) < 1.5


def test_control_tells_changes_that_sit_where_they_hurt() -> None:

    def ratio(factor: float) -> float:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        batches = list(torch.randn(4, 16, 32))
        with torch.no_grad():
            model[0].weight[:, :4] *= factor
        for batch in batches:
            batch[:, :4] *= factor
        found = audit(model, batches, "relative", formats=("fp8",))
        part = perturbations_of(SCHEMES["fp8"])[0]
        control = random_control(model, batches, found.predictor, {"0": ("fp8",)})
        return found.predictor.form.of([("0", part)]) / control.of([("0", part)])

    assert ratio(1.0) < 2
    assert ratio(16.0) > 4


def test_flip_share() -> None:
    """Margins far above the noise never flip, those of zero in half of the cases."""
    assert flip_share(torch.tensor([10.0]), 1.0) < 1e-20
    assert flip_share(torch.tensor([0.0, 10.0]), 1.0) == pytest.approx(0.25)
    assert flip_share(torch.tensor([0.0]), 0.0) == 0.0


class Recorder(Simulator):
    """A simulation that keeps the logits of the routers."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.logits: list[Tensor] = []

    def linear(self, name: str, *rest: Any) -> Tensor:
        output = super().linear(name, *rest)
        if name.endswith("mlp.gate"):
            self.logits.append(output)
        return output


def flips(found: Audit, assignment: dict[str, str]) -> tuple[float, float]:
    """Share of changed choices, and root mean square change of the margins, in a simulated run."""
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


def test_how_many_experts_are_picked_is_counted(mixtral: Audit) -> None:
    routers = routers_of(mixtral.observed)
    assert [router.top for router in routers] == [2, 2, 2, 2]
    assert all(bool((router.margins >= 0).all()) for router in routers)


def test_routing_noise_is_predicted(mixtral: Audit) -> None:
    """How far bf16 moves the routers' margins, and how many choices change, is as predicted within a factor of 1.5
    and 3."""
    routing = mixtral.routing
    assert routing is not None
    everywhere = {str(site): "bf16" for site in mixtral.sites}
    share, noise = flips(mixtral, everywhere)
    assert noise / 1.5 < routing.noise(mixtral.predictor.keys(everywhere)) < noise * 1.5
    assert share / 3 < routing.flips(mixtral.predictor.keys(everywhere)) < share * 3


class Mixture(torch.nn.Module):
    """A router's two best of four experts, each a module; the last one never is among them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(16, 4)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])
        with torch.no_grad():
            self.router.bias[3] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, -2)
        weights, picked = self.router(x).softmax(-1).topk(2, -1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            index, place = torch.where(picked == number)
            if len(index):
                output = output.index_add(0, index, expert(x[index]) * weights[index, place, None])
        return output


def test_experts_that_are_modules() -> None:
    """Experts that are modules of their own are counted too, those that never ran included."""
    torch.manual_seed(0)
    found = audit(Mixture(), list(torch.randn(3, 4, 8, 16)), "relative", formats=("bf16", "fp8"))
    (router,) = routers_of(found.observed)
    assert (router.top, router.tokens) == (2, 96)
    unseen = [finding for finding in advise(found) if finding.kind == "unseen_expert"]
    assert [(finding.site, finding.numbers["expert"]) for finding in unseen] == [("experts", 3)]


def test_a_recommendation_says_where_no_prediction_holds() -> None:
    torch.manual_seed(0)
    found = audit(Mixture(), list(torch.randn(3, 4, 8, 16)), "relative", formats=("bf16", "fp8"))
    found.calibrate(6)
    chosen = found.recommend(max_bytes=0.3 * found.cost({}).bytes)
    assert any(site.startswith("experts") for site in chosen)
    assert "go by what was measured" in chosen.why
    assert "expert 3 of experts" in chosen.why
    untouched = found.recommend(max_bytes=2 * found.cost({}).bytes)
    assert untouched.why == "no budget binds: the model as it is keeps them"


def test_a_model_without_routers_has_no_routing(llama: Audit) -> None:
    assert llama.routing is None


def test_flips_make_an_assignment_unreliable(mixtral: Audit) -> None:
    everywhere = {str(site): "mxfp4" for site in mixtral.sites if "mxfp4" in mixtral.menu(site)}
    assert any("choices of experts" in reason for reason in reliability(mixtral, everywhere))
    one = reliability(mixtral, {"lm_head": "bf16"})
    assert not any("choices of experts" in reason for reason in one)


def test_an_error_outside_of_the_calibrated_range_is_unreliable(llama: Audit) -> None:
    llama.calibrate(8)
    site = min(
        (site for site in llama.sites if site.type == "linear"), key=lambda site: llama.contribution(site, "bf16")
    )
    (reason,) = reliability(llama, {site: "bf16"})
    assert "far below" in reason
    assert reliability(llama, llama.measured[0][0]) == []


def test_reliability_checks_the_assignment(llama: Audit) -> None:
    """A site that there is not is refused as everywhere."""
    with pytest.raises(BadAssignment, match="expected a site"):
        reliability(llama, {"model.layers.9": "bf16"})
