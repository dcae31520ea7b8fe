"""Print the class that an engine's own parser gives each scheme of its row in configs/engines.toml, by capability.

    pip download --no-deps vllm && unzip -q 'vllm-*.whl' '*.py' -d FOLDER
    python benchmarks/audit/engine_parsers.py vllm FOLDER

Only the engine's compressed-tensors parser and its name matching are real; the rest of the engine, including its
kernels, is replaced by stubs, so neither a GPU nor its dependencies are needed. The parser is queried for fused
linears, a linear that is not fused, an unquantised one, and the head; for SGLang, most of whose models don't declare
the parts of fused linears, with and without these parts. For Mixtral and Qwen3-MoE the group of each layer's experts is
looked up by the names that the engine uses. Schemes that the row promises and the parser refuses are reported.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import re
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from assay.configs.architectures import fused
from assay.precision.export import quantization_config
from assay.precision.observation.sites import Site
from assay.precision.schemes import SCHEMES
from assay.precision.targets import engines

_PARSERS = {
    "vllm": ("vllm.model_executor.layers.quantization.", "vllm.platforms", "vllm.logger"),
    "sglang": ("sglang.srt.layers.quantization.", "sglang.srt.utils", "logging"),
}
_REAL = ("compressed_tensors.compressed_tensors", "compressed_tensors.utils", "utils.config_utils", "base_config")
_CAPABILITIES = (75, 80, 89, 90, 100)  # compute capabilities times ten
_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""The block of a layer and the linears of an expert (gate, up and down), by their checkpoint names."""
_REQUESTED = ("self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.o_proj")


class _Class(type):
    """Metaclass of stub classes: any attribute exists."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


class _Module(types.ModuleType):
    """A stub module: any name in it is a class that accepts anything."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def init(self: object, *_: object, **__: object) -> None: ...

        members = {
            "__init__": init,
            "__bool__": lambda self: False,
            "__getattr__": lambda self, name: lambda: False,
            "get_min_capability": classmethod(lambda _: 0),
        }
        made = _Class(name, (), members)
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Imports the parser from the folder, and stubs for the engine's other modules."""

    capability = 0

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.base, self.platforms, self.logger = _PARSERS[engine]

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] != self.engine:
            return None
        if name.removeprefix(self.base) in _REAL and name.startswith(self.base):
            return importlib.util.spec_from_file_location(name, self.folder / f"{name.replace('.', '/')}.py")
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__ == self.platforms:
            this = types.SimpleNamespace(to_int=lambda: self.capability)
            module.current_platform = types.SimpleNamespace(
                get_device_capability=lambda: this, is_xpu=lambda: False, is_cuda=lambda: True
            )
        if module.__name__ == self.logger:
            module.init_logger = logging.getLogger
        narrow = self.folder / f"{module.__name__.replace('.', '/')}/compressed_tensors_wNa16.py"
        if narrow.is_file():  # the widths of packed weights, which the parser uses
            table = re.search(r"WNA16_SUPPORTED_TYPES_MAP = \{(.*?)\}", narrow.read_text(encoding="utf-8"), re.DOTALL)
            module.WNA16_SUPPORTED_BITS = [int(each) for each in re.findall(r"(\d+):", table[1] if table else "")]


def sites() -> dict[str, Site]:
    """Return two layers of a Llama and its head."""
    results = {}
    for layer in (0, 1):
        for block, unit, parts in (("self_attn", "qkv", "qkv"), ("mlp", "gate_up", ("gate", "up"))):
            for part in parts:
                name = f"model.layers.{layer}.{block}.{part}_proj"
                results[name] = Site(name, "linear", "linear", (256, 256), f"model.layers.{layer}.{block}.{unit}")
        for last in ("self_attn.o_proj", "mlp.down_proj"):
            results[f"model.layers.{layer}.{last}"] = Site(
                f"model.layers.{layer}.{last}", "linear", "linear", (256, 256)
            )
    return {**results, "lm_head": Site("lm_head", "linear", "linear", (512, 256))}


def given(parser: Any, scheme: str, products: dict[str, list[str]]) -> tuple[set[str], set[str]]:
    """Return the parser's classes for the linears of a scheme, and for unquantised linears; refusals by name.

    products: the parts of fused linears, as the engine's model declares them.
    """
    model = sites()
    assignment = {name: scheme for name in model if name not in ("lm_head", "model.layers.1.mlp.down_proj")}
    config = parser.from_config(quantization_config(assignment, model).content)
    config.packed_modules_mapping = products
    read = config.get_scheme if hasattr(config, "get_scheme") else config.get_linear_scheme

    def of(name: str) -> str:
        try:
            result = read(torch.nn.Linear(1, 1), name)
        except (NotImplementedError, ValueError, ImportError, RuntimeError) as error:
            return type(error).__name__
        return "none" if result is None else type(result).__name__

    requested = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in _REQUESTED]
    return {of(name) for name in requested}, {of(name) for name in ("lm_head", "model.layers.1.mlp.down_proj")}


def experts_given(engine: str, parser: Any, kind: str, scheme: str) -> bool:
    """Return whether the experts of one layer have a scheme's group, and those of the next stay unquantised."""
    block, stored = _EXPERTS[kind]
    requested = _EXPERTS["qwen3_moe"][1] if engine == "sglang" else stored
    model, names = {}, {}
    for layer in (0, 1):
        for site, parts in (("gate_up_proj", stored[:2]), ("down_proj", stored[2:])):
            name = f"model.layers.{layer}.mlp.experts.{site}"
            model[name] = Site(name, "linear", "experts", (4, 256, 256), f"model.layers.{layer}.mlp.experts")
            base = f"model.layers.{layer}.{block}.experts"
            names[name] = [f"{base}.{expert}.{part}" for expert in range(4) for part in parts]
    assignment = {name: scheme for name in model if ".0." in name}
    config = parser.from_config(quantization_config(assignment, model, names=names).content)
    group = next(iter(config.target_scheme_map.values()))
    got = []
    for layer in (0, 1):
        for part in requested:
            try:
                got.append(config.get_scheme_dict(torch.nn.Module(), f"model.layers.{layer}.{block}.experts.0.{part}"))
            except ValueError:
                got.append("refused")
    return got == [group] * 3 + [None] * 3


def table_given(parser: Any, scheme: str) -> bool:
    """Return whether vLLM reads a quantised embedding table as packed integers, and an ignored one as it is.

    Both are tried with a model that passes the table's name and one that doesn't.
    """
    name = "model.embed_tokens"
    model = {**sites(), name: Site(name, "embedding", "embedding", (512, 256))}
    table = type("VocabParallelEmbedding", (torch.nn.Module,), {})()
    linear = "model.layers.0.mlp.down_proj"
    for assignment in ({linear: scheme, name: scheme}, {linear: scheme}):
        config = parser.from_config(quantization_config(assignment, model, kind="llama").content)
        for called in ("", name):
            result = config.get_scheme_dict(table, called)
            if (result is None) == (name in assignment):
                return False
            if result is not None and not config._is_wNa16_group_channel(result["weights"], None):
                return False
    return True


def main() -> int:
    """Print a row for each scheme; return 1 if the parser and the row of configs/engines.toml disagree."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("engine", choices=sorted(_PARSERS))
    options.add_argument("folder", type=Path, help="an unpacked wheel of the engine")
    chosen = options.parse_args()
    finder = _Finder(chosen.engine, chosen.folder)
    sys.meta_path.insert(0, finder)
    module = importlib.import_module(f"{finder.base}compressed_tensors.compressed_tensors")
    row, wrong = engines()[chosen.engine], 0
    linears = [name for name, scheme in SCHEMES.items() if name in row.kernels and scheme.weight is not None]
    for name in [*linears, "mxfp6"]:
        for capability in _CAPABILITIES:
            finder.capability = capability
            classes, left = set(), set()
            for products in (fused(), {}) if chosen.engine == "sglang" else (fused(),):
                with patch("torch.cuda.get_device_capability", lambda: divmod(finder.capability, 10)):
                    more, others = given(module.CompressedTensorsConfig, name, products)
                classes, left = classes | more, left | others
            served = name in row.kernels and not row.kernels[name].lacks(capability)
            loads = len(classes) == 1 and not any(each.endswith("Error") or each == "none" for each in classes)
            fault = (served and not loads) or left != {"none"}
            wrong += fault
            words = "served" if served else "off the menu"
            print(f"{name:16} {capability / 10:4.1f}  {words:12}  {', '.join(sorted(classes))}{'  WRONG' * fault}")
    tables = row.schemes_by_kind["tables"]
    fail = [name for name in tables if not table_given(module.CompressedTensorsConfig, name)]
    wrong += len(fail)
    print(f"tables: {len(tables)} schemes{', WRONG: ' * bool(fail)}{', '.join(fail)}")
    for kind in _EXPERTS:
        fail = [
            name
            for name in row.schemes_by_kind["experts"]
            if not experts_given(chosen.engine, module.CompressedTensorsConfig, kind, name)
        ]
        wrong += len(fail)
        print(
            f"experts of {kind}: {len(row.schemes_by_kind['experts'])} schemes"
            f"{', WRONG: ' * bool(fail)}{', '.join(fail)}"
        )
    print(f"{len(linears)} schemes, {wrong} disagreements")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
