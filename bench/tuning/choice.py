"""A choice among the ways to run a kernel, and the kernel pinned to it.

A pinned kernel can be imported by a name, ``assay.bench.tuning.choice:lambda ...``, so that whatever examines,
inspects or times kernels, in whichever process, takes it like any other.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.interpreter.replacing import replaced
from assay.verify.errors import TuneError
from assay.verify.harness.target import load_target

_MODULE = "assay.bench.tuning.choice"


@dataclass(frozen=True)
class Choice:
    """Keywords that the kernel is called with, and of autotuned Triton kernels, by name, the configuration: its
    constants, "num_warps" and "num_stages"."""

    keywords: Mapping[str, Any] = field(default_factory=dict)
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.keywords.items()]
        for kernel, config in self.configs.items():
            own = " ".join(f"{name}={value}" for name, value in config.items())
            parts.append(f"{kernel}: {own}" if len(self.configs) > 1 else own)
        return ", ".join(parts) or "as it is"

    @property
    def key(self) -> str:
        """One text of equal choices."""
        return json.dumps([self.keywords, self.configs], sort_keys=True)

    def target(self, kernel: str) -> str:
        """The name under which ``kernel``, ``module:function``, pinned to this, can be imported."""
        if not self.keywords and not self.configs:
            return kernel
        return f"{_MODULE}:lambda *tensors, **options: pinned({kernel!r}, {self.key!r})(*tensors, **options)"


@functools.cache
def pinned(kernel: str, key: str) -> Callable[..., Any]:
    """The kernel, ``module:function``, under the choice that has this `Choice.key`. Raises `TargetError`."""
    keywords, configs = json.loads(key)
    inner = functools.partial(load_target(kernel), **{name: _value(value) for name, value in keywords.items()})
    return _with_configs(inner, configs) if configs else inner


def _value(value: Any) -> Any:
    return tuple(map(_value, value)) if isinstance(value, list) else value


def _with_configs(kernel: Callable[..., Any], configs: Mapping[str, Mapping[str, Any]]) -> Callable[..., Any]:
    """The kernel, whose tuners have but one configuration each while it runs; at sizes where a tuner's own pruning
    leaves that one out it never serves, and the others stay."""

    @functools.wraps(kernel, assigned=())
    def call(*tensors: Any, **options: Any) -> Any:
        from triton.runtime.autotuner import Autotuner

        before = Autotuner.run

        def run(tuner: Any, *arguments: Any, **keywords: Any) -> Any:
            wanted = configs.get(kernel_name(tuner))
            if wanted is None or (chosen := _chosen(tuner, wanted)) not in _kept(tuner, arguments, keywords):
                return before(tuner, *arguments, **keywords)
            with replaced([(tuner, "configs", [chosen]), (tuner, "early_config_prune", None)]):
                return before(tuner, *arguments, **keywords)

        with replaced([(Autotuner, "run", run)]):
            return kernel(*tensors, **options)

    return call


def kernel_name(tuner: Any) -> str:
    """Of the function that a tuner, and what else wraps it, ends in."""
    inner = tuner
    while hasattr(inner, "fn"):
        inner = inner.fn
    return str(inner.__name__)


def config_of(config: Any) -> dict[str, Any]:
    """A ``triton.Config`` as a choice has it."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _kept(tuner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """What a tuner's own pruning leaves of its configurations at these arguments."""
    with replaced([(tuner, "nargs", dict(zip(tuner.arg_names, arguments, strict=False)))]):
        return list(tuner.prune_configs(dict(keywords)))


def _chosen(tuner: Any, wanted: Mapping[str, Any]) -> Any:
    for config in tuner.configs:
        if config_of(config) == wanted:
            return config
    words = " ".join(f"{name}={value}" for name, value in wanted.items())
    raise TuneError(f"{kernel_name(tuner)} has no configuration {words}; expected one of its {len(tuner.configs)}")
