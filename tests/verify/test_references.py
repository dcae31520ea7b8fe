"""Kernels against references of the caller's own: honest ones pass, faulty ones don't, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from assay.golden.errors import DefinitionError
from assay.golden.lowering import example_of
from assay.golden.registry import spec
from assay.verify import Contract, examine
from assay.verify.errors import SettingError

TENSORS = "x[T,D], weight[D] -> y[T,D]"
QUICK: dict[str, Any] = {"effort": "quick", "shrinking": False}
QUICK32 = {"dtype": "float32", **QUICK}


def rms(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def honest(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def one_too_many(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / (h.shape[-1] + 1) + eps) * weight.float()).to(x.dtype)


def rounded_inside(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_kernel_passes(dtype: str) -> None:
    verdict = examine(honest, rms, tensors=TENSORS, dtype=dtype, effort="quick")
    assert verdict.outcome == "PASS", str(verdict)
    assert verdict.spec == "rms"


@pytest.mark.parametrize("kernel", [one_too_many, rounded_inside])
def test_faulty_kernel_fails(kernel: Any) -> None:
    verdict = examine(kernel, rms, tensors=TENSORS, dtype="bfloat16", effort="quick", shrinking=False)
    assert verdict.outcome == "FAIL", str(verdict)
    assert verdict.aspects["numbers"].status == "broken"


def test_eager_roundings_are_in_the_contract_torch() -> None:

    def plain(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def own(x: Any, weight: Any) -> Any:
        return plain(x, weight)

    asked = {"tensors": TENSORS, "dtype": "bfloat16", **QUICK}
    assert examine(own, plain, **asked).outcome == "FAIL"
    assert examine(own, plain, **asked, contract="torch").passed


def test_any_form_is_admitted() -> None:

    def by_moments(x: Any) -> Any:
        return (x * x).mean(-1) - x.mean(-1) ** 2

    def by_differences(x: Any) -> Any:
        return (x - x.mean(-1, keepdim=True)).square().mean(-1)

    def unbiased(x: Any) -> Any:
        return x.var(-1)

    asked = {"tensors": "x[T,D] -> y[T]", **QUICK32}
    assert not examine(by_moments, by_differences, **asked).passed
    assert examine(by_moments, [by_differences, by_moments], **asked).passed
    with pytest.raises(DefinitionError, match="unbiased is another function than the first form"):
        examine(by_moments, [by_differences, unbiased], **asked, shapes={"D": [4]})


def test_another_process_makes_the_spec_from_its_name() -> None:
    name = f"{__name__}:rms({TENSORS})"
    assert spec(name).qualified_name == name
    verdict = examine(honest, name, dtype="bfloat16", effort="quick", isolate=True, examples=2)
    assert verdict.passed, str(verdict)


def test_sizes_that_the_reference_refuses_are_no_fault_of_the_kernel() -> None:

    def normed(x: Any) -> Any:
        return F.batch_norm(x, None, None, training=True)

    def refusing(x: Any) -> Any:
        if x.shape[0] > 8:
            raise ValueError("too many rows")
        return normed(x)

    asked: dict[str, Any] = {"tensors": "x[N,C,L] -> y[N,C,L]", "dtype": "float32", "effort": "quick"}
    verdict = examine(lambda x: normed(x), normed, **asked, shrinking=False)
    assert verdict.passed, str(verdict)
    assert any("the reference refuses these arguments too" in words for words in verdict.refused)
    assert not examine(refusing, normed, **asked, shrinking=False).passed


NAIVE: dict[str, tuple[Any, Any, str]] = {
    "softmax": (
        lambda x: x.exp() / x.exp().sum(-1, keepdim=True), lambda x: x.softmax(-1), "x[R,N] -> y[R,N]",
    ),
    "log-sum-exp": (lambda x: x.exp().sum(-1).log(), lambda x: x.logsumexp(-1), "x[R,N] -> y[R]"),
    "sigmoid": (lambda x: 1 / (1 + torch.exp(-x)), torch.sigmoid, "x[R,N] -> y[R,N]"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAIVE)
def test_a_stable_kernel_is_right_where_the_reference_overflows(name: str) -> None:
    reference, kernel, tensors = NAIVE[name]
    asked = {"tensors": tensors, **QUICK32}
    assert examine(lambda x: kernel(x), reference, **asked).passed
    assert not examine(lambda x: kernel(x) * 1.001, reference, **asked).passed


def test_an_exponential_that_overflows_is_infinite() -> None:
    asked = {"tensors": "x[R,N] -> y[R,N]", **QUICK32}
    assert examine(lambda x: x.exp(), lambda x: torch.exp(x), **asked).passed
    assert not examine(lambda x: x.exp().clamp(max=3e38), lambda x: torch.exp(x), **asked).passed


def test_a_question_that_cannot_be_asked() -> None:
    with pytest.raises(SettingError, match="expected what the reference takes and gives"):
        examine(honest, rms, dtype="float32")
    with pytest.raises(DefinitionError, match="tensors="):
        examine(honest, rms, tensors="x[T,D", dtype="float32")
    with pytest.raises(SettingError, match="leave tensors= out"):
        examine(honest, "softmax", tensors=TENSORS, dtype="float32")


class Reference(torch.nn.Module):
    """A convolution, a bias, batch norm, and a rectifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.bias = torch.nn.Parameter(torch.zeros(8, 1, 1))
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(self.norm(self.conv(x)) + self.bias)


class Fused(Reference):
    """The same, written another way."""

    def forward(self, x: torch.Tensor) -> Any:
        y = F.conv2d(x, self.conv.weight) + self.conv.bias[:, None, None]  # type: ignore[index]
        mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), keepdim=True, correction=0)
        scale = self.norm.weight[:, None, None] * torch.rsqrt(var + self.norm.eps)
        return ((y - mean) * scale + self.norm.bias[:, None, None] + self.bias).clamp(min=0)


class WithoutBias(Reference):
    """It leaves out the parameter that the constructor made of zeros."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(self.norm(self.conv(x)))


def images() -> list[torch.Tensor]:
    return [torch.rand(2, 3, 6, 6)]


def test_modules_share_parameters_that_are_drawn_anew() -> None:
    assert examine(Fused(), Reference(), inputs=images, effort="quick", examples=2).outcome == "PASS"
    verdict = examine(WithoutBias(), Reference(), inputs=images, effort="quick", examples=2, shrinking=False)
    assert verdict.outcome == "FAIL"
    buffers = Reference()
    examine(Fused(), buffers, inputs=images, effort="quick", examples=0, every_aspect=False)
    assert int(buffers.norm.num_batches_tracked) == 0  # type: ignore[arg-type]


def test_sizes_of_examples_vary_where_the_reference_allows_it() -> None:
    example = example_of(Reference(), images)
    assert example.text.startswith("x[B,3,D,D], bias[E,1,1], conv_weight[E,3,3,3]")
    assert example.text.endswith("norm_running_var[E]=slope -> out[B,E,D-2,D-2]")
    assert min(example.allowed["D"]) == 3
    best = example_of(
        lambda x, w, k: torch.topk(F.softmax(x @ w.T, -1), k).values, lambda: (torch.randn(4, 6), torch.randn(16, 6), 2)
    )
    assert best.text == "x[B,C], w[D,C] -> out[B,2]"
    loss = example_of(lambda p, t: F.binary_cross_entropy(p, t), lambda: (torch.rand(4, 6), torch.rand(4, 6)))
    assert loss.text == "p[B,C]=weight, t[B,C]=weight -> out[]"


def test_what_rounding_decides_is_inconclusive() -> None:

    def steered(x: Any) -> Any:
        return x * x.sum().item()

    asked = {"tensors": "x[T] -> y[T]", **QUICK32}
    verdict = examine(steered, steered, **asked)
    assert verdict.outcome == "INCONCLUSIVE", str(verdict)
    assert "test_references.py:" in verdict.note
    assert "in steered" in verdict.note


def test_a_reference_that_refuses_sizes_says_so() -> None:

    def halves(x: Any, z: Any = 0) -> Any:
        return x.reshape(x.shape[0], 2, -1).sum(1)

    asked: dict[str, Any] = {"dtype": "float32", "effort": "quick"}
    with pytest.raises(DefinitionError, match="halves raised RuntimeError for tensors of shapes"):
        examine(halves, halves, tensors="x[T,D], z[E] -> y[T,E]", shapes={"D": [3]}, **asked)
    assert examine(halves, halves, tensors="x[T,2*D] -> y[T,D]", **asked, examples=2).passed


def test_an_ill_conditioned_formula_is_remarked_on() -> None:

    def by_moments(x: Any) -> Any:
        return (x * x).mean(-1) - x.mean(-1) ** 2

    def unshifted(x: Any) -> Any:
        return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)

    def stable(x: Any) -> Any:
        return torch.softmax(x, -1)

    asked: dict[str, Any] = {"dtype": "float32", "effort": "quick", "shrinking": False, "examples": 0}
    (cancels,) = examine(by_moments, by_moments, tensors="x[T,D] -> y[T]", **asked).remarks
    assert "test_references.py:" in cancels
    assert "in by_moments: a difference loses" in cancels
    overflows = examine(unshifted, unshifted, tensors="x[T,D] -> y[T,D]", **asked)
    assert "elements overflow" in overflows.remarks[0]
    assert "remark      on data of a large mean" in str(overflows)
    assert examine(stable, stable, tensors="x[T,D] -> y[T,D]", **asked).remarks == ()


def test_a_flush_is_no_rounding_of_what_the_format_holds() -> None:

    def product(x: Any, w: Any) -> Any:
        return x @ w.T

    def rounded(x: Any, w: Any) -> Any:
        return (x.float() @ w.float().T).to(x.dtype)

    def truncated(x: Any, w: Any) -> Any:
        return ((x.float() @ w.float().T).view(torch.int32) & -65536).view(torch.float32).to(x.dtype)

    flushing = {"dtype": "bfloat16", "effort": "quick", "contract": Contract(subnormals="flush"), "shrinking": False}
    tensors = "x[T,K], w[N,K] -> y[T,N]"
    assert examine(rounded, product, tensors=tensors, **flushing).outcome == "PASS"
    verdict = examine(truncated, product, tensors=tensors, **flushing)
    assert verdict.aspects["numbers"].status == "broken", str(verdict)


def test_a_sum_that_overflows_on_the_way_may_end_at_either_side() -> None:

    def layer(x: Any, w: Any) -> Any:
        return torch.relu(x @ w.T)

    def one_term_after_the_other(x: Any, w: Any) -> Any:
        total = torch.zeros(x.shape[0], w.shape[0])
        for place in range(x.shape[1]):
            total += x[:, place : place + 1] * w[:, place]
        return torch.relu(total)

    def half(x: Any, w: Any) -> Any:
        return one_term_after_the_other(x, w) / 2

    asked = {"tensors": "x[T,K], w[N,K] -> y[T,N]", "effort": "quick", "shapes": {"K": [2, 7, 33]}, "shrinking": False}
    verdict = examine(one_term_after_the_other, layer, dtype="float32", **asked)
    assert verdict.outcome == "PASS", str(verdict)
    assert examine(half, layer, dtype="float32", **asked).outcome == "FAIL"
