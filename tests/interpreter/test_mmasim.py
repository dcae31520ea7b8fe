"""Tensor-core models against Microsoft's MMA-Sim (`mmasim`): every instruction that both have, to the last bit."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from assay.configs import table
from assay.formats.accumulator import accumulator_named
from assay.interpreter.numerics.dots import Operand, matmul, operand, truncate_to_tf32

pytest.importorskip("mmasim")
# mmasim.nv_ptx compiles this module with a C++ compiler at import, for float64 alone, which has no model here.
sys.modules.setdefault("mmasim.arithmetic.fma", types.SimpleNamespace(MMA_FMA=object))  # type: ignore[arg-type]
from mmasim import nv_ptx  # noqa: E402
from mmasim.nv_ptx import isa_mma, isa_tcgen05mma, isa_wgmma  # noqa: E402

TRITON_NAMES = {"f16": "fp16", "bf16": "bf16", "tf32": "fp32", "e4m3": "fp8e4nv", "e5m2": "fp8e5", "e2m1": "fp4"}
KINDS = {"f16": "float16", "bf16": "bfloat16", "tf32": "tf32", "e4m3": "float8", "e5m2": "float8"}
ARCHITECTURES = {
    "Volta": "volta", "Turing": "turing", "Ampere": "ampere", "Ada Lovelace": "ada", "Hopper": "hopper",
    "Blackwell": "blackwell",
}  # fmt: skip
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])
RANGES = ("raw bits", "large", "small", "subnormal", "sparse")


def instructions() -> Iterator[tuple[str, str, str, str]]:
    """Yield (class, architecture, instruction, model): mma.sync, wgmma and tcgen05.mma; the smallest n of each."""
    tables = table("tensor_cores")
    for name, listed in (
        ("MMA", isa_mma.mma_shape_and_type),
        ("WGMMA", isa_wgmma.wgmma_shape_and_type),
        ("TCGen05MMA", isa_tcgen05mma.tcgen05mma_shape_and_type),
    ):
        for architecture, row in ARCHITECTURES.items():
            for instruction in listed.get(architecture, ()):
                shape, *_, a_type, b_type = instruction.split(".")[: 5 if "kind::" in instruction else 4]
                kind = KINDS.get(a_type)
                if kind is None or b_type not in KINDS or (name != "MMA" and "n8k" not in shape):
                    continue  # float64 and the 6-bit formats
                if architecture == "Turing" and shape == "m8n8k4":
                    model = "volta-fp16"  # an instruction of Volta's
                else:
                    model = tables[row][kind]
                yield name, architecture, instruction, model


INSTRUCTIONS = list(instructions())
SAMPLE = {instruction[1:2] + instruction[3:]: instruction for instruction in INSTRUCTIONS}.values()  # one of each model


def drawn(kind: str, shape: tuple[int, ...], values: str, generator: torch.Generator) -> torch.Tensor:
    """Return numbers of a format: any bit pattern, or magnitudes around a power of two, or mostly zeros."""
    dtype = {"f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}.get(
        kind, torch.float32
    )
    if values == "raw bits":
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        return bits.view(dtype).reshape(shape)
    wide = kind in ("bf16", "tf32", "f32")
    middle = {"large": 20 if wide else 4, "small": -40 if wide else -4, "sparse": 0}.get(values, -66 if wide else -12)
    exponents = torch.randint(middle - 6, middle + 6, shape, generator=generator)
    numbers = torch.ldexp(torch.randn(shape, generator=generator), exponents)
    if values == "sparse":
        numbers *= torch.rand(shape, generator=generator) < 0.2
    return numbers.to(dtype)


def as_operand(numbers: torch.Tensor, kind: str) -> Operand:
    values = truncate_to_tf32(numbers.numpy()) if kind == "tf32" else numbers.float().numpy()
    return operand(values, TRITON_NAMES[kind])


def differences(ours: np.ndarray, theirs: torch.Tensor) -> int:
    """Count elements whose bits differ; any NaN equals any other."""
    other = theirs.numpy()
    bits = f"u{other.itemsize}"
    return int(((ours.view(bits) != other.view(bits)) & ~(np.isnan(ours) & np.isnan(other))).sum())


def compared(name: str, architecture: str, instruction: str, model: str, rounds: int) -> tuple[int, int]:
    """Return how many elements differ, and how many were compared."""
    op: Any = getattr(nv_ptx, name)(architecture, instruction)
    unit, different, elements = accumulator_named(model), 0, 0
    c_kind = "f16" if op.c_type == torch.float16 else "f32"
    for seed in range(rounds):
        for values in RANGES:
            generator = torch.Generator().manual_seed(seed)
            a = drawn(op.a_type_ptx, (op.m, op.k), values, generator)
            b = drawn(op.b_type_ptx, (op.k, op.n), values, generator)
            c = drawn(c_kind, (op.m, op.n), values, generator)
            c[:, ::2] *= values == "raw bits"
            c = c.to(op.d_type)  # m8n8k4.f32.f16.f16.f16 takes a float16 sum into float32
            with np.errstate(all="ignore"):
                ours = matmul(as_operand(a, op.a_type_ptx), as_operand(b, op.b_type_ptx), c.numpy(), unit)
            different += differences(ours, op(a, b, c))
            elements += c.numel()
    return different, elements


@pytest.mark.parametrize(("name", "architecture", "instruction", "model"), SAMPLE)
def test_a_model_is_mma_sims_to_the_last_bit(name: str, architecture: str, instruction: str, model: str) -> None:
    different, elements = compared(name, architecture, instruction, model, rounds=1)
    assert (different, elements > 0) == (0, True)


@pytest.mark.evidence
def test_every_instruction_is_mma_sims_to_the_last_bit() -> None:
    total = 0
    for name, architecture, instruction, model in INSTRUCTIONS:
        different, elements = compared(name, architecture, instruction, model, rounds=6)
        assert (instruction, different) == (instruction, 0)
        total += elements
    assert total > 900_000
    print(f"{len(INSTRUCTIONS)} instructions, {total:,} elements, no difference")


@pytest.mark.parametrize(("seed", "middle"), [(0, 127), (1, 60)])
@pytest.mark.parametrize(
    ("k_block", "a_type", "b_type", "scale_type"),
    [
        *((32, a, b, "ue8m0") for a in ("e4m3", "e5m2", "e2m1") for b in ("e4m3", "e5m2", "e2m1")),
        (16, "e2m1", "e2m1", "ue8m0"),
        (16, "e2m1", "e2m1", "ue4m3"),
    ],
)
def test_a_scaled_product_is_mma_sims_to_the_last_bit(
    k_block: int, a_type: str, b_type: str, scale_type: str, seed: int, middle: int
) -> None:
    """Products of a Blackwell with a scale for each 16 or 32 elements, of any bit patterns."""
    packed = (a_type, b_type) == ("e2m1", "e2m1")
    shape = f"m128n8k64.kind::mxf4nvf4.block{k_block}" if packed else "m128n8k32.kind::mxf8f6f4.block32"
    op: Any = nv_ptx.TCGen05MMABlockScale("Blackwell", f"{shape}.f32.{a_type}.{b_type}.{scale_type}")
    model = accumulator_named(table("tensor_cores")["blackwell"]["scaled_fp4" if packed else "scaled"])
    generator = torch.Generator().manual_seed(seed)

    def matrix(kind: str, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
        """Return MMA-Sim's operand and scales, the numbers, and the scales of each."""
        if kind == "e2m1":
            codes = torch.randint(0, 16, (rows, op.k), generator=generator, dtype=torch.uint8)
            theirs = codes[:, ::2] << 4 | codes[:, 1::2] if packed else codes << 2  # even elements in high nibbles
            numbers = E2M1[codes.int()]
        else:
            theirs = drawn(kind, (rows, op.k), "large" if seed else "raw bits", generator)
            numbers = theirs.float()
        low, high = (middle - 9, middle + 9) if scale_type == "ue8m0" else (0, 127)
        codes = torch.randint(low, high, (rows, op.k // k_block), generator=generator, dtype=torch.uint8)
        scales = codes.view(op.s_type)
        return theirs, scales, numbers, scales.float().repeat_interleave(k_block, 1).numpy()

    a, a_scales, left, left_scales = matrix(a_type, op.m)
    b, b_scales, right, right_scales = matrix(b_type, op.n)
    c = drawn("f32", (op.m, op.n), "small", generator)
    scale_format = "fp8e4nv" if scale_type == "ue4m3" else "e8m0"
    with np.errstate(all="ignore"):
        ours = matmul(
            operand(left.numpy(), TRITON_NAMES[a_type], left_scales, scale_format),
            operand(right.numpy().T, TRITON_NAMES[b_type], right_scales.T, scale_format),
            c.numpy(),
            model,
        )
    assert differences(ours, op(a, b.T, c, a_scales, b_scales.T)) == 0
