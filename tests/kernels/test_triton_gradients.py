"""Gradients of the bundled Triton kernels by autograd: right, registered, compiled, exported, skipped if not needed."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.kernels.triton.attention import attention
from assay.kernels.triton.causal_conv1d import causal_conv1d
from assay.kernels.triton.cross_entropy import cross_entropy
from assay.kernels.triton.gemm import gemm
from assay.kernels.triton.gemm_int8 import gemm_int8
from assay.kernels.triton.layernorm import layernorm
from assay.kernels.triton.linear_cross_entropy import linear_cross_entropy
from assay.kernels.triton.moe import moe, moe_fp8
from assay.kernels.triton.moe_route import moe_route
from assay.kernels.triton.rmsnorm import add_rmsnorm, rmsnorm
from assay.kernels.triton.rope import rope
from assay.kernels.triton.selective_scan import selective_scan
from assay.kernels.triton.softmax import log_softmax, softmax
from assay.kernels.triton.swiglu import swiglu
from assay.verify import examine_backward
from tests.kernels.test_triton_scan_gradients import scanned
from tests.kernels.triton_calls import check_operator

CODED = ("codes_gate_up", "codes_down", "scale_gate_up", "scale_down")
CONSTANT = ("cos", "sin", *CODED)  # tensors that have no gradient
SINGLE = ("weights", "a", "skip", *CODED)  # that keep their dtype whatever others have
pytestmark = pytest.mark.usefixtures("interpreted")


@dataclass(frozen=True)
class Differentiable:
    """A kernel, the same function in PyTorch, and arguments."""

    kernel: Callable[..., Any]
    right: Callable[..., Tensor]
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    operator: tuple[Any, ...] = ()  # what the operator takes after the tensors
    sizes: Mapping[str, int] = field(default_factory=dict)  # for an examination of the gradient, if an op defines it
    listed: Mapping[str, Any] = field(default_factory=dict)  # options of that examination

    def __str__(self) -> str:
        return " ".join([self.kernel.__name__, *map(str, self.options.values())])

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [
            tensor.detach().to(self.dtype_of(name, dtype)).requires_grad_(name not in CONSTANT)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in self.tensors.items()
        ]

    def dtype_of(self, name: str, dtype: torch.dtype | None) -> torch.dtype:
        fixed = dtype is None or (name in SINGLE and dtype != torch.float64)
        return self.tensors[name].dtype if fixed else dtype

    def call(self, *tensors: Tensor) -> Tensor:
        results = self.kernel(*tensors, **self.options)
        result = results[0] if isinstance(results, tuple) else results
        assert isinstance(result, Tensor)
        return result


def gradients(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Those of every floating leaf, from an upstream gradient that varies and is strided."""
    out = function(*leaves)
    numbers = torch.arange(2.0 * out.numel(), dtype=torch.float64).sin()[::2].reshape(out.shape).to(out.dtype)
    return list(torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], numbers))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[1:], weight + 1.0, 1e-6)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias, 1e-5)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), cos, sin = x.unflatten(-1, (-1, 2)).unbind(-1), cos[:, None], sin[:, None]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    padded = F.pad(x, (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    capped = 4.0 * torch.tanh(logits / 4.0)
    losses = F.cross_entropy(capped, target, reduction="none", label_smoothing=0.1)
    return (losses + 0.01 * capped.logsumexp(-1) ** 2 * (target != -100)).float()


def mixed(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    gate, up = torch.einsum("td,tkfd->tkf", x, w_gate_up[ids.long()]).chunk(2, -1)
    return torch.einsum("tkf,tkdf,tk->td", F.silu(gate) * up, w_down[ids.long()], weights)


def mixed_of_codes(
    x: Tensor, gate_up: Tensor, down: Tensor, of_gate_up: Tensor, of_down: Tensor, *rest: Tensor
) -> Tensor:
    return mixed(x, gate_up * of_gate_up, down * of_down, *rest)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


X, Y, WEIGHT, BIAS = torch.randn(37, 5).t(), torch.randn(5, 37), torch.randn(37), torch.randn(37)
ROWS = {"R": 5, "N": 37}
ANGLES = {"cos": torch.randn(3, 4), "sin": torch.randn(4, 3).t()}
LABELS = torch.tensor([3, -100, 0, 36, 1])
EXPERTS = {
    "x": torch.randn(16, 5).t(),
    "w_gate_up": torch.randn(3, 48, 16),
    "w_down": torch.randn(3, 16, 24),
    "weights": torch.rand(2, 5).t(),
    "ids": torch.tensor([[0, 2], [2, 2], [0, 0], [2, 0], [0, 2]], dtype=torch.int32),
}
CODES = {
    "x": EXPERTS["x"],
    "codes_gate_up": EXPERTS["w_gate_up"].to(torch.float8_e4m3fn),
    "codes_down": EXPERTS["w_down"].to(torch.float8_e4m3fn),
    "scale_gate_up": torch.rand(3, 48, 1) + 0.5,
    "scale_down": torch.rand(3, 16, 1) + 0.5,
    "weights": EXPERTS["weights"],
    "ids": EXPERTS["ids"],
}
SCORES = torch.randn(9, 5).t()


def routed(scoring: str, renormalize: bool) -> Differentiable:
    def right(logits: Tensor) -> Tensor:
        scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        weights = scores.gather(1, logits.topk(3).indices)
        return weights / weights.sum(1, keepdim=True) if renormalize else weights

    options = {"top_k": 3, "renormalize": renormalize, "scoring": scoring}
    return Differentiable(moe_route, right, {"logits": SCORES}, options, (3, renormalize, scoring == "sigmoid"))


LOSS = {"reduction": "none", "label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.01}
KERNELS = [
    Differentiable(softmax, lambda x: x.softmax(-1), {"x": X}, sizes=ROWS),
    Differentiable(log_softmax, lambda x: x.log_softmax(-1), {"x": X}),
    Differentiable(rmsnorm, rms, {"x": X, "weight": WEIGHT}, {"offset": 1.0}, (1e-6, 1.0), ROWS),
    Differentiable(
        add_rmsnorm,
        lambda x, residual, weight: F.rms_norm(x + residual, x.shape[1:], weight, 1e-6),
        *({"x": X, "residual": Y, "weight": WEIGHT}, {}, (1e-6,)),
    ),
    Differentiable(gemm, torch.matmul, {"left": X, "right": Y.t()}),
    Differentiable(layernorm, layer, {"x": X, "weight": WEIGHT, "bias": BIAS}, {}, (1e-5,), ROWS),
    Differentiable(swiglu, lambda gate, up: F.silu(gate) * up, {"gate": X, "up": Y}, {}, (None,), ROWS),
    Differentiable(swiglu, clamped, {"gate": X, "up": Y}, {"limit": 0.5}, (0.5,)),
    Differentiable(
        *(rope, rotated, {"x": torch.randn(2, 3, 5, 8), **ANGLES}, {"interleaved": True}, (True,)),
        sizes={"B": 2, "S": 3, "H": 5, "D": 8},
    ),
    Differentiable(
        *(causal_conv1d, convolved),
        {"x": torch.randn(2, 70, 3).mT, "weight": torch.randn(4, 3).t(), "bias": torch.randn(3)},
        *({"activation": "silu"}, (True,), {"B": 2, "D": 3, "L": 70, "W": 4}),
        listed={"activation": ["silu"]},
    ),
    Differentiable(
        *(selective_scan, lambda *tensors: scanned(*tensors, softplus=True)),
        {
            **{name: torch.randn(2, 18, 3).mT for name in ("u", "delta")},
            "a": -torch.rand(4, 3).t(),
            "b": torch.randn(2, 4, 18),
            "c": torch.randn(2, 4, 18),
            "skip": torch.randn(3),
        },
        *({"softplus": True}, (True,), {"B": 3, "D": 2, "S": 2, "L": 2}),
        listed={"softplus": [True]},
    ),
    Differentiable(
        *(cross_entropy, loss, {"logits": X, "target": LABELS}, LOSS, (-100, 0.1, "none", 4.0, 0.01)),
        sizes={"T": 5, "V": 37},
        listed={name: [value] for name, value in LOSS.items()},
    ),
    Differentiable(
        linear_cross_entropy,
        lambda x, weight, target: loss(x @ weight.t(), target),
        {"x": X[:, :9], "weight": torch.randn(37, 9), "target": LABELS},
        *(LOSS, (-100, 0.1, "none", 4.0, 0.01), {"T": 35, "D": 9, "V": 37}),
        listed={**{name: [value] for name, value in LOSS.items()}, "reduction": ["mean"]},
    ),
    Differentiable(
        *(
            attention,
            attended,
            {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 2, 7, 8), "v": torch.randn(2, 2, 7, 6)},
        ),
        *({"causal": "top_left", "scale": 0.3}, (None, None, 0.3, None, None, 0)),
    ),
    Differentiable(moe, mixed, EXPERTS),
    Differentiable(moe_fp8, mixed_of_codes, CODES, {"granularity": "channel"}, (1,)),
    *(routed(scoring, renormalize) for scoring in ("softmax", "sigmoid") for renormalize in (False, True)),
]
EXAMINED = (softmax, rmsnorm, swiglu, cross_entropy)
"""Those whose gradients a usual run examines: of one tensor, with a weight that all rows share, of two, of a loss."""
EVERY = pytest.mark.parametrize("kernel", KERNELS, ids=str)


@EVERY
def test_gradients_are_those_of_float64(kernel: Differentiable) -> None:
    right = gradients(kernel.right, kernel.leaves(torch.float64))
    for gradient, expected in zip(gradients(kernel.call, kernel.leaves()), right, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=2e-5, atol=2e-5)


@EVERY
def test_a_gradient_has_its_inputs_dtype(kernel: Differentiable) -> None:
    """In bfloat16 and float16, and for float32 weights of 16-bit rows."""
    for dtype in (torch.bfloat16, torch.float16):
        leaves = kernel.leaves(dtype)
        expected = [leaf.dtype for leaf in leaves if leaf.requires_grad]
        assert [gradient.dtype for gradient in gradients(kernel.call, leaves)] == expected
    if kernel.kernel in (rmsnorm, layernorm):
        mixed = [leaves[0], *kernel.leaves()[1:]]
        assert [gradient.dtype for gradient in gradients(kernel.call, mixed)] == [leaf.dtype for leaf in mixed]


@EVERY
def test_the_operator_is_differentiable(kernel: Differentiable) -> None:
    """Schema, autograd, fake implementation and compilation of both passes agree with the operator."""
    check_operator(kernel.kernel.__name__, kernel.leaves(), kernel.operator)


def test_the_sum_of_an_added_norm_has_a_gradient_too() -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in (X, Y, WEIGHT)]
    results = torch.autograd.grad(sum(each.square().sum() for each in add_rmsnorm(*leaves)), leaves)
    x, residual, weight = leaves
    total = x + residual
    right = F.rms_norm(total, X.shape[1:], weight, 1e-6).square().sum() + total.square().sum()
    for gradient, expected in zip(results, torch.autograd.grad(right, leaves), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.filterwarnings("error")
def test_a_missing_gradient_raises() -> None:
    """A second derivative, and a product of integers."""
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="assay::softmax_backward has no gradient"):
        first.sum().backward()
    scales = torch.rand(4, 1, requires_grad=True)
    codes = torch.ones(4, 4, dtype=torch.int8)
    product = gemm_int8(codes, codes, scales, torch.rand(1, 4))
    with pytest.raises(NotImplementedError, match="assay::gemm_int8 has no gradient"):
        product.sum().backward()


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, id=str(kernel), marks=() if kernel.kernel in EXAMINED else pytest.mark.evidence)
        for kernel in KERNELS
        if kernel.sizes
    ],
)
def test_gradients_keep_the_contract(kernel: Differentiable) -> None:
    """Forward and backward pass an examination in bfloat16; a usual run takes a few kernels of rows and a loss."""
    few: dict[str, Any] = {"shapes": kernel.sizes, "effort": "quick", "examples": 0, "layouts": ["contiguous"]}
    verdict = examine_backward(kernel.kernel, kernel.kernel.__name__, dtype="bfloat16", options=kernel.listed, **few)
    assert verdict.outcome == "PASS", str(verdict)


@EVERY
def test_compiled_gradients_have_the_same_bits(kernel: Differentiable) -> None:
    """Without a graph break in either pass."""
    torch.compiler.reset()
    compiled = torch.compile(kernel.call, backend="aot_eager", fullgraph=True)
    expected = gradients(kernel.call, kernel.leaves())
    assert all(map(torch.equal, gradients(compiled, kernel.leaves()), expected))


@EVERY
def test_an_exported_kernel_is_one_operator(kernel: Differentiable) -> None:
    """Of the same bits."""

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return kernel.call(*tensors)

    tensors = tuple(kernel.tensors.values())
    exported = torch.export.export(Module(), tensors)
    assert f"torch.ops.assay.{kernel.kernel.__name__}.default" in exported.module().code
    assert torch.equal(exported.module()(*tensors), kernel.call(*tensors))


@pytest.mark.parametrize("columns", [37, 5000, 20000])
def test_a_loss_leaves_what_its_gradient_needs_of_each_row(columns: int) -> None:
    """The gradient takes the maximum and the sum that the loss left, and is right with them as without."""
    logits, target = torch.randn(5, columns), torch.tensor([3, -100, 0, 36, 1])
    loss, level = torch.ops.assay.cross_entropy(logits, target, -100, 0.1, "sum", 4.0, 0.01)
    options = (-100, 0.1, "sum", 4.0, 0.01)
    backward = torch.ops.assay.cross_entropy_backward
    found, expected = (backward(logits, target, None, given, *options) for given in (level, None))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    plain = (-100, 0.0, "sum", None, 0.0)
    once, twice = (
        backward(logits, target, None, level * torch.tensor([[1.0], [factor]]), *plain) for factor in (1.0, 2.0)
    )
    assert loss.isfinite()
    assert torch.equal(once[0, 4:], 2.0 * twice[0, 4:])


# The module and name of the function that computes weights' gradients, its calls in a backward pass for all gradients,
# and for that of x alone.
WEIGHT_GRADIENTS = {
    "gemm": ("gemm", "matmul", 2, 1),
    "rmsnorm": ("norm_backward", "sum_partials", 1, 0),
    "add_rmsnorm": ("norm_backward", "sum_partials", 1, 0),
    "layernorm": ("norm_backward", "sum_partials", 2, 0),
    "causal_conv1d": ("causal_conv1d", "sum_partials", 2, 0),
    "linear_cross_entropy": ("linear_cross_entropy", "matmul_into", 2, 1),
    "moe": ("moe_backward", "write_weight_gradient", 2, 0),
}
WITH_WEIGHTS = pytest.mark.parametrize(
    "kernel", [kernel for kernel in KERNELS if kernel.kernel.__name__ in WEIGHT_GRADIENTS], ids=str
)


def x_gradient_and_calls(
    kernel: Differentiable, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, int]:
    module_name, name, *_ = WEIGHT_GRADIENTS[kernel.kernel.__name__]
    module = importlib.import_module(f"assay.kernels.triton.{module_name}")
    function, calls = getattr(module, name), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*args, **options)

    first, *others = kernel.leaves()
    leaves = [first, *(other.detach() if frozen else other for other in others)]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, counted)
        kernel.call(*leaves)
        forward, calls = calls, 0
        results = gradients(kernel.call, leaves)
    assert len(results) == sum(leaf.requires_grad for leaf in leaves)
    return results[0], calls - forward


@WITH_WEIGHTS
def test_gradients_of_frozen_weights_are_not_computed(kernel: Differentiable, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the gradient of x keeps its bits."""
    *_, all_calls, x_calls = WEIGHT_GRADIENTS[kernel.kernel.__name__]
    expected, count = x_gradient_and_calls(kernel, False, monkeypatch)
    gradient, frozen_count = x_gradient_and_calls(kernel, True, monkeypatch)
    assert torch.equal(gradient, expected)
    assert (count, frozen_count) == (all_calls, x_calls)


@WITH_WEIGHTS
def test_a_gradient_alone_has_the_same_bits(kernel: Differentiable) -> None:
    """Each tensor's with all others frozen, compiled or not."""
    for index, expected in enumerate(gradients(kernel.call, kernel.leaves())):
        leaves = kernel.leaves()
        for other in (leaf for leaf in leaves[:index] + leaves[index + 1 :] if leaf.requires_grad):
            other.requires_grad_(False)
        torch.compiler.reset()
        for call in (kernel.call, torch.compile(kernel.call, backend="aot_eager", fullgraph=True)):
            (gradient,) = gradients(call, leaves)
            assert torch.equal(gradient, expected)
