"""Arithmetic of matrix units and of the libraries that call them: no mistakes, but less than a contract may promise.

These models explain failures, and `assay.verify.power` doesn't use them. Their words name the switch of PyTorch and
Triton that decides, and the named contract that admits such results.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from assay.configs import table
from assay.formats import matrix_units
from assay.formats.accumulator import Accumulator, accumulator_named
from assay.formats.devices import TensorCores
from assay.golden.inputs.values import torch_dtype
from assay.golden.registry import Spec
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.mutators import (
    TF32,
    first_dtype,
    narrow_accumulator,
    narrowed,
    operations,
    out_dtype,
)

Tensor = torch.Tensor
_PLAIN = ("gemm", "linear")
_SCALED = (*_PLAIN, "gemm_fp8")
_OTHERS = (
    "gemm_int4", "gemm_mxfp8", "gemm_nvfp4", "moe", "moe_fp8", "moe_int4", "attention", "attention_varlen",
    "attention_decode", "block_attention", "mla_decode", "linear_cross_entropy",
)  # fmt: skip
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_FP8_CONTRACTS = {"hopper-fp8": "cublaslt-fp8-fast", "hopper-fp8-promoted": "cublaslt-fp8"}
_SCALES = 128  # terms of a block of scales along K
_IN_TF32 = operations(matmul=lambda xp, right, a, b, plus=None: right(narrowed(a, "tf32"), narrowed(b, "tf32"), plus))
_PARTS = (1, 4, 8)  # of a sum split along K, besides two; one is rounded before a bias is added


def _multiplies(op: Spec) -> bool:
    """Match ops with a matrix product, and references, which may have one."""
    return op.name in (*_SCALED, *_OTHERS) or op.needs_dtypes


def _split(format: str, parts: int = 2, *, in_format: bool = False) -> type:
    """Round the sums of ``parts`` of the terms to a format, and add them in float32, or ``in_format`` itself."""
    dtype = torch_dtype(format)

    def matmul(xp: object, right: object, a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
        length = max(-(-a.shape[-1] // parts), 1)
        total = a[..., :0] @ b[..., :0, :]
        for left, other in zip(torch.split(a, length, -1), torch.split(b, length, -2), strict=True):
            total = total + (left @ other).to(dtype).to(a.dtype)
            total = total.to(dtype).to(a.dtype) if in_format else total
        return total if plus is None else total + plus

    return operations(matmul=matmul)


def _on_unit(unit: Accumulator) -> type:
    """Form products as a matrix unit does, bit for bit; scales multiply its sums, a block of them at a time."""

    class OnUnit:
        def matmul(self, a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
            format = next(iter(self.case.dtypes.values()))  # type: ignore[attr-defined]
            left, right = (np.ascontiguousarray(x.float().numpy()) for x in (a, b))
            if unit.operands:
                left, right = map(matrix_units.truncate_to_tf32, (left, right))
                format = "float32"
            shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
            with np.errstate(all="ignore"):
                a_parts, b_parts = (matrix_units.operand(x, format) for x in (left, right))
                zeros = np.zeros(shape, np.float32)
                sums = matrix_units.matmul(a_parts, b_parts, zeros, unit, promotion=unit.promotion)
            total = torch.from_numpy(sums).to(a.dtype)
            return total if plus is None else total + plus

        def scaled_matmul(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
            if scale_a.dim() < 2 or scale_a.shape[-1] != a.shape[-1] or a.shape[-1] == 1:
                return self.matmul(a, b) * scale_a * scale_b
            total = a[..., :0] @ b[..., :0, :]
            for first in range(0, a.shape[-1], _SCALES):
                k = slice(first, first + _SCALES)
                total = total + self.matmul(a[:, k], b[k]) * scale_a[:, k][:, :1] * scale_b[k][:1]
            return total

    return OnUnit


def _split_k(format: str, switch: str) -> FaultModel:
    like = [_split(format, parts, in_format=adds) for parts in _PARTS for adds in (False, True)]
    return FaultModel(f"split_k_in_{format}", "accumulator",
        f"sums are split along K, and their parts rounded to {format}: torch.backends.cuda.matmul.{switch}, on by "
        "default (contract cublas-reduced)", _multiplies, "pytorch#89172", "K so large that the library splits it",
        applies=out_dtype(format), arithmetic=_split(format), contract={"accumulate": "split-k"}, like=tuple(like),
        sometimes=True)  # fmt: skip


def _units() -> Iterator[FaultModel]:
    """Yield two models of each unit with FP8 operands, to the last bit and by its bound, and one of each other unit."""
    for name, row in table("accumulators").items():
        if "inputs" not in row or "group" in row:
            continue
        unit, inputs = accumulator_named(name), tuple(row["inputs"])
        fp8 = set(inputs) <= set(_FP8)
        words = f"products are summed as the matrix unit {name} sums them"
        if fp8 and unit.output < 23:
            how = f"every {unit.promotion} terms moved to float32" if unit.promotion else "never moved to float32"
            words = (
                f"FP8 products are summed in {unit.output + 1} bits, as {name} does, {how}: use_fast_accum="
                f"{not unit.promotion} of torch._scaled_mm, max_num_imprecise_acc of tl.dot"
            )
            words += f" (contract {_FP8_CONTRACTS[name]})" if name in _FP8_CONTRACTS else ""
        plain = FaultModel(f"summed_as_{name.replace('-', '_')}", "accumulator", words, _SCALED if fp8 else _PLAIN,
            "MMA-Sim", applies=first_dtype("float32") if unit.operands else first_dtype(*inputs),
            arithmetic=_on_unit(unit), contract={"accumulate": name})  # fmt: skip
        if fp8:
            yield replace(plain, emulated=True)
            plain = replace(plain, name=f"{plain.name}_in_another_order", description=f"{words}; in another order")
        yield plain


@cache
def _arithmetics() -> tuple[FaultModel, ...]:
    return (
        *_units(),
        FaultModel("products_in_tf32_rounded", "precision", f"products are in TF32, their operands rounded: {TF32}",
            _multiplies, "triton#10176, jax#23182", applies=first_dtype("float32"), arithmetic=_IN_TF32,
            contract={"accumulate": "tf32-dot"}, emulated=True),
        _split_k("bfloat16", "allow_bf16_reduced_precision_reduction"),
        _split_k("float16", "allow_fp16_reduced_precision_reduction"),
        FaultModel("products_summed_in_float16", "accumulator",
            "sums of products are kept in float16: torch.backends.cuda.matmul.allow_fp16_accumulation, "
            "out_dtype=tl.float16 of tl.dot", _multiplies, "pytorch#123157", "sums of many terms, or beyond 65504",
            applies=first_dtype("float16"), arithmetic=narrow_accumulator("float16"),
            contract={"accumulate": "float16"},
            like=tuple(narrow_accumulator("float16", block) for block in (4, 8))),
    )  # fmt: skip


def arithmetics_of(op: Spec, cores: TensorCores | None = None) -> tuple[FaultModel, ...]:
    """Return the models of an op's products: those of the units of these tensor cores, or of all where unknown."""
    units = None if cores is None else tuple(cores.units.values())
    return tuple(model for model in _arithmetics() if model.is_of(op) and _has(units, model))


def _has(units: tuple[Accumulator, ...] | None, model: FaultModel) -> bool:
    """Return whether one of the units is the model's own, however often its sums move to float32."""
    unit = accumulator_named(model.contract["accumulate"])
    return units is None or not unit.block or replace(unit, promotion=0) in units
