"""Hugging Face directories: what they hold is checked first, then transformers builds the model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from assay.precision.errors import BadModel, NotInstalled, UntrustedModel
from assay.precision.loading.checks import commonest_dtype
from assay.precision.loading.loaded import Kind, Loaded
from assay.precision.loading.placement import Placement
from assay.precision.loading.quiet import one_line, quiet
from assay.precision.loading.shards import headers_of, json_of

__all__ = ["from_directory"]

_CLASSES: tuple[tuple[str, str, Kind], ...] = (
    ("ForCausalLM", "AutoModelForCausalLM", "causal_lm"),
    ("LMHeadModel", "AutoModelForCausalLM", "causal_lm"),
    ("ForSequenceClassification", "AutoModelForSequenceClassification", "classifier"),
    ("ForMaskedLM", "AutoModelForMaskedLM", "encoder"),
    ("Model", "AutoModel", "encoder"),
)
"""How an architecture's name ends, the class of transformers that loads it, and what it is."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


def from_directory(
    path: Path,
    name: str,
    trust: bool,
    dtype: torch.dtype,
    max_memory: int | Mapping[int | str, int] | None = None,
) -> Loaded:
    """The model that ``path`` holds, by transformers and without the network.

    Attention is torch's scaled_dot_product_attention, or "eager" where transformers has nothing else for the
    architecture; experts are computed one after the other ("eager"), so that every product is a call of its own.
    Raises `BadModel`, `UntrustedModel`, `NotInstalled`.
    """
    config = json_of(path / "config.json")
    if config.get("quantization_config"):
        raise BadModel(f"{path} is quantised already; an audit starts from the unquantised model, so give that one")
    if not trust:
        _refuse_code(path)
    automatic, kind = _class_of(path, config)
    headers = headers_of(path, trust)
    stored = commonest_dtype((stored, count) for stored, count in headers.values() if stored is not None)
    placed = (
        None if max_memory is None else Placement.of(max_memory, {kind for kind, _ in headers.values() if kind}, dtype)
    )
    transformers = _transformers(name)
    with quiet():
        model = _model(getattr(transformers, automatic), path, trust, dtype, headers, placed)
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


def _refuse_code(path: Path) -> None:
    for file in ("config.json", "tokenizer_config.json"):
        if (path / file).is_file() and "auto_map" in json_of(path / file):
            raise UntrustedModel(
                f"{path / file} asks for code that comes with the model (auto_map); "
                "read that code and allow it by trust=True, or give package.module:factory"
            )


def _class_of(path: Path, config: dict[str, Any]) -> tuple[str, Kind]:
    """The class that loads the model, by the architecture that the configuration names."""
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


def _transformers(name: str) -> Any:
    try:
        with quiet():
            return importlib.import_module("transformers")
    except ImportError as error:
        raise NotInstalled(f"{name} needs transformers ({one_line(error)}): pip install kernel-assay[audit]") from None


def _model(
    automatic: Any, path: Path, trust: bool, dtype: torch.dtype, headers: dict[str, Any], placed: Placement | None
) -> Any:
    try:
        model, report = automatic.from_pretrained(
            path,
            dtype=placed.dtype if placed else dtype,
            experts_implementation="eager",
            local_files_only=True,
            trust_remote_code=trust,
            use_safetensors=bool(headers),
            ignore_mismatched_sizes=True,  # they are reported
            output_loading_info=True,
            **(placed.options() if placed else {}),
        )
    except Exception as error:
        lacking = _missing(automatic, path, headers) if "conversion" in str(error) else []
        reason = f"weights of an expert are missing: {_listed(lacking)}" if lacking else one_line(error)
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
            raise BadModel(f"{path} {problem} {_listed(names)}; the weights and config.json must be of one model")
    return placed.settle(model, dtype) if placed else model


def _missing(automatic: Any, path: Path, headers: dict[str, Any]) -> list[str]:
    """The tensors that transformers would store for this configuration and that the files lack."""
    conversion = importlib.import_module("transformers.core_model_loading")
    config = importlib.import_module("transformers").AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        model = automatic.from_config(config)
    return sorted(set(conversion.revert_weight_conversion(model, model.state_dict())) - set(headers))


def _tokenizer(transformers: Any, path: Path, trust: bool) -> Any:
    """The tokenizer of the directory, None where there are no files of one."""
    if not any(next(path.glob(pattern), None) for pattern in _TOKENIZERS):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust)
    except Exception as error:
        raise BadModel(f"{path}: its tokenizer can't be loaded ({one_line(error)}); fetch its files again") from error


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
