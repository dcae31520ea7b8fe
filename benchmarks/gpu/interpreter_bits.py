"""Compare the faithful interpreter with the GPU bit by bit on the same cases: casts, arithmetic, functions, atomics."""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.interpreter import faithful
from benchmarks.gpu import probes
from benchmarks.gpu.part import Part, main, same_bits

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASTS = [
    *((F32, to) for to in (F16, BF16, E4M3, E5M2, torch.int32, torch.int8)),
    *((F16, to) for to in (F32, BF16, E4M3, E5M2)),
    *((BF16, to) for to in (F32, F16, E4M3, E5M2)),
    *((E4M3, to) for to in (F32, F16, BF16)),
    *((E5M2, to) for to in (F32, F16, BF16)),
]
KNOWN = {(E5M2, BF16)}  # Triton up to 3.9.0 converts infinity and NaN to finite numbers there (docs/interpreter.md)
EXACT = ("add", "multiply", "fma", "maximum")
# Units in the last place, of normal numbers: what PTX documents of ex2, lg2, rsqrt and sqrt, and one for the half of
# the interpreter and for rounding up; for exp also the rounding of x log2(e), for |x| <= 8.
APPROXIMATE = {"exp2": 4, "exp": 10, "log2": 5, "rsqrt": 3, "sqrt": 3}
_BLOCK = 1024
_SHOWN = 4  # differences printed for each operation


def body(part: Part) -> None:
    """Run each case on the device and in the interpreter; count every difference and print the first ones."""
    count = 2**12 if part.rehearsal else 2**20
    for source, target in CASTS:
        part.step(f"cast of {_name(source)} to {_name(target)}", partial(_cast, part, count, source, target))
    for dtype in (F32, F16, BF16):
        part.step(f"arithmetic of {_name(dtype)}", partial(_arithmetic, part, count, dtype))
    part.step("functions", partial(_functions, part, count))
    part.step("atomics", partial(_atomics, part, count))


def _cast(part: Part, count: int, source: torch.dtype, target: torch.dtype) -> None:
    what = f"cast of {_name(source)} to {_name(target)}"
    _exactly(part, what, probes.cast, (_numbers(source, count),), target, known=(source, target) in KNOWN)


def _arithmetic(part: Part, count: int, dtype: torch.dtype) -> None:
    x, y = _numbers(dtype, count), _numbers(dtype, count, seed=1)
    for op in EXACT:
        if op != "fma" or dtype != BF16:
            _exactly(part, f"{op} of {_name(dtype)}", probes.binary, (x, y), dtype, OP=op)


def _functions(part: Part, count: int) -> None:
    x, y = _numbers(F32, count), _numbers(F32, count, seed=1)
    _exactly(part, "div_rn of float32", probes.binary, (x, y), F32, OP="div_rn")
    _exactly(part, "sqrt_rn of float32", probes.unary, (x.abs(),), F32, OP="sqrt_rn")
    tame = torch.exp2(40 * torch.rand(count, generator=_generator(2)) - 20)
    other = torch.exp2(40 * torch.rand(count, generator=_generator(3)) - 20)
    _nearly(part, "division of float32", probes.binary, (tame, other), 3, OP="divide")
    for op, ulps in APPROXIMATE.items():
        values = 16 * torch.rand(count, generator=_generator(4)) - 8 if op.startswith("exp") else tame
        if op == "log2":  # near 1 its error is absolute
            values = torch.where((tame > 0.5) & (tame < 2), 4 * tame, tame)
        _nearly(part, f"{op} of float32", probes.unary, (values,), ulps, OP=op)


def _exactly(
    part: Part,
    what: str,
    kernel: object,
    inputs: tuple[Tensor, ...],
    dtype: torch.dtype,
    known: bool = False,
    **to: str,
) -> None:
    got, wanted = _both(part, kernel, inputs, dtype, **to)
    wrong = (~same_bits(got, wanted)).nonzero().flatten()
    for index in wrong[:_SHOWN].tolist():
        values = ", ".join(f"{x[index].item():.9g}" for x in inputs)
        part.say(f"  {what} of {values}: GPU {got[index].item():.9g}, interpreter {wanted[index].item():.9g}")
    detail = f"{len(wrong):,} of {got.numel():,} differ"
    if known:
        part.say(f"known  {what}: {detail}")
    else:
        part.claim(f"{what}: bit for bit", not len(wrong), detail)


def _nearly(part: Part, what: str, kernel: object, inputs: tuple[Tensor, ...], ulps: int, **to: str) -> None:
    """Compare functions, correct to half an ulp here and within ``ulps`` on a GPU, except at subnormal results."""
    got, wanted = _both(part, kernel, inputs, F32, **to)
    normal = (wanted.abs() >= torch.finfo(F32).tiny) & wanted.isfinite() & got.isfinite()
    indices = (got.view(torch.int32).long() - wanted.view(torch.int32).long()).abs()[normal]
    worst, equal = int(indices.max()), float((indices == 0).double().mean())
    part.claim(f"{what}: within {ulps} ulps", worst <= ulps, f"worst {worst}, {equal:.1%} the same bits")
    rest = int((~same_bits(got, wanted))[~normal].sum())
    part.say(f"  {what}: {rest:,} of {int((~normal).sum()):,} subnormal or infinite results differ")


def _both(
    part: Part, kernel: object, inputs: tuple[Tensor, ...], dtype: torch.dtype, **to: str
) -> tuple[Tensor, Tensor]:
    count = inputs[0].numel()
    block = min(count, _BLOCK)
    placed = [x.to(part.device) for x in inputs]
    got = torch.empty(count, dtype=dtype, device=part.device)
    wanted = torch.empty(count, dtype=dtype)
    with part.running():
        kernel[(count // block,)](*placed, got, N=block, **to)  # type: ignore[index]
    with faithful():
        kernel[(1,)](*inputs, wanted, N=count, **to)  # type: ignore[index]
    return got.cpu(), wanted


def _atomics(part: Part, count: int) -> None:
    """Compare atomics on integers and on sums that are exact in any order."""
    drawn = torch.randint(-4, 5, (count,), generator=_generator(5))
    for dtype in (torch.int32, F32, F16, BF16):
        x = drawn.to(dtype) if dtype in (torch.int32, F32) else (drawn[: 2**9] > 0).to(dtype)
        results = []
        for device in (part.device, "cpu"):
            total = torch.zeros(16, dtype=dtype, device=device)
            with part.running() if device == part.device and not part.rehearsal else faithful():
                probes.add_atomically[(x.numel() // 256,)](x.to(device), total, POSITIONS=16, N=256)
            results.append(total.cpu())
        part.claim(f"atomic_add of {_name(dtype)}, exact sums: bit for bit", bool(same_bits(*results).all()))


def _numbers(dtype: torch.dtype, count: int, seed: int = 0) -> Tensor:
    """Return bit patterns: every one of a narrow dtype as far as there is room, random ones of float32."""
    bits = 8 * dtype.itemsize
    drawn = torch.randint(-(2**31), 2**31, (count,), generator=_generator(seed))
    if bits < 32 and seed == 0:
        drawn[: min(count, 2**bits)] = torch.arange(2**bits)[torch.randperm(2**bits, generator=_generator(9))][:count]
    kinds = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
    return drawn.to(kinds[bits]).view(dtype)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main("interpreter_bits", body)
