"""Records launches: each launch of a function is compiled for an architecture, and none runs.

Triton compiles as for a real GPU because CUDA is emulated (`assay.interpreter.pretend_cuda`): types and argument
specialisation (divisible by 16, equal to 1) are those of a real launch. Of an autotuned kernel every configuration that
its tuner would try is compiled.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from assay.bench.inspection.arch import Arch
from assay.interpreter import pretend_cuda
from assay.interpreter.replacing import replaced
from assay.runtime.errors import one_line

_DEFAULT_WARPS = 4  # Triton's own default
_READING = {"item", "tolist", "numpy", "__int__", "__bool__", "__index__", "__float__"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel in one configuration.

    ``constants`` are its compile-time arguments; of them ``tuned`` are the ones that a tuner's configuration sets, and
    ``pruned`` says that the tuner's own pruning leaves that one out at these sizes. ``numbers`` are the scalar
    arguments by the names of Triton's IR, ``grid`` the programs; both may be ``guessed``, where the caller has read a
    tensor since the first launch, whose result isn't there. ``compiled`` is what Triton made of it, or None and
    the compiler's ``error``; ``again(changes)`` compiles it with other constants, or another number of warps.
    """

    kernel: str
    file: str
    line: int
    grid: tuple[int, int, int]
    numbers: Mapping[str, int]
    constants: Mapping[str, Any]
    tuned: tuple[str, ...] | None
    pruned: bool
    warps: int
    stages: int | None
    guessed: bool
    compiled: Any = field(repr=False)
    again: Callable[..., Any] = field(repr=False)
    error: str = ""


class Recording:
    """The launches that were recorded: those of one share of ``shares``, by a hash of what is compiled."""

    def __init__(self, share: int = 0, shares: int = 1, *, pruned: bool = False) -> None:
        self.launches: list[Launch] = []
        self._pruned = pruned
        self._share, self._shares = share, shares
        self._tuned: tuple[tuple[str, ...], bool] | None = None
        self._seen: set[Any] = set()
        self._caches: dict[Any, Any] = {}
        self._launched = self._read = False

    def begin(self) -> None:
        """Forget the launches of earlier calls."""
        self.launches.clear()
        self._seen.clear()
        self._launched = self._read = False

    def read(self) -> None:
        """Note that the caller read a tensor: later sizes may depend on results that don't exist."""
        self._read |= self._launched

    def skips(self, key: Any) -> bool:
        """Return whether another share compiles this key."""
        return zlib.crc32(repr(key).encode()) % self._shares != self._share

    def launch(self, owner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], grid: Any) -> Any:
        """Compile one launch and record it."""
        self._launched = True
        if owner not in self._caches:  # earlier compilations are for another device, or for none
            self._caches[owner] = owner.device_caches
            owner.device_caches = defaultdict(owner.create_binder)
        compiled, error = None, ""
        try:
            compiled = _run(owner, *arguments, grid=(1, 1, 1), warmup=True, **keywords)
        except Exception as problem:  # any error of the compiler
            error = _reason(problem)
        if compiled is None and not error:
            return _Nothing(None)  # compiled by another share
        bound = _bound(owner, arguments, keywords)
        sizes = _grid(grid, bound)
        known = (owner.fn.__qualname__, compiled.hash if compiled else error, sizes)
        if known in self._seen:
            return _Nothing(compiled)
        self._seen.add(known)
        constant = {parameter.name for parameter in owner.params if parameter.is_constexpr}
        options = {name: value for name, value in keywords.items() if name not in bound}
        self.launches.append(
            Launch(
                kernel=owner.fn.__name__,
                file=Path(inspect.unwrap(owner.fn).__code__.co_filename).name,
                line=owner.fn.__code__.co_firstlineno,
                grid=sizes,
                numbers=dict(_numbers({name: value for name, value in bound.items() if name not in constant})),
                constants={name: _plain(value) for name, value in bound.items() if name in constant},
                tuned=self._tuned[0] if self._tuned else None,
                pruned=self._tuned[1] if self._tuned else False,
                warps=compiled.metadata.num_warps if compiled else keywords.get("num_warps", _DEFAULT_WARPS),
                stages=getattr(compiled.metadata, "num_stages", None) if compiled else keywords.get("num_stages"),
                guessed=self._read,
                compiled=compiled,
                again=lambda **changes: self._again(owner, {**options, **bound, **changes}),
                error=error,
            )
        )
        return _Nothing(compiled)

    def _again(self, owner: Any, keywords: Mapping[str, Any]) -> Any:
        """Compile another launch of a kernel; None if the compiler refuses it."""
        hook, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, None
        try:
            return _run(owner, grid=(1, 1, 1), warmup=True, **keywords)
        except Exception:  # any error of the compiler
            return None
        finally:
            knobs.runtime.jit_cache_hook = hook

    def tune(self, tuner: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Compile a launch in every configuration that an autotuner would try, and in pruned ones if requested."""
        tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
        result: Any = None
        try:
            kept = tuner.prune_configs(dict(keywords)) or tuner.configs
            for config in dict.fromkeys([*tuner.configs, *kept] if self._pruned else kept):
                result = self._configured(tuner, config, config not in kept, arguments, keywords)
            tuner.best_config = kept[0]
        finally:
            tuner.nargs = None
        return result

    def _configured(self, tuner: Any, config: Any, pruned: bool, arguments: Sequence[Any], keywords: Any) -> Any:
        before, self._tuned = self._tuned, (tuple(config.kwargs), pruned)
        try:
            if config.pre_hook is not None:
                config.pre_hook(
                    {**dict(zip(tuner.arg_names, arguments, strict=False)), **keywords, **config.all_kwargs()}
                )
            return tuner.fn.run(*arguments, **{**keywords, **config.all_kwargs()})
        finally:
            self._tuned = before

    def benchmark(self, tuner: Any, arguments: Sequence[Any], config: Any, keywords: dict[str, Any]) -> list[float]:
        """Compile a configuration for a tuner with a ``run`` of its own; return equal times."""
        self._configured(tuner, config, False, arguments, keywords)
        return [1.0, 1.0, 1.0]

    def close(self) -> None:
        """Restore the kernels' own caches."""
        for owner, caches in self._caches.items():
            owner.device_caches = caches


def _reason(error: BaseException) -> str:
    """Return the innermost error, which Triton wraps in errors of the callers, and the line of each caller."""
    lines, chain = [], [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for error in chain:
        at, source = getattr(getattr(error, "node", None), "lineno", 0), getattr(error, "src", None)
        if at and source:
            lines.append(f"`{source.splitlines()[at - 1].strip()}`")
    words = one_line(getattr(error, "error_message", None) or error)
    return f"{type(error).__name__}: {words}" + (f", in {', of '.join(reversed(lines))}" if lines else "")


@contextlib.contextmanager
def recorded(arch: Arch, share: int = 0, shares: int = 1, *, pruned: bool = False) -> Iterator[Recording]:
    """Inside, launches are compiled for ``arch`` and recorded, and none runs.

    Results hold whatever memory holds, but new integer tensors hold 1, because a caller may read sizes from them. Of
    ``shares`` processes that compile in parallel this one compiles its own ``share``. ``pruned``: also compile
    configurations that the kernel's tuner prunes.
    """
    recording = Recording(share, shares, pruned=pruned)

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        return recording.launch(self, args, kwargs, grid)

    def tune(self: Any, *args: Any, **kwargs: Any) -> Any:
        return recording.tune(self, args, kwargs)

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        return recording.benchmark(self, args, config, meta)

    class Reads(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") in _READING:
                recording.read()
            result = function(*args, **(kwargs or {}))
            if getattr(function, "__name__", "") in _EMPTY and not (result.is_floating_point() or result.is_complex()):
                result.fill_(1)
            return result

    hook = knobs.runtime.jit_cache_hook
    changes: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", run),
        (Autotuner, "run", tune),
        (Autotuner, "_bench", bench),
    ]
    with pretend_cuda(arch.device.key), replaced(changes), Reads(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # the default is the user's own setting
        knobs.runtime.jit_cache_hook = (lambda *, key, **_: recording.skips(key)) if shares > 1 else None
        try:
            yield recording
        finally:
            knobs.runtime.jit_cache_hook = hook
            recording.close()


class _Nothing:
    """The result of a recorded launch: launching it does nothing, attributes are those of the compiled kernel."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **keywords: None

    def run(self, *arguments: Any, **keywords: Any) -> None:
        """Do nothing."""

    n_regs, n_spills, n_max_threads = 32, 0, 1024  # placeholders: the binary is not loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def _bound(owner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by name."""
    names = [parameter.name for parameter in owner.params]
    given = dict(zip(names, arguments, strict=False)) | {name: keywords[name] for name in names if name in keywords}
    return {p.name: p.default for p in owner.params if p.has_default and p.name not in given} | given


def _grid(grid: Any, bound: dict[str, Any]) -> tuple[int, int, int]:
    sizes = grid(bound) if callable(grid) else grid
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes or (1,))
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield integers by their names in Triton's IR; elements of a tuple are ``name.0``."""
    for name, value in values.items():
        if isinstance(value, (bool, int)):
            yield prefix + name, int(value)
        elif isinstance(value, tuple):
            yield from _numbers({str(index): part for index, part in enumerate(value)}, f"{prefix}{name}.")


def _plain(value: Any) -> Any:
    """Return a constant as a report shows it."""
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else getattr(value, "__name__", str(value))


_run = JITFunction.run

__all__ = ["Launch", "Recording", "recorded"]
