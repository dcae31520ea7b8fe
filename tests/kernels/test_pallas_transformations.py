"""The Pallas kernels under `jax.jit`, `jax.vmap` and `jax.grad`, and lowered for a TPU without one."""

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest

pytest.importorskip("jax")

import jax
import jax.experimental.topologies
import jax.export
import jax.numpy as jnp

from assay.kernels.pallas.add_rmsnorm import add_rmsnorm
from assay.kernels.pallas.attention import attention
from assay.kernels.pallas.attention_decode import attention_decode
from assay.kernels.pallas.calls import as_on_gpu
from assay.kernels.pallas.causal_conv1d import causal_conv1d
from assay.kernels.pallas.cross_entropy import cross_entropy
from assay.kernels.pallas.gemm import gemm
from assay.kernels.pallas.gemm_scaled import gemm_fp8, gemm_int8
from assay.kernels.pallas.layernorm import layernorm
from assay.kernels.pallas.moe import moe
from assay.kernels.pallas.rmsnorm import rmsnorm
from assay.kernels.pallas.rope import rope
from assay.kernels.pallas.selective_scan import selective_scan
from assay.kernels.pallas.softmax import softmax
from assay.kernels.pallas.swiglu import swiglu


@dataclass(frozen=True)
class Kernel:
    """A kernel, what it computes in jax's own words, and the shapes of its floating arrays, without the batch.

    ``others`` are arrays that have a gradient no more than the kernel then has.
    """

    function: Callable[..., Any]
    right: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[Any, ...] = ()
    loops: int = 0
    """Those that vmap makes over a batch of scalars that are fetched before the rest."""

    def arrays(self, dtype: Any) -> list[Any]:
        """Two of each, so many that vmap goes over."""
        random = numpy.random.default_rng(0)
        found = [random.normal(size=(2, *shape)).astype(dtype) for shape in self.shapes]
        return found + [numpy.stack([other, numpy.flip(other)]) for other in self.others]

    def derived(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The results of a batch, and the gradients from upstream ones that differ at each place, if it has any."""
        function = functools.partial(function, **self.options)
        if self.others:
            return jax.jit(jax.vmap(function))

        def one(*arrays: Any) -> Any:
            results, pull = jax.vjp(function, *arrays)
            upstream = jax.tree.map(lambda y: jnp.sin(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype), results)
            return results, pull(upstream)

        return jax.jit(jax.vmap(one))


def rms(x: Any, weight: Any, *, offset: float = 0.0) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (weight + offset)


def layer(x: Any, weight: Any, bias: Any) -> Any:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5) * weight + bias


def clamped(gate: Any, up: Any, *, limit: float) -> Any:
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def turned(x: Any, cos: Any, sin: Any) -> Any:
    (a, b), cos, sin = jnp.split(x, 2, -1), *(jax.lax.stop_gradient(angle)[:, None] for angle in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def loss(logits: Any) -> Any:
    logits = 4.0 * jnp.tanh(logits / 4.0)
    logs = jax.nn.log_softmax(logits)
    found = -0.9 * logs[jnp.arange(130), LABELS] - 0.1 * logs.mean(-1) + 0.01 * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.where(LABELS < 0, 0.0, found)


def decoded(q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any) -> Any:
    k, v = (cache[block_table].reshape(len(q), -1, *cache.shape[2:]).swapaxes(1, 2) for cache in (k_cache, v_cache))
    k, v = (jnp.repeat(array, q.shape[1] // k.shape[1], axis=1) for array in (k, v))
    s = jnp.einsum("bhd,bhkd->bhk", q, k, precision="highest") * q.shape[2] ** -0.5
    s = jnp.where(jnp.arange(s.shape[2]) < seq_lens[:, None, None], s, -jnp.inf)
    return jnp.einsum("bhk,bhkd->bhd", jax.nn.softmax(s), v, precision="highest")


def mixed(x: Any, w_gate_up: Any, w_down: Any, weights: Any, ids: Any) -> Any:
    gate, up = jnp.split(jnp.einsum("td,efd->tef", x, w_gate_up, precision="highest"), 2, axis=-1)
    out = jnp.einsum("tef,edf->ted", jax.nn.silu(gate) * up, w_down, precision="highest")
    return jnp.sum(jnp.take_along_axis(out, ids[:, :, None], axis=1) * weights[:, :, None], axis=1)


def scaled(a: Any, b: Any, scale_a: Any, scale_b: Any, *, granularity: str = "row") -> Any:
    assert granularity == "row"
    return (jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32)) * scale_a * scale_b).astype(jnp.bfloat16)


def convolved(x: Any, weight: Any, bias: Any, *, activation: str) -> Any:
    assert activation == "silu"
    width, places = weight.shape[1], x.shape[2]
    padded = jnp.pad(x, ((0, 0), (0, 0), (width - 1, 0)))
    y = sum(padded[:, :, tap : tap + places] * weight[:, tap, None] for tap in range(width)) + bias[:, None]
    return jax.nn.silu(y)


def scanned(u: Any, delta: Any, b: Any, c: Any, a: Any, skip: Any) -> Any:
    def one(state: Any, at: Any) -> Any:
        u, delta, b, c = at
        state = jnp.exp(delta[:, :, None] * a) * state + (delta * u)[:, :, None] * b[:, None]
        return state, jnp.sum(state * c[:, None], axis=2) + skip * u

    delta = jax.nn.softplus(delta)
    _, y = jax.lax.scan(one, jnp.zeros((len(u), *a.shape)), [jnp.moveaxis(array, 2, 0) for array in (u, delta, b, c)])
    return jnp.moveaxis(y, 0, 2)


def attended(q: Any, k: Any, v: Any, *, causal: str, scale: float) -> Any:
    assert causal == "bottom_right"
    k, v = (jnp.repeat(array, q.shape[1] // k.shape[1], axis=1) for array in (k, v))
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k, precision="highest") * scale
    seen = jnp.tril(jnp.ones(s.shape[2:], bool), s.shape[3] - s.shape[2])
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.where(seen, s, -jnp.inf)), v, precision="highest")


EIGHT = tuple(
    numpy.arange(rows * columns).reshape(rows, columns).astype(numpy.int8) for rows, columns in ((5, 300), (300, 4))
)
LABELS = numpy.where(numpy.arange(130) % 7 == 3, -100, numpy.arange(130) * 5).astype(numpy.int32)
PAIRS = numpy.arange(140).reshape(70, 2) ** 2
LOSS: dict[str, Any] = {"reduction": "none", "label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.01}
SCALES = numpy.linspace(0.1, 1.0, 5, dtype=numpy.float32)[:, None]
KERNELS = {
    "softmax": Kernel(softmax, jax.nn.softmax, ((17, 37),)),
    "rmsnorm": Kernel(rmsnorm, rms, ((300, 37), (37,)), {"offset": 1.0}),
    "layernorm": Kernel(layernorm, layer, ((300, 37), (37,), (37,))),
    "add_rmsnorm": Kernel(add_rmsnorm, lambda x, more, w: (rms(x + more, w), x + more), ((17, 37), (17, 37), (37,))),
    "swiglu": Kernel(swiglu, clamped, ((17, 37), (17, 37)), {"limit": 0.5}),
    "rope": Kernel(rope, turned, ((2, 17, 3, 64), (17, 32), (17, 32))),
    "gemm": Kernel(gemm, functools.partial(jnp.matmul, precision="highest"), ((5, 300), (300, 130))),
    "attention": Kernel(
        *(attention, attended, ((1, 4, 150, 8), (1, 2, 200, 8), (1, 2, 200, 6))),
        {"causal": "bottom_right", "scale": 0.3},
    ),
    "cross_entropy": Kernel(lambda logits: cross_entropy(logits, jnp.asarray(LABELS), **LOSS), loss, ((130, 700),)),
    "attention_decode": Kernel(
        *(attention_decode, decoded, ((3, 4, 40), (14, 16, 2, 40), (14, 16, 2, 40))),
        loops=1,
        others=(numpy.arange(12, dtype=numpy.int32).reshape(3, 4), numpy.array([64, 17, 1], numpy.int32)),
    ),
    "moe": Kernel(
        *(moe, mixed, ((70, 20), (3, 12, 20), (3, 20, 6))),
        loops=2,
        others=(numpy.linspace(0, 1, 140, dtype=numpy.float32).reshape(70, 2), (PAIRS % 3).astype(numpy.int32)),
    ),
    "causal_conv1d": Kernel(causal_conv1d, convolved, ((2, 20, 37), (20, 4), (20,)), {"activation": "silu"}),
    "selective_scan": Kernel(
        *(lambda u, delta, b, c, *rest: selective_scan(u, delta, rest[0], b, c, rest[1], softplus=True), scanned),
        shapes=((2, 20, 37), (2, 20, 37), (2, 3, 37), (2, 3, 37)),
        others=(
            -numpy.arange(60, dtype=numpy.float32).reshape(20, 3) / 8,
            numpy.linspace(0, 1, 20, dtype=numpy.float32),
        ),
    ),
    "gemm_int8": Kernel(gemm_int8, scaled, others=(*EIGHT, SCALES, SCALES.T[:, :4])),
    "gemm_fp8": Kernel(
        *(gemm_fp8, scaled, (), {"granularity": "row"}),
        others=(*(factor.astype(jnp.float8_e4m3fn) for factor in EIGHT), SCALES, SCALES.T[:, :4]),
    ),
}
TRITON = "__gpu$xla.gpu.triton"
ON_GPU = ("softmax", "rmsnorm", "layernorm", "add_rmsnorm", "swiglu", "rope", "gemm", "attention", "cross_entropy")
EVERY = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@EVERY
def test_results_and_gradients_of_a_batch_are_right(kernel: Kernel) -> None:
    """Under jit, vmap and vjp at once each result and gradient is jax's own, to float32's precision."""
    check(kernel, kernel.derived(kernel.function))


@pytest.mark.parametrize("name", ON_GPU)
def test_a_grid_for_gpus_gives_right_results_and_gradients(name: str) -> None:
    """As above, where a CPU interprets the grids for GPUs."""
    check(KERNELS[name], as_on_gpu(KERNELS[name].derived(KERNELS[name].function)))


def check(kernel: Kernel, derived: Callable[..., Any]) -> None:
    """Compare the results and gradients of a kernel with those of its jax reference."""
    arrays = kernel.arrays(jnp.float32)
    right = jax.tree.leaves(kernel.derived(kernel.right)(*arrays))
    found = jax.tree.leaves(derived(*arrays))
    for one, other in zip(found, right, strict=True):
        assert one.shape == other.shape
        scale = max(1.0, float(jnp.abs(other).max()))
        assert float(jnp.abs(one - other).max()) <= (2**-8 if one.dtype == jnp.bfloat16 else 3e-5) * scale


@EVERY
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_kernel_and_its_gradients_are_lowered_for_a_tpu(kernel: Kernel, dtype: Any) -> None:
    """Without a TPU, in a batch: the program has Mosaic's modules and no loops of the interpreter."""
    program = jax.export.export(kernel.derived(kernel.function), platforms=["tpu"])(*kernel.arrays(dtype)).mlir_module()
    assert "tpu_custom_call" in program
    assert program.count("stablehlo.while") == kernel.loops


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_kernel_and_its_gradients_are_lowered_for_cuda(name: str, dtype: Any) -> None:
    """Without a GPU, in a batch: the program has Triton's modules and no loops of the interpreter."""
    program = lowered_for_cuda(KERNELS[name], dtype)
    assert TRITON in program
    assert "stablehlo.while" not in program


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == ("softmax", "bfloat16") else pytest.mark.evidence)
        for name in ON_GPU
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_a_kernel_and_its_gradients_are_compiled_for_sm_90(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The installed Triton compiles the modules that jax would compile with its own, and needs no GPU for it."""
    triton = pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.backends.compiler")
    lowering = importlib.import_module("jax._src.pallas.triton.lowering")
    modules, lower = [], lowering.lower_jaxpr_to_triton_module

    def keep(*arguments: Any, **options: Any) -> Any:
        result = lower(*arguments, **options)
        modules.append(str(result.module.operation.get_asm()))
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", keep)
    lowered_for_cuda(KERNELS[name], jnp.dtype(dtype))
    assert len(modules) >= 2
    for module in modules:
        (tmp_path / "kernel.ttir").write_text(module)
        compiled = triton.compile(str(tmp_path / "kernel.ttir"), target=compiler.GPUTarget("cuda", 90, 32))
        assert ".target sm_90" in compiled.asm["ptx"]


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - set(ON_GPU)))
def test_a_kernel_without_a_grid_for_gpus_says_so(name: str) -> None:
    """Lowering it for CUDA raises an error that begins with its name and says what else there is."""
    with pytest.raises(NotImplementedError, match=rf"^{name}.*: this Pallas kernel has no grid for GPUs; lower it for"):
        lowered_for_cuda(KERNELS[name], jnp.float32)


def lowered_for_cuda(kernel: Kernel, dtype: Any) -> str:
    """Return the program of a batch's results and gradients."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(TRITON)]
    exported = jax.export.export(kernel.derived(kernel.function), platforms=["cuda"], disabled_checks=checks)
    return str(exported(*kernel.arrays(dtype)).mlir_module())


@pytest.mark.evidence
@EVERY
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_kernel_and_its_gradients_are_compiled_for_a_tpu(
    kernel: Kernel, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mosaic comes with libtpu (TPU_LIBRARY_PATH, if it isn't installed) and needs no TPU."""
    if "TPU_LIBRARY_PATH" not in os.environ:
        pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # or it looks for a TPU's host in the network
    device = jax.experimental.topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding) for array in kernel.arrays(dtype)]
    assert "tpu_custom_call" in kernel.derived(kernel.function).lower(*shapes).compile().as_text()
