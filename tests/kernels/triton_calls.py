"""A valid call of every Triton kernel except attention, and arguments that it refuses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assay.kernels.triton.causal_conv1d import causal_conv1d, causal_conv1d_backward
from assay.kernels.triton.cross_entropy import cross_entropy, cross_entropy_backward
from assay.kernels.triton.gemm import gemm
from assay.kernels.triton.gemm_2to4 import gemm_2to4
from assay.kernels.triton.gemm_fp8 import gemm_fp8
from assay.kernels.triton.gemm_int4 import gemm_int4
from assay.kernels.triton.gemm_int8 import gemm_int8
from assay.kernels.triton.gemm_scaled import gemm_mxfp8, gemm_nvfp4
from assay.kernels.triton.layernorm import layernorm, layernorm_backward
from assay.kernels.triton.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_backward
from assay.kernels.triton.merge_states import merge_states
from assay.kernels.triton.moe import moe, moe_fp8, moe_int4
from assay.kernels.triton.moe_backward import moe_backward, moe_fp8_backward
from assay.kernels.triton.moe_route import moe_route
from assay.kernels.triton.quantize import quantize_fp8, quantize_int4, quantize_int8
from assay.kernels.triton.rmsnorm import add_rmsnorm, rmsnorm, rmsnorm_backward
from assay.kernels.triton.rope import rope, rope_backward
from assay.kernels.triton.selective_scan import selective_scan, selective_scan_backward
from assay.kernels.triton.softmax import log_softmax, log_softmax_backward, softmax, softmax_backward
from assay.kernels.triton.swiglu import swiglu, swiglu_backward

E4M3, E8M0, BF16, INT32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.int32


@dataclass(frozen=True)
class Call:
    """A valid call of a kernel's public function."""

    kernel: Callable[..., Any]
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    operator: tuple[Any, ...] = ()  # what the operator takes after the tensors
    refused: tuple[tuple[str, Any], ...] = ()  # wrong arguments, in addition to those that are wrong for every kernel

    def __str__(self) -> str:
        return " ".join([self.kernel.__name__, *map(str, self.options.values())])


def check_operator(name: str, tensors: Sequence[Tensor], options: Sequence[Any]) -> None:
    """torch's own check of an operator: schema, autograd, fake implementation, and compilation with dynamic shapes."""
    # Torch compares the arguments before and after to check the schema, which it can't do in 8 bits.
    narrow = any(tensor.dtype == E4M3 for tensor in tensors)
    every = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = getattr(torch.ops.assay, name).default
    torch.library.opcheck(operator, (*tensors, *options), test_utils=every[narrow:])


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype)


def fp8(granularity: str, scale_a: tuple[int, ...], scale_b: tuple[int, ...]) -> Call:
    tensors = {"a": torch.randn(5, 137).to(E4M3), "b": torch.randn(137, 7).to(torch.float8_e5m2)}
    tensors |= {"scale_a": torch.rand(scale_a), "scale_b": torch.rand(scale_b)}
    wrong = (
        *(("granularity", "group"), ("a", torch.zeros(5, 137, dtype=torch.float8_e4m3fnuz))),
        *(("b", torch.zeros(5, 7, dtype=E4M3)), ("scale_a", torch.ones(2, 3)), ("scale_b", torch.ones(1, 4))),
        ("scale_a", torch.ones(5, 3)),
    )
    return Call(gemm_fp8, tensors, {"granularity": granularity}, (granularity,), wrong)


def int4(packing: str, words: torch.dtype, per_k: int, per_n: int, per_zero: int) -> Call:
    tensors = {"x": torch.randn(64, 3, dtype=BF16).t(), "qweight": codes(64 // per_k, 24 // per_n, dtype=words)}
    tensors |= {"scales": torch.rand(2, 24).to(BF16), "zeros": codes(2, 24 // per_zero, dtype=words)}
    other = torch.uint8 if words == INT32 else INT32
    wrong = (
        *(("packing", "marlin"), ("qweight", codes(64 // per_k, 24 // per_n, dtype=other))),
        *(("qweight", codes(64, 24, dtype=words)), ("scales", torch.ones(2, 24)), ("scales", torch.ones(24).to(BF16))),
        ("zeros", codes(1, 24 // per_zero, dtype=words)),
    )
    return Call(gemm_int4, tensors, {"packing": packing}, (packing,), wrong)


X, RESIDUAL, WEIGHT = torch.randn(37, 3, dtype=BF16).t(), torch.randn(3, 37), torch.randn(37)
NORM = (("weight", torch.zeros(2)), ("weight", torch.zeros(1, 37)))
MIXTURE = {
    "x": torch.randn(5, 17),
    "w_gate_up": torch.randn(3, 18, 17),
    "w_down": torch.randn(3, 17, 9),
    "weights": torch.rand(5, 2),
    "ids": torch.randint(0, 3, (5, 2), dtype=INT32),
}


def experts_in_fp8(
    kernel: Callable[..., Any], granularity: str, gate_up: tuple[int, int], down: tuple[int, int], **others: Tensor
) -> Call:
    names = ("x", "w_gate_up", "w_down", "scale_gate_up", "scale_down", "weights", "ids")
    tensors = MIXTURE | {name: MIXTURE[name].to(E4M3) for name in ("w_gate_up", "w_down")}
    tensors |= {"scale_gate_up": torch.rand(3, *gate_up), "scale_down": torch.rand(3, *down)}
    wrong = (
        *(("granularity", "tensor"), ("w_down", MIXTURE["w_down"]), ("w_gate_up", torch.zeros(3, 17, 17, dtype=E4M3))),
        *(("scale_gate_up", torch.ones(3, 9, 1)), ("scale_down", torch.ones(3, 17, 2)), ("ids", codes(5, 2))),
    )
    scale_block = 1 if granularity == "channel" else 128
    wrong += tuple((name, torch.zeros(5, 16)) for name in others)
    tensors = {name: tensors[name] for name in names} | others
    return Call(kernel, tensors, {"granularity": granularity}, (scale_block,), wrong)


NIBBLES = {
    "x": torch.randn(5, 16),
    "w_gate_up": codes(3, 24, 8, dtype=torch.uint8),
    "w_down": codes(3, 16, 6, dtype=torch.uint8),
    "scale_gate_up": torch.rand(3, 24, 4),
    "scale_down": torch.rand(3, 16, 3),
    "zero_gate_up": codes(3, 24, 4, dtype=torch.uint8) & 15,
    "zero_down": codes(3, 16, 3, dtype=torch.uint8) & 15,
    "weights": MIXTURE["weights"],
    "ids": MIXTURE["ids"],
}
ANGLES = {"cos": torch.randn(3, 4), "sin": torch.randn(4, 3).t()}
ROPE_REFUSED = (*((name, torch.zeros(3, 5)) for name in ANGLES), *((name, torch.zeros(2, 4)) for name in ANGLES))
LABELS = torch.tensor([3, -100, 0])
LOSS = (
    *(("target", torch.zeros(4, dtype=torch.int64)), ("target", torch.zeros(3, dtype=torch.int32))),
    *(("label_smoothing", 1.5), ("reduction", "max"), ("softcap", 0.0), ("logits", torch.zeros(3, 0))),
)
CLASSIFIED = {"x": torch.randn(3, 5), "weight": torch.randn(5, 33).t(), "target": LABELS}
LINEAR = (
    *(refused for refused in LOSS if refused[0] != "logits"),
    *(("weight", torch.zeros(0, 5)), ("weight", torch.zeros(33, 6)), ("weight", torch.zeros(33, 5, dtype=BF16))),
)
PRODUCT = {"a": torch.randn(5, 65), "b": torch.randn(7, 65).t()}
CALLS = [
    Call(softmax, {"x": X}),
    Call(log_softmax, {"x": RESIDUAL}),
    Call(layernorm, {"x": X, "weight": WEIGHT, "bias": WEIGHT}, {"eps": 0.1}, (0.1,), (*NORM, ("bias", WEIGHT[None]))),
    Call(rmsnorm, {"x": X, "weight": WEIGHT}, {"offset": 1.0}, (1e-6, 1.0), NORM),
    Call(
        add_rmsnorm,
        {"x": X, "residual": RESIDUAL, "weight": WEIGHT},
        operator=(1e-6,),
        refused=(*NORM, ("residual", torch.zeros(1, 37))),
    ),
    *(
        Call(
            swiglu,
            {"gate": X, "up": RESIDUAL},
            {"limit": limit},
            (limit,),
            (("up", torch.zeros(1, 37)), *(("limit", value) for value in (0.0, -7.0, float("nan")))),
        )
        for limit in (None, 7.0)
    ),
    Call(softmax_backward, {"y": X, "dy": RESIDUAL}, refused=(("dy", torch.zeros(1, 37)),)),
    Call(log_softmax_backward, {"y": X, "dy": RESIDUAL}, refused=(("dy", torch.zeros(1, 37)),)),
    Call(
        rmsnorm_backward,
        {"x": X, "weight": WEIGHT, "dy": RESIDUAL},
        {"offset": 1.0},
        (1e-6, 1.0, True),
        (*NORM, ("dy", torch.zeros(1, 37))),
    ),
    Call(
        layernorm_backward,
        {"x": X, "weight": WEIGHT, "dy": RESIDUAL},
        {"bias_dtype": BF16},
        (1e-5, BF16, True),
        (*NORM, ("dy", torch.zeros(1, 37)), ("bias_dtype", torch.int32)),
    ),
    *(
        Call(
            swiglu_backward,
            {"gate": X, "up": RESIDUAL, "dy": RESIDUAL},
            {"limit": limit},
            (limit,),
            (("up", torch.zeros(1, 37)), ("dy", torch.zeros(1, 37)), ("limit", 0.0)),
        )
        for limit in (None, 0.5)
    ),
    Call(
        rope,
        {"x": torch.randn(2, 3, 5, 8, dtype=BF16), **ANGLES},
        operator=(False,),
        refused=(*ROPE_REFUSED, ("x", torch.randn(2, 3, 5, 7))),
    ),
    Call(
        rope_backward,
        {**ANGLES, "dy": torch.randn(2, 3, 5, 8)},
        {"interleaved": True},
        (True,),
        (*ROPE_REFUSED, ("dy", torch.randn(2, 3, 5, 7))),
    ),
    *(
        Call(cross_entropy, {"logits": X, "target": LABELS}, {"reduction": kind}, (-100, 0.1, kind, 4.0, 0.01), LOSS)
        for kind in ("mean", "none")
    ),
    Call(
        cross_entropy_backward,
        {"logits": X, "target": LABELS},
        {"reduction": "none"},
        (None, None, -100, 0.1, "none", 4.0, 0.01),
        (*LOSS, ("dloss", torch.tensor(1.0)), ("dloss", torch.ones(3, dtype=BF16))),
    ),
    Call(linear_cross_entropy, CLASSIFIED, operator=(-100, 0.1, "mean", 4.0, 0.01), refused=LINEAR),
    Call(
        linear_cross_entropy_backward,
        CLASSIFIED,
        operator=(None, -100, 0.1, "mean", 4.0, 0.01, True, True),
        refused=(*LINEAR, ("dloss", torch.ones(3))),
    ),
    Call(gemm, PRODUCT, refused=(("b", torch.zeros(65, 7, dtype=torch.float16)), ("b", torch.zeros(2, 4)))),
    Call(
        gemm_int8,
        {"a": codes(5, 65), "b": codes(65, 7), "scale_a": torch.rand(5, 1), "scale_b": torch.rand(1, 7)},
        refused=(
            *(("a", codes(5, 65, dtype=torch.uint8)), ("b", codes(2, 4))),
            *(("scale_a", torch.ones(5)), ("scale_b", torch.ones(7, 1))),
        ),
    ),
    *(fp8("tensor", (), ()), fp8("row", (5, 1), (1, 7)), fp8("block", (5, 2), (2, 1))),
    Call(
        gemm_mxfp8,
        {
            "a": torch.randn(5, 64).to(E4M3),
            "b": torch.randn(64, 7).to(E4M3),
            "scale_a": torch.ones(5, 2).to(E8M0),
            "scale_b": torch.ones(2, 7).to(E8M0),
        },
        refused=(
            *(("a", torch.zeros(5, 64, dtype=torch.float8_e5m2)), ("b", torch.zeros(5, 7, dtype=E4M3))),
            *(("scale_a", torch.ones(5, 2)), ("scale_a", torch.ones(5, 1).to(E8M0))),
            *(("scale_b", torch.ones(2, 6).to(E8M0)), ("scale_b", torch.ones(3, 7).to(E8M0))),
        ),
    ),
    Call(
        gemm_nvfp4,
        {
            "a": codes(5, 32, dtype=torch.uint8),
            "b": codes(7, 32, dtype=torch.uint8),
            "scale_a": torch.rand(5, 4).to(E4M3),
            "scale_b": torch.rand(7, 4).to(E4M3),
            "global_a": torch.tensor(0.5),
            "global_b": torch.tensor(0.3),
        },
        refused=(
            *(("a", codes(5, 32)), ("b", codes(7, 24, dtype=torch.uint8)), ("global_b", torch.tensor(1.0, dtype=BF16))),
            *(("scale_a", torch.ones(5, 4)), ("scale_a", torch.ones(5, 2).to(E4M3)), ("global_a", torch.ones(1))),
            *(("scale_b", torch.ones(6, 4).to(E4M3)), ("scale_b", torch.ones(7, 5).to(E4M3))),
        ),
    ),
    Call(
        gemm_2to4,
        {"values": torch.randn(34, 5).t(), "index": codes(5, 34, dtype=torch.uint8) & 3, "b": torch.randn(68, 7)},
        refused=(
            *(
                ("values", torch.ones(5, 34).to(E4M3)),
                ("index", codes(5, 33, dtype=torch.uint8)),
                ("index", codes(5, 34)),
            ),
            *(("b", torch.ones(66, 7)), ("b", torch.ones(68, 7, dtype=BF16))),
        ),
    ),
    *(int4("plain", torch.uint8, 2, 1, 1), int4("awq", INT32, 1, 8, 8), int4("gptq", INT32, 8, 1, 8)),
    *(
        Call(quantize_fp8, {"x": X}, {"granularity": kind}, (kind,), (("granularity", "block"),))
        for kind in ("row", "tensor", "group128")
    ),
    Call(quantize_int8, {"x": X}, {"granularity": "tensor"}, ("tensor",), (("granularity", "group128"),)),
    *(
        Call(
            quantize_int4,
            {"x": X},
            {"group": 32, "symmetric": symmetric},
            (32, symmetric),
            tuple(("group", value) for value in (0, -1, 2.0, True)),
        )
        for symmetric in (False, True)
    ),
    Call(
        merge_states,
        {
            "o_a": torch.randn(3, 2, 5, dtype=BF16),
            "lse_a": torch.randn(3, 2),
            "o_b": torch.randn(2, 3, 5, dtype=BF16).transpose(0, 1),
            "lse_b": torch.randn(2, 3).t(),
        },
        refused=(
            *(("o_b", torch.randn(3, 2, 5)), ("o_b", torch.randn(3, 2, 6, dtype=BF16))),
            *(("lse_a", torch.randn(2, 3)), ("lse_b", torch.randn(3, 2, dtype=BF16))),
        ),
    ),
    Call(
        moe,
        MIXTURE,
        refused=(
            *(("w_gate_up", torch.zeros(3, 18, 17, dtype=BF16)), ("w_gate_up", torch.zeros(3, 17, 17))),
            *(("w_gate_up", torch.zeros(2, 18, 17)), ("w_down", torch.zeros(3, 9, 17))),
            *(("weights", torch.zeros(5, 1)), ("ids", torch.zeros(4, 2, dtype=INT32)), ("ids", codes(5, 2))),
        ),
    ),
    *(experts_in_fp8(moe_fp8, "channel", (18, 1), (17, 1)), experts_in_fp8(moe_fp8, "block", (1, 1), (1, 1))),
    *(
        experts_in_fp8(moe_fp8_backward, "channel", (18, 1), (17, 1), dy=torch.randn(17, 5).t()),
        experts_in_fp8(moe_fp8_backward, "block", (1, 1), (1, 1), dy=torch.randn(17, 5).t()),
    ),
    Call(
        moe_int4,
        NIBBLES,
        refused=(
            *(
                ("w_gate_up", codes(3, 24, 8)),
                ("w_gate_up", codes(3, 22, 8, dtype=torch.uint8)),
            ),
            *(("scale_gate_up", torch.ones(3, 24, 5)), ("scale_down", torch.ones(3, 16, 3, dtype=BF16))),
            *(("zero_gate_up", NIBBLES["zero_down"]), ("zero_down", torch.ones(3, 16, 3)), ("ids", codes(5, 2))),
        ),
    ),
    Call(
        moe_backward,
        MIXTURE | {"dy": torch.randn(17, 5).t()},
        operator=(True, True),
        refused=(
            *(("dy", torch.zeros(5, 16)), ("dy", torch.zeros(5, 17, dtype=BF16)), ("weights", torch.zeros(5, 1))),
            *(("w_down", torch.zeros(3, 9, 17)), ("ids", torch.zeros(5, 2, dtype=torch.int64))),
        ),
    ),
    *(
        Call(
            moe_route,
            {"logits": torch.randn(5, 17, dtype=dtype)},
            {"top_k": 3, "renormalize": renormalize, "scoring": scoring},
            (3, renormalize, scoring == "sigmoid"),
            (*(("top_k", value) for value in (0, 18, 2.0, True)), ("scoring", "tanh")),
        )
        for dtype, renormalize, scoring in ((torch.float32, True, "softmax"), (BF16, False, "sigmoid"))
    ),
]

CONV = {"x": torch.randn(2, 7, 5, dtype=BF16).mT, "weight": torch.randn(5, 4), "bias": torch.randn(5)}
CONV_REFUSED = (("weight", torch.zeros(4, 4)), ("bias", torch.zeros(6)), ("activation", "gelu"))
SCAN = {
    **{name: torch.randn(2, 7, 5, dtype=BF16).mT for name in ("u", "delta")},
    "a": -torch.rand(3, 5).t(),
    "b": torch.randn(2, 3, 7),
    "c": torch.randn(2, 3, 7, dtype=BF16),
    "skip": torch.randn(5),
}
SCAN_REFUSED = (
    *(("delta", torch.zeros(2, 5, 8)), ("a", torch.zeros(5, 3, dtype=BF16)), ("a", torch.zeros(6, 3))),
    *(("b", torch.zeros(2, 4, 7)), ("c", torch.zeros(2, 3, 8)), ("skip", torch.zeros(6))),
)
CALLS += [
    Call(causal_conv1d, CONV, {"activation": "silu"}, (True,), CONV_REFUSED),
    Call(
        causal_conv1d_backward,
        {**CONV, "dy": torch.randn(2, 5, 7)},
        {"activation": "silu"},
        (True, True),
        (*CONV_REFUSED, ("dy", torch.zeros(2, 5, 8))),
    ),
    Call(selective_scan, SCAN, {"softplus": True}, (True,), SCAN_REFUSED),
    Call(
        selective_scan_backward,
        {**SCAN, "dy": torch.randn(2, 5, 7)},
        {"softplus": True},
        (True,),
        (*SCAN_REFUSED, ("dy", torch.zeros(2, 5, 8)), ("dy", torch.zeros(2, 5, 7, dtype=torch.float64))),
    ),
]
