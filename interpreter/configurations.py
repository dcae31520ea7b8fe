"""Configurations of autotuned launches, without timing them: by the tuning key, or as an `Assignment` says."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Heuristics, OutOfResources, PTXASError
from triton.runtime.jit import JITFunction, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.interpreter.assignment import current
from assay.interpreter.builder import TARGET
from assay.interpreter.compiler import compiles, signature_of
from assay.interpreter.language import language

REFUSALS = (OutOfResources, PTXASError, CompileTimeAssertionFailure)
"""Errors that make Triton's autotuner count a configuration as infinitely slow (`Autotuner._bench`)."""
_ALIGNMENT = 16  # Triton specialises integers and addresses that are multiples of it
_OF_A_LAUNCH = ("grid", "warmup")
_accepted: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()


def pick_config(tuner: Any, keywords: Mapping[str, Any], nargs: Mapping[str, Any] | None = None) -> Any:
    """Return the configuration of an autotuned launch, without a GPU to time them: by a hash of the tuning key.

    Over many keys all configurations come up. One that the compiler refuses, as by a failing ``tl.static_assert``, is
    no candidate, as on a GPU it counts as infinitely slow (`triton.runtime.autotuner.Autotuner`). An `Assignment` that
    is active decides instead. ``nargs`` are the positional arguments by name, by default the tuner's.
    """
    nargs = tuner.nargs if nargs is None else nargs
    configs = _candidates(tuner, keywords)
    assignment = current()
    if assignment is None:
        return configs[_index(tuner, configs, nargs, keywords)]
    values = {**nargs, **keywords}

    names, key = [in_words(config) for config in configs], (id(tuner), repr(_tuning_key(tuner, values)))
    index = assignment.chosen(
        key,
        _name(tuner),
        names,
        lambda: _index(tuner, configs, nargs, keywords),
        lambda turn: program(tuner, configs[turn], values),
    )
    return configs[index]


def pretended_timing(tuner: Any, config: Any, nargs: Mapping[str, Any], keywords: Mapping[str, Any]) -> list[float]:
    """Return the made-up times of a configuration: the one to be picked is fastest, then those after it."""
    configs = _candidates(tuner, keywords) if tuner.nargs else tuner.configs
    index = configs.index(config) if config in configs else 0
    chosen = pick_config(tuner, keywords) if tuner.nargs else configs[_index(tuner, configs, nargs, keywords)]
    time = 1.0 + (index - configs.index(chosen)) % len(configs)
    return [time, time, time]


def program_of(tuner: Any, config: Any, values: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the digest of a launch's program, and the kernel and configuration in words."""
    return program(tuner, config, values), _name(tuner), in_words(config)


def in_one_line(error: Exception) -> str:
    """Return an error's class and the first line of its message that isn't empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def in_words(config: Any) -> str:
    """Return a configuration as the keywords of `triton.Config`; one block to a cluster isn't said."""
    values = {name: value for name, value in config.all_kwargs().items() if (name, value) != ("num_ctas", 1)}
    return ", ".join(f"{name}={_plain(value)}" for name, value in values.items())


def program(tuner: Any, config: Any, values: Mapping[str, Any]) -> str:
    """Return a digest of what is compiled for a launch in a configuration: types, constants, divisibility, options.

    ``values`` are the launch's arguments by name.
    """
    try:
        bound, kernel = _bound(tuner, config, values), _kernel(tuner)
        types = [(parameter.name, _specialized(parameter, bound[parameter.name])) for parameter in kernel.params]
        known = {name for name, _ in types}
        options = sorted((name, repr(value)) for name, value in bound.items() if name not in {*known, *_OF_A_LAUNCH})
        what: Any = (_name(tuner), types, options)
    except Exception:  # a heuristic that fails for this configuration, as its launch would
        what = (_name(tuner), in_words(config), _tuning_key(tuner, values))
    return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()


def _specialized(parameter: Any, value: Any) -> Any:
    """Return what Triton compiles an argument for: a constant, or a type and whether it is divisible by 16."""
    if parameter.is_constexpr or value is None:
        return ("constant", _plain(value))
    free = parameter.do_not_specialize
    if isinstance(value, tuple):
        return tuple(_specialized(parameter, part) for part in value)
    if isinstance(value, TensorDescriptor):
        return ("descriptor", str(value.base.dtype), tuple(value.block_shape))
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), not free and value.data_ptr() % _ALIGNMENT == 0)
    if type(value) is int and not free:
        return ("constant", 1) if value == 1 else (mangle_type(value), value % _ALIGNMENT == 0)
    return mangle_type(value)


def _plain(value: Any) -> Any:
    """Return a constant without addresses in its text."""
    value = getattr(value, "value", value)
    return getattr(value, "__name__", value) if callable(value) else value


def _name(tuner: Any) -> str:
    return str(tuner.base_fn.__name__)


def _kernel(tuner: Any) -> Any:
    kernel = tuner.fn
    while not isinstance(kernel, JITFunction) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _tuning_key(tuner: Any, values: Mapping[str, Any]) -> list[Any]:
    """Return the arguments by which a launch is tuned, and the dtypes of its tensors."""
    key = [values[name] for name in tuner.keys if name in values]
    return key + [str(value.dtype) for value in values.values() if isinstance(value, torch.Tensor)]


def _candidates(tuner: Any, keywords: Mapping[str, Any]) -> Sequence[Any]:
    """Return the configurations left by the tuner's own pruning, without duplicates."""
    return list(dict.fromkeys(tuner.prune_configs(dict(keywords)) or tuner.configs))


def _index(tuner: Any, configs: Sequence[Any], nargs: Mapping[str, Any], keywords: Mapping[str, Any]) -> int:
    """Return the hashed index, or the next one that compiles; the hashed index if none does."""
    values = {**nargs, **keywords}
    first = zlib.crc32(repr(_tuning_key(tuner, values)).encode()) % len(configs)
    kernel = _kernel(tuner)
    if len(configs) > 1 and isinstance(kernel, JITFunction) and "static_assert" in kernel.src:
        for step in range(len(configs)):
            if _is_accepted(kernel, _bound(tuner, configs[(first + step) % len(configs)], values)):
                return (first + step) % len(configs)
    return first


def _is_accepted(kernel: Any, bound: Mapping[str, Any]) -> bool:
    """Whether the compiler accepts a kernel with these arguments; cached by their types and constants."""
    try:
        key = repr(signature_of(kernel, bound))
    except Exception:  # the compiler would fail likewise
        return False
    accepted = _accepted.setdefault(kernel.fn, {})
    if key not in accepted:
        with language.suspended():
            accepted[key] = compiles(kernel, bound, TARGET)
    return accepted[key]


def _bound(tuner: Any, config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kernel's arguments by name, including those of heuristics and defaults."""
    arguments, inner = {**values, **config.all_kwargs()}, tuner.fn
    while not isinstance(inner, JITFunction):
        if isinstance(inner, Heuristics):
            arguments |= {name: heuristic(arguments) for name, heuristic in inner.values.items()}
        inner = inner.fn
    return {parameter.name: parameter.default for parameter in inner.params if parameter.has_default} | arguments
