"""Arrays of other frameworks: convert a kernel's inputs to them, and its results to tensors.

Arrays share the tensors' memory if the framework can express its strides, so that writes into inputs and beyond them
are detected. Otherwise the values are copied into dense memory, and `examine` draws no such layouts:

| framework | conversion                                | shares memory of                               |
|-----------|-------------------------------------------|------------------------------------------------|
| numpy     | `Tensor.numpy`, bits                      | every layout                                   |
| jax       | DLPack, bits where DLPack lacks the dtype | contiguous and transposed ones, 64-byte-aligned |
| cupy      | DLPack, bits                              | every layout                                   |

"Bits": bfloat16 and 8-bit floats are passed as integers of their size, and viewed as the dtype of ml_dtypes; 8-bit
floats stay uint8 in CuPy, which has no such dtype.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from assay.formats.format import FORMATS
from assay.runtime.errors import first_line
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.errors import SettingError

_BY_BITS = {
    format.torch_dtype: torch.uint8 if format.bits == 8 else torch.int16
    for format in FORMATS.values()
    if format.kind == "float" and format.torch_dtype is not None and not hasattr(np, format.name)
}
"""Floats that NumPy lacks, and the integers that they cross as."""
_ENABLE_X64 = "set JAX_ENABLE_X64=1, or call jax.config.update('jax_enable_x64', True)"
_FLAG = "--xla_allow_excess_precision"
MEND = f"start JAX's backend after assay, or set XLA_FLAGS={_FLAG}=false"
"""What makes roundings stay."""
_XLA_ALIGNMENT = 16
"""Bytes: XLA aborts a program on a GPU with "Address of buffer 1 must be a multiple of 10" (hexadecimal) at others."""
_EACH = 16  # calls between two looks at a process's maps
_calls = itertools.count(1)


@dataclass(frozen=True)
class Framework:
    """How to call kernels of one framework.

    ``give`` converts a tensor to an array. ``take`` converts an array that should have a dtype to a tensor; it raises
    TypeError for another object, or a dtype that torch lacks. ``wait`` blocks until a result has been computed.
    ``layouts`` are those that arrays can have, ``devices`` where they can be; ``module`` must be installed, by
    ``install``. ``check_device`` raises `SettingError` for a kind of device that isn't here, ``why_not`` says why the
    installed framework lacks a dtype.
    """

    name: str
    give: Callable[[torch.Tensor], Any]
    take: Callable[[Any, torch.dtype], torch.Tensor]
    wait: Callable[[Any], Any] = lambda result: result
    layouts: tuple[str, ...] = LAYOUTS
    devices: tuple[str, ...] = ()
    module: str = ""
    install: str = ""
    check_device: Callable[[str], None] = lambda kind: None
    why_not: Callable[[str], str] = lambda dtype: ""

    def arguments(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call, with tensors converted to arrays."""
        return [self._given(value) for value in positional], {k: self._given(v) for k, v in keywords.items()}

    def _given(self, value: Any) -> Any:
        return self.give(value) if isinstance(value, torch.Tensor) else value


def framework_named(name: str) -> Framework:
    """Return the framework of this name. Raises `SettingError` if there is none."""
    if name not in _FRAMEWORKS:
        raise SettingError(f"framework={name!r}; expected one of {', '.join(map(repr, _FRAMEWORKS))}")
    return _FRAMEWORKS[name]


def check_device(device: str) -> None:
    """Raise `SettingError` for a device that this machine lacks.

    A GPU that is there isn't used yet: another process may be the one that needs it.
    """
    try:
        given = torch.device(device)
        if given.type != "cuda" or not torch.cuda.is_available() or (given.index or 0) >= torch.cuda.device_count():
            torch.empty(0, device=given)
    except (RuntimeError, AssertionError) as error:
        here = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        reason = str(error).splitlines()[0].partition(" device type at start")[0].partition("Expected one of")[0]
        raise SettingError(
            f"device={device!r} can't be used{f' ({reason})' if reason else ''}; expected one that this machine has, "
            f"e.g. {' or '.join(here)}"
        ) from None


def check_framework(name: str, device: str = "cpu") -> None:
    """Raise `SettingError` for a framework that isn't available, here or on ``device``."""
    framework = framework_named(name)
    if framework.module and not _is_installed(framework.module):
        raise SettingError(f"framework={name!r}: {framework.module} is not installed; pip install {framework.install}")
    kind = device.partition(":")[0]
    if framework.devices and kind not in framework.devices:
        expected = " or ".join(map(repr, framework.devices))
        raise SettingError(f"framework={name!r} takes device={expected}, got {device!r}")
    if name == "jax" and kind == "cpu":
        keep_roundings()
    framework.check_device(kind)


def check_dtypes(name: str, dtypes: Mapping[str, str]) -> None:
    """Raise `SettingError` for dtypes, by tensor name, that the installed framework lacks."""
    for tensor, dtype in dtypes.items():
        why = framework_named(name).why_not(dtype)
        if why:
            raise SettingError(f"framework={name!r}: {tensor} is {dtype}, {why}")


def layouts_of(name: str, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return those of the ``wanted`` layouts that arrays of the framework can have. Raises `SettingError` if there is
    none."""
    known = framework_named(name).layouts
    left = tuple(layout for layout in wanted if layout in known)
    if wanted and not left:
        raise SettingError(f"layouts={list(wanted)!r}; arrays of {name} can be {' or '.join(map(repr, known))}")
    return left


def to_numpy(tensor: torch.Tensor) -> Any:
    """Return the tensor's memory as a NumPy array of the same strides; dtypes that NumPy lacks are those of
    ml_dtypes."""
    bits = _BY_BITS.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy().view(_narrow_dtype(tensor.dtype))


def from_numpy(array: Any) -> torch.Tensor:
    """Return a copy of an array or NumPy scalar as a tensor. Raises TypeError for anything else, or a dtype that torch
    lacks."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise TypeError(f"expected a numpy array, got {type(array).__name__}")
    result = np.array(array)  # its own memory, and strides that torch can express
    dtype = _torch_dtype(result.dtype)
    if dtype is None:
        try:
            return torch.from_numpy(result)
        except (TypeError, ValueError):
            raise TypeError(f"torch has no tensors of {result.dtype}") from None
    return torch.from_numpy(result.view(np.int16 if dtype.itemsize == 2 else np.uint8)).view(dtype)


def _to_jax(tensor: torch.Tensor) -> Any:
    """Return a jax array. 64-bit integers that jax would truncate are passed as 32-bit ones if they fit."""
    jax = importlib.import_module("jax")
    if tensor.dtype == torch.int64 and not _has_x64():
        narrow = tensor.to(torch.int32)
        if not torch.equal(narrow.to(torch.int64), tensor):
            raise SettingError(f"framework='jax': an integer beyond 32 bits, which jax would truncate; {_ENABLE_X64}")
        tensor = narrow
    tensor = tensor if _is_dense(tensor) else tensor.contiguous()
    if tensor.data_ptr() % _XLA_ALIGNMENT:  # a row alone, say
        tensor = tensor.clone()
    try:
        return jax.dlpack.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):  # DLPack has no such dtype
        return jax.numpy.array(to_numpy(tensor))


def _from_jax(array: Any, expected: torch.dtype) -> torch.Tensor:
    jax = importlib.import_module("jax")
    if not isinstance(array, jax.Array):
        raise TypeError(f"expected a jax array, got {type(array).__name__}")
    try:
        return from_dlpack(array)
    except (BufferError, RuntimeError, TypeError):  # DLPack has no such dtype, or the array lies on many devices
        return from_numpy(np.asarray(array))


def _check_jax_device(kind: str) -> None:
    try:
        if kind != "cpu":
            importlib.import_module("jax").devices(kind)
    except RuntimeError as error:
        raise SettingError(f"framework='jax': this jax has no {kind} device ({first_line(error)})") from None


def _not_in_jax(dtype: str) -> str:
    if dtype != "float64" or _has_x64():
        return ""
    return "of which jax makes float32 until told otherwise: " + _ENABLE_X64


def _not_in_numpy(dtype: str) -> str:
    if getattr(torch, dtype, None) not in _BY_BITS or _is_installed("ml_dtypes"):
        return ""
    return "for which ml_dtypes is needed, and not installed; pip install ml_dtypes"


def _has_x64() -> bool:
    return bool(importlib.import_module("jax").config.jax_enable_x64)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements have no gaps between them, in any order of the axes."""
    expected = 1
    axes = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    for stride, size in sorted(axes):
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _to_cupy(tensor: torch.Tensor) -> Any:
    cupy = importlib.import_module("cupy")
    bits = _BY_BITS.get(tensor.dtype)
    array = cupy.from_dlpack(tensor if bits is None else tensor.view(bits))
    if bits is not torch.int16:
        return array
    try:
        return array.view(_narrow_dtype(tensor.dtype))
    except TypeError:
        raise SettingError(f"framework='cupy': CuPy {cupy.__version__} has no bfloat16; it came with 14") from None


def _from_cupy(array: Any, expected: torch.dtype) -> torch.Tensor:
    cupy = importlib.import_module("cupy")
    if not isinstance(array, cupy.ndarray):
        raise TypeError(f"expected a cupy array, got {type(array).__name__}")
    dtype = _torch_dtype(array.dtype)
    if dtype is not None:
        return from_dlpack(array.view(np.int16 if dtype.itemsize == 2 else np.uint8)).view(dtype)
    result = from_dlpack(array)
    return result.view(expected) if result.dtype == _BY_BITS.get(expected) == torch.uint8 else result


def _wait_for_cupy(result: Any) -> Any:
    importlib.import_module("cupy").cuda.get_current_stream().synchronize()
    return result


def _narrow_dtype(dtype: torch.dtype) -> Any:
    import ml_dtypes  # numpy's own dtypes lack these

    return np.dtype(getattr(ml_dtypes, str(dtype).removeprefix("torch.")))


def _torch_dtype(dtype: Any) -> torch.dtype | None:
    """Return the torch dtype that is passed by its bits, if this is one."""
    result = getattr(torch, np.dtype(dtype).name, None)
    return result if result in _BY_BITS else None


def _from_torch(value: Any, expected: torch.dtype) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"expected a torch tensor, got {type(value).__name__}")
    return value


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # put into sys.modules by hand
        return True


def keep_roundings() -> None:
    """Make XLA on a CPU keep explicit roundings, unless XLA_FLAGS says otherwise or JAX has already started.

    By default XLA drops a conversion to bfloat16 and back, so that a kernel that subtracts in bfloat16 is judged as if
    it subtracted in float32, unlike on a GPU or TPU. The flag is read when JAX starts its backend, not at import;
    afterwards only a probe tells whether roundings are kept.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}=false".strip()


@cache
def drops_roundings() -> bool:
    """Whether 1 - 2^-12, rounded to bfloat16, keeps its digits in this process."""
    jax = importlib.import_module("jax")
    numbers = jax.numpy
    with jax.default_device(jax.devices("cpu")[0]):
        one, little = (numbers.asarray(value, numbers.bfloat16) for value in (1.0, 2.0**-12))
        return float(jax.jit(lambda x, y: (x - y).astype(numbers.float32))(one, little)) != 1.0


def make_room() -> None:
    """Clear JAX's compilation caches before they crash the process; checked every few calls.

    A kernel is compiled for each size, a program takes up to a hundred memory maps, and Linux allows a process 65,530
    (vm.max_map_count); beyond them XLA's compiler ends in a segmentation fault. The caches are cleared at a quarter of
    them.
    """
    if next(_calls) % _EACH:
        return
    with suppress(OSError):  # no Linux
        if _maps() > _most_maps() // 4:
            importlib.import_module("jax").clear_caches()
            gc.collect()


def _maps() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


@cache
def _most_maps() -> int:
    return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))


_FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("torch", lambda tensor: tensor, _from_torch),
        Framework(
            "numpy", to_numpy, lambda value, expected: from_numpy(value), devices=("cpu",), why_not=_not_in_numpy
        ),
        Framework(
            "jax",
            _to_jax,
            _from_jax,
            wait=lambda result: importlib.import_module("jax").block_until_ready(result),
            layouts=("contiguous", "transposed"),
            module="jax",
            install="'kernel-assay[pallas]'",
            check_device=_check_jax_device,
            why_not=_not_in_jax,
        ),
        Framework(
            "cupy",
            _to_cupy,
            _from_cupy,
            wait=_wait_for_cupy,
            devices=("cuda",),
            module="cupy",
            install="cupy-cuda12x",
            why_not=_not_in_numpy,
        ),
    )
}
