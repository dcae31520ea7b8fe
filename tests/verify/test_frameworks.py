"""Kernels of other frameworks' arrays: values cross bit for bit, and faults are found as with tensors."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from assay.golden.errors import AssayError
from assay.verify import Contract
from assay.verify.cases.case import Case, build
from assay.verify.errors import SettingError
from assay.verify.findings import Failure
from assay.verify.harness import frameworks
from assay.verify.harness.call import Call
from assay.verify.harness.frameworks import check_framework, framework_named, from_numpy, to_numpy

from .examined import fails, failure_of, first, passes, quick

jax = pytest.importorskip("jax")
jnp = jax.numpy

FLUSH = Contract(subnormals="flush")  # XLA's CPU backend flushes them
SHAPES = {"R": [5], "N": [7]}
JAX: dict[str, Any] = {"framework": "jax", "shapes": SHAPES, "contract": FLUSH}
CUPY: dict[str, Any] = {"framework": "cupy", "shapes": SHAPES}
Array = np.ndarray[Any, np.dtype[Any]]
NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = ("float32", "float16", "int8", "uint8", "int32", *NARROW)


@jax.jit
def softmax(x: Any) -> Any:
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


@jax.jit
def softmax_in_input_dtype(x: Any) -> Any:
    weights = jnp.exp(x - x.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@jax.jit
def softmax_of_columns(x: Any) -> Any:
    return jax.nn.softmax(x, axis=0)


def _poke(x: Any, place: int) -> None:
    """Write a float32 into an array's memory behind jax's back, as a foreign function may."""
    ctypes.c_float.from_address(x.unsafe_buffer_pointer() + 4 * place).value = 7.0


def softmax_that_writes_into_x(x: Any) -> Any:
    y = softmax(x).block_until_ready()
    _poke(x, 0)
    return y


def softmax_that_writes_beyond_x(x: Any) -> Any:
    _poke(x, x.size)
    return softmax(x)


def as_stored(dtype: str, *shape: int) -> torch.Tensor:
    """Every byte pattern in turn."""
    size = getattr(torch, dtype).itemsize
    count = int(np.prod(shape)) * size
    return (torch.arange(count) * 7 % 256).to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["numpy", "jax"])
def test_bits_cross_there_and_back(name: str, dtype: str) -> None:
    framework, whole = framework_named(name), as_stored(dtype, 6, 8)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[whole.dtype.itemsize]
    for view in (whole, whole.T, whole[:, ::2], whole[:1].expand(3, 8), whole[:0], whole[0, 0]):
        array = framework.give(view)
        assert str(np.dtype(array.dtype)) == dtype
        assert tuple(array.shape) == tuple(view.shape)
        back = framework.take(array, whole.dtype)
        assert back.dtype == whole.dtype
        assert torch.equal(back.contiguous().view(bits), view.contiguous().view(bits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_jax_shares_the_memory_of_dense_inputs(dtype: str, layout: str) -> None:
    case = Case("softmax", {"R": 5, "N": 7}, {"x": dtype}, layouts={"x": layout})
    (tensor,) = build(case).positional
    assert framework_named("jax").give(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_jax_gets_buffers_aligned_as_xla_asks_on_a_gpu(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone begins anywhere; XLA on a GPU aborts programs whose buffers don't begin at a multiple of 16 bytes."""
    addresses = []
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda tensor: addresses.append(tensor.data_ptr()) or tensor)
    whole = torch.arange(33.0).bfloat16().reshape(3, 11)
    part = whole[1:] if layout == "contiguous" else whole[1:].T
    given = framework_named("jax").give(part)
    assert part.data_ptr() % 16
    assert addresses[0] % 16 == 0
    assert torch.equal(given, part)
    framework_named("jax").give(whole)
    assert addresses[1] == whole.data_ptr()


def test_layouts_that_arrays_cannot_have_are_not_drawn() -> None:
    """A jax array has no gaps: no verdict says that it saw a strided one; where only those are asked for, an error."""
    lines: list[str] = []
    quick(softmax, examples=10, watch=lambda line, seconds: lines.append(line), **JAX)
    assert any("transposed" in line for line in lines)
    assert not any("strided" in line or "expanded" in line for line in lines)
    with pytest.raises(SettingError, match=r"arrays of jax can be 'contiguous' or 'transposed'"):
        quick(softmax, layouts=["strided", "expanded"], **JAX)


def numpy_softmax(x: Array) -> Array:
    """The textbook form, in float32."""
    values = x.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(values - values.max(axis=1, keepdims=True))
        return (weights / weights.sum(axis=1, keepdims=True)).astype(x.dtype)


def numpy_softmax_in_input_dtype(x: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(x - x.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)


def numpy_softmax_in_place(x: Array) -> Array:
    x -= x.max(axis=1, keepdims=True)
    return numpy_softmax(x)


def numpy_softmax_strides_ignored(x: Array) -> Array:
    """The array's memory is taken for rows without gaps."""
    behind = np.lib.stride_tricks.as_strided(x, (x.shape[0] * x.shape[1],), (x.itemsize,))
    return numpy_softmax(behind.reshape(x.shape).copy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_honest_kernel_passes(dtype: str) -> None:
    """It gets, and returns, arrays of its framework; in bfloat16 those of NumPy are of ml_dtypes."""
    passes(quick(softmax, dtype=dtype, **JAX))
    passes(quick(numpy_softmax, dtype=dtype, framework="numpy", examples=5))


WRONG = {"contract", "exact"}


@pytest.mark.parametrize(
    ("kernel", "dtype", "kinds"),
    [
        (softmax_in_input_dtype, "bfloat16", WRONG),
        (softmax_of_columns, "float32", WRONG),
        (softmax_that_writes_into_x, "float32", {"input_mutated"}),
        (softmax_that_writes_beyond_x, "float32", {"out_of_bounds_write"}),
        (lambda x: softmax(x)[:-1], "float32", {"shape"}),
        (lambda x: softmax(x).astype(jnp.bfloat16), "float32", {"dtype"}),
        (lambda x: softmax(x).astype(jnp.int4), "float32", {"dtype"}),
        (lambda x: np.asarray(softmax(x)), "float32", {"dtype"}),
        (lambda x: softmax(x) @ x, "float32", {"crash"}),
    ],
    ids=["bfloat16", "columns", "in-place", "beyond", "shape", "dtype", "int4", "numpy", "crash"],
)
def test_a_faulty_jax_kernel_fails(kernel: Any, dtype: str, kinds: set[str]) -> None:
    assert failure_of(quick(kernel, dtype=dtype, **JAX)).kind in kinds


@pytest.mark.parametrize(
    ("kernel", "dtype", "kinds"),
    [
        (numpy_softmax_in_input_dtype, "bfloat16", WRONG),
        (numpy_softmax_in_input_dtype, "float16", WRONG),
        (lambda x: numpy_softmax(np.ascontiguousarray(x.T)).T, "float32", {*WRONG, "crash"}),
        (numpy_softmax_in_place, "float32", {"input_mutated"}),
        (numpy_softmax_strides_ignored, "float32", {"layout", "nonfinite"}),
        (lambda x: numpy_softmax(x)[:-1], "float32", {"shape"}),
        (lambda x: numpy_softmax(x).astype(np.float64), "float32", {"dtype"}),
        (lambda x: numpy_softmax(x).astype(np.float32), "bfloat16", {"dtype"}),
        (lambda x: numpy_softmax(x).tolist(), "float32", {"dtype", "shape"}),
        (lambda x: x @ x, "float32", {*WRONG, "crash"}),
    ],
    ids=["bfloat16", "float16", "columns", "in-place", "strides", "shape", "float64", "float32", "list", "crash"],
)
def test_a_faulty_numpy_kernel_fails(kernel: Any, dtype: str, kinds: set[str]) -> None:
    assert failure_of(first(kernel, dtype=dtype, framework="numpy", examples=5)).kind in kinds


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "strided", "expanded"])
def test_numpy_sees_the_tensors_own_memory(dtype: str, layout: str) -> None:
    case = Case("silu", {"R": 5, "N": 7}, {"x": dtype}, values={"x": "patterns"}, layouts={"x": layout})
    inputs, seen = build(case), []

    def keep(x: Array) -> Array:
        seen.append(x)
        return x.copy()

    outputs = Call(keep, {}, framework="numpy")(replace(case, out_dtype=dtype), inputs)
    assert not isinstance(outputs, Failure)
    tensor = inputs.positional[0]
    assert str(seen[0].dtype) == dtype
    assert seen[0].ctypes.data == tensor.data_ptr()
    assert [stride // seen[0].itemsize for stride in seen[0].strides] == list(tensor.stride())
    assert outputs[0].dtype == tensor.dtype
    assert torch.equal(outputs[0].double(), tensor.double())


def test_options_and_several_results_cross_over_too() -> None:
    def add_rmsnorm(x: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        with np.errstate(invalid="ignore", over="ignore"):
            total = x.astype(np.float32) + residual.astype(np.float32)
            scale = 1 / np.sqrt((total * total).mean(axis=1, keepdims=True) + np.float32(eps))
            return (total * scale * weight.astype(np.float32)).astype(x.dtype), total.astype(x.dtype)

    settings: dict[str, Any] = {"dtype": "bfloat16", "framework": "numpy", "options": {"eps": [1e-6, 1e-3]}}
    passes(quick(add_rmsnorm, "add_rmsnorm", examples=2, **settings))
    fails(first(lambda *inputs, eps: add_rmsnorm(*inputs, eps=1e-6), "add_rmsnorm", **settings))


def test_labels_of_64_bits_cross_where_jax_has_32() -> None:
    """They fit; a label that doesn't is an error, and so are float64 inputs or results that jax would truncate."""
    give = framework_named("jax").give
    assert give(torch.tensor([5, -100])).dtype == jnp.int32
    with pytest.raises(SettingError, match="beyond 32 bits"):
        give(torch.tensor([2**40]))
    for settings in ({"dtype": "float64"}, {"dtype": "float32", "out_dtype": "float64"}):
        with pytest.raises(SettingError, match="JAX_ENABLE_X64=1") as caught:
            quick(softmax, **settings, **JAX)
        assert "\n" not in str(caught.value)


def test_64_bits_are_kept_where_jax_has_them() -> None:
    """With x64 enabled, integers and doubles cross whole, and a float64 kernel is examined as such."""
    with jax.enable_x64(True):
        assert framework_named("jax").give(torch.tensor([2**40])).dtype == jnp.int64
        double = {**JAX, "contract": Contract(compute="float64", accumulate="float64")}
        assert quick(lambda x: jax.nn.softmax(x, axis=-1), dtype="float64", **double).passed
        fails(quick(softmax, dtype="float64", **double))


def test_packed_codes_reach_jax_as_bytes() -> None:
    def dequantized(x: Any, qweight: Any, scales: Any, zeros: Any, *, swapped: bool = False) -> Any:
        low, high = qweight & 15, qweight >> 4
        pair = (high, low) if swapped else (low, high)
        codes = jnp.stack(pair, axis=1).reshape(-1, qweight.shape[1])
        group = codes.shape[0] // scales.shape[0]
        spread = jnp.repeat(scales.astype(jnp.float32), group, axis=0)
        weights = (codes.astype(jnp.float32) - jnp.repeat(zeros.astype(jnp.float32), group, axis=0)) * spread
        product = jnp.dot(x.astype(jnp.float32), weights, precision="highest")
        return product.astype(x.dtype)

    settings = {**JAX, "shapes": {"M": [3], "N": [5], "K": [64], "g": [32]}, "dtype": "bfloat16"}
    assert quick(jax.jit(dequantized), "gemm_int4", **settings).passed
    fails(quick(lambda *t: dequantized(*t, swapped=True), "gemm_int4", **settings))


def test_results_that_torch_has_no_dtype_for_are_findings() -> None:
    for result in (np.array(["a"]), np.array([object()]), np.zeros((5, 7), ">f4"), np.zeros((5, 7), ml_dtypes.int4)):
        verdict = quick(lambda x, result=result: result, framework="numpy", shapes=SHAPES)
        assert failure_of(verdict).kind == "dtype"


def test_a_framework_that_is_not_here_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "_is_installed", lambda module: False)
    for name, words in (("jax", r"pip install 'kernel-assay\[pallas\]'"), ("cupy", "pip install cupy-cuda12x")):
        with pytest.raises(AssayError, match=words) as caught:
            quick(softmax, framework=name)
        assert "\n" not in str(caught.value)
    with pytest.raises(SettingError, match="bfloat16, for which ml_dtypes is needed"):
        quick(softmax, dtype="bfloat16", framework="numpy")
    monkeypatch.setattr(frameworks, "_is_installed", lambda module: True)
    with pytest.raises(SettingError, match="takes device='cuda', got 'cpu'"):
        check_framework("cupy", "cpu")
    with pytest.raises(SettingError, match="takes device='cpu', got 'cuda:0'"):
        check_framework("numpy", "cuda:0")
    with pytest.raises(SettingError, match="this jax has no tpu device"):
        check_framework("jax", "tpu")


class CupyArray:
    """As much of cupy.ndarray as is needed, in the memory of a NumPy array: no dtypes of ml_dtypes but bfloat16."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.dtype, self.shape = array.dtype, array.shape

    def view(self, dtype: Any) -> CupyArray:
        if np.dtype(dtype).name.startswith("float8"):
            raise TypeError("Unsupported type")
        return CupyArray(self.array.view(dtype))

    def __dlpack__(self, **settings: Any) -> Any:
        return self.array.__dlpack__(**settings)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in with cupy's names, on the CPU; the list holds what was called."""
    called: list[str] = []

    def get_current_stream() -> Any:
        return SimpleNamespace(synchronize=lambda: called.append("synchronize"))

    module = SimpleNamespace(
        ndarray=CupyArray,
        from_dlpack=lambda x: CupyArray(np.from_dlpack(x)),
        cuda=SimpleNamespace(get_current_stream=get_current_stream),
        __version__="14.0",
        __spec__=SimpleNamespace(name="cupy"),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    known = frameworks._FRAMEWORKS["cupy"]
    monkeypatch.setitem(frameworks._FRAMEWORKS, "cupy", replace(known, devices=()))
    return called


def cupy_softmax(x: Any) -> Any:
    return CupyArray(numpy_softmax(x.array))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cupy_arrays_cross_by_dlpack(cupy: list[str], dtype: str) -> None:
    def in_place(x: Any) -> Any:
        x.array[...] = 1
        return cupy_softmax(x)

    assert quick(cupy_softmax, dtype=dtype, **CUPY).passed
    assert cupy
    assert failure_of(quick(in_place, dtype=dtype, **CUPY)).kind == "input_mutated"
    message = failure_of(quick(lambda x: x.array, dtype=dtype, **CUPY)).message
    assert "expected a cupy array, got ndarray" in message


def test_cupys_codes_of_8_bits_are_bytes(cupy: list[str]) -> None:
    """Floats of 8 bits arrive as uint8, and so may they come back; bytes for a wider result are still an error."""
    framework, codes = framework_named("cupy"), as_stored("float8_e4m3fn", 3, 5)
    array = framework.give(codes)
    assert array.dtype == np.uint8
    assert torch.equal(framework.take(array, codes.dtype).view(torch.uint8), codes.view(torch.uint8))
    assert framework.take(array, torch.float32).dtype == torch.uint8


def test_an_old_cupy_says_that_it_has_no_bfloat16(cupy: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def view(self: CupyArray, dtype: Any) -> CupyArray:
        raise TypeError("Unsupported type")

    monkeypatch.setattr(CupyArray, "view", view)
    with pytest.raises(SettingError, match="has no bfloat16; it came with 14"):
        quick(cupy_softmax, dtype="bfloat16", **CUPY)


def test_numpy_takes_its_own_scalars_and_gives_copies() -> None:
    """A result of no dimensions may be a NumPy scalar; what comes back is no view of the kernel's memory."""
    assert from_numpy(np.float32(3.0)).shape == ()
    mine = np.ones((2, 3), np.float32)
    assert from_numpy(mine).data_ptr() != mine.ctypes.data
    assert from_numpy(mine[:, ::-1]).shape == (2, 3)
    assert to_numpy(torch.ones(2, dtype=torch.float8_e5m2)).dtype == ml_dtypes.float8_e5m2


def test_a_jax_result_is_waited_for() -> None:
    """The call's own time is measured, not that of its dispatch: an error in the computation is a finding."""

    def fails(x: Any) -> Any:
        def raises(values: Any) -> Any:
            raise ValueError("inside of the computation")

        return jax.pure_callback(raises, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    case = Case("softmax", {"R": 2, "N": 3}, {"x": "float32"})
    found = Call(jax.jit(fails), {}, "jax")(case, build(case))
    assert isinstance(found, Failure)
    assert found.kind == "crash"
