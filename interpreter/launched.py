"""What a launch gives back: a kernel that can be launched again, as Triton's `CompiledKernel` can.

Libraries keep it (FlagGems' `LibEntry`), call it with a grid of their own (Triton's tutorial on fused softmax) or ask
for its registers. What it is asked beyond launching is answered by the compiler, which needs no GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.jit import JITFunction, MockTensor

from assay.interpreter.cuda_devices import USUAL, cuda_device_named
from assay.interpreter.pretence import pretended
from assay.interpreter.pretended_driver import changes as pretended_driver
from assay.interpreter.replacing import replaced

_compiling_run = JITFunction.run
_BEFORE_ARGUMENTS = 9  # of CompiledKernel.run: the grid, stream, function, metadata of two kinds, hooks of two kinds
_REGISTERS, _MOST_THREADS, _WARP = 65536, 1024, 32


class Launched:
    """A `JITFunction` with the constants and options of one launch; ``start(arguments, keywords, grid)`` launches."""

    def __init__(
        self, owner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], start: Callable[..., None]
    ) -> None:
        parameters = getattr(owner, "params", ())  # of an InterpretedFunction nobody keeps the result
        names = [parameter.name for parameter in parameters]
        self._owner, self._start = owner, start
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        constant = {parameter.name for parameter in parameters if parameter.is_constexpr}
        self._constants = {name: value for name, value in given.items() if name in constant}
        self._options = {name: value for name, value in given.items() if name not in names}
        self._kinds = {
            name: value if isinstance(value, (int, float, str, type(None))) or name in constant else _kind_of(value)
            for name, value in given.items()
        }
        self._names, self._varying = names, [name for name in names if name not in constant]
        self.name = owner.fn.__name__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """A function that launches the kernel with all its parameters in order, or with those that are no constants."""

        def launch(*arguments: Any, stream: Any = None) -> None:
            self._launch(arguments, grid)

        return launch

    def run(self, *arguments: Any) -> None:
        """`CompiledKernel.run`: three numbers of the grid, six things that a GPU's driver needs, the arguments."""
        self._launch(arguments[_BEFORE_ARGUMENTS:], arguments[:3])

    def _launch(self, arguments: Sequence[Any], grid: Any) -> None:
        """Raises TypeError where the arguments are neither all parameters nor all that are no constants."""
        if len(arguments) == len(self._varying):
            keywords = {**self._constants, **dict(zip(self._varying, arguments, strict=True))}
        elif len(arguments) == len(self._names):
            keywords = dict(zip(self._names, arguments, strict=True))
        else:
            raise TypeError(
                f"{self.name}: expected {len(self._names)} arguments, or {len(self._varying)} without constants, "
                f"got {len(arguments)}"
            )
        self._start((), {**self._options, **keywords}, grid)

    def launch_metadata(self, grid: Any, stream: Any, *arguments: Any) -> None:
        """Nothing, as where no hook wants it."""

    function = packed_metadata = module = None

    def _init_handles(self) -> None:
        """Nothing to load."""

    @cached_property
    def _compiled(self) -> Any:
        """The same kernel, compiled for the device that is pretended, or the usual one."""
        device = cuda_device_named(pretended() or USUAL)
        owner, caches = self._owner, self._owner.device_caches
        owner.device_caches = defaultdict(owner.create_binder)  # what is compiled here is for no device that is there
        try:
            with replaced(pretended_driver(lambda: device)):
                return _compiling_run(owner, grid=(1,), warmup=True, **self._kinds)
        finally:
            owner.device_caches = caches

    @cached_property
    def _usage(self) -> dict[str, int]:
        """Registers and bytes of local memory of a thread, as NVIDIA's cuobjdump tells them."""
        with tempfile.TemporaryDirectory() as folder:
            binary = Path(folder, "kernel.cubin")
            binary.write_bytes(self._compiled.asm["cubin"])
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}

    @property
    def n_regs(self) -> int:
        """Registers of a thread."""
        return self._usage["REG"]

    @property
    def n_spills(self) -> int:
        """Spilled registers of a thread, counted by the stack that holds them."""
        return (self._usage["STACK"] + self._usage["LOCAL"]) // 4

    @property
    def n_max_threads(self) -> int:
        """The most threads of a block that registers leave room for."""
        return min(_MOST_THREADS, _REGISTERS // max(self.n_regs, 1) // _WARP * _WARP)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._compiled, name)


def _kind_of(value: Any) -> Any:
    """What the compiler needs to know of an argument, without its memory."""
    return MockTensor(value.dtype) if hasattr(value, "data_ptr") and not isinstance(value, MockTensor) else value


__all__ = ["Launched"]
