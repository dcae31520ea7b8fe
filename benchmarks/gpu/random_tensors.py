"""Compare PyTorch's random tensors of the GPU with `fake_cuda.random`: equal bits, for randn within its radius."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.interpreter.fake_cuda.random import CudaGenerator
from benchmarks.gpu.part import Part, main, same_bits

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
RANGES = ((0, 10, torch.int64), (-5, 100, torch.int8), (0, 2**30, torch.int32), (-(2**62), 2**62, torch.int64))


def body(part: Part) -> None:
    """Compare two calls after each seed, of sizes below and beyond a grid, so that the offset is tested too."""
    sizes = (7, 5000) if part.rehearsal else (7, 5000, 300_000, 2_000_003)
    for seed in (0, 2**40 + 3):
        for size in sizes:
            part.step(f"{size} of seed {seed}", partial(_all, part, size, seed))


def _all(part: Part, size: int, seed: int) -> None:
    for dtype in FLOATS:
        name = str(dtype).removeprefix("torch.")
        _compare(
            part,
            f"rand of {size:,} {name}, seed {seed}",
            lambda g, dtype=dtype: g.rand(size, dtype=dtype),
            lambda dtype=dtype: torch.rand(size, dtype=dtype, device="cuda"),
            seed,
        )
        _compare(
            part,
            f"bernoulli of {size:,} {name}, seed {seed}",
            lambda g, dtype=dtype: g.bernoulli(0.3, size, dtype=dtype),
            lambda dtype=dtype: torch.empty(size, dtype=dtype, device="cuda").bernoulli_(0.3),
            seed,
        )
    for low, high, whole in RANGES:
        _compare(
            part,
            f"randint from {low} to {high} of {size:,}, seed {seed}",
            lambda g, a=low, b=high, dtype=whole: g.randint(a, b, (size,), dtype),
            lambda a=low, b=high, dtype=whole: torch.randint(a, b, (size,), dtype=dtype, device="cuda"),
            seed,
        )
    for dtype in FLOATS[:3]:
        _normal(part, size, dtype, seed)


def _compare(part: Part, what: str, ours: Callable[..., Tensor], theirs: Callable[[], Tensor], seed: int) -> None:
    generator, again = CudaGenerator(seed, part.key), CudaGenerator(seed, part.key)
    if not part.rehearsal:
        torch.manual_seed(seed)
    different = elements = 0
    for _ in range(2):
        wanted = ours(again) if part.rehearsal else theirs().cpu()
        different += int((~same_bits(ours(generator), wanted)).sum())
        elements += wanted.numel()
    part.claim(f"{what}: bit for bit", different == 0, f"{different:,} of {elements:,} differ")


def _normal(part: Part, size: int, dtype: torch.dtype, seed: int) -> None:
    result = CudaGenerator(seed, part.key).randn(size, dtype=dtype)
    if part.rehearsal:
        wanted = result.values
    else:
        torch.manual_seed(seed)
        wanted = torch.randn(size, dtype=dtype, device="cuda").cpu()
    off = (wanted.double() - result.values.double()).abs()
    equal = float(same_bits(wanted, result.values).double().mean())
    worst = float((off / result.radius).max())
    part.claim(
        f"randn of {size:,} {str(dtype).removeprefix('torch.')}, seed {seed}: within the radius",
        worst <= 1,
        f"worst {worst:.2f} of it, {equal:.1%} have the same bits",
    )


if __name__ == "__main__":
    main("random_tensors", body)
