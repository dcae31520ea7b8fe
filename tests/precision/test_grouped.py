"""Grouped and depthwise convolutions: sites with the operation's own outputs, predicted as they are measured."""

import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.precision import Audit, audit, reliability
from assay.precision.observation import groups
from assay.precision.prediction.simulation import split_product
from assay.precision.schemes import Split
from tests.precision.opened import drawn, observed
from tests.precision.recurrent_models import assert_stored_weights_give_torchs_error, trained
from tests.precision.traps import new_findings, planted

FORMATS = ("bf16", "w8a16", "fp8-tensor", "w8a8-static", "w4a16-g32", "w3a16-g32")


class Separable(torch.nn.Module):
    """Two depthwise-separable blocks between a stem and a classifier, as MobileNet has them (arXiv:1704.04861)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 24, 3, padding=1)
        self.blocks = torch.nn.Sequential(self.block(24, 32, 1), self.block(32, 48, 2))
        self.fc = torch.nn.Linear(48, 10)

    def block(self, inputs: int, outputs: int, stride: int) -> torch.nn.Sequential:
        return torch.nn.Sequential(
            torch.nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            torch.nn.BatchNorm2d(inputs),
            torch.nn.ReLU(),
            torch.nn.Conv2d(inputs, outputs, 1, bias=False),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x).relu()).mean((2, 3)))


class Grouped(torch.nn.Module):
    """Two bottlenecks whose middle convolution has groups, as ResNeXt has them (arXiv:1611.05431)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 32, 3, 2, 1)
        self.a, self.b = self.block(), self.block()
        self.fc = torch.nn.Linear(32, 10)

    def block(self) -> torch.nn.Sequential:
        return torch.nn.Sequential(
            torch.nn.Conv2d(32, 64, 1, bias=False),
            torch.nn.BatchNorm2d(64),
            torch.nn.ReLU(),
            torch.nn.Conv2d(64, 64, 3, 1, 1, groups=2, bias=False),
            torch.nn.BatchNorm2d(64),
            torch.nn.ReLU(),
            torch.nn.Conv2d(64, 32, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.a(x)).relu()
        return self.fc((x + self.b(x)).relu().mean((2, 3)))


MODELS = {"depthwise": (Separable, "blocks.1.0"), "grouped": (Grouped, "b.3")}


def pictures(seed: int) -> Tensor:
    return drawn(64, 3, 10, 10, seed=seed)


def loss(model: torch.nn.Module, x: Tensor) -> Tensor:
    """That of telling how bright a picture is."""
    return torch.nn.functional.cross_entropy(model(x), (x.mean((1, 2, 3)) * 40).long().clamp(-4, 5) + 4)


@cache
def audited(name: str) -> tuple[Audit, str]:
    """A calibrated audit of one of the models, and a site of it."""
    build, site = MODELS[name]
    model = trained(build, [pictures(seed) for seed in range(4)], loss)
    found = audit(model, [pictures(5), pictures(6)], "kl", FORMATS, check=[pictures(7), pictures(8)])
    found.calibrate(24)
    return found, site


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[Audit, str]:
    return audited(request.param)


@settings(max_examples=40, deadline=None)
@given(
    sides=st.integers(1, 3),
    several=st.integers(2, 4),
    inputs=st.integers(1, 3),
    outputs=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    batched=st.booleans(),
    bias=st.booleans(),
)
def test_a_convolution_in_groups_is_a_product_in_groups(
    sides: int, several: int, inputs: int, outputs: int, kernel: int, stride: int, batched: bool, bias: bool
) -> None:
    kind = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[sides - 1]
    model = kind(several * inputs, several * outputs, kernel, stride, 1, groups=several, bias=bias)
    x = drawn(*([2] if batched else []), several * inputs, *range(4, 4 + sides))
    site = observed(model, x).sites["weight"]
    assert (site.type, site.role, site.shape) == ("linear", "convolution", (several * outputs, inputs * kernel**sides))


@pytest.mark.parametrize("padding", [1, "same"])
def test_an_exported_convolution_has_the_site_of_the_module(padding: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=padding, groups=2)).eval()
    program: Any = torch.export.export(model, (drawn(2, 4, 5, 5),)).module(check_guards=False)
    assert observed(program, drawn(2, 4, 5, 5)).sites["0"].shape == (8, 18)


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"stride": 3, "output_padding": 1}, {"dilation": 2, "bias": False}]
)
@pytest.mark.parametrize("sides", [1, 2])
def test_a_transposed_convolution_in_groups_is_one_too(several: int, options: dict[str, Any], sides: int) -> None:
    kind = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d)[sides - 1]
    model = kind(6, 9, 3, groups=several, **options)
    site = observed(model, drawn(2, 6, *range(4, 4 + sides))).sites["weight"]
    assert site.shape == (9 * 3**sides, 6 // several)


def test_outputs_with_stored_weights_are_torchs_own(case: tuple[Audit, str]) -> None:
    found, site = case
    stored = assert_stored_weights_give_torchs_error(found, f"{site}.weight")
    assert stored.scales is not None
    assert stored.scales.scale.shape == (len(found.model.get_parameter(f"{site}.weight")), 1)  # one an output channel


def test_rows_of_a_weight_have_the_gradient_that_all_have() -> None:
    x, g = drawn(5, 3 * 4), drawn(5, 3 * 6)
    whole = groups.weight_gradient(g, x, 3)
    assert whole.shape == (18, 4)
    for start, stop in [(0, 18), (0, 5), (4, 8), (7, 11), (5, 13), (17, 18)]:
        some_x, some_g, held, here = groups.slice_rows(x, g, 3, start, stop)
        torch.testing.assert_close(groups.weight_gradient(some_g, some_x, held)[here], whole[start:stop])


def test_a_sum_in_parts_is_one_of_each_group() -> None:
    x, weight, bias = drawn(2, 5, 3 * 8), drawn(6, 8, seed=2), drawn(6, seed=3)

    def product(a: Tensor, w: Tensor) -> Tensor:
        return groups.linear(a, w, bias)

    torch.testing.assert_close(split_product(x, weight, [Split(length=3)], product), product(x, weight))
    rounded = split_product(x, weight, [Split(length=3, total="bfloat16")], product) - bias
    torch.testing.assert_close(rounded, rounded.bfloat16().float(), rtol=0, atol=1e-6)


def test_what_is_measured_lies_within_what_is_predicted() -> None:
    inside = []
    for found, site in map(audited, MODELS):
        draw = random.Random(1)
        drawn_ones = [found.random_assignment(draw, (1.0, 0.3, 0.1)[turn % 3]) for turn in range(30)]
        every = [{site: "w8a16"}, *drawn_ones]
        told = list(zip(map(found.predict, every), found.measure_together(every), strict=True))
        told = [(predicted, measured) for predicted, measured in told if predicted.error and predicted.level]
        inside.append([predicted.low <= measured <= predicted.high for predicted, measured in told])
        assert sum(inside[-1]) >= 0.8 * len(inside[-1]) > 19, told
    assert sum(map(sum, inside)) >= 0.9 * sum(map(len, inside))


def test_a_model_with_large_errors_says_where_its_predictions_end() -> None:
    found, _ = audited("grouped")
    coarse, mild = (
        {str(site): scheme for site in found.sites if scheme in found.menu(site)} for scheme in ("w3a16-g32", "bf16")
    )
    prediction = found.predict(coarse)
    assert found.measure(coarse) < 0.67 * prediction.error
    assert prediction.level == 0
    (reason,) = reliability(found, coarse)
    assert reason.endswith("lies where it was predicted, so its interval is a guess.")
    assert found.predict(mild).level == 0.95
    assert reliability(found, mild) == []


@pytest.mark.parametrize("scheme", ["fp8-tensor", "w8a8-static"])
def test_windows_that_share_values_have_errors_that_add_up(scheme: str) -> None:
    """A value that is rounded is in nine windows, whose errors go the same way where a mean over all places follows:
    the prediction has them together, also where a picture has many windows."""
    found, site = audited("grouped")
    alone = found.contribution(site, scheme)
    assert 0.6 < alone / found.trial({site: scheme}) < 1.6


def test_everything_of_such_a_model_has_a_site(case: tuple[Audit, str]) -> None:
    found, site = case
    assert str(found.observed.unaudited) == ""
    assert {"bf16", "w8a16", "fp8-tensor", "w8a8-static"} <= set(found.menu(site))
    assert "w8a8" not in found.menu(site)


def test_an_outlier_channel_before_a_depthwise_convolution_is_found() -> None:
    model = trained(Separable, [pictures(seed) for seed in range(2)], loss)

    def trap(model: Any) -> None:
        norm, kernel = model.blocks[0][4], model.blocks[1][0]
        norm.weight[5] *= 2.0**8
        norm.bias[5] *= 2.0**8
        kernel.weight[5] /= 2.0**8

    batches = [pictures(9)]
    changed = planted(model, trap)
    torch.testing.assert_close(changed(batches[0]), model(batches[0]), rtol=1e-4, atol=1e-4)
    clean, found, new = new_findings(model, changed, batches, "kl", FORMATS)
    new = [each for each in new if each.kind == "outlier_channel"]
    assert [each.site for each in new] == ["blocks.1.0"]
    assert {place // 9 for place in new[0].numbers["channels"]} == {5}
    assert found.contribution("blocks.1.0", "w8a8-static") > 10 * clean.contribution("blocks.1.0", "w8a8-static")
