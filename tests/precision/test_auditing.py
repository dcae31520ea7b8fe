"""The audit as a whole: predictions against measurements, recommendations against exhaustive search, refusals."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from assay.formats.errors import UnknownOption
from assay.precision import audit
from assay.precision.auditing import Audit
from assay.precision.errors import BadAssignment, BadModel, NoData, UnknownScheme
from assay.precision.loading import load
from assay.runtime.errors import AssayError
from tests.precision.tiny_models import MODELS
from tests.precision.traps import HELD_OUT

FORMATS = ("bf16", "fp8", "w8a8", "w8a16", "w4a16-g32", "w3a16-g32", "mxfp4", "kv-fp8", "kv-int4", "a-fp8")


@pytest.fixture(scope="module")
def language_model() -> Audit:
    loaded = load("stdlib-llama")
    found = audit(loaded.model, loaded.batches(HELD_OUT, sequence=64, sequences=16, batch=16), formats=FORMATS, bits=16)
    found.calibrate(24)
    return found


def deep(widths: int, *, size: int = 64, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for _ in range(widths):
        layers += [torch.nn.Linear(size, size), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


def batches(count: int = 4, size: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, size, generator=generator) for _ in range(count)]


@pytest.mark.slow
def test_random_assignments_are_predicted(language_model: Audit) -> None:
    """Of fresh random assignments the median is right to a fifth (of eight that fit it), and most intervals hold."""
    draw = random.Random(7)
    assignments = [language_model.random_assignment(draw, 1.0 if index % 2 else 0.3) for index in range(24)]
    measured = np.array(language_model.measure_together(assignments))
    predictions = [language_model.predict(assignment) for assignment in assignments]
    predicted, low, high = np.array([(each.error, each.low, each.high) for each in predictions]).T
    assert abs(math.log(float(np.median(predicted / measured)))) < 0.2
    assert float(spearmanr(predicted, measured)[0]) > 0.95
    assert ((low <= measured) & (measured <= high)).sum() >= 20


def test_one_site_is_predicted_as_it_is_measured(language_model: Audit) -> None:
    for site, scheme in (
        ("model.layers.1.mlp.down_proj", "w3a16-g32"),
        ("lm_head", "mxfp4"),
        ("model.layers.2.self_attn:kv_cache", "kv-int4"),
    ):
        ratio = language_model.contribution(site, scheme) / language_model.measure({site: scheme})
        assert 1 / 1.5 < ratio < 1.5, (site, scheme, ratio)


def test_nothing_assigned_is_no_error(language_model: Audit) -> None:
    assert language_model.predict({}).error == language_model.measure({}) == 0.0
    parameters = sum(parameter.numel() for parameter in language_model.model.parameters())
    assert language_model.cost({}).bytes == 2 * parameters


def test_a_budget_of_the_error_is_one_of_the_measured_error(language_model: Audit) -> None:
    found = language_model.recommend(max_error=0.01)
    assert found.met
    assert found.measured == language_model.measure(found) <= 0.01
    assert found.cost.bytes < 0.5 * language_model.cost({}).bytes


def test_budgets_that_contradict_each_other_are_named(language_model: Audit) -> None:
    found = language_model.recommend(max_error=1e-7, max_bytes=0.25 * language_model.cost({}).bytes)
    assert not found.met
    assert "max_bytes" in found.why
    assert "max_error" in found.why


def test_the_front_falls(language_model: Audit) -> None:
    front = language_model.pareto(6)
    sizes, _, predictions, assignments = zip(*front, strict=True)
    assert list(sizes) == sorted(sizes)
    errors = [prediction.error for prediction in predictions]
    assert errors == sorted(errors, reverse=True)
    assert sizes[0] < 0.33 * language_model.cost({}).bytes
    assert [language_model.cost(assignment).bytes for assignment in assignments] == list(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.evidence) for seed in range(1, 6))])
def test_the_choice_is_the_exhaustive_optimum(seed: int) -> None:
    model = deep(5, seed=seed)
    for layer in range(0, 9, 2):
        model[layer].weight.data *= 0.7 + 0.3 * ((layer + seed) % 5)  # type: ignore[index, union-attr, operator]
    found = audit(model, batches(2), "relative", ["w8a16", "w4a16-g32", "w3a16-g32"], bits=16)
    found.calibrate(12)
    budget = 0.3 * found.cost({}).bytes
    chosen = found.recommend(max_bytes=budget)
    assert chosen.cost.bytes <= budget
    sites = [str(site) for site in found.sites]
    every = (
        {site: scheme for site, scheme in zip(sites, schemes, strict=True) if scheme}
        for schemes in itertools.product(["", "w8a16", "w4a16-g32", "w3a16-g32"], repeat=5)
    )
    fits = [assignment for assignment in every if found.cost(assignment).bytes <= budget]
    assert chosen.measured == min(found.measure_together(fits))


@pytest.mark.parametrize("metric", ["relative", "kl", lambda outputs, batch: outputs.square().mean(-1)])
def test_every_metric_is_predicted(metric: Any) -> None:
    found = audit(deep(3), batches(), metric, ["bf16", "w8a8", "w4a16-g32", "fp8"])
    found.calibrate(12)
    draw = random.Random(1)
    some = [found.random_assignment(draw) for _ in range(8)]
    assert 0.7 < float(np.median([found.predict(each).error / found.measure(each) for each in some])) < 1.4


def test_padding_doesn_t_count() -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]()
    ids = torch.randint(0, 256, (4, 12))
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    errors = []
    for fill in (0, 255):
        padded = ids.clone()
        padded[:, 8:] = fill
        found = audit(model, [{"input_ids": padded, "attention_mask": mask}], formats=["w4a16-g32"])
        errors.append((found.measure({"lm_head": "w4a16-g32"}), found.contribution("lm_head", "w4a16-g32")))
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


def test_an_exported_program_is_audited_as_its_module() -> None:
    model, data = deep(2).eval(), batches(2)
    program = torch.export.export(model, (data[0],))
    plain, exported = (audit(one, data, "relative", ["w8a8"]) for one in (model, program))
    assert [str(site) for site in plain.sites] == [str(site) for site in exported.sites]
    assert plain.measure({"0": "w8a8"}) == exported.measure({"0": "w8a8"})


def test_what_the_model_costs_does_not_depend_on_the_formats() -> None:
    torch.manual_seed(0)
    ids = [{"input_ids": torch.randint(0, 256, (4, 12))}]
    costs = [audit(MODELS["llama"](), ids, formats=[name], bits=16).cost({}) for name in ("fp8", "w8a16", "kv-fp8")]
    assert costs[0] == costs[1] == costs[2]


def test_a_model_without_attention_has_no_cache() -> None:
    found = audit(deep(2), batches(1), "relative", ["w8a8"], bits=16)
    assert found.cost({}).kv_bytes == 0
    assert found.cost({}).bytes == 2 * sum(parameter.numel() for parameter in found.model.parameters())


def test_overflow_is_said_beforehand() -> None:
    model = deep(2)
    model[0].bias.data[:] = 0  # type: ignore[union-attr, operator]
    data = [batch * 1e5 for batch in batches(1)]
    found = audit(model, data, "relative", ["fp16", "bf16"])
    assert found.contribution("0", "fp16") == math.inf
    assert not math.isfinite(found.measure({"0": "fp16"}))
    assert math.isfinite(found.contribution("0", "bf16"))


def nan_weights() -> torch.nn.Module:
    model = deep(2)
    model[2].weight.data[3, 5] = math.nan  # type: ignore[union-attr, operator, index]
    return model


REFUSED: dict[str, tuple[Callable[[], Any], type[AssayError], str]] = {
    "no batches": (lambda: audit(deep(1), []), NoData, "calibration batches"),
    "no sequences": (lambda: audit(deep(1), [{"x": 3}]), NoData, "first dimension"),
    "NaN weights": (lambda: audit(nan_weights(), batches(1)), BadModel, "2.weight"),
    "no linears": (lambda: audit(torch.nn.ReLU(), batches(1), "relative"), BadModel, "linear"),
    "no module": (lambda: audit("model", batches(1)), BadModel, "torch.nn.Module"),  # type: ignore[arg-type]
    "metric": (lambda: audit(deep(1), batches(1), "mse"), UnknownOption, "'kl'"),
    "format": (lambda: audit(deep(1), batches(1), formats=["fp9"]), UnknownScheme, "fp8"),
    "site": (lambda: audit(deep(1), batches(1), "relative").measure({"O": "fp8"}), BadAssignment, "site"),
    "place": (lambda: audit(deep(1), batches(1), "relative").measure({"0": "kv-fp8"}), BadAssignment, "w8a8"),
    "budget of nothing": (
        lambda: audit(deep(1), batches(1), "relative").recommend(max_error=0.0),
        UnknownOption,
        "max_error above 0",
    ),
    "no budget": (lambda: audit(deep(1), batches(1), "relative").recommend(), UnknownOption, "max_error"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_t_be_audited_is_refused_in_one_line(case: str) -> None:
    call, error, words = REFUSED[case]
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistaken_setting_is_told_the_right_one() -> None:
    with pytest.raises(UnknownOption, match="audit: unknown setting 'metrc'; did you mean 'metric'"):
        audit(torch.nn.Linear(2, 2), [], metrc="kl")
