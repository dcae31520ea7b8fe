"""Findings in order, the random control, and where a prediction is not to be trusted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from assay.precision.advice import KINDS, Finding
from assay.precision.advice.detectors import ordered, random_control
from assay.precision.auditing import Audit, advise, audit, reliability
from assay.precision.errors import BadAssignment
from assay.precision.loading import load
from assay.precision.prediction.perturbations import perturbations_of
from assay.precision.schemes import SCHEMES
from tests.precision import traps
from tests.precision.tiny_models import MODELS
from tests.precision.traps import HELD_OUT


@pytest.fixture
def llama() -> Audit:
    return traps.clean("stdlib-llama")


def test_findings_come_in_order() -> None:
    given = [Finding(kind, "site", "Words.", {}, "Remedy.", weight) for weight in (1.0, 2.0) for kind in KINDS]
    found = [(KINDS[finding.kind], -finding.weight) for finding in ordered(given)]
    assert found == sorted(found)
    assert ordered(given)[0] == Finding("nonfinite", "site", "Words.", {}, "Remedy.", 2.0)


def test_findings_are_sentences_in_order(llama: Audit) -> None:
    sites, findings = set(map(str, llama.sites)), advise(llama)
    assert findings == ordered(findings)
    for finding in findings:
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
    found = audit(model, loaded.batches(HELD_OUT, sequence=24, sequences=4, batch=4), formats=formats)
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
    control = random_control(llama.model, llama.batches, llama.predictor, dict.fromkeys(sites, ("mxfp4",)))
    part = perturbations_of(SCHEMES["mxfp4"])[0]
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


def test_an_error_outside_of_the_calibrated_range_is_unreliable(llama: Audit) -> None:
    llama.calibrate(8)
    site = min(
        (site for site in llama.sites if site.type == "linear"), key=lambda site: llama.contribution(site, "bf16")
    )
    (reason,) = reliability(llama, {site: "bf16"})
    assert "far below" in reason
    assert reliability(llama, llama.measured[0][0]) == []


def test_reliability_checks_the_assignment(llama: Audit) -> None:
    with pytest.raises(BadAssignment, match="expected a site"):
        reliability(llama, {"model.layers.9": "bf16"})
