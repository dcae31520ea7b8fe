"""llama.cpp: which of ggml's types each tensor of a GGUF file has, for llama-quantize, with the importance matrix.

The option ``--tensor-type-file`` reads patterns and types, by white space apart; some versions take the first pattern
that is found in a tensor's name, others the last, so each line here is a whole name, and none is found in another's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace

import torch

from assay.configs.architectures import quantised_by_gguf
from assay.precision.errors import CannotExport
from assay.precision.export.gguf.importance import imatrix
from assay.precision.export.gguf.names import TensorNames
from assay.precision.export.plan import Plan, plan_of
from assay.precision.export.target import Recipe, Request, of_linears, register
from assay.precision.observation.sites import Site
from assay.precision.schemes.ggml import BlockType, block_types

TYPES, IMATRIX, COMMANDS = "gguf-types.txt", "gguf-imatrix.gguf", "gguf.txt"
"""The files that are written."""
_KEPT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_MIXES = {"q5_k": "Q5_K_M", "q4_k": "Q4_K_M", "q3_k": "Q3_K_M", "mxfp4": "MXFP4_MOE"}
"""What llama-quantize calls a file of mostly one type, where not by the type's own name."""


def tensor_types(request: Request) -> Recipe:
    """A type for each tensor with a weight that llama-quantize would quantise (``types``), and the bytes of all.

    Raises CannotExport and UnknownScheme as `plan_of` does, NotInstalled.
    """
    plan = plan_of(request.assignment, request.sites, request.dtype, experts=True, tables=lambda scheme, tied: "")
    for name, scheme in plan.caches.items():
        plan.note(name, scheme.name, "llama.cpp's caches have types of their own (--cache-type-k, --cache-type-v)")
    wanted = {name: kind for name, scheme in plan.weights.items() if (kind := _blocks(plan, name)) is not None}
    if not wanted or request.module is None:
        return plan.recipe({}, ())
    try:
        tensors = TensorNames(request.module)
    except CannotExport as error:
        for name in wanted:
            plan.note(name, plan.weights[name].name, str(error))
        return plan.recipe({}, ())
    indices = tensors.of_sites(request.sites, request.names)
    asked: dict[str, set[str]] = {}
    for name, several in indices.items():
        for each in several:
            asked.setdefault(each, set()).add(wanted[name].ggml_name if name in wanted else "")
    types: dict[str, str] = {}
    held, total = [], 0.0
    for name, several in indices.items():
        kind, site = wanted.get(name), request.sites[name]
        if kind is not None:
            mixed = any(len(asked[each]) > 1 for each in several)
            if reason := _refused(site, several, kind, mixed):
                plan.note(name, plan.weights[name].name, reason)
                kind = None if mixed else _instead(site, kind)
            else:
                held.append(name)
        total += float(site.parameters * request.dtype.itemsize) if kind is None else _bytes(site, kind)
        kept = _KEPT[request.dtype] if kind is None else kind.ggml_name
        types |= {each: kept for each in several if quantised_by_gguf(each)}
    total += _others(request, tensors, indices, types)
    return replace(plan.recipe({"types": types, "bytes": int(total)}, held), tensors=indices)


def unquantised(request: Request) -> list[str]:
    """Sites with a weight that keep their own format in any file that llama-quantize makes: routers above all.

    Raises CannotExport, NotInstalled.
    """
    if request.module is None:
        return []
    indices = TensorNames(request.module).of_sites(request.sites, request.names)
    return [name for name, several in indices.items() if not several or not all(map(quantised_by_gguf, several))]


def lines(types: Mapping[str, str]) -> str:
    """The content of a ``--tensor-type-file``."""
    return "".join(f"^{re.escape(tensor)}$={kind}\n" for tensor, kind in types.items())


def commands(request: Request, recipe: Recipe) -> str:
    """The commands of llama.cpp that make the file and compare it with the model as it is."""
    kept = _KEPT[request.dtype]
    counted: dict[str, int] = {}
    for kind in recipe.content["types"].values():
        counted[kind] = counted.get(kind, 0) + (kind != kept)
    most = max(counted, key=counted.__getitem__)
    mix, wide, narrow = _MIXES.get(most, most.upper()), f"model-{kept}.gguf", "model.gguf"
    texts = (
        ["python", "convert_hf_to_gguf.py", request.model, "--outtype", kept, "--outfile", wide],
        ["llama-quantize", "--imatrix", IMATRIX, "--tensor-type-file", TYPES, wide, narrow, mix],
        ["llama-perplexity", "-m", wide, "-f", "TEXT", "--kl-divergence-base", "logits.kld"],
        ["llama-perplexity", "-m", narrow, "-f", "TEXT", "--kl-divergence-base", "logits.kld", "--kl-divergence"],
    )
    size = f"# tensors of {recipe.content['bytes']:,} bytes, which llama-quantize --dry-run tells too\n"
    return size + "".join(shlex.join(words) + "\n" for words in texts)


def _blocks(plan: Plan, name: str) -> BlockType | None:
    """The type that a site's scheme stores weights in; None, and noted, where it is none of ggml's."""
    weight = plan.weights[name].weight
    if weight is None or weight.blocks is None:
        plan.note(name, plan.weights[name].name, "GGUF holds types of ggml, such as q4_k")
        return None
    return weight.blocks


def _refused(site: Site, tensors: tuple[str, ...], kind: BlockType, mixed: bool) -> str:
    """Why the tensors of a site can't have a type; empty if they can."""
    if not tensors:
        return "gguf has no name for it"
    if not all(map(quantised_by_gguf, tensors)):
        return f"llama-quantize leaves {tensors[0]} as it is"
    if mixed:
        return f"{tensors[0]} holds the weights of other experts too, which have another type"
    if site.shape[-1] % kind.block:
        return f"rows of {site.shape[-1]} aren't whole blocks: llama-quantize takes {kind.fallback or 'f16'} instead"
    return ""


def _instead(site: Site, kind: BlockType) -> BlockType | None:
    """What llama-quantize takes for rows that aren't whole blocks, where it has a type of smaller ones."""
    fallback = block_types().get(kind.fallback) if site.shape[-1] % kind.block else None
    return fallback if fallback is not None and site.shape[-1] % fallback.block == 0 else None


def _bytes(site: Site, kind: BlockType) -> float:
    return float(site.parameters // site.shape[-1] * kind.row_bytes(site.shape[-1]))


def _others(
    request: Request, tensors: TensorNames, indices: Mapping[str, tuple[str, ...]], types: dict[str, str]
) -> float:
    """Bytes of the parameters that are no site's; those that llama-quantize would quantise are told to stay."""
    assert request.module is not None
    total = 0
    for name, parameter in request.module.named_parameters():
        if name.removesuffix(".weight") in indices or name in indices:
            continue
        tensor = tensors[name] or ""
        if parameter.dim() > 1 and quantised_by_gguf(tensor):
            types.setdefault(tensor, _KEPT[request.dtype])
        # The converter holds vectors in float32.
        total += parameter.numel() * (4 if parameter.dim() < 2 else request.dtype.itemsize)
    return float(total)


def _files(request: Request, recipe: Recipe) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {
        TYPES: lines(recipe.content["types"]),
        COMMANDS: commands(request, recipe),
    }
    if request.fits is not None:
        files[IMATRIX] = imatrix(request.fits, request.sites, recipe.tensors)
    return files


register(
    "gguf",
    tensor_types,
    _files,
    of_linears(
        lambda scheme: "" if scheme.weight and scheme.weight.blocks else "GGUF holds types of ggml, such as q4_k"
    ),
    fixed=unquantised,
    apart=True,
)
