"""Reading an export with its readers' own code: the scheme that each layer gets there against the intended one.

It also reads the files that llama-quantize and mlx_lm have written into the same folder, and compares bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open

from assay.configs.architectures import fused, products_of, quantised_by_gguf
from assay.precision.errors import CannotExport
from assay.precision.export.configurations.compressed_tensors import group_of
from assay.precision.export.configurations.gguf import IMATRIX, TYPES, kinds_of, library, types_in
from assay.precision.export.configurations.mlx import layers_in, parameters_of
from assay.precision.export.configurations.torchao import entry_of
from assay.precision.export.manifest import OPTIONS, digest_of, record_in
from assay.precision.loading.quiet import one_line, quiet
from assay.precision.schemes import scheme_named
from assay.precision.schemes.ggml import block_types
from assay.runtime.errors import NotInstalled, listed
from assay.runtime.files import read_text
from assay.runtime.modules import optional
from assay.runtime.results import installed_version

_GGUF_MODEL, _MLX_MODEL = "model.gguf", "mlx_model"  # names that the exported commands give to their outputs
_UNQUANTISED: Set[str] = {"bf16", "f16", "f32"}
_COLUMNS, _ROWS = 128, 8  # of the linears that MLX quantises: 128 is a multiple of all of its group sizes
_PURPOSE = "--verify-export"


@dataclass(frozen=True, slots=True)
class Verified:
    """The result for one file of an export.

    ``reader``: the package and its version; empty if none is installed, so that the file was not read. ``checked``: the
    number of layers compared. ``wrong``: a line for each layer with another scheme, or the reason to distrust the file.
    """

    file: str
    reader: str
    checked: int = 0
    wrong: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.reader:
            return f"{self.file}: not verified, no reader of it is installed"
        if self.wrong and not self.checked:
            return f"{self.file}: not what was exported ({self.reader})"
        if self.wrong:
            return f"{self.file}: {len(self.wrong)} lines differ, of {self.checked} layers ({self.reader})"
        return f"{self.file}: {self.checked} layers get what they were to get ({self.reader})"


def verify_export(folder: str | Path) -> list[Verified]:
    """Read the files of an export (a folder with export.json) by the code of the libraries that load them.

    compressed-tensors' classes parse its configuration and match each linear, and the fused linears of vLLM; a
    checkpoint's tensors are checked for scales. torchao parses its file, MLX quantises linears of the same names by the
    program's table, and llama-quantize's rules match the patterns. gguf and MLX read model.gguf and mlx_model where
    llama-quantize and mlx_lm have written them. A file whose bytes have changed is reported in any case. Raises
    CannotExport for another folder.
    """
    try:
        export = msgspec.convert({"folder": Path(folder), **record_in(Path(folder))}, _Export)
    except (msgspec.ValidationError, TypeError):
        raise CannotExport(f"{folder} has no export.json that names linears: give the folder of an export") from None
    results = {file: _result(file, partial(_READERS[file], export, file)) for file in export.files if file in _READERS}
    results |= {file: Verified(file, "") for file in export.files if file == "vllm.json"}  # vLLM is not installed here
    for file, digest in export.digests.items():
        if file in results and results[file].wrong:
            continue
        now = digest_of(export.folder / file) if (export.folder / file).is_file() else None
        if now != digest:
            was = "it is missing" if now is None else "its bytes aren't those that were written"
            results[file] = Verified(file, "SHA-256", 0, (f"{was}: export anew",))
    for name, (format, read) in _WRITTEN_BY_COMMANDS.items():
        if format in export.held and (export.folder / name).exists():
            results[name] = _result(name, partial(read, export, export.folder / name))
    return list(results.values())


class _Export(msgspec.Struct):
    """The record of an export, from its export.json."""

    files: tuple[str, ...]
    assignment: dict[str, str]
    names: dict[str, list[str]]
    """The checkpoint's names of each site."""
    held: dict[str, dict[str, str]]
    """The part of the assignment that each format expresses."""
    tensors: dict[str, list[str]] = {}
    """The GGUF tensors of each site's weight."""
    tables: list[str] = []
    """Embedding sites."""
    tied: list[str] = []
    """Sites that share another site's weight."""
    digests: dict[str, str] = {}
    """SHA-256 of the files."""
    folder: Path = Path()


def _result(file: str, read: Callable[[], Verified]) -> Verified:
    """Call a reader; an exception of it is its refusal."""
    try:
        with quiet():
            return read()
    except NotInstalled:
        return Verified(file, "")
    except Exception as error:
        return Verified(file, "its reader refuses it", 0, (one_line(error),))


def _difference(name: str, wanted: str | None, got: Any) -> str:
    """Return the line of a layer that gets another scheme than intended; None means no scheme."""
    words = "none" if got is None else listed([str(each) for each in got]) if isinstance(got, list) else str(got)
    return f"{name}: expected {wanted or 'none'}, gets {' '.join(words.split())[:160]}"


def _compressed_tensors(export: _Export, file: str) -> Verified:
    """Match each linear with the groups of a ``quantization_config``, by the library's own matching."""
    tensors = file != "quantization_config.json"
    held = export.held["checkpoint" if tensors else "compressed-tensors"]
    library: Any = optional("compressed_tensors", purpose=_PURPOSE, extra="audit")
    quantization: Any = optional("compressed_tensors.quantization", purpose=_PURPOSE, extra="audit")
    match: Any = optional("compressed_tensors.utils.match", purpose=_PURPOSE, extra="audit")
    content = json.loads(read_text(export.folder / file, CannotExport))
    config = quantization.QuantizationConfig.model_validate(content.get("quantization_config", content))
    linear = torch.nn.Linear(1, 1, device="meta")

    def scheme_of(name: str) -> Any:
        """Return the one scheme that the library gives a linear, several as a list, or None."""
        groups = config.config_groups.values()
        hits = [each for each in groups if match.is_match(name, linear, each.targets, config.ignore, fused=fused())]
        return hits[0] if len(hits) == 1 else hits or None

    def same(scheme: Any, name: str, wanted: str | None) -> bool:
        if wanted is None or scheme is None or isinstance(scheme, list):
            return wanted is None and scheme is None
        expected = quantization.QuantizationScheme.model_validate(group_of(scheme_named(wanted), [name]))
        parts = ("weights", "input_activations", "output_activations", "format")
        return all(getattr(scheme, part) == getattr(expected, part) for part in parts)

    wanted = {name: held.get(site) for site, names in export.names.items() for name in names}
    products = products_of(wanted).items()
    fused_ones = {name: wanted[of[0]] for name, of in products if len({wanted[each] for each in of}) == 1}
    wrong = [
        _difference(name, scheme, scheme_of(name))
        for name, scheme in [*wanted.items(), *fused_ones.items()]
        if not same(scheme_of(name), name, scheme)
    ]
    caches = [scheme for scheme in held.values() if scheme_named(scheme).weight is None]
    cached = caches[0] if caches and OPTIONS not in export.files else None
    if (config.kv_cache_scheme is None) != (cached is None):
        wrong.append(_difference("KV caches", cached, config.kv_cache_scheme))
    if tensors:  # the weights that have scales must be those that have a scheme
        keys: set[str] = set()
        for shard in (export.folder / file).parent.glob("*.safetensors"):
            with safe_open(shard, "pt") as opened:
                keys |= set(opened.keys())
        wrong += [
            f"{name}: its tensors are {'not ' * (scheme is not None)}quantised"
            for name, scheme in wanted.items()
            if (f"{name}.weight_scale" in keys) != (scheme is not None)
        ]
    return Verified(file, f"compressed-tensors {library.__version__}", len(wanted), tuple(wrong))


def _torchao(export: _Export, file: str) -> Verified:
    """Compare the configuration of each linear in an ``FqnToConfig``."""
    core: Any = optional("torchao.core.config", purpose=_PURPOSE, extra="audit")
    held = export.held["torchao"]
    read = core.config_from_dict(json.loads(read_text(export.folder / file, CannotExport))).fqn_to_config
    wrong = []
    for site in export.names:
        entry = entry_of(scheme_named(held[site]))[0] if site in held else None
        expected = None if entry is None else core.config_to_dict(core.config_from_dict(entry))
        got = None if read.get(site) is None else core.config_to_dict(read[site])
        if got != expected:
            wrong.append(_difference(site, held.get(site), got and got["_type"]))
    return Verified(file, f"torchao {installed_version('torchao')}", len(export.names), tuple(wrong))


def _gguf_types(export: _Export, file: str) -> Verified:
    """Apply the patterns of a ``--tensor-type-file`` to each tensor; first and last match must agree.

    Raises ValueError for an invalid pattern or type.
    """
    gguf = library()
    patterns = types_in(read_text(export.folder / file, CannotExport))
    for pattern, kind in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        if kind.upper() not in gguf.GGMLQuantizationType.__members__:
            raise ValueError(f"expected types of ggml, got {pattern}={kind}")
    wrong = []
    for site, tensor, expected in _gguf_tensors(export):
        kinds = kinds_of(tensor, patterns)
        skipped = not kinds and not quantised_by_gguf(tensor)  # routers: llama-quantize leaves them as they are
        if not (skipped and site not in export.held["gguf"]) and (len(kinds) != 1 or not kinds <= expected):
            wrong.append(_gguf_difference(export, site, tensor, sorted(kinds)))
    rules = f"llama-quantize's rules, types of gguf {installed_version('gguf')}"
    return Verified(file, rules, len(export.tensors), tuple(wrong))


def _gguf_importance(export: _Export, file: str) -> Verified:
    """Check that each tensor with a type has finite sums of squares in the importance matrix, and a count."""
    read = {tensor.name: np.array(tensor.data) for tensor in library().GGUFReader(export.folder / file).tensors}
    weighted = export.held["gguf"].keys() - set(export.tables)  # tables have no inputs to weight by
    wrong = []
    for site, tensor, _ in _gguf_tensors(export):
        if site not in weighted:
            continue
        sums, counts = read.get(f"{tensor}.in_sum2"), read.get(f"{tensor}.counts")
        if sums is None or counts is None or not (np.isfinite(sums).all() and (sums >= 0).all() and (counts > 0).all()):
            wrong.append(f"{site}: expected sums of squares of its inputs for {tensor}, finite, with a count")
    return Verified(file, f"gguf {installed_version('gguf')}", len(weighted), tuple(wrong))


def _gguf_model(export: _Export, path: Path) -> Verified:
    """Compare the type of each tensor in a GGUF file of the model."""
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in library().GGUFReader(path).tensors}
    wrong = [
        _gguf_difference(export, site, tensor, [kinds[tensor]] if tensor in kinds else [])
        for site, tensor, expected in _gguf_tensors(export)
        if kinds.get(tensor) not in expected
    ]
    return Verified(path.name, f"gguf {installed_version('gguf')}", len(export.tensors), tuple(wrong))


def _gguf_tensors(export: _Export) -> Iterator[tuple[str, str, Set[str]]]:
    """Yield each site, each of its tensors and the types allowed there.

    Where the format does not hold the site: any type without blocks, or llama-quantize's fallback for rows that are not
    whole blocks.
    """
    held = export.held["gguf"]
    for site, tensors in export.tensors.items():
        weight = scheme_named(export.assignment[site]).weight if site in export.assignment else None
        kind = None if weight is None else weight.blocks
        if kind is not None and site in held:
            expected: Set[str] = {kind.ggml_name}
        else:
            fallback = block_types().get(kind.fallback) if kind is not None else None
            expected = _UNQUANTISED if fallback is None else {*_UNQUANTISED, fallback.ggml_name}
        for tensor in tensors:
            yield site, tensor, expected


def _gguf_difference(export: _Export, site: str, tensor: str, kinds: list[str]) -> str:
    return _difference(f"{site} ({tensor})", export.held["gguf"].get(site), " and ".join(kinds) or None)


def _mlx_program(export: _Export, file: str) -> Verified:
    """Let MLX quantise a linear of each layer's name by the program's table; the program itself is not run.

    Raises ValueError where it has no layers.
    """
    nn: Any = optional("mlx.nn", purpose=_PURPOSE, extra="audit")
    layers = layers_in(read_text(export.folder / file, CannotExport))
    model = nn.Module()
    for name in export.names:
        *parents, last = name.split(".")
        parent = model
        for word in parents:
            parent = parent.setdefault(word, {})
        parent[last] = nn.Linear(_COLUMNS, _ROWS, bias=False)
    nn.quantize(model, class_predicate=lambda path, module: layers.get(path, False))
    parameters = {
        path: {key: getattr(module, key) for key in ("group_size", "bits", "mode")}
        for path, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear)
    }
    return Verified(file, f"mlx {installed_version('mlx')}", len(export.names), _mlx_differences(export, parameters))


def _mlx_model(export: _Export, folder: Path) -> Verified:
    """Compare the parameters in config.json of a folder by mlx_lm, and let MLX dequantise its tensors by them."""
    mlx: Any = optional("mlx.core", purpose=_PURPOSE, extra="audit")
    config = json.loads(read_text(folder / "config.json", CannotExport))["quantization"]
    tensors = {name: each for path in folder.glob("*.safetensors") for name, each in mlx.load(str(path)).items()}
    default = {"group_size": config["group_size"], "bits": config["bits"], "mode": config.get("mode", "affine")}
    parameters: dict[str, dict[str, Any]] = {}
    wrong = []
    for name in export.names:
        if f"{name}.scales" in tensors:
            parameters[name] = {**default, **(config[name] if isinstance(config.get(name), dict) else {})}
            parts = [tensors.get(f"{name}.{part}") for part in ("weight", "scales", "biases")]
            try:
                mlx.eval(mlx.dequantize(*parts, **parameters[name]))
            except (TypeError, ValueError, RuntimeError) as error:
                wrong.append(f"{name}: MLX can't read its tensors ({error})")
        elif f"{name}.weight" not in tensors and name not in export.tied:
            wrong.append(f"{name}: it has no weight")
    lines = (*_mlx_differences(export, parameters), *wrong)
    return Verified(folder.name, f"mlx {installed_version('mlx')}", len(export.names), lines)


def _mlx_differences(export: _Export, parameters: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return a line for each layer whose parameters are not those of its scheme."""
    held = export.held["mlx"]
    expected = {name: parameters_of(scheme_named(scheme))[0] for name, scheme in held.items()}
    return tuple(
        _difference(name, held.get(name), parameters.get(name))
        for name in export.names
        if name not in export.tied and parameters.get(name) != expected.get(name)
    )


_READERS: dict[str, Callable[[_Export, str], Verified]] = {
    "quantization_config.json": _compressed_tensors,
    "checkpoint/config.json": _compressed_tensors,
    "torchao.json": _torchao,
    TYPES: _gguf_types,
    IMATRIX: _gguf_importance,
    "mlx_convert.py": _mlx_program,
}
_WRITTEN_BY_COMMANDS: dict[str, tuple[str, Callable[[_Export, Path], Verified]]] = {
    _GGUF_MODEL: ("gguf", _gguf_model),
    _MLX_MODEL: ("mlx", _mlx_model),
}
"""Files that the commands of an export write, with their format."""
