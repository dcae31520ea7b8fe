"""A choice of keywords and configurations of a kernel, and the kernel pinned to it.

A pinned kernel can be imported by a name, ``assay.bench.tuning.choice:lambda ...``, so that it can be examined,
inspected and timed in any process like any other kernel.
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
    """Keywords that the kernel is called with, and configurations of its autotuned Triton kernels, by name.

    A configuration has the constants, "num_warps" and "num_stages".
    """

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
        """Return a text that is equal for equal choices."""
        return json.dumps([self.keywords, self.configs], sort_keys=True)

    def target(self, kernel: str) -> str:
        """Return the name by which ``kernel`` (``module:function``), pinned to this choice, can be imported."""
        if not self.keywords and not self.configs:
            return kernel
        return f"{_MODULE}:lambda *tensors, **options: pinned({kernel!r}, {self.key!r})(*tensors, **options)"


@functools.cache
def pinned(kernel: str, key: str) -> Callable[..., Any]:
    """Return ``kernel`` (``module:function``) pinned to the choice with this `Choice.key`. Raises `TargetError`."""
    keywords, configs = json.loads(key)
    inner = functools.partial(load_target(kernel), **{name: _value(value) for name, value in keywords.items()})
    return _with_configs(inner, configs) if configs else inner


def _value(value: Any) -> Any:
    return tuple(map(_value, value)) if isinstance(value, list) else value


def _with_configs(kernel: Callable[..., Any], configs: Mapping[str, Mapping[str, Any]]) -> Callable[..., Any]:
    """Return the kernel with one configuration for each tuner, where the tuner's own pruning keeps it; else all."""

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
    """Return the name of the innermost function that a tuner and other decorators wrap."""
    inner = tuner
    while hasattr(inner, "fn"):
        inner = inner.fn
    return str(inner.__name__)


def config_of(config: Any) -> dict[str, Any]:
    """Return a ``triton.Config`` in the form of a choice."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _kept(tuner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Return the configurations that a tuner's own pruning keeps at these arguments."""
    with replaced([(tuner, "nargs", dict(zip(tuner.arg_names, arguments, strict=False)))]):
        return list(tuner.prune_configs(dict(keywords)))


def _chosen(tuner: Any, wanted: Mapping[str, Any]) -> Any:
    for config in tuner.configs:
        if config_of(config) == wanted:
            return config
    words = " ".join(f"{name}={value}" for name, value in wanted.items())
    raise TuneError(f"{kernel_name(tuner)} has no configuration {words}; expected one of its {len(tuner.configs)}")
