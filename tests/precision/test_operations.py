"""Convolutions, products of several matrices and products by subscripts: sites with the operation's own outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from assay.precision import audit
from assay.precision.errors import BadModel
from assay.precision.export import quantization_config
from assay.precision.schemes import SCHEMES
from tests.precision.opened import drawn, observed

functional = torch.nn.functional


class Of(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(drawn(*shape, seed=2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.w)


@settings(max_examples=60, deadline=None)
@given(
    sides=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    padding=st.sampled_from([0, 1, 2, "valid"]),
    batched=st.booleans(),
    bias=st.booleans(),
)
def test_a_convolution_is_a_product_with_its_windows(
    sides: int, kernel: int, stride: int, dilation: int, padding: Any, batched: bool, bias: bool
) -> None:
    kind = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[sides - 1]
    model = kind(3, 5, kernel, stride=stride, padding=padding, dilation=dilation, bias=bias)
    x = drawn(*([2] if batched else []), 3, *range(6, 6 + sides))
    site = observed(model, x).sites["weight"]
    assert (site.type, site.role, site.shape) == ("linear", "convolution", (5, 3 * kernel**sides))


def test_same_padding_of_an_even_kernel_is_torchs() -> None:
    assert observed(torch.nn.Conv2d(3, 4, (2, 3), padding="same"), drawn(2, 3, 7, 5)).sites


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"stride": 3, "output_padding": (1, 2)}, {"dilation": 2, "bias": False}],
)
def test_a_transposed_convolution_is_a_product_with_its_input(options: dict[str, Any]) -> None:
    model = torch.nn.ConvTranspose2d(3, 5, (2, 3), **options)
    assert observed(model, drawn(2, 3, 4, 6)).sites["weight"].shape == (5 * 6, 3)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "bmm": (torch.bmm, (3, 4, 8), (3, 8, 6)),
    "bmm of the parameter first": (lambda x, w: torch.bmm(w, x), (3, 8, 4), (3, 6, 8)),
    "baddbmm": (lambda x, w: torch.baddbmm(torch.ones(3, 1, 6), x, w), (3, 4, 8), (3, 8, 6)),
    "matmul of one matrix": (lambda x, w: x @ w, (2, 4, 8), (8, 6)),
    "matmul of the matrix first": (lambda x, w: w @ x, (2, 8, 4), (6, 8)),
    "matmul of matrices": (lambda x, w: x @ w, (2, 3, 4, 8), (3, 8, 6)),
    "the same rows for every matrix": (lambda x, w: x[:, None] @ w, (2, 4, 8), (3, 8, 6)),
    "einsum of a head's projection": (lambda x, w: torch.einsum("btd,dhk->bthk", x, w), (2, 4, 8), (8, 3, 2)),
    "einsum that sums two": (lambda x, w: torch.einsum("bthk,hkd->btd", x, w), (2, 4, 3, 2), (3, 2, 8)),
    "einsum of experts": (lambda x, w: torch.einsum("ebd,edf->bef", x, w), (3, 4, 8), (3, 8, 6)),
    "einsum of the parameter first": (lambda x, w: torch.einsum("of, b f -> b o", w, x), (4, 8), (6, 8)),
    "einsum to one number a row": (lambda x, w: torch.einsum("ijk,jk->i", x, w), (5, 4, 8), (4, 8)),
    "grouped": (
        lambda x, w: functional.grouped_mm(x, w, offs=torch.tensor([3, 3, 7], dtype=torch.int32)),
        (7, 16),
        (3, 16, 8),
    ),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_with_a_parameter_are_sites(case: str) -> None:
    function, of_x, of_w = PRODUCTS[case]
    site = observed(Of(function, *of_w), drawn(*of_x)).sites["w"]
    matrices = len(of_w) == 3 and "einsum of a" not in case and "sums" not in case
    assert site.role == ("experts" if matrices else "linear")
    assert site.parameters == torch.Size(of_w).numel()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.einsum("bd,bd->b", x, w),
        lambda x, w: torch.einsum("bd,de->e", x, w),
        lambda x, w: torch.einsum("bb,bd->bd", x, w),
        lambda x, w: (x @ x) * w,
        lambda x, w: w @ w + x,
        lambda x, w: functional.grouped_mm(
            mat_a=x.repeat(1, 4), mat_b=w.repeat(4, 2)[None], offs=torch.tensor([4], dtype=torch.int32)
        ),
    ],
)
def test_what_is_no_product_of_a_tensor_with_a_weight_is_left_alone(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert not observed(Of(function, 4, 4), drawn(4, 4)).sites


@pytest.mark.parametrize("case", PRODUCTS)
def test_a_scheme_rounds_parameter_and_input(case: str) -> None:
    function, of_x, of_w = PRODUCTS[case]
    model, x = Of(function, *of_w), drawn(*of_x)
    found = audit(model, [x], "relative", ["bf16"])
    expected = function(x, model.w.detach())
    change = function(*(values.bfloat16().float() for values in (x, model.w.detach()))) - expected
    assert float(found.trial({"w": "bf16"})) == pytest.approx(float(change.norm() / expected.norm()), rel=0.02)


class Picture(torch.nn.Module):
    """A convolution, a transposed one back, and one matrix an image's half."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = torch.nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.halves = torch.nn.Parameter(drawn(2, 4 * 32, 6, seed=4) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x).tanh()).tanh()
        return torch.einsum("bhk,hkn->bhn", y.unflatten(2, (2, 4)).transpose(1, 2).flatten(2), self.halves)


def test_a_convolutions_input_has_one_scale() -> None:
    found = audit(Picture(), [drawn(3, 3, 8, 8)], "relative", list(SCHEMES))
    menu = found.menu("up")
    assert {"bf16", "w8a16", "fp8-tensor", "w8a8-static"} <= set(menu)
    assert not {"w8a8", "fp8", "w8a8-smooth", "w8a8-hadamard", "w4a16-g32-awq"} & set(menu)
    groups = {name for name in found.menu("down") if "-g" in name}
    assert not groups  # of 27 numbers a row


def test_an_export_says_that_it_has_no_words_for_convolutions() -> None:
    found = audit(Picture(), [drawn(3, 3, 8, 8)], "relative", ["w8a16"])
    recipe = quantization_config({"down": "w8a16"}, {str(site): site for site in found.sites})
    assert not recipe.held
    assert "no serving stack loads a quantised convolution" in recipe.notes[0]


def test_a_model_without_products_is_refused_with_what_has_sites() -> None:
    with pytest.raises(BadModel, match=r"expected a model with linear, convolutional or recurrent layers"):
        audit(torch.nn.ReLU(), [drawn(3, 5, 4)], "relative", ["bf16"])
