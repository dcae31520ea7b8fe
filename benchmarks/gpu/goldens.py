"""Compare the device's float64 with what goldens assume of it, and the times of goldens there and on the CPU.

Elementary functions are compared with the correctly rounded results, by NVIDIA's own measure and its own maxima
(configs/cuda_functions.toml), sums and products with more digits.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.configs import table
from assay.golden import evaluate, spec
from assay.golden.arithmetic import BallArithmetic, Exact
from assay.golden.arithmetic.double_double import DoubleDouble, two_sum
from assay.golden.evaluation.call import run
from assay.golden.evaluation.device import LEAST, evaluating_on
from assay.golden.evaluation.golden import golden_of
from benchmarks.gpu.part import Part, main

_LEAST_RESULT = 2.0**-1000  # below it a golden claims an absolute error only
_DOMAINS = {  # where they are smaller than all numbers, or where larger results overflow
    "sqrt": (0.0, 1e300), "exp": (-700.0, 700.0), "exp2": (-1000.0, 1000.0), "expm1": (-700.0, 700.0),
    "log": (0.0, 1e300), "log2": (0.0, 1e300), "log10": (0.0, 1e300), "log1p": (-1.0, 1e300),
    "asin": (-1.0, 1.0), "acos": (-1.0, 1.0), "sinh": (-700.0, 700.0), "cosh": (-700.0, 700.0),
    "acosh": (1.0, 1e300), "atanh": (-1.0, 1.0), "erf": (-6.0, 6.0), "erfc": (-6.0, 26.0),
    "erfinv": (-1.0, 1.0), "sigmoid": (-690.0, 690.0), "tan": (-1e5, 1e5), "sin": (-1e5, 1e5), "cos": (-1e5, 1e5),
}  # fmt: skip
_EXACT = {"sum": torch.add, "product": torch.mul, "quotient": torch.div}
_SHAPES = {
    "gemm": lambda n: ((n, n), (n, n)),
    "softmax": lambda n: ((n, n),),
    "layernorm": lambda n: ((n, n), (n,), (n,)),
    "attention": lambda n: ((1, 4, n, 64), (1, 4, n, 64), (1, 4, n, 64)),
}
"""The tensors of an op by its size."""


def body(part: Part) -> None:
    """Measure each function, IEEE operations, and goldens of products, rows and attention."""
    count = 2**8 if part.rehearsal else 2**16
    part.step("operations", partial(_operations, part, count))
    for name, most in table("cuda_functions")["ulps"].items():
        part.step(name, partial(_function, part, name, most, count))
    for op in _SHAPES:
        for size in (16,) if part.rehearsal else (128, 256, 512, 2048):
            part.step(f"{op} of {size}", partial(_golden, part, op, size))


def _operations(part: Part, count: int) -> None:
    """Claim that sums, products and quotients are rounded to nearest, and that none is contracted with another."""
    x, y = _wide(count, 1), _wide(count, 2)
    here = [each.to(part.device) for each in (x, y)]
    for name, operation in _EXACT.items():
        different = int((operation(*here).cpu() != operation(x, y)).sum())
        part.claim(f"{name} of float64: the CPU's bits", different == 0, f"{different:,} of {count:,} differ")
    rest = two_sum(*here)[1].cpu()
    part.claim("the error of a sum, by its own operations: the CPU's bits", torch.equal(rest, two_sum(x, y)[1]))


def _function(part: Part, name: str, most: float, count: int) -> None:
    """Claim that a function is within so many ulps of the correctly rounded result."""
    x = _arguments(name, count)
    exponent = _wide(count, 5).clamp(-30, 30)
    if name == "pow":
        x = x.abs().clamp(1e-9, 1e9)
        got = torch.pow(x.to(part.device), exponent.to(part.device)).cpu()
    else:
        got = getattr(torch, name)(x.to(part.device)).cpu()
    exact = _exactly(name, x, exponent)
    right = two_sum(exact.high, exact.rest)[0]  # the correctly rounded result, but for ties
    regular = right.isfinite() & (right.abs() > _LEAST_RESULT)
    ulps = torch.where(regular, (got.view(torch.int64) - right.view(torch.int64)).abs(), 0)
    worst = int(ulps.argmax())
    # in a rehearsal the CPU's functions, which are within what goldens allow
    limit = 4.0 if part.rehearsal else most
    part.claim(
        f"{name}: within {most:g} ulps of the correctly rounded result",
        int(ulps[worst]) <= limit,
        f"at most {int(ulps[worst])}, at {float(x[worst])!r}, of {int(regular.sum()):,} arguments",
    )


def _exactly(name: str, x: Tensor, exponent: Tensor) -> DoubleDouble:
    xp = Exact()
    number = xp.exact(x)
    if name == "pow":
        return xp.exp(xp.log(number) * xp.exact(exponent))
    if name == "log10":
        return xp.log(number) / xp.log(xp.exact(torch.tensor(10.0, dtype=torch.float64)))
    return xp.function(name, number)


def _arguments(name: str, count: int) -> Tensor:
    """Return arguments in a function's domain: half of them of any magnitude, half uniform in its middle."""
    least, most = _DOMAINS.get(name, (-1e300, 1e300))
    generator = torch.Generator().manual_seed(7)
    middle = torch.rand(count // 2, generator=generator, dtype=torch.float64)
    middle = max(least, -10.0) + middle * (min(most, 10.0) - max(least, -10.0))
    return torch.cat([_wide(count - count // 2, 3), middle]).clamp(least, most)


def _wide(count: int, seed: int) -> Tensor:
    """Return numbers of either sign, their logarithms uniform within 2^-40 and 2^40."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.rand(count, generator=generator, dtype=torch.float64) * 80 - 40
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return signs * torch.exp2(powers)


def _golden(part: Part, op: str, size: int) -> None:
    """Claim that goldens of the device hold those of 25 digits, and say its times beside the CPU's."""
    generator = torch.Generator().manual_seed(size)
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in _SHAPES[op](size)]

    def golden() -> Iterator[Tensor]:
        (result, *_) = map(golden_of, run(spec(op), BallArithmetic(), tensors, {}))
        yield from (result.value, result.radius)

    left: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("assay.golden.evaluation.call")
    handler.emit = left.append  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with evaluating_on(part.device, 0):
        value, radius = golden()
        here = _seconds(lambda: list(golden()))
    log.removeHandler(handler)
    why = left[0].getMessage() if left else ""
    part.claim(f"goldens of {op} at {size} are evaluated on the device", not left, why)
    numbers = sum(tensor.numel() for tensor in tensors) + value.numel()
    if size <= 256:
        exact = evaluate(op, *tensors, digits=25)
        exact = exact[0] if isinstance(exact, tuple) else exact
        off = ((value - exact.value) - exact.rest).abs()
        held = off <= radius + exact.radius
        part.claim(f"goldens of {op} at {size} hold 25 digits", bool(held.all()), f"{int((~held).sum())} don't")
    there = _seconds(lambda: list(golden()))
    pays = "is to pay" if numbers >= LEAST else "isn't to pay"
    part.say(
        f"  {op} at {size}, {numbers:,} numbers, where a device {pays}: {here:.2g} s there, {there:.2g} s on the CPU"
    )


def _seconds(action: Callable[[], object]) -> float:
    """Return the least time of three, the result on the CPU."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    main("goldens", body)
