"""`examine_backward`: functions with honest gradients pass, and each fault is found on the side that has it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.golden import evaluate, spec, specs
from assay.golden.inputs.distributions import names_of
from assay.golden.inputs.values import dtype_of
from assay.verify import BackwardVerdict, Contract, examine_backward, gradient_of
from assay.verify.cases.case import Case
from assay.verify.errors import SettingError
from assay.verify.examination.backward import pair_of
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness

from .examined import quick

ROWS = {"R": 5, "N": 6}
TOKENS = {"T": 5, "V": 6}
HEADS = {"B": 1, "Hkv": 1, "H": 2, "Sq": 5, "Sk": 6, "D": 8, "Dv": 8}


def rms_norm(
    gradients: Callable[..., tuple[Any, Any]] = lambda ctx, dx, rows: (dx, rows.sum(0)),
    read: Callable[[Tensor], Tensor] = lambda dy: dy,
    plus: float = 0.0,
) -> Any:
    """RMS norm with its gradient by hand; a fault replaces a part.

    ``gradients`` makes both of dx and the rows of dweight, in float32; ``read`` reads dy; ``plus`` weights
    are added in the forward pass alone.
    """

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            values = x.float()
            root = torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6)
            y = values * root * weight.float()
            return (y + plus * weight if plus else y).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, weight = (saved.float() for saved in ctx.saved_tensors)
            root, dense = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), read(dy).float()
            normalized, grown = x * root, dense * weight
            dx = (grown - normalized * (grown * normalized).mean(-1, keepdim=True)) * root
            found = gradients(ctx, dx, dense * normalized)
            return tuple(None if one is None else one.to(dy.dtype) for one in found)

    return RmsNorm.apply


def written_over_x(ctx: Any, dx: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    saved = ctx.saved_tensors[0].detach()
    saved.copy_(dx.to(saved.dtype))
    return saved, rows.sum(0)


NO_GRADIENT_OF_WEIGHT = rms_norm(lambda ctx, dx, rows: (dx, None))
RMS_NORMS = {
    "no gradient of weight": (NO_GRADIENT_OF_WEIGHT, "float32", "crash"),
    "wrong factor": (rms_norm(lambda ctx, dx, rows: (dx * 1.01, rows.sum(0))), "float32", "contract"),
    "weight not summed": (rms_norm(lambda ctx, dx, rows: (dx, rows[:1].sum(0))), "float32", "contract"),
    # dweight is summed in the input's dtype, row by row (Liger-Kernel#950)
    "weight summed narrowly": (
        rms_norm(lambda ctx, dx, rows: (dx, sum(rows.bfloat16(), rows[:0].sum(0).bfloat16()))), "bfloat16", "contract",
    ),
    "x overwritten": (rms_norm(written_over_x), "float32", "input_mutated"),
    # dy's memory is taken for dense rows (flash-attention#2541)
    "strides ignored": (
        rms_norm(read=lambda dy: torch.as_strided(dy, dy.shape, (dy.shape[1], 1))), "float32", "contract",
    ),
}  # fmt: skip


def softmax_of_saved(gradient: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda y, dy, dx: dx) -> Any:
    """The backward pass starts from y as it was returned; a fault makes something else of y, dy and dx."""

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = torch.softmax(x, -1)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            (y,) = ctx.saved_tensors
            dx = y.float() * (dy.float() - (y.float() * dy.float()).sum(-1, keepdim=True))
            return gradient(y, dy, dx.to(dy.dtype))

    return Softmax.apply


class CrossEntropy(torch.autograd.Function):
    """The upstream gradient is taken for one number (Liger-Kernel#680)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.reduction = reduction
        return F.cross_entropy(logits, target, reduction=reduction)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, target = ctx.saved_tensors
        given = evaluate("cross_entropy_backward", logits, target, reduction=ctx.reduction).value
        return given.to(logits.dtype) * dloss.reshape(-1)[:1].sum(), None, None


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.float(), target, **options)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (part.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = q.float() @ k.transpose(2, 3) * q.shape[3] ** -0.5
    return (torch.softmax(scores, -1) @ v).to(q.dtype)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias, **options)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Torch's silu makes NaN of -inf."""
    return (F.silu(gate.float()) * up.float()).to(up.dtype)


def examined(function: Any, op: str, sizes: dict[str, int], dtype: str = "float32", **settings: Any) -> BackwardVerdict:
    few: dict[str, Any] = {"shapes": sizes, "effort": "quick", "examples": 0, "layouts": ["contiguous"]}
    return examine_backward(function, op, dtype=dtype, **{**few, **settings})


def failures(
    function: Any, op: str, sizes: dict[str, int], dtype: str, framework: str = "torch", **options: Any
) -> set[str]:
    """The kinds of failure of the gradients in single cases: numbers of two kinds, and a transposed upstream."""
    pair = pair_of(op)
    definition = pair.backward
    complete = definition.complete(options)
    contract = Contract(subnormals="flush") if framework == "jax" else Contract()
    listed = {name: [value] for name, value in options.items()}
    harness = KernelHarness(Call(gradient_of(function, op, framework=framework), listed, framework), contract)
    tensors = definition.signature(complete).tensors
    plain = Case(definition.name, sizes, {t.name: dtype_of(t, dtype) for t in tensors}, complete)
    integers = {t.name: "integers" for t in tensors if "integers" in names_of(t)}
    found = [
        harness.try_case(case).failure
        for case in (
            plain,
            replace(plain, values=integers, seed=1),
            replace(plain, layouts={tensors[-1].name: "transposed"}, seed=2),
        )
    ]
    return {failure.kind for failure in found if failure is not None}


def test_every_gradient_of_the_table_can_be_examined() -> None:
    forward = {op: spec(op).outputs.gradient_of for op in specs() if spec(op).outputs.gradient_of}
    assert {op: pair_of(op).forward.name for op in forward} == forward
    assert not {"softmax_gradient", "cross_entropy_gradient"} & set(specs())


UNSAID = Contract(nonfinite="unspecified")
HONEST: dict[str, tuple[Any, str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), "softmax", ROWS, {}, {}),
    "softmax of a saved y": (softmax_of_saved(), "softmax_backward", ROWS, {}, {}),
    "layernorm": (layernorm, "layernorm", ROWS, {"eps": 1e-3}, {}),
    "rmsnorm": (rms_norm(), "rmsnorm", ROWS, {}, {}),
    "swiglu": (swiglu, "swiglu", ROWS, {}, {"contract": UNSAID, "backward_contract": UNSAID}),
    "mean cross entropy": (cross_entropy, "cross_entropy", TOKENS, {"reduction": "mean"}, {}),
    "smooth cross entropy": (cross_entropy, "cross_entropy", TOKENS, {"reduction": "none", "label_smoothing": 0.1}, {}),
    "attention": (attention, "attention", HEADS, {}, {}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HONEST)
def test_honest_gradients_keep_their_contract(name: str, dtype: str) -> None:
    function, op, sizes, options, _ = HONEST[name]
    if (name, dtype) == ("layernorm", "bfloat16"):  # PyTorch's CPU kernel saves the mean and the root rounded
        assert "contract" in failures(function, op, sizes, dtype, **options)
    else:
        assert failures(function, op, sizes, dtype, **options) == set()


def test_an_honest_function_passes() -> None:
    verdict = examined(rms_norm(), "rmsnorm", ROWS, "bfloat16")
    assert verdict.outcome == "PASS", str(verdict)
    assert (verdict.forward.spec, verdict.backward.spec) == ("rmsnorm", "rmsnorm_backward")
    assert min(verdict.forward.cases, verdict.backward.cases) > 10


@pytest.mark.parametrize(("function", "dtype", "kind"), RMS_NORMS.values(), ids=RMS_NORMS)
def test_a_faulty_gradient_of_a_norm_is_found(function: Any, dtype: str, kind: str) -> None:
    assert kind in failures(function, "rmsnorm", {"R": 70, "N": 6}, dtype)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (softmax_of_saved(lambda y, dy, dx: y.detach().copy_(dx)), "crash"),
        (softmax_of_saved(lambda y, dy, dx: y * dy), "contract"),
        (lambda x: torch.softmax(x.detach(), -1), "crash"),
    ],
    ids=["result overwritten", "without sum", "detached"],
)
def test_a_faulty_gradient_of_a_softmax_is_found(function: Any, kind: str) -> None:
    assert kind in failures(function, "softmax", {"R": 70, "N": 6}, "float32")


def test_a_faulty_backward_is_named() -> None:
    verdict = examined(NO_GRADIENT_OF_WEIGHT, "rmsnorm", ROWS, shrinking=False)
    assert verdict.failed == ("backward",)
    assert verdict.outcome == "FAIL"
    assert "no gradient of weight" in verdict.backward.failure.message
    assert str(verdict).startswith("FAIL: backward\n")
    assert json.loads(verdict.to_json())["failed"] == ["backward"]


def test_an_upstream_gradient_for_each_token_is_not_one_number() -> None:
    """With reduction="none" every token has its own; the same function is right where there is only one."""

    def function(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        return CrossEntropy.apply(logits, target, reduction)

    assert "contract" in failures(function, "cross_entropy", TOKENS, "float32", reduction="none")
    for reduction in ("mean", "sum"):
        assert failures(function, "cross_entropy", TOKENS, "float32", reduction=reduction) == set()


def test_a_faulty_forward_is_named() -> None:
    verdict = examined(rms_norm(plus=1.0), "rmsnorm", ROWS, shrinking=False)
    assert verdict.failed == ("forward",), str(verdict)


def test_a_module_takes_its_parameters_from_the_case() -> None:
    class Scaled(torch.nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            out.register_hook(lambda gradient: gradient * 0.5)
            return out

    assert failures(torch.nn.LayerNorm(6), "layernorm", ROWS, "float32") == set()
    assert "contract" in failures(Scaled(6), "layernorm", ROWS, "float32")
    with pytest.raises(SettingError, match="parameter 'in_proj_weight'"):
        examined(torch.nn.MultiheadAttention(8, 2), "attention", HEADS)


def test_a_gradient_is_a_kernel_of_its_own() -> None:
    """`gradient_of` gives what the backward spec's table row asks for, to examine like any kernel."""
    kernel = gradient_of(rms_norm(), "rmsnorm")
    assert quick(kernel, "rmsnorm_backward", shapes=ROWS, layouts=["strided"]).passed
    assert kernel.__name__.startswith("gradient of ")


def test_questions_that_cannot_be_asked() -> None:
    for settings, words in (
        ({"op": "gemm"}, "op='gemm' has no backward spec; those that have: attention, attention_varlen, causal_conv1d"),
        ({"framework": "numpy"}, "'torch' or 'jax'"),
        ({"options": {"offset": [1.0]}}, "unknown option 'offset'"),
        ({"dtype": {"x": "float32"}}, "expected one name"),
    ):
        question = {"op": "rmsnorm", "dtype": "float32", **settings}
        with pytest.raises(SettingError, match=words):
            examine_backward(rms_norm(), question.pop("op"), **question)


def test_gradients_of_jax_functions() -> None:
    """`jax.vjp` of an honest function passes; a custom gradient that is off by a factor does not."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    @jax.jit
    def softmax(x: Any) -> Any:
        return jax.nn.softmax(x, axis=-1)

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return softmax(x)

    scaled.defvjp(
        lambda x: (softmax(x), softmax(x)), lambda y, dy: (y * (dy - 1.1 * jnp.sum(y * dy, axis=-1, keepdims=True)),)
    )
    assert failures(softmax, "softmax", ROWS, "float32", "jax") == set()
    assert "contract" in failures(scaled, "softmax", ROWS, "float32", "jax")


@pytest.mark.evidence
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(set(HONEST) - {"layernorm"}))
def test_honest_gradients_at_length(name: str, dtype: str) -> None:
    """Over all sizes, 200 examples each."""
    function, op, _, options, settings = HONEST[name]
    listed = {option: [value] for option, value in options.items()}
    verdict = examine_backward(function, op, dtype=dtype, options=listed, **settings)
    assert verdict.passed, str(verdict)
