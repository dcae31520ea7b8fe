"""`record`: writes what the modules of a running model take and give, for `compare`.

Hooks see each module's call; PyTorch's attention and log-softmax, and the attention that transformers dispatches to,
are seen as functions, since they lie between modules. Nothing is kept in memory but one shard of tensors.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from assay.compare.errors import RecordingError
from assay.compare.runs.tensor_store import TensorWriter
from assay.runtime.results import installed_version

VERSION = 1
"""Of the folder's layout; raised where older readers would misread it."""
MANIFEST, EVENTS = "run.json", "events.jsonl"
_FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (torch, "log_softmax", "log_softmax"),
    (nn.functional, "log_softmax", "log_softmax"),
    (Tensor, "log_softmax", "log_softmax"),
    (nn.functional, "scaled_dot_product_attention", "sdpa"),
)
"""Functions that are recorded besides modules: owner, attribute, kind."""
_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_PLAIN = (bool, int, float, str, type(None))


class record:  # noqa: N801 - used as a function: with record("run_a", model):
    """Record each forward pass of ``model`` in the block into the folder ``out``, which must not exist yet.

    ``regions`` are patterns of module names (``"model.layers.0.*"``); only these modules are recorded then, beside the
    model itself. ``notes`` are further facts of the run for its manifest, as {"temperature": 0.7}.

    The folder is written under another name and renamed at the end of the block; of a block that raised it holds what
    was seen until then, with the error in its manifest. Raises `RecordingError` where the folder can't be written, or
    the model was not called.
    """

    def __init__(
        self,
        out: str | Path,
        model: nn.Module,
        regions: Sequence[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise RecordingError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if isinstance(regions, str):
            raise RecordingError(f"regions: expected a list of patterns, got the text {regions!r}; write [{regions!r}]")
        self._out = Path(out)
        self._model = getattr(model, "_orig_mod", model)
        self._regions = None if regions is None else tuple(regions)
        self._notes = dict(notes or {})
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._out.exists():
            raise RecordingError(f"{self._out} exists; record into a new folder, or remove this one")
        self._folder = self._out.with_name(f".{self._out.name}.unfinished")
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._events = self._stack.enter_context((self._folder / EVENTS).open("w", encoding="utf-8"))
        except OSError as error:
            raise RecordingError(f"{self._out}: can't be written ({error.strerror})") from None
        self._tensors = TensorWriter(self._folder)
        self._path: list[str] = []
        self._names: dict[int, str] = {}
        self._calls = 0
        self._within = False  # whether a function that is recorded runs inside another
        self._modules = {name: self._described(name, module) for name, module in self._recorded_modules()}
        for name, module in self._recorded_modules():
            self._names[id(module)] = name
            self._hook(name, module)
        for owner, attribute, kind in _FUNCTIONS:
            self._patch(owner, attribute, kind)
        self._patch_transformers()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.close()
        if error is None and not self._calls:
            shutil.rmtree(self._folder)
            raise RecordingError(
                f"{self._out}: the model was not called in the block; call it inside of `with record(...)`"
            )
        self._tensors.close()
        manifest = {
            "version": VERSION,
            "assay": installed_version("kernel-assay"),
            "versions": _versions(),
            "flags": _flags(),
            "device": str(next((p.device for p in self._model.parameters()), torch.device("cpu"))),
            "class": type(self._model).__name__,
            "config": _config_of(self._model),
            "modules": self._modules,
            "calls": self._calls,
            "notes": self._notes,
            "error": "" if error is None else f"{type(error).__name__}: {error}",
        }
        (self._folder / MANIFEST).write_text(json.dumps(manifest, indent=1, default=str), encoding="utf-8")
        self._folder.replace(self._out)

    def _recorded_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            wanted = self._regions is None or not name or any(fnmatch.fnmatch(name, each) for each in self._regions)
            if wanted and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                yield name, module

    def _described(self, name: str, module: nn.Module) -> dict[str, Any]:
        """Return a module's class, its own numbers and flags, and references of its own parameters and buffers."""
        own = {key: value for key, value in vars(module).items() if not key.startswith("_") and type(value) in _PLAIN}
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        return {
            "class": type(module).__name__,
            "attributes": own,
            "parameters": {key: self._tensors.add(value) for key, value in tensors if not value.is_meta},
        }

    def _hook(self, name: str, module: nn.Module) -> None:
        names = _parameter_names(module)
        given: list[dict[str, Any]] = []  # of the calls that run, the inner ones last

        @_uncompiled
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._path.append(name)
            inputs = {names[index] if index < len(names) else str(index): value for index, value in enumerate(args)}
            given.append(self._references({**inputs, **kwargs}))
            if not name:
                self._root_called({**inputs, **kwargs})

        @_uncompiled
        def after(_: nn.Module, args: Any, output: Any) -> None:
            self._path.pop()
            self._write({"module": name, "inputs": given.pop(), "outputs": self._references(output)})

        self._stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._stack.callback(module.register_forward_hook(after).remove)

    def _root_called(self, inputs: Mapping[str, Any]) -> None:
        """Note where in their sequences the tokens of this call stand."""
        past = inputs.get("past_key_values", inputs.get("start_pos"))
        length = past if isinstance(past, int) else getattr(past, "get_seq_length", lambda: 0)()
        self._write({"call": self._calls, "past": int(length)})
        self._calls += 1

    def _references(self, value: Any, name: str = "") -> dict[str, Any]:
        """Return references of the tensors in nested tuples, lists and mappings, by dotted names."""
        if isinstance(value, Tensor):
            opaque = value.is_meta or value.layout != torch.strided or type(value).__name__ == "FakeTensor"
            return {} if opaque else {name or "0": self._tensors.add(value)}
        if isinstance(value, Mapping):
            entries: Any = value.items()
        elif isinstance(value, (tuple, list)):
            entries = enumerate(value)
        else:
            return {}
        found: dict[str, Any] = {}
        for key, each in entries:
            found |= self._references(each, f"{name}.{key}" if name else str(key))
        return found

    def _write(self, event: Mapping[str, Any]) -> None:
        self._events.write(json.dumps(event) + "\n")

    def _patch(self, owner: Any, attribute: str, kind: str) -> None:
        original = getattr(owner, attribute)

        @wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._within or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return self._seen(kind, original, args, kwargs)

        self._stack.enter_context(patch.object(owner, attribute, recorded))

    def _seen(self, kind: str, function: Callable[..., Any], args: Any, kwargs: Any, inputs: Any = None) -> Any:
        """Call a function, and write what it took and gave."""
        values = {**{str(index): each for index, each in enumerate(args)}, **kwargs} if inputs is None else inputs
        references = self._references(values)
        options = {key: value for key, value in values.items() if type(value) in _PLAIN}
        options |= {key: str(value) for key, value in values.items() if isinstance(value, torch.dtype)}
        self._within = True
        try:
            output = function(*args, **kwargs)
        finally:
            self._within = False
        module = self._path[-1] if self._path else ""
        outputs = self._references(output)
        self._write({"function": kind, "module": module, "inputs": references, "options": options, "outputs": outputs})
        return output

    def _patch_transformers(self) -> None:
        """See the attention that transformers dispatches to by the configuration, "eager" included."""
        try:
            from transformers.modeling_utils import AttentionInterface
        except ImportError:
            return
        get_interface = AttentionInterface.get_interface

        def recorded(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function: Callable[..., Any] = get_interface(interface, implementation, default)

            @wraps(function)
            def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return function(module, query, key, value, *args, **kwargs)
                inputs = {"query": query, "key": key, "value": value, **kwargs}
                return self._seen("attention", function, (module, query, key, value, *args), kwargs, inputs)

            return attend

        self._stack.enter_context(patch.object(AttentionInterface, "get_interface", recorded))


def _uncompiled(hook: _Hook) -> _Hook:
    """Keep a hook out of compiled graphs."""
    disabled: _Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def _parameter_names(module: nn.Module) -> list[str]:
    try:
        return [
            parameter.name
            for parameter in inspect.signature(type(module).forward).parameters.values()
            if parameter.name != "self"
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        return []


def _config_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's configuration as plain data: that of transformers, or attributes of ``config`` or ``args``."""
    config = getattr(model, "config", None) or getattr(model, "args", None) or getattr(model, "params", None)
    if config is None:
        return {}
    content = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", config)
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(content), default=str))
    except (TypeError, ValueError):
        return {}
    return plain


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import transformers
    except ImportError:
        return versions
    return versions | {"transformers": transformers.__version__}


def _flags() -> dict[str, Any]:
    """Return the switches of PyTorch that change numbers."""
    matmul = torch.backends.cuda.matmul
    return {
        "tf32": bool(matmul.allow_tf32),
        "reduced_precision_bfloat16": bool(matmul.allow_bf16_reduced_precision_reduction),
        "reduced_precision_float16": bool(matmul.allow_fp16_reduced_precision_reduction),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }
