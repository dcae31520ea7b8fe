"""Changed definitions of each kind of region, as faults of trainers and engines make them: the candidates of `causes`.

Those of rotary embedding, attention, caches and delta rules are in `attention_changes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.compare import definitions
from assay.compare.explanation.attention_changes import (
    of_attention,
    of_cache,
    of_delta_rule,
    of_rotary,
    rotation_of,
)
from assay.compare.explanation.changed import Change, doubles, exchanged, rounded, with_inputs, with_options
from assay.compare.judging import Evidence
from assay.compare.runs.run import scaled


def changes_of(evidence: Evidence) -> Iterator[Change]:
    """Yield the changes of a region's definition, the likeliest first."""
    if evidence.plan.kind == "cache":
        yield from of_cache(evidence)
    elif evidence.plan.definition in _CHANGES:
        yield from _CHANGES[evidence.plan.definition](evidence)


_EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0, 1e-2, 1e-1)


def _of_norm(evidence: Evidence) -> Iterator[Change]:
    eps, offset = evidence.plan.options["eps"], evidence.plan.options.get("offset", 0.0)
    for other in _EPSILONS:
        if other != eps:
            yield f"eps={other:g} in place of {eps:g}", with_options(evidence, eps=other)
    if evidence.plan.definition != "rmsnorm":
        return
    words = f"weight + {1 - offset:g} in place of weight + {offset:g}"
    yield words, with_options(evidence, offset=1.0 - offset)
    x, weight = doubles(evidence)[:2]
    rows = x.reshape(-1, weight.shape[0])
    mean, weight = rows.pow(2).mean(-1, keepdim=True), weight + offset
    centred = rows - rows.mean(-1, keepdim=True)
    for words, changed in (
        ("eps added to the root, not inside of it", rows / (mean.sqrt() + eps) * weight),
        ("the mean is subtracted", centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight),
        ("the weight is not applied", rows / (mean + eps).sqrt()),
        ("the sum of squares in place of their mean", rows / (mean * rows.shape[1] + eps).sqrt() * weight),
        ("not normalised", rows * weight),
        ("the norm is missing", rows),
    ):
        yield words, [changed.reshape(x.shape)]


def _of_gated_norm(evidence: Evidence) -> Iterator[Change]:
    x, weight, gate = doubles(evidence)
    eps, gate = evidence.plan.options["eps"], gate.reshape(x.shape)
    for other in _EPSILONS:
        if other != eps:
            yield f"eps={other:g} in place of {eps:g}", with_options(evidence, eps=other)
    normed = definitions.rmsnorm(x, weight, eps=eps)
    yield "the gate is not applied", [normed]
    yield "the logistic function of the gate, not SiLU", [normed * gate.sigmoid()]
    yield "gated before the norm", [definitions.rmsnorm(x * F.silu(gate), weight, eps=eps)]


def _of_linear(evidence: Evidence) -> Iterator[Change]:
    x, weight, *biases = doubles(evidence)
    bias = biases[0] if biases else torch.zeros(len(weight), dtype=torch.float64)
    if biases:
        yield "the bias is missing", [x @ weight.T]
        yield "the bias is added twice", [x @ weight.T + 2 * bias]
    if weight.shape[0] == weight.shape[1]:
        yield "the weight is transposed", [x @ weight + bias]
    for words, used in _other_scales(evidence, weight):
        yield words, [x @ used.T + bias]
    for size in (128, 64, 32, 16):
        if size > max(weight.shape):
            continue
        for shift, words in (
            ((0, 0), ""),
            ((0, 1), ", each with the scale of its neighbour along K"),
            ((1, 0), ", each with the scale of its neighbour along N"),
        ):
            yield f"FP8 weights in blocks of {size}{words}", [x @ _in_blocks(weight, size, shift).T + bias]
    for blocks in (2, 4, 8):
        if part := weight.shape[1] // blocks:
            kept = slice(0, weight.shape[1] - part)
            words = f"the last {part} of {weight.shape[1]} terms of each sum are missing"
            yield words, [x[:, kept] @ weight[:, kept].T + bias]
    for parts in (2, 4, 8):
        for format in (torch.bfloat16, torch.float16):
            name = str(format).removeprefix("torch.")
            results = [_in_parts(x, weight, parts, format) + bias]
            yield f"the sum of {parts} parts, each rounded to {name} (as of ranks)", results


def _other_scales(evidence: Evidence, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight of codes and scales with the scales of the neighbouring blocks."""
    scale = next(
        (s for name in ("weight_scale_inv", "weight_scale") if (s := evidence.parameter(name)) is not None), None
    )
    if scale is None or scale.dim() != 2 or scale.numel() < 2:
        return
    own = scaled(torch.ones_like(weight), scale.double())
    for axis, side in ((1, "K"), (0, "N")):
        for shift in (1, -1) if scale.shape[axis] > 1 else ():
            used = scaled(weight / own, scale.double().roll(shift, axis))
            yield f"each block of the weight has the scale of its neighbour along {side}", used


def _in_parts(x: Tensor, weight: Tensor, parts: int, format: torch.dtype) -> Tensor:
    """Return the sum of ranks' products as they are gathered: each rounded, then added in the format."""
    products = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
    return definitions.total(*((some @ rows.T).to(format) for some, rows in products)).double()


def _in_blocks(weight: Tensor, size: int, shift: tuple[int, int]) -> Tensor:
    """Return a weight in FP8 with a scale for each block, its own or that of a neighbour."""
    rows, columns = (math.ceil(length / size) for length in weight.shape)
    padded = F.pad(weight, (0, columns * size - weight.shape[1], 0, rows * size - weight.shape[0]))
    blocks = padded.reshape(rows, size, columns, size)
    scale = (blocks.abs().amax((1, 3), keepdim=True) / 448.0).clamp(min=1e-30)
    codes = rounded(blocks / scale, torch.float8_e4m3fn)
    used = scale.roll((-shift[0], -shift[1]), (0, 2))
    return (codes * used).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]


def _of_gated_product(evidence: Evidence) -> Iterator[Change]:
    yield from _other_activations(evidence)
    gate, up = doubles(evidence)
    yield "gate and up exchanged", exchanged(evidence, 0, 1)
    yield "the activation is missing", [gate * up]


def _other_activations(evidence: Evidence) -> Iterator[Change]:
    own = evidence.plan.options["activation"]
    for other in definitions.ACTIVATIONS:
        if other != own:
            yield f"{other} in place of {own}", with_options(evidence, activation=other)


def _of_output_gate(evidence: Evidence) -> Iterator[Change]:
    yield "the gate is not applied", [doubles(evidence)[0]]


def _of_routing(evidence: Evidence) -> Iterator[Change]:
    options, golden = evidence.plan.options, evidence.golden[0]
    words = "not renormalised" if options["renormalize"] else "renormalised"
    changed = with_options(evidence, renormalize=not options["renormalize"])
    yield f"the weights of the chosen experts are {words}", changed
    if options["factor"] != 1.0:
        yield "the scaling factor is missing", with_options(evidence, factor=1.0)
    other = "sigmoid" if options["scoring"] == "softmax" else "softmax"
    yield f"{other} in place of {options['scoring']}", with_options(evidence, scoring=other)
    yield "the weights are applied twice", [golden.pow(2)]
    bias = evidence.parameter("e_score_correction_bias")
    if bias is not None:
        logits, ids = doubles(evidence)
        scores = logits.sigmoid() if options["scoring"] == "sigmoid" else logits.softmax(-1)
        weights = (scores + bias.double()).gather(1, ids.long())
        weights = weights / weights.sum(-1, keepdim=True) if options["renormalize"] else weights
        yield "the bias that only chooses is in the weights too", [weights * options["factor"]]
    yield "the weights are all one", [torch.ones_like(golden)]


def _of_experts(evidence: Evidence) -> Iterator[Change]:
    ids, weights, gate_up = 1, 2, 3
    count = evidence.inputs[0][gate_up].shape[0]
    yield "the routing weights are applied twice", with_inputs(evidence, {weights: torch.square})
    yield "the routing weights are not applied", with_inputs(evidence, {weights: torch.ones_like})
    yield "the routing weights are renormalised", with_inputs(evidence, {weights: _renormalised})
    for shift, words in ((1, "one too large"), (-1, "one too small")):
        change = partial(_other_ids, shift=shift, count=count)
        yield f"each expert's id is {words}", with_inputs(evidence, {ids: change})
    for choice in range(evidence.inputs[0][ids].shape[1]):
        changed = with_inputs(evidence, {weights: partial(_without, choice=choice)})
        yield f"the token's choice {choice} is dropped", changed
    yield "the weights of the choices are in the reverse order", with_inputs(evidence, {weights: _reversed})
    yield "gate and up exchanged", with_inputs(evidence, {gate_up: _halves_exchanged})
    yield "layout of gate and up: rows in turns in place of halves", with_inputs(evidence, {gate_up: _in_turns})
    yield "layout of gate and up: halves in place of rows in turns", with_inputs(evidence, {gate_up: _in_halves})
    ranks = _ranks(evidence.inputs[0][ids], count)
    for capacity in range(1, min(int(ranks.max()) + 1, 65)):
        changed = with_inputs(evidence, {weights: partial(_up_to, ranks=ranks, capacity=capacity)})
        yield f"tokens beyond an expert's capacity of {capacity} are dropped", changed
    yield from _other_activations(evidence)


def _renormalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _other_ids(ids: Tensor, shift: int, count: int) -> Tensor:
    return (ids.long() + shift) % count


def _without(weights: Tensor, choice: int) -> Tensor:
    weights = weights.clone()
    weights[:, choice] = 0
    return weights


def _reversed(x: Tensor) -> Tensor:
    return x.flip(-1)


def _in_turns(x: Tensor) -> Tensor:
    return torch.cat([x[:, 0::2], x[:, 1::2]], 1)


def _in_halves(x: Tensor) -> Tensor:
    return torch.stack(x.chunk(2, 1), 2).flatten(1, 2)


def _ranks(ids: Tensor, count: int) -> Tensor:
    """Return for each choice [T, k] how many choices of the same expert come before, token by token."""
    flat = ids.flatten().long()
    chosen = F.one_hot(flat, count).cumsum(0)
    return (chosen.gather(1, flat[:, None])[:, 0] - 1).reshape(ids.shape)


def _up_to(weights: Tensor, ranks: Tensor, capacity: int) -> Tensor:
    return torch.where(ranks < capacity, weights, 0.0)


def _halves_exchanged(x: Tensor) -> Tensor:
    return x.roll(x.shape[1] // 2, 1)


def _of_total(evidence: Evidence) -> Iterator[Change]:
    terms = doubles(evidence)
    for index, what in enumerate(evidence.plan.inputs):
        if len(terms) > 1:
            yield f"{what} is not added", [definitions.total(*terms[:index], *terms[index + 1 :])]
        yield f"{what} is added twice", [definitions.total(*terms, terms[index])]


def _of_shared(evidence: Evidence) -> Iterator[Change]:
    stream, branch, gate = doubles(evidence)
    yield "the shared expert is missing", [stream]
    yield "the shared expert's gate is not applied", [stream + branch]
    yield "the shared expert's gate has no sigmoid", [stream + gate * branch]


def _of_log_softmax(evidence: Evidence) -> Iterator[Change]:
    yield "logits are not normalised", doubles(evidence)
    yield "the logarithm to base 2", [evidence.golden[0] / math.log(2)]


def _of_tempered(evidence: Evidence) -> Iterator[Change]:
    temperature = evidence.plan.options["temperature"]
    yield "the temperature is applied twice", with_options(evidence, temperature=temperature**2)
    yield "the temperature is not applied", with_options(evidence, temperature=1.0)


def _of_capped(evidence: Evidence) -> Iterator[Change]:
    yield "the logits are not capped", doubles(evidence)


def _of_embedding(evidence: Evidence) -> Iterator[Change]:
    yield "the embeddings are not scaled", with_options(evidence, scale=1.0)
    width = evidence.golden[0].shape[1]
    yield "the embeddings are multiplied by sqrt(width)", with_options(evidence, scale=width**0.5)


def _of_table(evidence: Evidence) -> Iterator[Change]:
    positions, frequencies = doubles(evidence)
    for factor in (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0, 32.0):
        changed = with_inputs(evidence, {1: partial(torch.mul, other=1 / factor)})
        yield f"all frequencies divided by {factor:g}", changed
    for base in (1e4, 1e5, 5e5, 1e6, 1e7):
        plain = base ** (-torch.arange(len(frequencies)).double() / len(frequencies))
        for words, options in (("without scaling", {}), ("and no factor", {"scale": 1.0})):
            changed = list(definitions.rotary_table(positions, plain, **{**evidence.plan.options, **options, **_WIDE}))
            yield f"rope theta {base:g}, {words}", changed
    yield "the factor of cosines and sines is missing", with_options(evidence, scale=1.0)
    given = [each.double() for each in evidence.given]
    angles, scale = rotation_of(*given)
    own = angles[: len(frequencies)] / max(float(positions[min(1, len(positions) - 1)] - positions[0]), 1.0)
    ratio = own / frequencies
    words = f"from {float(ratio.min()):.3g} to {float(ratio.max()):.3g} times those of the configuration"
    full: dict[str, Any] = {**evidence.plan.options, **_WIDE, "scale": scale}
    changed = list(definitions.rotary_table(positions, own, **full))
    yield f"other frequencies, {words}: another theta, YaRN factor or scaling", changed
    for shift, words in ((1, "one too large"), (-1, "one too small")):
        moved = (positions + shift).clamp(min=0)
        yield (
            f"positions are {words}",
            list(definitions.rotary_table(moved, frequencies, **{**evidence.plan.options, **_WIDE})),
        )


_WIDE: dict[str, Any] = {"dtype": "float64"}

_CHANGES: dict[str, Callable[[Evidence], Iterator[Change]]] = {
    "embedding": _of_embedding,
    "rotary_table": _of_table,
    "rmsnorm": _of_norm,
    "layernorm": _of_norm,
    "gated_rmsnorm": _of_gated_norm,
    "linear": _of_linear,
    "router_logits": _of_linear,
    "rotary": of_rotary,
    "attention": of_attention,
    "rotary_attention": of_attention,
    "latent_attention": of_attention,
    "output_gate": _of_output_gate,
    "gated_delta_rule": of_delta_rule,
    "gated_product": _of_gated_product,
    "routing_weights": _of_routing,
    "experts": _of_experts,
    "total": _of_total,
    "gated_total": _of_shared,
    "log_softmax": _of_log_softmax,
    "tempered": _of_tempered,
    "capped": _of_capped,
}
