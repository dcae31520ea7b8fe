"""Compiles a source of `sources/` for a GPU or the CPU, and launches it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCES = Path(__file__).with_name("sources")
Defines = tuple[tuple[str, str], ...]


def launch(name: str, grid: tuple[int, int], threads: int, arguments: Sequence[Any], **defines: object) -> None:
    """Run the kernel ``name`` of ``sources/name.cu`` on the device of its tensors.

    arguments: tensors are passed as pointers, None as a null pointer, numbers as ctypes. defines: macros of the source,
    a dtype by its name. Raises ImportError if the tensors are on a GPU and cuda.core isn't installed, RuntimeError if
    there is no compiler or, on a CPU, not all threads of a block reach a barrier.
    """
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    macros = tuple((key, str(value).removeprefix("torch.")) for key, value in sorted(defines.items()))
    values = [
        ctypes.c_uint64(0 if arg is None else arg.data_ptr()) if arg is None or isinstance(arg, Tensor) else arg
        for arg in arguments
    ]
    if device.type == "cuda":
        _on_gpu(name, grid, threads, values, macros, device)
        return
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    if _on_host(name, macros)(*grid, threads, pointers):
        raise RuntimeError(f"{name}.cu: expected every thread of a block at its barriers, some never came")


@cache
def compiled(name: str, arch: str, defines: Defines) -> Any:
    """Return the cubin of ``sources/name.cu`` for an architecture such as "sm_90a", by NVRTC; needs no GPU.

    Raises ImportError if cuda.core isn't installed.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise ImportError("CUDA C++ is compiled by NVRTC: pip install 'kernel-assay[cuda]'") from error
    options = ProgramOptions(arch=arch, std="c++17", include_path=str(_SOURCES), define_macro=list(defines))
    source = (_SOURCES / f"{name}.cu").read_text(encoding="utf-8")
    return Program(source, "c++", options).compile("cubin")


def _on_gpu(
    name: str, grid: tuple[int, int], threads: int, values: Sequence[Any], defines: Defines, device: torch.device
) -> None:
    from cuda.core import Device, LaunchConfig
    from cuda.core import launch as launch_on_gpu

    major, minor = torch.cuda.get_device_capability(device)
    kernel = compiled(name, f"sm_{major}{minor}{'a' * (major >= 9)}", defines).get_kernel(name)
    gpu = Device(device.index)
    gpu.set_current()
    stream = gpu.create_stream(_Stream(torch.cuda.current_stream(device).cuda_stream))
    launch_on_gpu(stream, LaunchConfig(grid=grid, block=threads), kernel, *values)


class _Stream:
    """A stream of torch, by cuda.core's protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@cache
def _on_host(name: str, defines: Defines) -> Any:
    """Return launch(x, y, threads, pointers) of a source compiled for the CPU; the user's cache keeps the library."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("CUDA C++ on a CPU needs a C++ compiler: install g++, or set CXX")
    text = (
        f'#include "host.cuh"\n#include "{name}.cu"\n'
        'extern "C" int assay_launch(unsigned x, unsigned y, unsigned threads, void **arguments) '
        f"{{ return host::launch({name}, x, y, threads, arguments); }}\n"
    )
    command = [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-w", "-x", "c++", "-", f"-I{_SOURCES}"]
    command += [f"-D{key}={value}" for key, value in defines]
    inputs = [path.read_bytes() for path in sorted(_SOURCES.glob("*.cu*"))]
    key = hashlib.sha256(b"\0".join([repr((command, text)).encode(), *inputs])).hexdigest()[:32]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "assay", "cuda")
    library = folder / f"{name}-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            output = Path(temporary, "kernel.so")
            run = subprocess.run([*command, "-o", str(output)], input=text, capture_output=True, text=True, check=False)
            if run.returncode:
                raise RuntimeError(f"{name}.cu: {compiler} failed:\n{run.stderr}")
            output.replace(library)
    function = ctypes.CDLL(str(library)).assay_launch
    function.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p]
    return function
