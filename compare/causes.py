"""Why a region is beyond: which changed definition, number format or number gives what the run gave.

Each candidate is evaluated in float64 on the inputs that the run had. It is a cause if it leaves at most a tenth of the
error, or what the run's own dtypes explain, on the tokens that are wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from assay.compare import definitions
from assay.compare.judging import Evidence, in_float64
from assay.compare.run import Slot

Results = list[Tensor]
_FORMATS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_LEFT = 0.1  # share of the error that a cause may leave
_NOISE = 3.0  # times PyTorch's own error, where that is more


def cause_of(evidence: Evidence) -> str:
    """Return in words what explains a region that is beyond; empty if no candidate does."""
    with torch.no_grad():
        best: tuple[float, str] = (1.0, "")
        for words, make in _candidates(evidence):
            try:
                results = make()
            except (RuntimeError, ValueError, IndexError, TypeError):  # a change that these shapes don't admit
                continue
            left = _left(evidence, results)
            if left < 0.5 * best[0]:  # a later candidate must be clearly better
                best = left, words
        # What no change of the definition gives may be a constant factor, or what stands elsewhere.
        return best[1] if best[0] <= 1.0 and best[1] else _relation(evidence)


def suspicion_of(evidence: Evidence) -> str:
    """Return the changed definition that the errors of a region within its bounds lean to; empty if they lean to none.

    Of a candidate whose results differ from the golden by d, p = <e, d> / <d, d> of the errors e is 1 where it is what the
    run computes, and near 0 where e is rounding. Tokens are independent samples: z = sum t / sqrt(sum (t - p |d|^2)^2) with
    t = <e, d> of each. Number formats are no candidates: the errors of an honest rounding lean to themselves.
    """
    with torch.no_grad():
        changes = _CHANGES.get(evidence.plan.definition, lambda evidence: iter(()))(evidence)
        for words, make in changes:
            if "FP8" in words or "rounded" in words:
                continue
            try:
                results = make()
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            share, sigmas = _lean(evidence, results)
            if abs(share - 1) < _NEAR and sigmas > _SIGMAS:
                return words
    return ""


_NEAR, _SIGMAS, _LEAST_TOKENS = 0.25, 7.0, 8
"""How near 1 the errors' projection must be, of how many standard errors, and from how many tokens."""


def _lean(evidence: Evidence, results: Results) -> tuple[float, float]:
    products, squares = torch.zeros(0), torch.zeros(0)
    for result, golden, error in zip(results, evidence.golden, evidence.errors, strict=True):
        d = result - golden
        products = torch.cat([products, (error * d).sum(-1)])
        squares = torch.cat([squares, d.pow(2).sum(-1)])
    total = float(squares.sum())
    if not total > 0 or not math.isfinite(total):
        return 0.0, 0.0
    if total**2 < _LEAST_TOKENS * float(squares.pow(2).sum()):  # one token alone says nothing of how errors scatter
        return 0.0, 0.0
    share = float(products.sum()) / total
    spread = float((products - share * squares).pow(2).sum().sqrt())
    return share, float(products.sum()) / spread if spread else math.inf


def _left(evidence: Evidence, results: Results) -> float:
    """Return the error that a candidate leaves, over what a cause may leave: below 1 it is one."""
    worst = 0.0
    for given, result, error, typical, wrong in zip(
        evidence.given, results, evidence.errors, evidence.typical, evidence.wrong, strict=True
    ):
        if not bool(wrong.any()):
            continue
        rest = given.double() - result
        allowed = torch.maximum(_LEFT * error[wrong].pow(2).mean().sqrt(), _NOISE * typical.pow(2).mean().sqrt())
        floor = given.double().abs().mean() * torch.finfo(given.dtype).eps
        worst = max(worst, float(rest[wrong].pow(2).mean().sqrt() / torch.maximum(allowed, floor)))
        if bool((~wrong).any()):  # and it may not spoil what is right
            spoilt = rest[~wrong].pow(2).mean().sqrt() / torch.maximum(allowed, floor)
            worst = max(worst, min(float(spoilt), 2.0))
    return worst if worst == worst else math.inf


def _candidates(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    plan = evidence.plan
    yield from _CHANGES.get(plan.definition, lambda evidence: iter(()))(evidence)
    for format in _FORMATS:
        name = str(format).removeprefix("torch.")
        if evidence.given[0].dtype.itemsize <= format.itemsize and format.itemsize == 2:
            if evidence.given[0].dtype == format and plan.definition in ("rmsnorm", "log_softmax", "router_logits"):
                yield f"computed in {name} throughout, not in float32", _rounded_throughout(evidence, format)
            continue
        yield f"operands and result rounded to {name}", _with_rounded_inputs(evidence, format, result=True)
        yield f"operands rounded to {name}", _with_rounded_inputs(evidence, format, result=False)
        yield f"result rounded to {name}", _with_rounded_result(evidence, format)
        for index, what in enumerate(plan.inputs):
            if isinstance(what, Slot) and len(plan.inputs) > 1 and evidence.inputs[0][index].is_floating_point():
                label = _label(evidence, index)
                yield f"{label} rounded to {name}", _with_rounded_inputs(evidence, format, result=False, only=index)
    for index, what in enumerate(plan.inputs):
        if isinstance(what, Slot) and len(plan.inputs) > 1 and evidence.inputs[0][index].is_floating_point():
            yield f"{_label(evidence, index)} taken as zero", _with_inputs(evidence, {index: torch.zeros_like})
            yield f"{_label(evidence, index)} counted twice", _with_inputs(evidence, {index: lambda x: 2 * x})


def _label(evidence: Evidence, index: int) -> str:
    names = definitions_arguments(evidence.plan.definition)
    return names[min(index, len(names) - 1)]


def definitions_arguments(definition: str) -> Sequence[str]:
    """Return the names of a definition's positional arguments."""
    code = getattr(definitions, definition).__code__
    return code.co_varnames[: code.co_argcount] or ("term",)


def _evaluated(evidence: Evidence, calls: list[list[Tensor]], options: Any = None) -> Results:
    parts = [in_float64(evidence.plan, tensors, options) for tensors in calls]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _with_options(evidence: Evidence, **options: Any) -> Callable[[], Results]:
    return lambda: _evaluated(evidence, evidence.inputs, {**evidence.plan.options, **options})


def _with_inputs(evidence: Evidence, changes: dict[int, Callable[[Tensor], Tensor]], **options: Any) -> Callable[[], Results]:
    def make() -> Results:
        calls = [
            [changes[index](each.double()) if index in changes else each for index, each in enumerate(tensors)]
            for tensors in evidence.inputs
        ]
        return _evaluated(evidence, calls, {**evidence.plan.options, **options})

    return make


def _with_definition(evidence: Evidence, definition: str, calls: Any = None, **options: Any) -> Callable[[], Results]:
    other = replace(evidence, plan=replace(evidence.plan, definition=definition, options=options))
    return lambda: _evaluated(other, evidence.inputs if calls is None else calls)


def _with_rounded_inputs(
    evidence: Evidence, format: torch.dtype, *, result: bool, only: int | None = None
) -> Callable[[], Results]:
    def rounded(x: Tensor) -> Tensor:
        return _rounded(x, format)

    def make() -> Results:
        floats = [index for index, each in enumerate(evidence.inputs[0]) if each.is_floating_point()]
        changes = dict.fromkeys([index for index in floats if only in (None, index)], rounded)
        results = _with_inputs(evidence, changes)()
        return [rounded(each) for each in results] if result else results

    return make


def _with_rounded_result(evidence: Evidence, format: torch.dtype) -> Callable[[], Results]:
    return lambda: [_rounded(golden, format) for golden in evidence.golden]


def _rounded_throughout(evidence: Evidence, format: torch.dtype) -> Callable[[], Results]:
    """Every operation's result rounded: PyTorch's eager mode in the format, without the definition's float32."""

    def make() -> Results:
        kept = definitions.wide
        definitions.wide = lambda x: x  # type: ignore[assignment]
        try:
            function = getattr(definitions, evidence.plan.definition)
            calls = [[each.to(format) if each.is_floating_point() else each for each in call] for call in evidence.inputs]
            results = [function(*call, **evidence.plan.options) for call in calls]
        finally:
            definitions.wide = kept
        return [torch.cat([each.double().reshape(len(each), -1) for each in results])]

    return make


def _rounded(x: Tensor, format: torch.dtype) -> Tensor:
    limit = torch.finfo(format).max
    return x.clamp(-limit, limit).to(format).double() if format.itemsize == 1 else x.to(format).double()


# Changes of each definition, the likeliest first.


def _of_norm(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    eps = evidence.plan.options["eps"]
    for other in (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0, 1e-2, 1e-1):
        if other != eps:
            yield f"eps={other:g} in place of {eps:g}", _with_options(evidence, eps=other)
    if evidence.plan.definition == "rmsnorm":
        offset = evidence.plan.options.get("offset", 0.0)
        yield f"weight + {1 - offset:g} in place of weight + {offset:g}", _with_options(evidence, offset=1.0 - offset)
        yield "eps added to the root, not inside of it", lambda: [_rms(evidence, "outside")]
        yield "the mean is subtracted", lambda: [_rms(evidence, "centred")]
        yield "the weight is not applied", lambda: [_rms(evidence, "unweighted")]
        yield "the sum of squares in place of their mean", lambda: [_rms(evidence, "sum")]
        yield "not normalised", lambda: [_rms(evidence, "none")]


def _rms(evidence: Evidence, change: str) -> Tensor:
    x, weight, *_ = (each.double() for each in evidence.inputs[0])
    eps, offset = evidence.plan.options["eps"], evidence.plan.options.get("offset", 0.0)
    rows = x.reshape(-1, weight.shape[0])
    if change == "centred":
        rows = rows - rows.mean(-1, keepdim=True)
    squares = rows.pow(2)
    mean = squares.sum(-1, keepdim=True) if change == "sum" else squares.mean(-1, keepdim=True)
    root = mean.sqrt() + eps if change == "outside" else (mean + eps).sqrt()
    normed = rows if change == "none" else rows / root
    return (normed if change == "unweighted" else normed * (weight + offset)).reshape(x.shape)


def _of_gated_norm(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    x, weight, gate = (each.double() for each in evidence.inputs[0])
    eps = evidence.plan.options["eps"]
    for other in (1e-5, 1e-6, 1e-12, 0.0, 1e-3):
        if other != eps:
            yield f"eps={other:g} in place of {eps:g}", _with_options(evidence, eps=other)
    silu, normed = torch.nn.functional.silu(gate.reshape(x.shape)), definitions.rmsnorm(x, weight, eps=eps)
    yield "the gate is not applied", lambda: [normed]
    yield "the logistic function of the gate, not SiLU", lambda: [normed * gate.reshape(x.shape).sigmoid()]
    yield "gated before the norm", lambda: [definitions.rmsnorm(x * silu, weight, eps=eps)]


def _of_linear(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    x, weight, *bias = (each.double() for each in evidence.inputs[0])
    if bias:
        yield "the bias is missing", lambda: [x @ weight.T]
        yield "the bias is added twice", lambda: [x @ weight.T + 2 * bias[0]]
    if weight.shape[0] == weight.shape[1]:
        yield "the weight is transposed", lambda: [x @ weight]
    yield from _quantised(x, weight, bias)
    for blocks in (2, 4, 8):
        part = weight.shape[1] // blocks
        if part:
            kept = slice(0, weight.shape[1] - part)
            yield (
                f"the last {part} of {weight.shape[1]} terms of each sum are missing",
                lambda kept=kept: [x[:, kept] @ weight[:, kept].T + (bias[0] if bias else 0.0)],
            )
    for parts in (2, 4, 8):
        yield (
            f"the sum of {parts} parts, each rounded to bfloat16 (as of ranks)",
            lambda parts=parts: [_in_parts(x, weight, bias, parts, torch.bfloat16)],
        )
        yield (
            f"the sum of {parts} parts, each rounded to float16 (as of ranks)",
            lambda parts=parts: [_in_parts(x, weight, bias, parts, torch.float16)],
        )
    for shift in (1, -1):
        yield f"features shifted by {shift}", lambda shift=shift: [evidence.golden[0].roll(shift, -1)]


def _in_parts(x: Tensor, weight: Tensor, bias: list[Tensor], parts: int, format: torch.dtype) -> Tensor:
    """The sum of ranks' products as they are gathered: each rounded, then added in the format."""
    total: Tensor | None = None
    for some, rows in zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True):
        product = (some @ rows.T).to(format)
        total = product if total is None else total + product
    assert total is not None
    return total.double() + (bias[0] if bias else 0.0)


def _quantised(x: Tensor, weight: Tensor, bias: list[Tensor]) -> Iterator[tuple[str, Callable[[], Results]]]:
    """Weights in 8-bit floats with a scale for each block, right and with a neighbour's scale."""
    for size in (128, 64, 32, 16):
        if size > max(weight.shape):
            continue
        for along, words in (((0, 0), "blocks"), ((0, 1), "blocks"), ((1, 0), "blocks")):
            label = f"FP8 weights in {words} of {size}"
            wrong = "" if along == (0, 0) else f", each with the scale of its neighbour along {'N' if along[0] else 'K'}"
            yield (
                label + wrong,
                lambda size=size, along=along: [x @ _fp8(weight, size, along).T + (bias[0] if bias else 0.0)],
            )


def _fp8(weight: Tensor, size: int, shift: tuple[int, int]) -> Tensor:
    rows, columns = (math.ceil(length / size) for length in weight.shape)
    padded = torch.nn.functional.pad(weight, (0, columns * size - weight.shape[1], 0, rows * size - weight.shape[0]))
    blocks = padded.reshape(rows, size, columns, size)
    scale = (blocks.abs().amax((1, 3), keepdim=True) / 448.0).clamp(min=1e-30)
    codes = _rounded(blocks / scale, torch.float8_e4m3fn)
    other = scale.roll((-shift[0], -shift[1]), (0, 2))
    return (codes * other).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]


def _of_rotary(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    options = evidence.plan.options
    names = definitions_arguments(evidence.plan.definition)
    cos, sin = names.index("cos"), names.index("sin")
    other = not options["interleaved"]
    words = "neighbouring features are rotated together" if other else "features are rotated by halves"
    yield f"rotary pairing: {words}", _with_options(evidence, interleaved=other)
    if other:
        yield f"rotary pairing: {words}, in their own places", lambda: _neighbours(evidence)
    yield "the rotary embedding is not applied", _with_inputs(
        evidence, {cos: torch.ones_like, sin: torch.zeros_like}
    )
    yield "rotated the other way", _with_inputs(evidence, {sin: lambda x: -x})
    for shift in (1, -1):
        yield (
            f"positions are {'one too small' if shift > 0 else 'one too large'}",
            _with_inputs(evidence, {each: lambda x, shift=shift: _shifted(x, shift) for each in (cos, sin)}),
        )
    yield "all positions are the first", _with_inputs(
        evidence, {each: lambda x: x[:1].expand_as(x) for each in (cos, sin)}
    )
    for only in ("q", "k") if "k" in names else ():
        yield f"only {'keys' if only == 'q' else 'queries'} are rotated", lambda only=only: _one_rotated(evidence, only)
    theta = _theta(evidence.inputs[0][cos], evidence.inputs[0][sin])
    if theta is not None:
        angles, scale = theta
        for factor in (2.0, 0.5, 4.0, 0.25, 8.0, 16.0, 32.0):
            yield (
                f"frequencies divided by {factor:g}",
                _with_inputs(evidence, {cos: lambda x, f=factor: _angle(angles, f, scale, len(x))[0],
                                        sin: lambda x, f=factor: _angle(angles, f, scale, len(x))[1]}),
            )  # fmt: skip
        for base in (1e4, 1e5, 5e5, 1e6, 1e7):
            yield (
                f"rope theta {base:g}",
                _with_inputs(evidence, {cos: lambda x, b=base: _base(x, b, scale)[0], sin: lambda x, b=base: _base(x, b, scale)[1]}),
            )


def _neighbours(evidence: Evidence) -> Results:
    """Rotate the pairs (2i, 2i + 1) in place, as Llama's own complex multiplication does."""
    calls = []
    q, k, cos, sin, *rest = (each.double() for each in evidence.inputs[0])
    options = evidence.plan.options
    for x, count in ((q, options["heads"]), (k, options["groups"])):
        rows = x.reshape(len(x), count, -1)
        width = cos.shape[-1]
        even, odd = rows[..., 0:width:2], rows[..., 1:width:2]
        c, s = cos[:, None, : width // 2], sin[:, None, : width // 2]
        turned = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)
        calls.append(torch.cat([turned, rows[..., width:]], -1).reshape(x.shape))
    return calls


def _one_rotated(evidence: Evidence, only: str) -> Results:
    golden, call = evidence.golden, evidence.inputs[0]
    if len(golden) == 2:
        return [call[0].double(), golden[1]] if only == "q" else [golden[0], call[1].double()]
    raise ValueError


def _shifted(x: Tensor, shift: int) -> Tensor:
    """The rows one token earlier (1) or later (-1), continued by the same rotation as the end's."""
    return torch.cat([x[:1], x[:-1]]) if shift > 0 else torch.cat([x[1:], x[-1:]])


def _theta(cos: Tensor, sin: Tensor) -> tuple[Tensor, float] | None:
    """Return the angles of one position [R] and the factor of cosines, from tables of consecutive positions."""
    scale = float((cos.double().pow(2) + sin.double().pow(2)).sqrt().mean())
    if len(cos) < 2 or scale == 0:
        return None
    one, two = (torch.complex(cos[row].double(), sin[row].double()) for row in (0, 1))
    return torch.angle(two / one), scale


def _angle(angles: Tensor, divisor: float, scale: float, length: int) -> tuple[Tensor, Tensor]:
    full = torch.arange(length).double()[:, None] * angles / divisor
    return full.cos() * scale, full.sin() * scale


def _base(x: Tensor, base: float, scale: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    frequencies = base ** (-torch.arange(0, width, 2).double() / width)
    return _angle(torch.cat([frequencies, frequencies]), 1.0, scale, len(x))


def _of_attention(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    options = evidence.plan.options
    scale, window = options["scale"], options.get("window", 0)
    width = evidence.golden[0].shape[1] // options["heads"]
    for words, other in (
        ("1", 1.0), ("1 / D", 1.0 / width), ("1 / sqrt(D)", width**-0.5), ("1 / sqrt(2 D)", (2 * width) ** -0.5),
        ("1 / sqrt(D / 2)", (width / 2) ** -0.5), ("1 / sqrt(hidden size)", evidence.golden[0].shape[1] ** -0.5),
        ("its square", scale**2), ("its root", scale**0.5), ("log2(e) times it", scale * math.log2(math.e)),
        ("ln(2) times it", scale * math.log(2)), ("twice it", 2 * scale), ("half of it", scale / 2),
    ):  # fmt: skip
        if other != scale:
            yield f"softmax scale {words} ({other:.6g}) in place of {scale:.6g}", _with_options(evidence, scale=other)
    fitted = _fitted(evidence, "scale")
    if fitted is not None and abs(fitted / scale - 1) > 5e-3:
        yield f"softmax scale {fitted / scale:.4g} times {scale:.6g}", _with_options(evidence, scale=fitted)
    names = definitions_arguments(evidence.plan.definition)
    if "k" in names and "v" in names:
        heads, groups = options["heads"], options["groups"]
        shared = heads // max(groups, 1)
        k, v = names.index("k"), names.index("v")
        if 1 < groups < heads:
            order = [head % groups for head in range(heads)]
            both = {index: lambda x: _heads(x, groups, order) for index in (k, v)}
            yield "head group: query head h reads key head h mod groups, not h // n", _with_inputs(evidence, both, groups=heads)
            first = [min(head // shared + 1, groups - 1) for head in range(heads)]
            both = {index: lambda x: _heads(x, groups, first) for index in (k, v)}
            yield "head group: each query head reads the next key head", _with_inputs(evidence, both, groups=heads)
            zero = {index: lambda x: _heads(x, groups, [0] * heads) for index in (k, v)}
            yield "head group: all query heads read the first key head", _with_inputs(evidence, zero, groups=heads)
        yield "keys and values exchanged", _exchanged(evidence, k, v)
        for size, index in itertools.product((1, 2, 4, 8, 16, 32, 64), (k, v)):
            yield (
                f"{names[index]} of the last {size} tokens are zero",
                _with_inputs(evidence, {index: lambda x, size=size: torch.cat([x[:-size], 0 * x[-size:]])}),
            )
    yield "the next key is seen (mask one too far)", _masked(evidence, 1, window)
    yield "a query doesn't see its own key (mask one too short)", _masked(evidence, -1, window)
    yield "no causal mask", _masked(evidence, 1 << 30, 0)
    if window:
        yield "no sliding window", _with_options(evidence, window=0)
    length = max(len(call[0]) for call in evidence.inputs)
    for other in dict.fromkeys([window + 1, window - 1, 2 * window, window // 2, *(() if window else (length // 2, 64, 32, 16, 8))]):
        if 0 < other < length and other != window:
            yield f"a sliding window of {other} in place of {window or 'none'}", _with_options(evidence, window=other)
    if options.get("softcap"):
        yield "the scores are not capped", _with_options(evidence, softcap=0.0)
    if "cos" in names:
        yield from _of_rotary(evidence)


def _fitted(evidence: Evidence, option: str) -> float | None:
    """Return the value of a number among the options that fits the errors best, by three steps of Newton's method."""
    value = evidence.plan.options[option]
    for _ in range(3):
        step = 1e-3 * value
        here = _evaluated(evidence, evidence.inputs, {**evidence.plan.options, option: value})
        there = _evaluated(evidence, evidence.inputs, {**evidence.plan.options, option: value + step})
        slope = torch.cat([(two - one).reshape(-1) for one, two in zip(here, there, strict=True)])
        error = torch.cat([(g.double() - one).reshape(-1) for g, one in zip(evidence.given, here, strict=True)])
        size = float(slope.pow(2).sum())
        if not size > 0:
            return None
        value += step * float((slope * error).sum()) / size
        if not math.isfinite(value) or value <= 0:
            return None
    return float(value)


def _heads(x: Tensor, groups: int, order: Sequence[int]) -> Tensor:
    return x.reshape(len(x), groups, -1)[:, list(order)].reshape(len(x), -1)


def _exchanged(evidence: Evidence, one: int, other: int) -> Callable[[], Results]:
    def make() -> Results:
        calls = [list(call) for call in evidence.inputs]
        for call in calls:
            call[one], call[other] = call[other], call[one]
        return _evaluated(evidence, calls)

    return make


def _masked(evidence: Evidence, ahead: int, window: int) -> Callable[[], Results]:
    """Attention in which a query sees ``ahead`` more keys after its own."""

    def make() -> Results:
        if evidence.plan.definition != "attention":
            raise ValueError
        options, outputs = evidence.plan.options, []
        for q, k, v, *_ in evidence.inputs:
            length = len(q)
            q, k, v = (
                x.double().reshape(length, count, -1).transpose(0, 1)
                for x, count in ((q, options["heads"]), (k, options["groups"]), (v, options["groups"]))
            )
            k, v = (x.repeat_interleave(options["heads"] // options["groups"], 0) for x in (k, v))
            mask = torch.ones(length, length, dtype=torch.bool).tril(min(ahead, length))
            if window:
                mask &= torch.ones(length, length, dtype=torch.bool).triu(1 - window)
            weights = (q @ k.mT * options["scale"]).masked_fill(~mask, -1e30).softmax(-1)
            outputs.append((weights @ v).transpose(0, 1).reshape(length, -1))
        return [torch.cat(outputs)]

    return make


def _of_gated_product(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    for other in definitions.ACTIVATIONS:
        if other != evidence.plan.options["activation"]:
            yield f"{other} in place of {evidence.plan.options['activation']}", _with_options(evidence, activation=other)
    yield "gate and up exchanged", _exchanged(evidence, 0, 1)
    yield "the activation is missing", lambda: [evidence.inputs[0][0].double() * evidence.inputs[0][1].double()]


def _of_output_gate(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    yield "the gate is not applied", lambda: [evidence.inputs[0][0].double()]


def _of_routing(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    options = evidence.plan.options
    words = "not renormalised" if options["renormalize"] else "renormalised"
    yield f"the weights of the chosen experts are {words}", _with_options(evidence, renormalize=not options["renormalize"])
    if options["factor"] != 1.0:
        yield "the scaling factor is missing", _with_options(evidence, factor=1.0)
    other = "sigmoid" if options["scoring"] == "softmax" else "softmax"
    yield f"{other} in place of {options['scoring']}", _with_options(evidence, scoring=other)
    yield "the weights are applied twice", lambda: [evidence.golden[0].pow(2)]
    yield "the weights are all one", lambda: [torch.ones_like(evidence.golden[0])]
    yield "the softmax is of the chosen experts' logits, twice", lambda: [evidence.golden[0].softmax(-1)]


def _of_experts(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    count = evidence.inputs[0][3].shape[0]
    weights, ids = 2, 1
    renormalised = {weights: lambda x: x / x.sum(-1, keepdim=True)}
    yield "the routing weights are applied twice", _with_inputs(evidence, {weights: lambda x: x * x})
    yield "the routing weights are not applied", _with_inputs(evidence, {weights: torch.ones_like})
    yield "the routing weights are renormalised", _with_inputs(evidence, renormalised)
    for shift in (1, -1):
        yield (
            f"each expert's id is {'one too large' if shift > 0 else 'one too small'}",
            _with_inputs(evidence, {ids: lambda x, shift=shift: (x.long() + shift) % count}),
        )
    for choice in range(evidence.inputs[0][ids].shape[1]):
        yield (
            f"the token's choice {choice} is dropped",
            _with_inputs(evidence, {weights: lambda x, choice=choice: _without(x, choice)}),
        )
    yield "the weights of the choices are in the reverse order", _with_inputs(evidence, {weights: lambda x: x.flip(-1)})
    yield "gate and up exchanged", _with_inputs(evidence, {3: lambda x: x.roll(x.shape[1] // 2, 1)})
    for other in definitions.ACTIVATIONS:
        if other != evidence.plan.options["activation"]:
            yield f"{other} in place of {evidence.plan.options['activation']}", _with_options(evidence, activation=other)


def _without(weights: Tensor, choice: int) -> Tensor:
    weights = weights.clone()
    weights[:, choice] = 0
    return weights


def _of_total(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    terms = [each.double() for each in evidence.inputs[0]]
    labels = [str(each) for each in evidence.plan.inputs]
    for index, label in enumerate(labels):
        others = [term for order, term in enumerate(terms) if order != index]
        yield f"{label} is not added", lambda others=others: [sum(others)]  # type: ignore[list-item]
        yield f"{label} is added twice", lambda index=index: [sum(terms) + terms[index]]  # type: ignore[list-item]


def _of_shared(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    stream, branch, gate = (each.double() for each in evidence.inputs[0])
    yield "the shared expert is missing", lambda: [stream]
    yield "the shared expert's gate is not applied", lambda: [stream + branch]
    yield "the shared expert's gate has no sigmoid", lambda: [stream + gate * branch]


def _of_delta_rule(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    yield "dt_bias is missing", _with_inputs(evidence, {4: torch.zeros_like})
    yield "A_log has the other sign", _with_inputs(evidence, {3: lambda x: -x})
    yield "A_log is not exponentiated", _with_inputs(evidence, {3: lambda x: x.clamp(min=1e-30).log()})
    yield "the taps of the convolution are reversed", _with_inputs(evidence, {2: lambda x: x.flip(-1)})
    for words, change in (
        ("queries and keys are not normalised", {"normalise": False}),
        ("keys are not normalised", {"normalise": "q"}),
        ("queries are not normalised", {"normalise": "k"}),
        ("the scale is missing", {"scale": False}),
        ("beta is not applied", {"beta": False}),
        ("the state does not decay", {"decay": False}),
        ("the state's value for a key is not subtracted", {"subtract": False}),
        ("the activation of the convolution is missing", {"activation": False}),
        *((f"the decay begins anew every {size} tokens (counted from the chunk)", {"chunk": size}) for size in (16, 32, 64)),
        *((f"the state is zero again every {size} tokens", {"restart": size}) for size in (16, 32, 64)),
    ):
        yield words, lambda change=change: _delta_variant(evidence, **change)


def _delta_variant(
    evidence: Evidence,
    *,
    normalise: bool | str = True,
    scale: bool = True,
    beta: bool = True,
    decay: bool = True,
    subtract: bool = True,
    activation: bool = True,
    chunk: int = 0,
    restart: int = 0,
) -> Results:
    """`gated_delta_rule` with one of its parts changed."""
    results = []
    for qkvz, ba, convolution, a_log, dt_bias in evidence.inputs:
        o = evidence.plan.options
        length, heads, shared = len(qkvz), o["value_heads"], o["value_heads"] // o["key_heads"]
        width, value_width = o["key_width"], o["value_width"]
        q, k, v, _ = (
            qkvz.double().reshape(length, o["key_heads"], -1).split([width, width, shared * value_width, shared * value_width], -1)
        )
        mixed = torch.cat([x.reshape(length, -1) for x in (q, k, v)], -1)
        taps = convolution.double().reshape(mixed.shape[1], -1)
        before = torch.cat([mixed.new_zeros(taps.shape[1] - 1, mixed.shape[1]), mixed])
        mixed = torch.stack([before[tap : tap + length] * taps[:, tap] for tap in range(taps.shape[1])]).sum(0)
        mixed = torch.nn.functional.silu(mixed) if activation else mixed
        q, k, v = mixed.split([o["key_heads"] * width, o["key_heads"] * width, heads * value_width], -1)
        q, k = (x.reshape(length, o["key_heads"], width) for x in (q, k))
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) if normalise in (True, "q") else q
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6) if normalise in (True, "k") else k
        q, k = (x.repeat_interleave(shared, 1) for x in (q, k))
        v = v.reshape(length, heads, value_width)
        parts = ba.double().reshape(length, o["key_heads"], 2 * shared)
        weight = parts[..., :shared].reshape(length, heads).sigmoid()
        weight = weight if beta else torch.ones_like(weight)
        rate = -a_log.double().exp() * torch.nn.functional.softplus(parts[..., shared:].reshape(length, heads) + dt_bias.double())
        state, outputs = q.new_zeros(heads, width, value_width), []
        for step in range(length):
            if restart and step % restart == 0:
                state = torch.zeros_like(state)
            carried = chunk and step % chunk == 0
            state = state * (rate[step].exp()[:, None, None] if decay and not carried else 1.0)
            missing = v[step] - ((k[step][:, None] @ state)[:, 0] if subtract else 0.0)
            state = state + k[step][:, :, None] * (missing * weight[step][:, None])[:, None, :]
            outputs.append((q[step][:, None] @ state)[:, 0] * (width**-0.5 if scale else 1.0))
        results.append(torch.stack(outputs).reshape(length, -1))
    return [torch.cat(results)]


def _of_log_softmax(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    x = evidence.inputs[0][0].double()
    yield "logits are not normalised", lambda: [x]
    yield "the logarithm to base 2", lambda: [evidence.golden[0] / math.log(2)]


def _of_scaled(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    factor = evidence.plan.options["factor"]
    yield "the temperature is applied twice", _with_options(evidence, factor=factor * factor)
    yield "the temperature is not applied", _with_options(evidence, factor=1.0)


def _of_capped(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    yield "the logits are not capped", lambda: [evidence.inputs[0][0].double()]


def _of_embedding(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    width = evidence.golden[0].shape[1]
    yield "the embeddings are not scaled", _with_options(evidence, scale=1.0)
    yield "the embeddings are multiplied by sqrt(width)", _with_options(evidence, scale=width**0.5)


def _of_table(evidence: Evidence) -> Iterator[tuple[str, Callable[[], Results]]]:
    frequencies = evidence.inputs[0][1].double()
    width = 2 * len(frequencies)
    for factor in (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0, 32.0):
        yield f"all frequencies divided by {factor:g}", _with_inputs(evidence, {1: lambda x, f=factor: x / f})
    for base in (1e4, 1e5, 5e5, 1e6, 1e7):
        plain = base ** (-torch.arange(0, width, 2).double() / width)
        yield f"rope theta {base:g}, without scaling", _with_inputs(evidence, {1: lambda x, plain=plain: plain})
        yield f"rope theta {base:g} and no factor", _with_inputs(evidence, {1: lambda x, plain=plain: plain}, scale=1.0)
    yield "the factor of cosines and sines is missing", _with_options(evidence, scale=1.0)
    for shift in (1, -1):
        words = "one too large" if shift > 0 else "one too small"
        yield f"positions are {words}", _with_inputs(evidence, {0: lambda x, shift=shift: x + shift})


def _relation(evidence: Evidence) -> str:
    """Return a simple relation between what was given and the golden, in words; empty if there is none."""
    for given, golden, wrong, typical in zip(evidence.given, evidence.golden, evidence.wrong, evidence.typical, strict=True):
        if not bool(wrong.any()):
            continue
        y, g = given.double()[wrong], golden[wrong]
        size = g.pow(2).mean().sqrt()
        noise = torch.maximum(3 * typical.pow(2).mean().sqrt(), 4 * torch.finfo(given.dtype).eps * size)

        def fits(candidate: Tensor, y: Tensor = y, g: Tensor = g, noise: Tensor = noise) -> bool:
            rest = (y - candidate).pow(2).mean().sqrt()
            return bool(rest <= torch.maximum(noise, _LEFT * (y - g).pow(2).mean().sqrt()))

        if bool((y == 0).all()):
            return "the result is zero"
        factor = float((y * g).sum() / g.pow(2).sum()) if float(g.pow(2).sum()) else 0.0
        if factor and fits(g * factor):
            return f"the result times {factor:.6g}"
        for shift in (1, -1):
            if len(golden) > 1 and fits(golden.roll(shift, 0)[wrong]):
                return f"each token has the result of the {'one before' if shift > 0 else 'next one'}"
    return ""


_CHANGES: dict[str, Callable[[Evidence], Iterator[tuple[str, Callable[[], Results]]]]] = {
    "embedding": _of_embedding,
    "rotary_table": _of_table,
    "rmsnorm": _of_norm,
    "layernorm": _of_norm,
    "gated_rmsnorm": _of_gated_norm,
    "linear": _of_linear,
    "router_logits": _of_linear,
    "rotary": _of_rotary,
    "attention": _of_attention,
    "rotary_attention": _of_attention,
    "latent_attention": _of_attention,
    "output_gate": _of_output_gate,
    "gated_delta_rule": _of_delta_rule,
    "gated_product": _of_gated_product,
    "routing_weights": _of_routing,
    "experts": _of_experts,
    "total": _of_total,
    "gated_total": _of_shared,
    "log_softmax": _of_log_softmax,
    "scaled": _of_scaled,
    "capped": _of_capped,
}
