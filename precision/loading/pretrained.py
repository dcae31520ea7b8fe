"""Hugging Face directories: checks their contents, then builds the model with transformers.

Also holds weights in the 16 bits of their files and casts them to float32 one module at a time
(`load(as_stored=True)`).
"""

from __future__ import annotations

import math
import weakref
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from assay.formats.errors import UnknownOption
from assay.precision.errors import BadModel, UntrustedModel
from assay.precision.loading.loaded import Kind, Loaded, commonest_dtype
from assay.precision.loading.quiet import one_line, quiet
from assay.runtime.errors import listed
from assay.runtime.files import OwnFolder, read_text
from assay.runtime.memory import cast, map_large_blocks
from assay.runtime.modules import optional
from assay.runtime.records import from_json

_SMALL = 1 << 16
"""Elements of a module's own parameters up to which they are cast once: a hook would take longer than the cast."""


def cast_when_run(model: torch.nn.Module, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Leave each weight in its dtype; give its module a temporary copy in ``dtype`` whenever it runs.

    The parameters themselves move to the meta device, as with accelerate's values in files; small ones are cast at
    once. A model whose modules use each other's weights, as torch's MultiheadAttention does, is cast entirely.
    """
    hooks = optional("accelerate.hooks", purpose=name, extra="audit")
    if any(isinstance(module, torch.nn.MultiheadAttention) for module in model.modules()):
        model.to(dtype)
        return
    own_parameters = dict(model.named_parameters(remove_duplicate=False))
    # Tied names share one tensor, by which ties are recognised.
    held = {key: each.detach() for key, each in own_parameters.items()}
    for path, module in model.named_modules():
        own = sum(each.numel() for each in module.parameters(recurse=False))
        if own <= _SMALL or getattr(module, "_hf_hook", None) is not None:
            continue
        prefix = f"{path}." if path else ""
        device = next(iter(module.parameters(recurse=False))).device
        some = _Cast({key: held[f"{prefix}{key}"] for key, _ in module.named_parameters(recurse=False)}, dtype)
        hook = hooks.AlignDevicesHook(execution_device=device, offload=True, weights_map=some, place_submodules=False)
        hooks.add_hook_to_module(module, hook)
    shared: dict[int, torch.nn.Parameter] = {}
    for path, module in model.named_modules():  # a hook gives its module new parameters, which are not tied
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                tied = own_parameters[f"{path}.{key}" if path else key]
                module._parameters[key] = shared.setdefault(id(tied), parameter)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)  # on the meta device: sets the dtype of the cast
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


class _Cast(UserDict[str, Any]):
    """Tensors by name, each returned as a new cast; used as accelerate's ``weights_map``."""

    def __init__(self, held: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(held)
        self.state_dict: Mapping[str, torch.Tensor] = dict(held)
        """The tensors in their stored dtype, under the attribute name that accelerate uses."""
        self._dtype = dtype

    def __getitem__(self, key: str) -> torch.Tensor:
        return cast(self.data[key], self._dtype)


_CLASSES: tuple[tuple[str, str, Kind], ...] = (
    ("ForCausalLM", "AutoModelForCausalLM", "causal_lm"),
    ("LMHeadModel", "AutoModelForCausalLM", "causal_lm"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification", "classifier"),
    ("ForMaskedLM", "AutoModelForMaskedLM", "encoder"),
    ("Model", "AutoModel", "encoder"),
)
"""Suffix of an architecture's name, the class of transformers that loads it, and the kind of model."""

CPU = torch.device("cpu")
_MOST_LAYERS = 1000  # where there are fewer tensors: layers may share them
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def from_directory(
    path: Path,
    name: str,
    trust: bool,
    dtype: torch.dtype,
    max_memory: int | Mapping[int | str, int] | None = None,
    as_stored: bool = False,
    device: torch.device = CPU,
) -> Loaded:
    """Load the model in ``path`` with transformers, without the network.

    Attention is torch's scaled_dot_product_attention, or "eager" if transformers has nothing else for the architecture;
    experts are computed one after the other ("eager"), so that every matrix product is a separate call. Raises
    `BadModel`, `UntrustedModel`, `NotInstalled`.
    """
    if from_directory.__doc__ is None:
        raise BadModel(f"{name}: transformers reads docstrings, which python -OO drops; run python without -OO")
    config = json_of(path / "config.json")
    if config.get("quantization_config"):
        raise BadModel(f"{path} is quantised already; an audit starts from the unquantised model, so give that one")
    for file in () if trust else ("config.json", "tokenizer_config.json"):
        if (path / file).is_file() and "auto_map" in json_of(path / file):
            raise UntrustedModel(
                f"{path / file} asks for code that comes with the model (auto_map); "
                "read that code and allow it by trust=True, or give package.module:factory"
            )
    automatic, kind = _class_of(path, config)
    headers = headers_of(path, trust)
    _check_layers(path / "config.json", config, max(len(headers), _MOST_LAYERS))
    stored = commonest_dtype((stored, count) for stored, count in headers.values() if stored is not None)
    with quiet():
        transformers = optional("transformers", purpose=name, extra="audit")
    with quiet():  # again, since transformers' progress bars can be silenced only once it is loaded
        narrow = as_stored and max_memory is None and stored.itemsize == 2
        held = stored if narrow else dtype
        model = _model(getattr(transformers, automatic), path, trust, held, headers, max_memory, device)
        if narrow:
            cast_when_run(model, name, dtype)
            model.config.dtype = dtype
        tokenizer = _tokenizer(transformers, path, trust)
    embedding = model.get_input_embeddings()
    return Loaded(
        model=model.eval(),
        tokenizer=tokenizer,
        kind=kind,
        name=name,
        path=path,
        stored=stored,
        vocabulary=embedding.num_embeddings if isinstance(embedding, torch.nn.Embedding) else None,
        positions=getattr(model.config, "max_position_embeddings", None),
    )


def _check_layers(file: Path, config: Mapping[str, Any], most: int) -> None:
    """Raise `BadModel` if the configuration, or a part of it, states more than ``most`` layers: they take for ever."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_layers(file, value, most)
        elif name.endswith(("layers", "n_layer")) and isinstance(value, int) and value > most:
            raise BadModel(f"{file}: {name}: expected at most {most:,}, by its weights, got {value:,}; fetch it again")


def _class_of(path: Path, config: dict[str, Any]) -> tuple[str, Kind]:
    """Return the class that loads the model, by the architecture in its configuration."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise BadModel(f'{path / "config.json"} names no architecture; expected e.g. "architectures": ["BertModel"]')
    architecture = str(architectures[0])
    known = [(automatic, kind) for ending, automatic, kind in _CLASSES if architecture.endswith(ending)]
    if not known or config.get("is_encoder_decoder"):
        raise BadModel(
            f"{path} is a {architecture}; expected a causal language model, an encoder or a sequence classifier, "
            "so give package.module:factory for it"
        )
    return known[0]


def _model(
    automatic: Any,
    path: Path,
    trust: bool,
    dtype: torch.dtype,
    headers: dict[str, Any],
    max_memory: int | Mapping[int | str, int] | None,
    device: torch.device,
) -> Any:
    placed: dict[str, Any] = {"dtype": dtype} | ({} if device.type == "cpu" else {"device_map": {"": device}})
    if max_memory is not None:
        stored = {kind for kind, _ in headers.values() if kind}
        # Weights that transformers stores in another layout than it computes with are written there.
        folder = OwnFolder("assay-weights-")
        placed = {**_placed(max_memory, stored, dtype), "offload_folder": str(folder.path)}
    try:
        model, report = automatic.from_pretrained(
            path,
            experts_implementation="eager",
            local_files_only=True,
            trust_remote_code=trust,
            use_safetensors=bool(headers),
            ignore_mismatched_sizes=True,  # mismatches are reported below
            output_loading_info=True,
            **placed,
        )
    except Exception as error:
        lacking = _missing(automatic, path, headers) if "conversion" in str(error) else []
        reason = f"weights of an expert are missing: {listed(lacking)}" if lacking else one_line(error)
        raise BadModel(f"{path} can't be loaded by transformers ({reason}); fetch it again") from error
    wrong = [
        f"{name} is {tuple(stored)}, by config.json {tuple(expected)}"
        for name, stored, expected in sorted(report["mismatched_keys"])
    ]
    for problem, names in (
        ("lacks", sorted(report["missing_keys"])),
        ("has more than config.json describes:", sorted(report["unexpected_keys"])),
        ("has a tensor of another shape:", wrong),
    ):
        if names:
            raise BadModel(f"{path} {problem} {listed(names)}; the weights and config.json must be of one model")
    if max_memory is not None:
        map_large_blocks()  # a memory limit holds only if freed memory is returned to the system
        weakref.finalize(model, folder.close)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)  # on the meta device: sets the dtype of what is read
        model.config.dtype = dtype
    return model


def _placed(memory: int | Mapping[int | str, int], stored: set[torch.dtype], held: torch.dtype) -> dict[str, Any]:
    """Return from_pretrained's options that keep at most ``memory`` bytes of weights of dtype ``held`` on a device.

    stored: the dtypes in the files; weights are read in it, or in float32 if there are several, so that none is
    rounded. Raises `UnknownOption`.
    """
    devices = memory if isinstance(memory, Mapping) else {"cpu": memory}
    for device, count in devices.items():
        if count < 0:
            raise UnknownOption(f"max_memory of {count} bytes on {device}; expected at least 0")
    (dtype,) = stored if len(stored) == 1 else (torch.float32,)
    scaled = {device: count * dtype.itemsize // held.itemsize for device, count in devices.items()}
    if not any(scaled.values()):
        return {"dtype": dtype, "device_map": {"": "disk"}}
    return {"dtype": dtype, "device_map": "auto", "max_memory": scaled}


def _missing(automatic: Any, path: Path, headers: dict[str, Any]) -> list[str]:
    """Return the tensors that transformers expects for this configuration but the files lack."""
    conversion = optional("transformers.core_model_loading", purpose=str(path), extra="audit")
    config = optional("transformers", purpose=str(path), extra="audit").AutoConfig.from_pretrained(
        path, local_files_only=True
    )
    with torch.device("meta"):
        model = automatic.from_config(config)
    return sorted(set(conversion.revert_weight_conversion(model, model.state_dict())) - set(headers))


def _tokenizer(transformers: Any, path: Path, trust: bool) -> Any:
    """Return the tokenizer of the directory, None if it has no tokenizer files."""
    if not any(next(path.glob(pattern), None) for pattern in _TOKENIZERS):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust)
    except Exception as error:
        raise BadModel(f"{path}: its tokenizer can't be loaded ({one_line(error)}); fetch its files again") from error


def json_of(path: Path) -> dict[str, object]:
    """Return the JSON object in a file. Raises `BadModel` if there is none."""
    if not path.exists():
        raise BadModel(f"{path.parent} has no {path.name}; expected a model in the form of save_pretrained")
    again = "fetch it again"
    content = from_json(read_text(path, BadModel, again), str(path), lambda words: BadModel(f"{words}; {again}"))
    if not isinstance(content, dict):
        raise BadModel(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def headers_of(path: Path, trust: bool) -> dict[str, tuple[torch.dtype | None, int]]:
    """Return dtype (None unless a usual floating-point one) and number of values of each tensor in ``path``.

    Empty if there are only pickled weights and ``trust`` allows them. Raises `BadModel` for files that are missing,
    damaged or inconsistent with the index, `UntrustedModel` for pickled weights.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return _header(single)
    if not index.is_file():
        pickles = sorted(file.name for file in path.glob("*.bin"))
        if pickles and trust:
            return {}
        if pickles:
            raise UntrustedModel(
                f"{path} has its weights only as pickle ({pickles[0]}), which runs code when it is read; "
                "store them as model.safetensors (save_pretrained does), or allow it by trust=True"
            )
        raise BadModel(f"{path} has no weights; expected model.safetensors, or its shards and their index")
    indices = json_of(index).get("weight_map")
    if not isinstance(indices, dict) or not all(isinstance(file, str) for file in indices.values()):
        raise BadModel(f"{index} has no weight_map of tensors to files; fetch it again")
    results: dict[str, tuple[torch.dtype | None, int]] = {}
    for file in sorted(set(indices.values())):
        if not (path / file).is_file():
            raise BadModel(f"{path} lacks {file}, which {index.name} names; fetch it again")
        header = _header(path / file)
        lost = [name for name, position in indices.items() if position == file and name not in header]
        if lost:
            raise BadModel(
                f"{path / file} lacks {listed(lost, 'tensors')}, which {index.name} says it has; fetch both again"
            )
        results |= header
    return results


def _header(file: Path) -> dict[str, tuple[torch.dtype | None, int]]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: (_DTYPES.get(s.get_dtype()), math.prod(s.get_shape())) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise BadModel(f"{file} is no safetensors file, or is cut off ({one_line(error)}); fetch it again") from None
