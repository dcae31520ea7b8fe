"""Changed definitions of rotary embedding, attention, its cache, and delta rules (`changes`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.compare import definitions
from assay.compare.explanation.changed import (
    Change,
    Results,
    arguments_of,
    doubles,
    exchanged,
    fitted,
    rounded,
    scaled_to,
    with_inputs,
    with_options,
)
from assay.compare.judging import Evidence


def of_rotary(evidence: Evidence) -> Iterator[Change]:
    """Yield other pairings, positions, frequencies and directions."""
    names, other = arguments_of(evidence.plan.definition), not evidence.plan.options["interleaved"]
    cos, sin = names.index("cos"), names.index("sin")
    words = "neighbouring features are rotated together" if other else "features are rotated by halves"
    yield f"rotary pairing: {words}", with_options(evidence, interleaved=other)
    if evidence.plan.definition == "rotary":
        q, k, *tables = doubles(evidence)
        counts = evidence.plan.options["heads"], evidence.plan.options["groups"]
        if other:
            turned = [_neighbours(x, count, *tables) for x, count in zip((q, k), counts, strict=True)]
            yield f"rotary pairing: {words}, in their own places", turned
        ends = [_last_rotated(x, count, *tables) for x, count in zip((q, k), counts, strict=True)]
        yield "partial rotary embedding: the last features of each head are rotated, not the first", ends
        yield "only keys are rotated", [q, evidence.golden[1]]
        yield "only queries are rotated", [evidence.golden[0], k]
    if evidence.plan.definition == "latent_attention":
        yield "the rotary key is not rotated", with_options(evidence, rotates="q")
        yield "queries are not rotated", with_options(evidence, rotates="k")
    changed = with_inputs(evidence, {cos: torch.ones_like, sin: torch.zeros_like})
    yield "the rotary embedding is not applied", changed
    yield "rotated the other way", with_inputs(evidence, {sin: torch.neg})
    for earlier, words in ((True, "one too small"), (False, "one too large")):
        change = partial(_shifted, earlier=earlier)
        yield f"positions are {words}", with_inputs(evidence, {cos: change, sin: change})
    yield "all positions are the first", with_inputs(evidence, {cos: _first, sin: _first})
    angles, scale = rotation_of(*(evidence.inputs[0][index].double() for index in (cos, sin)))
    for factor in (2.0, 0.5, 4.0, 0.25, 8.0, 16.0, 32.0):
        one, other_one = _tables(angles / factor, scale)
        yield f"frequencies divided by {factor:g}", with_inputs(evidence, {cos: one, sin: other_one})
    for base in (1e4, 1e5, 5e5, 1e6, 1e7):
        plain = base ** (-torch.arange(0, len(angles), 2).double() / len(angles))
        one, other_one = _tables(torch.cat([plain, plain]), scale)
        yield f"rope theta {base:g}", with_inputs(evidence, {cos: one, sin: other_one})


def _neighbours(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) in place, as Llama's own complex multiplication does."""
    rows, width = x.reshape(len(x), heads, -1), cos.shape[-1]
    even, odd = rows[..., 0:width:2], rows[..., 1:width:2]
    c, s = cos[:, None, : width // 2], sin[:, None, : width // 2]
    turned = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)
    return torch.cat([turned, rows[..., width:]], -1).reshape(x.shape)


def _last_rotated(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last features of each head by the tables' width."""
    rows, width = x.reshape(len(x), heads, -1), cos.shape[-1]
    turned = definitions.rotated(rows[..., -width:].reshape(len(x), -1), cos, sin, heads=heads)
    return torch.cat([rows[..., :-width], turned.reshape(len(x), heads, width)], -1).reshape(x.shape)


def _first(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def _shifted(x: Tensor, *, earlier: bool) -> Tensor:
    """Return each token's row of the token before, or of the next; at the end its own."""
    return torch.cat([x[:1], x[:-1]]) if earlier else torch.cat([x[1:], x[-1:]])


def rotation_of(cos: Tensor, sin: Tensor) -> tuple[Tensor, float]:
    """Return the angles of one position [R] and the factor of cosines, from tables of consecutive positions."""
    turns = torch.complex(cos, sin)
    return torch.angle(turns[min(1, len(turns) - 1)] / turns[0]), float(turns.abs().mean())


def _tables(angles: Tensor, scale: float) -> tuple[partial[Tensor], partial[Tensor]]:
    return partial(_table, angles=angles, scale=scale, sine=False), partial(
        _table, angles=angles, scale=scale, sine=True
    )


def _table(like: Tensor, angles: Tensor, scale: float, *, sine: bool) -> Tensor:
    full = torch.arange(len(like)).double()[:, None] * angles
    return (full.sin() if sine else full.cos()) * scale


def of_attention(evidence: Evidence) -> Iterator[Change]:
    """Yield other scales, groups of heads, keys and values, masks and windows."""
    options, names = evidence.plan.options, arguments_of(evidence.plan.definition)
    yield from _scales(evidence)
    if "k" in names and "v" in names:
        yield from _heads_of_keys(evidence, names.index("k"), names.index("v"))
    if evidence.plan.definition == "attention":
        yield from _own_values(evidence)
        yield from _masks(evidence)
        yield from _pages(evidence)
    if options.get("softcap"):
        yield "the scores are not capped", with_options(evidence, softcap=0.0)
    if "cos" in names:
        yield from of_rotary(evidence)


def _scales(evidence: Evidence) -> Iterator[Change]:
    scale, hidden = evidence.plan.options["scale"], evidence.golden[0].shape[1]
    width = hidden // evidence.plan.options["heads"]
    for words, other in (
        ("1", 1.0), ("1 / D", 1.0 / width), ("1 / sqrt(D)", width**-0.5), ("1 / sqrt(2 D)", (2 * width) ** -0.5),
        ("1 / sqrt(D / 2)", (width / 2) ** -0.5), ("1 / sqrt(hidden size)", hidden**-0.5), ("its square", scale**2),
        ("its root", scale**0.5), ("log2(e) times it", scale * math.log2(math.e)),
        ("ln(2) times it", scale * math.log(2)),
    ):  # fmt: skip
        if other != scale:
            yield f"softmax scale {words} ({other:.6g}) in place of {scale:.6g}", with_options(evidence, scale=other)
    best = fitted(evidence, "scale")
    if best is not None and abs(best / scale - 1) > 5e-3:
        yield f"softmax scale {best / scale:.4g} times {scale:.6g}", with_options(evidence, scale=best)


def _heads_of_keys(evidence: Evidence, k: int, v: int) -> Iterator[Change]:
    heads, groups = evidence.plan.options["heads"], evidence.plan.options["groups"]
    shared = heads // max(groups, 1)
    for words, order in (
        ("query head h reads key head h mod groups, not h // n", [head % groups for head in range(heads)]),
        ("each query head reads the next key head", [min(head // shared + 1, groups - 1) for head in range(heads)]),
        ("all query heads read the first key head", [0] * heads),
    ):
        if 1 < groups < heads:
            change = partial(_ordered, groups=groups, order=order)
            yield f"head group: {words}", with_inputs(evidence, {k: change, v: change}, groups=heads)
    yield "keys and values exchanged", exchanged(evidence, k, v)
    for format in (torch.float8_e4m3fn, torch.float8_e5m2):
        name = str(format).removeprefix("torch.")
        for words, change in (
            ("", partial(rounded, format=format)),
            (" with a scale for each tensor", partial(scaled_to, format=format)),
            (" with a scale for each token", partial(scaled_to, format=format, axes=(-1,))),
        ):
            yield f"keys of the cache in {name}{words}", with_inputs(evidence, {k: change})
            yield f"keys and values of the cache in {name}{words}", with_inputs(evidence, {k: change, v: change})
    for size, index in itertools.product((1, 2, 4, 8, 16, 32, 64), (k, v)):
        name = "keys" if index == k else "values"
        yield f"{name} of the last {size} tokens are zero", with_inputs(evidence, {index: partial(_cut, size=size)})


def _ordered(x: Tensor, groups: int, order: Sequence[int]) -> Tensor:
    return x.reshape(len(x), groups, -1)[:, list(order)].reshape(len(x), -1)


def _cut(x: Tensor, size: int) -> Tensor:
    return torch.cat([x[:-size], torch.zeros_like(x[-size:])])


def _own_values(evidence: Evidence) -> Iterator[Change]:
    """Steps that read the value of the newest token before it is written: zero."""
    wrong = evidence.wrong[0]
    begin = int(wrong.nonzero()[0, 0]) if bool(wrong.any()) else 0
    options, results, start = evidence.plan.options, [], 0
    for q, k, v, *_ in evidence.inputs:
        length, shared = len(q), options["heads"] // options["groups"]
        queries, keys = (
            x.double().reshape(length, count, -1).transpose(0, 1)
            for x, count in ((q, options["heads"]), (k, options["groups"]))
        )
        scores = queries @ keys.repeat_interleave(shared, 0).mT * options["scale"]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        own = scores.masked_fill(mask, -math.inf).softmax(-1).diagonal(0, -2, -1)  # [heads, tokens]
        values = v.double().reshape(length, options["groups"], -1).repeat_interleave(shared, 1)
        results.append(evidence.golden[0][start : start + length] - (own.T[:, :, None] * values).reshape(length, -1))
        start += length
    changed = torch.cat(results)
    if not options.get("window") and not options.get("softcap"):
        words = "the value of the last token is missing (read before it is written)"
        yield words, [torch.cat([evidence.golden[0][:begin], changed[begin:]])]


def _masks(evidence: Evidence) -> Iterator[Change]:
    window = evidence.plan.options.get("window", 0)
    length = max(len(call[0]) for call in evidence.inputs)
    for words, ahead in (
        ("the next key is seen (mask one too far)", 1),
        ("a query doesn't see its own key (mask one too short)", -1),
        ("no causal mask", length),
    ):
        parts = [
            definitions.stepwise_attention(*(x.double() for x in call), **evidence.plan.options, ahead=ahead)
            for call in evidence.inputs
        ]
        yield words, [torch.cat(parts)]
    if window:
        yield "no sliding window", with_options(evidence, window=0)
    others = (window + 1, window - 1, 2 * window, window // 2) if window else (length // 2, 64, 32, 16, 8)
    for other in others:
        if 0 < other < length:
            words = f"a sliding window of {other} in place of {window or 'none'}"
            yield words, with_options(evidence, window=other)


def _pages(evidence: Evidence) -> Iterator[Change]:
    """Pages of the cache that later tokens read as other ones: zero, or another page's keys and values."""
    wrong = evidence.wrong[0]
    if len(evidence.inputs) != 1 or not bool(wrong.any()) or bool(wrong.all()):
        return
    first = int(wrong.nonzero()[0, 0])  # earlier tokens read the right page
    for size in (16, 32, 8):
        pages = range(len(evidence.golden[0]) // size)
        for page, other in itertools.product(pages, (None, *pages)):
            if page == other or page * size >= first:
                continue
            read = "zero" if other is None else f"those of {other * size} to {(other + 1) * size - 1}"
            change = partial(_paged, page=page, other=other, size=size)
            changed = with_inputs(evidence, {1: change, 2: change})[0]
            words = f"stale page: keys and values of tokens {page * size} to {(page + 1) * size - 1} are read as {read}"
            yield words, [torch.cat([evidence.golden[0][:first], changed[first:]])]


def _paged(x: Tensor, page: int, other: int | None, size: int) -> Tensor:
    x = x.clone()
    x[page * size : (page + 1) * size] = 0.0 if other is None else x[other * size : (other + 1) * size].clone()
    return x


def of_cache(evidence: Evidence) -> Iterator[Change]:
    """Yield caches in other formats, and with other tokens' keys or values where they are wrong."""
    given, golden, wrong = evidence.given[0].double(), evidence.golden[0], evidence.wrong[0]
    for format in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16):
        name = str(format).removeprefix("torch.")
        yield f"the cache is in {name}", [rounded(golden, format)]
        yield f"the cache is in {name} with a scale for each tensor", [scaled_to(golden, format)]
        yield f"the cache is in {name} with a scale for each token", [scaled_to(golden, format, (-1,))]
    rows = wrong.nonzero()[:, 0].tolist()
    if not rows:
        return
    first, count = rows[0], len(rows)
    for other in (golden == given[first]).all(-1).nonzero()[:1, 0].tolist():
        words = (
            f"the cache holds at tokens {first} to {first + count - 1} those of tokens {other} to {other + count - 1}"
        )
        yield words, [torch.where(wrong[:, None], golden.roll(first - other, 0), golden)]
    yield "the cache holds zeros there (never written)", [torch.where(wrong[:, None], 0.0, golden)]
    yield "the cache holds other numbers there: overwritten, or stale", [given]


def of_delta_rule(evidence: Evidence) -> Iterator[Change]:
    """Yield delta rules with one of their parts changed."""
    yield "dt_bias is missing", with_inputs(evidence, {4: torch.zeros_like})
    yield "A_log has the other sign", with_inputs(evidence, {3: torch.neg})
    yield "A_log is not exponentiated", with_inputs(evidence, {3: _logarithm})
    yield "the taps of the convolution are reversed", with_inputs(evidence, {2: _flipped})
    calls, options = [[x.double() for x in call] for call in evidence.inputs], evidence.plan.options

    def changed(
        normalised: str = "qk",
        activated: bool = True,
        part: int | None = None,
        change: Callable[[Tensor], Tensor] = torch.ones_like,
        **steps: Any,
    ) -> Results:
        results = []
        for call in calls:
            parts = list(definitions.delta_parts(*call, **options, normalised=normalised, activated=activated))
            if part is not None:
                parts[part] = change(parts[part])
            results.append(definitions.delta_steps(*parts, **steps))
        return [torch.cat(results)]

    yield "queries and keys are not normalised", changed("")
    yield "keys are not normalised", changed("q")
    yield "queries are not normalised", changed("k")
    yield "the activation of the convolution is missing", changed(activated=False)
    yield "the scale is missing", changed(part=0, change=_unscaled)
    yield "beta is not applied", changed(part=3)
    yield "the state does not decay", changed(part=4)
    yield "the state's value for a key is not subtracted", changed(subtracts=False)
    for size in (16, 32, 64):
        yield (
            f"the decay begins anew every {size} tokens (counted from the chunk)",
            changed(part=4, change=partial(_not_at_first, size=size)),
        )
        yield f"the state is zero again every {size} tokens", changed(restart=size)
        yield f"the decay since the beginning of a chunk of {size} is missing", changed(undecayed=size)
    shared = options["value_heads"] // options["key_heads"]
    if shared > 1 and options["key_heads"] > 1:
        order = [head % options["key_heads"] * shared for head in range(options["value_heads"])]
        words = "head group: value head h reads key head h mod groups, not h // n"
        yield words, [_of_other_heads(calls, options, order)]
    yield from _lost_convolution(evidence)


def _of_other_heads(calls: list[list[Tensor]], options: Mapping[str, Any], order: Sequence[int]) -> Tensor:
    results = []
    for call in calls:
        q, k, *rest = definitions.delta_parts(*call, **options)
        results.append(definitions.delta_steps(q[:, list(order)], k[:, list(order)], *rest))
    return torch.cat(results)


def _lost_convolution(evidence: Evidence) -> Iterator[Change]:
    """Convolutions whose last inputs aren't carried to the next chunk or step, from the first wrong token on."""
    wrong = evidence.wrong[0]
    if len(evidence.inputs) != 1 or not bool(wrong.any()):
        return
    qkvz, ba, convolution, a_log, dt_bias = doubles(evidence)
    begin, options = int(wrong.nonzero()[0, 0]), evidence.plan.options
    whole = definitions.delta_parts(qkvz, ba, convolution, a_log, dt_bias, **options)
    for words, size in (("chunk", 0), ("chunk of 32", 32), ("chunk of 16", 16), ("step", 1)):
        ends = [begin, *(range(begin + size, len(qkvz), size) if size else ()), len(qkvz)]
        pieces = [
            definitions.delta_parts(qkvz[one:two], ba[one:two], convolution, a_log, dt_bias, **options)
            for one, two in itertools.pairwise(ends)
        ]
        parts = [torch.cat([each[:begin], *(piece[index] for piece in pieces)]) for index, each in enumerate(whole)]
        yield f"the convolution's state is not carried to the next {words}", [definitions.delta_steps(*parts)]


def _unscaled(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** 0.5


def _not_at_first(decay: Tensor, size: int) -> Tensor:
    """Return the decays with one at the first step of each chunk."""
    return torch.where(torch.arange(len(decay))[:, None] % size == 0, 1.0, decay)


def _logarithm(x: Tensor) -> Tensor:
    return x.clamp(min=1e-30).log()


def _flipped(x: Tensor) -> Tensor:
    return x.flip(-1)
