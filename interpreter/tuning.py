"""Which configuration of an autotuned kernel is taken, without a GPU to time them: by a hash of its key.

Over many calls all of them come up. A configuration that Triton's compiler refuses, as one whose ``tl.static_assert``
fails, is no candidate: on a GPU it counts as infinitely slow (`triton.runtime.autotuner.Autotuner`).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from triton.runtime.autotuner import Heuristics
from triton.runtime.jit import JITFunction

from assay.interpreter.blame import compiles, signature_of
from assay.interpreter.builder import TARGET
from assay.interpreter.patches import language


def pick_config(tuner: Any, keywords: dict[str, Any]) -> Any:
    """A configuration for the launch whose arguments ``tuner.nargs`` and ``keywords`` hold."""
    configs = _candidates(tuner, keywords)
    return configs[_place(tuner, configs, tuner.nargs, keywords)]


def pretended_timing(tuner: Any, config: Any, nargs: Mapping[str, Any], keywords: Mapping[str, Any]) -> list[float]:
    """What a tuner measures of a configuration: the one to be picked is the quickest, then those after it."""
    configs = _candidates(tuner, keywords) if tuner.nargs else tuner.configs
    place = configs.index(config) if config in configs else 0
    time = 1.0 + (place - _place(tuner, configs, nargs, keywords)) % len(configs)
    return [time, time, time]


def _candidates(tuner: Any, keywords: Mapping[str, Any]) -> Sequence[Any]:
    """The configurations that the tuner's own pruning leaves, each once."""
    return list(dict.fromkeys(tuner.prune_configs(dict(keywords)) or tuner.configs))


def _place(tuner: Any, configs: Sequence[Any], nargs: Mapping[str, Any], keywords: Mapping[str, Any]) -> int:
    """By the hash of the key, or the first one after it that compiles; that of the hash where none does."""
    values = {**nargs, **keywords}
    key = [values[name] for name in tuner.keys if name in values]
    key += [str(value.dtype) for value in values.values() if isinstance(value, torch.Tensor)]
    first = zlib.crc32(repr(key).encode()) % len(configs)
    kernel = _kernel(tuner)
    if len(configs) > 1 and isinstance(kernel, JITFunction) and "static_assert" in kernel.src:
        for step in range(len(configs)):
            if _is_taken(kernel, _bound(tuner, configs[(first + step) % len(configs)], values)):
                return (first + step) % len(configs)
    return first


def _is_taken(kernel: Any, bound: Mapping[str, Any]) -> bool:
    """Whether the compiler takes a kernel with these arguments; asked once for their types and constants."""
    try:
        key = repr(signature_of(kernel, bound))
    except Exception:  # as the compiler would fail
        return False
    known = _TAKEN.setdefault(kernel.fn, {})
    if key not in known:
        with language.suspended():
            known[key] = compiles(kernel, bound, TARGET)
    return known[key]


_TAKEN: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()


def _kernel(tuner: Any) -> Any:
    """What the tuner, heuristics and the like end in."""
    inner = tuner.fn
    while not isinstance(inner, JITFunction) and hasattr(inner, "fn"):
        inner = inner.fn
    return inner


def _bound(tuner: Any, config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The kernel's arguments by name, those that heuristics and defaults give included."""
    found, inner = {**values, **config.all_kwargs()}, tuner.fn
    while not isinstance(inner, JITFunction):
        if isinstance(inner, Heuristics):
            found |= {name: heuristic(found) for name, heuristic in inner.values.items()}
        inner = inner.fn
    return {parameter.name: parameter.default for parameter in inner.params if parameter.has_default} | found
