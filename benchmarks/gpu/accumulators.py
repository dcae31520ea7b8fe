"""Compare the accumulator models of configs/tensor_cores.toml with the hardware's dots, bit by bit."""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.configs import table
from assay.formats.accumulator import accumulator_named
from assay.interpreter.numerics.dots import matmul, operand
from benchmarks.gpu import probes
from benchmarks.gpu.part import Part, main, same_bits

OPERANDS = {
    "float16": (torch.float16, "fp16", "float16"),
    "bfloat16": (torch.bfloat16, "bf16", "bfloat16"),
    "tf32": (torch.float32, "fp32", "tf32"),
    "float8": (torch.float8_e4m3fn, "fp8e4nv", "float8_e4m3fn"),
}
_LOW = -(2**13)  # mask of the float32 bits that a tensor core reads as TF32


def body(part: Part) -> None:
    """Report the share of elements that each model gives exactly, by dtype; the device's model must give all."""
    row = table("tensor_cores")[table("devices")[part.key]["tensor_cores"]]
    for kind in OPERANDS:
        if kind in row:
            part.step(kind, partial(_compare, part, kind, row[kind]))
        else:
            part.say(f"{kind}: no model on {part.key}")


def _compare(part: Part, kind: str, wanted: str) -> None:
    dtype, format, name = OPERANDS[kind]
    rows = 64 if part.rehearsal else 128
    models = [model for model, about in table("accumulators").items() if name in about.get("inputs", ())]
    shares = dict.fromkeys(models, 0.0)
    depth = 64 if part.rehearsal else 512 // dtype.itemsize  # as deep as shared memory allows
    spreads = (1, 6) if part.rehearsal else (1, 3, 6, 12)
    for seed, spread in enumerate(spreads):
        a, b = (_drawn(dtype, shape, spread, seed + 8 * i) for i, shape in enumerate([(rows, depth), (depth, 64)]))
        got = _on_device(part, a, b)
        for model in models:
            shares[model] += float(same_bits(got, _by(model, a, b, format)).double().mean()) / len(spreads)
    for model, share in shares.items():
        part.say(f"  {kind}: {model} gives {share:.2%} of the elements to the last bit")
    part.claim(f"{kind} on {part.key} is {wanted}", shares.get(wanted, 0.0) >= 1 - 1e-12)


def _on_device(part: Part, a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty(a.shape[0], b.shape[1], device=part.device)
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    with part.running():
        probes.dot[(1,)](a.to(part.device), b.to(part.device), c, M=m, N=n, K=k, PRECISION="tf32", num_warps=4)
    return c.cpu()


def _by(model: str, a: Tensor, b: Tensor, format: str) -> Tensor:
    left, right = (operand(x.float().numpy(), format) for x in (a, b))
    unit = accumulator_named(model)
    zeros = torch.zeros(a.shape[0], b.shape[1]).numpy()
    return torch.from_numpy(matmul(left, right, zeros, unit, promotion=unit.promotion))


def _drawn(dtype: torch.dtype, shape: tuple[int, int], spread: int, seed: int) -> Tensor:
    """Return finite normal numbers times powers of two within ``spread`` of one; float32 is truncated to TF32."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, spread + 1, shape, generator=generator)
    numbers = torch.ldexp(torch.randn(shape, generator=generator), powers)
    if dtype == torch.float32:
        return (numbers.view(torch.int32) & _LOW).view(torch.float32)
    if dtype.itemsize == 1:
        numbers = numbers.clamp(-448, 448)
    return numbers.to(dtype)


if __name__ == "__main__":
    main("accumulators", body)
