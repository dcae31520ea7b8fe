"""Time bundled kernels and PyTorch's own on the device: medians, with a check that outputs agree, and the host's time.

A first run with `--warm` only compiles what is timed, so that it may run beside others.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.kernels.triton.attention import attention
from assay.kernels.triton.cross_entropy import cross_entropy
from assay.kernels.triton.gemm import gemm
from assay.kernels.triton.gemm_fp8 import gemm_fp8
from assay.kernels.triton.layernorm import layernorm
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.rmsnorm import rmsnorm
from assay.kernels.triton.softmax import softmax
from assay.kernels.triton.swiglu import swiglu
from assay.runtime.errors import first_line
from benchmarks.gpu import launches
from benchmarks.gpu.part import Part, main

_CLOSE = 2.0**-6  # of the largest output: two roundings to bfloat16 and sums in another order
Call = Callable[[], Tensor]


@dataclass
class Timed:
    """A call of a bundled kernel, and others' calls of the same; an output must agree with the first other's.

    ``operations``: of products, two for each multiplication and addition.
    """

    name: str
    ours: Call
    others: dict[str, Call] = field(default_factory=dict)
    operations: float = 0.0


def body(part: Part, warm: bool) -> None:
    """Report a row per op and size: median microseconds of all, and the ratio; claim that outputs agree."""
    for name, group in GROUPS.items():
        if warm:
            with part.running():
                for timed in group(part):
                    _tried([timed.ours, *timed.others.values()])
        else:
            try:
                part.step(name, partial(_group, part, group))
            except TimeoutError:
                raise
            except Exception as error:  # the other groups may still be timed
                part.claim(f"{name} can be timed", False, f"{type(error).__name__}: {first_line(error)}")
    if not (warm or part.rehearsal):
        part.step("host", partial(_host, part))


def _group(part: Part, group: Callable[[Part], Iterator[Timed]]) -> None:
    with part.running():
        for timed in group(part):
            _report(part, timed)


def _report(part: Part, timed: Timed) -> None:
    got, us = timed.ours().double(), _microseconds(part, timed.ours)
    others = {name: call for name, call in timed.others.items() if _tried([call])}
    times = {name: _microseconds(part, call) for name, call in others.items()}
    words = [f"{us:.1f} us", *(f"{name} {took:.1f}" for name, took in times.items())]
    words += [f"{name} refuses" for name in timed.others if name not in others]
    if times:
        words.append(f"ratio {us / min(times.values()):.2f}")
    if timed.operations:
        words.append(f"{timed.operations / us / 1e6:.0f} TFLOP/s")
    part.say(f"  {timed.name}: {', '.join(words)}")
    for name, call in [*others.items()][:1]:
        wanted = call().double()
        off = float((got - wanted).abs().max() / wanted.abs().max())
        part.claim(f"{timed.name} agrees with {name}", off <= _CLOSE, f"{off:.1e} of the largest output")


def _tried(calls: list[Call]) -> bool:
    """Return whether calls run; PyTorch refuses some on some devices."""
    try:
        for call in calls:
            call()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _rows(part: Part) -> Iterator[Timed]:
    for rows, columns in [(8, 64)] if part.rehearsal else [(4096, 4096), (64, 16384), (16384, 8192), (8, 4096)]:
        x, y = _normal(part, 2, rows, columns)
        w, b = _normal(part, 2, columns)
        size = f"[{rows}, {columns}]"
        yield Timed(f"softmax {size}", partial(softmax, x), {"PyTorch": partial(functional.softmax, x, -1)})
        norm = partial(functional.rms_norm, x, w.shape, w, 1e-6)
        yield Timed(f"rmsnorm {size}", partial(rmsnorm, x, w, eps=1e-6), {"PyTorch": norm})
        norm = partial(functional.layer_norm, x, w.shape, w, b, 1e-5)
        yield Timed(f"layernorm {size}", partial(layernorm, x, w, b, eps=1e-5), {"PyTorch": norm})
        yield Timed(f"swiglu {size}", partial(swiglu, x, y), {"PyTorch": partial(_swiglu, x, y)})


def _products(part: Part) -> Iterator[Timed]:
    sizes = [(32, 32)] if part.rehearsal else [(1024, 1024), (8192, 8192), (1, 8192), (16, 8192)]
    for rows, size in sizes:
        a, b = _normal(part, rows, size), _normal(part, size, size).t()
        operations = 2.0 * rows * size * size
        yield Timed(
            f"gemm [{rows}, {size}, {size}]", partial(gemm, a, b), {"cuBLAS": partial(torch.mm, a, b)}, operations
        )


def _products_of_8_bits(part: Part) -> Iterator[Timed]:
    for rows, size in [(32, 32)] if part.rehearsal else [(8192, 8192), (64, 8192)]:
        a, b = (_normal(part, n, size).to(torch.float8_e4m3fn) for n in (rows, size))
        one = torch.ones((), device=part.device)
        exact, fast = (
            partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=each)
            for each in (False, True)
        )
        others = {"cuBLASLt": exact, "cuBLASLt, fast accumulation": fast}
        name, operations = f"gemm_fp8 [{rows}, {size}, {size}]", 2.0 * rows * size * size
        yield Timed(name, partial(gemm_fp8, a, b.t(), one, one.clone()), others, operations)


def _attentions(part: Part) -> Iterator[Timed]:
    whole = [(2, 16, 16, 8192, 128), (4, 32, 8, 2048, 128), (4, 16, 16, 4096, 64)]
    for batch, heads, kv_heads, length, columns in [(1, 2, 1, 32, 64)] if part.rehearsal else whole:
        q, k, v = (_normal(part, batch, each, length, columns) for each in (heads, kv_heads, kv_heads))
        backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
        others: dict[str, Call] = {name: partial(_sdpa, each, q, k, v) for name, each in backends.items()}
        name = f"causal attention [{batch}, {heads}/{kv_heads}, {length}, {columns}]"
        operations = 2.0 * batch * heads * length * length * columns
        yield Timed(name, partial(attention, q, k, v, causal="top_left"), others, operations)


def _losses(part: Part) -> Iterator[Timed]:
    rows, classes = (8, 64) if part.rehearsal else (8192, 128256)
    logits = _normal(part, rows, classes)
    target = torch.randint(0, classes, (rows,), device=part.device)
    theirs = partial(functional.cross_entropy, logits, target)
    yield Timed(f"cross_entropy [{rows}, {classes}]", partial(cross_entropy, logits, target), {"PyTorch": theirs})


GROUPS: dict[str, Callable[[Part], Iterator[Timed]]] = {
    "rows": _rows,
    "products": _products,
    "attention": _attentions,
    "products of 8 bits": _products_of_8_bits,
    "losses": _losses,
}


def _host(part: Part) -> None:
    """Report the host's time of a call, ordinary and replayed."""
    with torch.no_grad():
        for name, (function, arguments) in launches.calls(part.device).items():
            ordinary = function.__wrapped__  # type: ignore[attr-defined]
            times = [launches.microseconds(each, arguments) for each in (ordinary, replayed(ordinary))]
            part.say(f"  host, {name}: {times[0]:.1f} us, replayed {times[1]:.1f} us")


def _normal(part: Part, *shape: int) -> Tensor:
    return torch.randn(*shape, device=part.device).bfloat16()


def _swiglu(x: Tensor, y: Tensor) -> Tensor:
    return functional.silu(x) * y


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _microseconds(part: Part, function: Call) -> float:
    if not part.rehearsal:
        from triton.testing import do_bench

        return 1000 * float(do_bench(function, return_mode="median"))
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken)


if __name__ == "__main__":
    main("libraries", body, {"warm": {"action": "store_true", "help": "only compile"}})
