"""Changed definitions of each kind of region, as faults of trainers and engines make them: the candidates of `causes`.

A change is its words and a function that evaluates it in float64 on the inputs that the run had.
"""

# mypy can't infer lambdas that bind a loop's variable by a default.
# mypy: disable-error-code="misc"

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assay.compare import definitions
from assay.compare.judging import Evidence, in_float64
from assay.compare.run import Slot

Results = list[Tensor]
Change = tuple[str, Callable[[], Results]]


def argument_name(evidence: Evidence, index: int) -> str:
    names = arguments_of(evidence.plan.definition)
    return names[min(index, len(names) - 1)]


def arguments_of(definition: str) -> Sequence[str]:
    """Return the names of a definition's positional arguments."""
    code = getattr(definitions, definition).__code__
    return code.co_varnames[: code.co_argcount] or ("term",)


def _evaluated(evidence: Evidence, calls: list[list[Tensor]], options: Any = None) -> Results:
    parts = [in_float64(evidence.plan, tensors, options) for tensors in calls]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _with_options(evidence: Evidence, **options: Any) -> Callable[[], Results]:
    return lambda: _evaluated(evidence, evidence.inputs, {**evidence.plan.options, **options})


def with_inputs(
    evidence: Evidence, changes: Mapping[int, Callable[[Tensor], Tensor]], **options: Any
) -> Callable[[], Results]:
    def make() -> Results:
        calls = [
            [changes[index](each.double()) if index in changes else each for index, each in enumerate(tensors)]
            for tensors in evidence.inputs
        ]
        return _evaluated(evidence, calls, {**evidence.plan.options, **options})

    return make


def with_rounded_inputs(
    evidence: Evidence, format: torch.dtype, *, result: bool, only: int | None = None
) -> Callable[[], Results]:
    """The definition of inputs rounded to a format, all or one alone, and of a rounded result."""

    def make() -> Results:
        floats = [index for index, each in enumerate(evidence.inputs[0]) if each.is_floating_point()]

        def change(x: Tensor) -> Tensor:
            return rounded(x, format)

        changes = {index: change for index in floats if only in (None, index)}
        results = with_inputs(evidence, changes)()
        return [rounded(each, format) for each in results] if result else results

    return make


def with_rounded_result(evidence: Evidence, format: torch.dtype) -> Callable[[], Results]:
    """The definition's result rounded to a format."""
    return lambda: [rounded(golden, format) for golden in evidence.golden]


def rounded_throughout(
    evidence: Evidence, format: torch.dtype, *, keeps_float32: bool = False
) -> Callable[[], Results]:
    """Every operation's result rounded: PyTorch's eager mode in the format, without the definition's float32."""

    def make() -> Results:
        kept = definitions.wide
        if not keeps_float32:
            definitions.wide = lambda x: x
        try:
            name = evidence.plan.definition
            function = getattr(definitions, "stepwise_attention" if name == "attention" else name)
            calls = [[x.to(format) if x.is_floating_point() else x for x in call] for call in evidence.inputs]
            parts = [tree_leaves(function(*call, **evidence.plan.options)) for call in calls]
        finally:
            definitions.wide = kept
        return [torch.cat([each.double().reshape(len(each), -1) for each in some]) for some in zip(*parts, strict=True)]

    return make


def scaled_to(format: torch.dtype, axes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Return the rounding to an 8-bit format with a scale from the largest number along ``axes``, or of the tensor."""
    most = torch.finfo(format).max

    def change(x: Tensor) -> Tensor:
        largest = x.abs().amax(axes, keepdim=True) if axes else x.abs().max()
        scale = (largest / most).clamp(min=1e-30)
        return rounded(x / scale, format) * scale

    return change


def elsewhere(evidence: Evidence) -> Iterator[Change]:
    """Yield a region's definition with another of the layer's tensors in place of an input."""
    others = evidence.others()
    for index, what in enumerate(evidence.plan.inputs):
        if not isinstance(what, Slot):
            continue
        for label, values in others.items():
            if values.shape == evidence.inputs[0][index].shape and len(evidence.inputs) == 1:
                change = {index: lambda x, values=values: values.double()}
                yield f"{label} in place of {what}", with_inputs(evidence, change)


def rounded(x: Tensor, format: torch.dtype) -> Tensor:
    limit = torch.finfo(format).max
    return x.clamp(-limit, limit).to(format).double() if format.itemsize == 1 else x.to(format).double()


# Changes of each definition, the likeliest first.


def _of_norm(evidence: Evidence) -> Iterator[Change]:
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


def _of_gated_norm(evidence: Evidence) -> Iterator[Change]:
    x, weight, gate = (each.double() for each in evidence.inputs[0])
    eps = evidence.plan.options["eps"]
    for other in (1e-5, 1e-6, 1e-12, 0.0, 1e-3):
        if other != eps:
            yield f"eps={other:g} in place of {eps:g}", _with_options(evidence, eps=other)
    silu, normed = torch.nn.functional.silu(gate.reshape(x.shape)), definitions.rmsnorm(x, weight, eps=eps)
    yield "the gate is not applied", lambda: [normed]
    yield "the logistic function of the gate, not SiLU", lambda: [normed * gate.reshape(x.shape).sigmoid()]
    yield "gated before the norm", lambda: [definitions.rmsnorm(x * silu, weight, eps=eps)]


def _of_linear(evidence: Evidence) -> Iterator[Change]:
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


def _quantised(x: Tensor, weight: Tensor, bias: list[Tensor]) -> Iterator[Change]:
    """Weights in 8-bit floats with a scale for each block, right and with a neighbour's scale."""
    for size in (128, 64, 32, 16):
        if size > max(weight.shape):
            continue
        for along, words in (((0, 0), "blocks"), ((0, 1), "blocks"), ((1, 0), "blocks")):
            label = f"FP8 weights in {words} of {size}"
            wrong = (
                "" if along == (0, 0) else f", each with the scale of its neighbour along {'N' if along[0] else 'K'}"
            )
            yield (
                label + wrong,
                lambda size=size, along=along: [x @ _fp8(weight, size, along).T + (bias[0] if bias else 0.0)],
            )


def _fp8(weight: Tensor, size: int, shift: tuple[int, int]) -> Tensor:
    rows, columns = (math.ceil(length / size) for length in weight.shape)
    padded = torch.nn.functional.pad(weight, (0, columns * size - weight.shape[1], 0, rows * size - weight.shape[0]))
    blocks = padded.reshape(rows, size, columns, size)
    scale = (blocks.abs().amax((1, 3), keepdim=True) / 448.0).clamp(min=1e-30)
    codes = rounded(blocks / scale, torch.float8_e4m3fn)
    other = scale.roll((-shift[0], -shift[1]), (0, 2))
    return (codes * other).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]


def _of_rotary(evidence: Evidence) -> Iterator[Change]:
    options = evidence.plan.options
    names = arguments_of(evidence.plan.definition)
    cos, sin = names.index("cos"), names.index("sin")
    other = not options["interleaved"]
    words = "neighbouring features are rotated together" if other else "features are rotated by halves"
    yield f"rotary pairing: {words}", _with_options(evidence, interleaved=other)
    if other:
        yield f"rotary pairing: {words}, in their own places", lambda: _neighbours(evidence)
    yield "the rotary embedding is not applied", with_inputs(evidence, {cos: torch.ones_like, sin: torch.zeros_like})
    yield "rotated the other way", with_inputs(evidence, {sin: lambda x: -x})
    for shift in (1, -1):
        yield (
            f"positions are {'one too small' if shift > 0 else 'one too large'}",
            with_inputs(evidence, {each: lambda x, shift=shift: _shifted(x, shift) for each in (cos, sin)}),
        )
    yield (
        "all positions are the first",
        with_inputs(evidence, {each: lambda x: x[:1].expand_as(x) for each in (cos, sin)}),
    )
    for only in ("q", "k") if "k" in names else ():
        yield f"only {'keys' if only == 'q' else 'queries'} are rotated", lambda only=only: _one_rotated(evidence, only)
    theta = _theta(evidence.inputs[0][cos], evidence.inputs[0][sin])
    if theta is not None:
        angles, scale = theta
        for factor in (2.0, 0.5, 4.0, 0.25, 8.0, 16.0, 32.0):
            yield (
                f"frequencies divided by {factor:g}",
                with_inputs(evidence, {cos: lambda x, f=factor: _angle(angles, f, scale, len(x))[0],
                                        sin: lambda x, f=factor: _angle(angles, f, scale, len(x))[1]}),
            )  # fmt: skip
        for base in (1e4, 1e5, 5e5, 1e6, 1e7):
            yield (
                f"rope theta {base:g}",
                with_inputs(
                    evidence,
                    {cos: lambda x, b=base: _base(x, b, scale)[0], sin: lambda x, b=base: _base(x, b, scale)[1]},
                ),
            )


def _neighbours(evidence: Evidence) -> Results:
    """Rotate the pairs (2i, 2i + 1) in place, as Llama's own complex multiplication does."""
    calls = []
    q, k, cos, sin = (each.double() for each in evidence.inputs[0][:4])
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


def _of_attention(evidence: Evidence) -> Iterator[Change]:
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
    names = arguments_of(evidence.plan.definition)
    if "k" in names and "v" in names:
        heads, groups = options["heads"], options["groups"]
        shared = heads // max(groups, 1)
        k, v = names.index("k"), names.index("v")
        if 1 < groups < heads:
            order = [head % groups for head in range(heads)]
            both = {index: lambda x: _heads(x, groups, order) for index in (k, v)}
            yield (
                "head group: query head h reads key head h mod groups, not h // n",
                with_inputs(evidence, both, groups=heads),
            )
            first = [min(head // shared + 1, groups - 1) for head in range(heads)]
            both = {index: lambda x: _heads(x, groups, first) for index in (k, v)}
            yield "head group: each query head reads the next key head", with_inputs(evidence, both, groups=heads)
            zero = {index: lambda x: _heads(x, groups, [0] * heads) for index in (k, v)}
            yield "head group: all query heads read the first key head", with_inputs(evidence, zero, groups=heads)
        yield "keys and values exchanged", _exchanged(evidence, k, v)
        for size, index in itertools.product((1, 2, 4, 8, 16, 32, 64), (k, v)):
            yield (
                f"{names[index]} of the last {size} tokens are zero",
                with_inputs(evidence, {index: lambda x, size=size: torch.cat([x[:-size], 0 * x[-size:]])}),
            )
    if "k" in names and evidence.plan.definition == "attention":
        yield from _of_pages(evidence, names.index("k"), names.index("v"))
    yield "the next key is seen (mask one too far)", _masked(evidence, 1, window)
    yield "a query doesn't see its own key (mask one too short)", _masked(evidence, -1, window)
    yield "no causal mask", _masked(evidence, 1 << 30, 0)
    if window:
        yield "no sliding window", _with_options(evidence, window=0)
    length = max(len(call[0]) for call in evidence.inputs)
    for other in dict.fromkeys(
        [window + 1, window - 1, 2 * window, window // 2, *(() if window else (length // 2, 64, 32, 16, 8))]
    ):
        if 0 < other < length and other != window:
            yield f"a sliding window of {other} in place of {window or 'none'}", _with_options(evidence, window=other)
    if options.get("softcap"):
        yield "the scores are not capped", _with_options(evidence, softcap=0.0)
    if "cos" in names:
        yield from _of_rotary(evidence)


def _of_pages(evidence: Evidence, k: int, v: int) -> Iterator[Change]:
    """Pages of the cache that later tokens read as other ones: zero, unwritten, or another page's keys and values."""
    if len(evidence.inputs) != 1 or not bool(evidence.wrong[0].any()) or bool(evidence.wrong[0].all()):
        return
    first = int(evidence.wrong[0].nonzero()[0, 0])  # earlier tokens read the right page
    for size in (16, 32, 8, 64):
        pages = range(len(evidence.golden[0]) // size)
        for page in pages:
            for other in pages:
                if page != other and page * size < len(evidence.golden[0]):
                    words = f"stale page: keys and values of tokens {_span(page, size)} are read as those of"
                    yield (
                        f"{words} {_span(other, size)}",
                        lambda page=page, other=other, size=size: _from(evidence, first, {
                            each: lambda x: _page(x, page, other, size) for each in (k, v)
                        }),
                    )  # fmt: skip
            yield (
                f"stale page: keys and values of tokens {_span(page, size)} are read as zero",
                lambda page=page, size=size: _from(evidence, first, {
                    each: lambda x: _page(x, page, None, size) for each in (k, v)
                }),
            )  # fmt: skip


def _span(page: int, size: int) -> str:
    return f"{page * size} to {(page + 1) * size - 1}"


def _page(x: Tensor, page: int, other: int | None, size: int) -> Tensor:
    x = x.clone()
    x[page * size : (page + 1) * size] = 0.0 if other is None else x[other * size : (other + 1) * size].clone()
    return x


def _from(evidence: Evidence, first: int, changes: Mapping[int, Callable[[Tensor], Tensor]]) -> Results:
    """The changed definition from a token on, the right one before."""
    return [
        torch.cat([g[:first], r[first:]])
        for g, r in zip(evidence.golden, with_inputs(evidence, changes)(), strict=True)
    ]


def _of_cache(evidence: Evidence) -> Iterator[Change]:
    for format in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16):
        name = str(format).removeprefix("torch.")
        yield f"the cache is in {name}", lambda format=format: [rounded(evidence.golden[0], format)]
        for words, axes in (("tensor", ()), ("token", (-1,))):
            change = scaled_to(format, axes)
            yield (
                f"the cache is in {name} with a scale for each {words}",
                lambda change=change: [change(evidence.golden[0])],
            )
    given, golden = evidence.given[0].double(), evidence.golden[0]
    wrong = evidence.wrong[0].nonzero()[:, 0]
    if len(wrong):
        row, count = int(wrong[0]), len(wrong)
        same = (golden == given[row]).all(-1).nonzero()[:, 0].tolist()
        for other in same[:1]:
            span = f"tokens {row} to {row + count - 1}"
            words = f"the cache holds at {span} those of tokens {other} to {other + count - 1}"
            moved = golden.roll(row - other, 0)
            yield words, lambda moved=moved: [torch.where(evidence.wrong[0][:, None], moved, golden)]
    if len(wrong):
        yield (
            "the cache holds zeros there (never written)",
            lambda: [torch.where(evidence.wrong[0][:, None], 0.0, golden)],
        )
        yield "the cache holds other numbers there: overwritten, or stale", lambda: [given]


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


def _of_gated_product(evidence: Evidence) -> Iterator[Change]:
    for other in definitions.ACTIVATIONS:
        if other != evidence.plan.options["activation"]:
            yield (
                f"{other} in place of {evidence.plan.options['activation']}",
                _with_options(evidence, activation=other),
            )
    yield "gate and up exchanged", _exchanged(evidence, 0, 1)
    yield "the activation is missing", lambda: [evidence.inputs[0][0].double() * evidence.inputs[0][1].double()]


def _of_output_gate(evidence: Evidence) -> Iterator[Change]:
    yield "the gate is not applied", lambda: [evidence.inputs[0][0].double()]


def _of_routing(evidence: Evidence) -> Iterator[Change]:
    options = evidence.plan.options
    words = "not renormalised" if options["renormalize"] else "renormalised"
    yield (
        f"the weights of the chosen experts are {words}",
        _with_options(evidence, renormalize=not options["renormalize"]),
    )
    if options["factor"] != 1.0:
        yield "the scaling factor is missing", _with_options(evidence, factor=1.0)
    other = "sigmoid" if options["scoring"] == "softmax" else "softmax"
    yield f"{other} in place of {options['scoring']}", _with_options(evidence, scoring=other)
    yield "the weights are applied twice", lambda: [evidence.golden[0].pow(2)]
    yield "the weights are all one", lambda: [torch.ones_like(evidence.golden[0])]
    yield "the softmax is of the chosen experts' logits, twice", lambda: [evidence.golden[0].softmax(-1)]


def _of_experts(evidence: Evidence) -> Iterator[Change]:
    count = evidence.inputs[0][3].shape[0]
    weights, ids = 2, 1
    renormalised = {weights: lambda x: x / x.sum(-1, keepdim=True)}
    yield "the routing weights are applied twice", with_inputs(evidence, {weights: lambda x: x * x})
    yield "the routing weights are not applied", with_inputs(evidence, {weights: torch.ones_like})
    yield "the routing weights are renormalised", with_inputs(evidence, renormalised)
    for shift in (1, -1):
        yield (
            f"each expert's id is {'one too large' if shift > 0 else 'one too small'}",
            with_inputs(evidence, {ids: lambda x, shift=shift: (x.long() + shift) % count}),
        )
    for choice in range(evidence.inputs[0][ids].shape[1]):
        yield (
            f"the token's choice {choice} is dropped",
            with_inputs(evidence, {weights: lambda x, choice=choice: _without(x, choice)}),
        )
    yield "the weights of the choices are in the reverse order", with_inputs(evidence, {weights: lambda x: x.flip(-1)})
    yield "gate and up exchanged", with_inputs(evidence, {3: lambda x: x.roll(x.shape[1] // 2, 1)})
    for other in definitions.ACTIVATIONS:
        if other != evidence.plan.options["activation"]:
            yield (
                f"{other} in place of {evidence.plan.options['activation']}",
                _with_options(evidence, activation=other),
            )


def _without(weights: Tensor, choice: int) -> Tensor:
    weights = weights.clone()
    weights[:, choice] = 0
    return weights


def _of_total(evidence: Evidence) -> Iterator[Change]:
    if evidence.plan.kind == "cache":
        yield from _of_cache(evidence)
        return
    terms = [each.double() for each in evidence.inputs[0]]
    labels = [str(each) for each in evidence.plan.inputs]
    for index, label in enumerate(labels):
        others = [term for order, term in enumerate(terms) if order != index]
        yield f"{label} is not added", lambda others=others: [definitions.total(*others)]
        yield f"{label} is added twice", lambda index=index: [definitions.total(*terms, terms[index])]


def _of_shared(evidence: Evidence) -> Iterator[Change]:
    stream, branch, gate = (each.double() for each in evidence.inputs[0])
    yield "the shared expert is missing", lambda: [stream]
    yield "the shared expert's gate is not applied", lambda: [stream + branch]
    yield "the shared expert's gate has no sigmoid", lambda: [stream + gate * branch]


def _of_delta_rule(evidence: Evidence) -> Iterator[Change]:
    yield "dt_bias is missing", with_inputs(evidence, {4: torch.zeros_like})
    yield "A_log has the other sign", with_inputs(evidence, {3: lambda x: -x})
    yield "A_log is not exponentiated", with_inputs(evidence, {3: lambda x: x.clamp(min=1e-30).log()})
    yield "the taps of the convolution are reversed", with_inputs(evidence, {2: lambda x: x.flip(-1)})
    for words, change in (
        ("queries and keys are not normalised", {"normalise": False}),
        ("keys are not normalised", {"normalise": "q"}),
        ("queries are not normalised", {"normalise": "k"}),
        ("the scale is missing", {"scale": False}),
        ("beta is not applied", {"beta": False}),
        ("the state does not decay", {"decay": False}),
        ("the state's value for a key is not subtracted", {"subtract": False}),
        ("the activation of the convolution is missing", {"activation": False}),
        *(
            (f"the decay begins anew every {size} tokens (counted from the chunk)", {"chunk": size})
            for size in (16, 32, 64)
        ),
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
        groups = qkvz.double().reshape(length, o["key_heads"], -1)
        q, k, v, _ = torch.split(groups, [width, width, shared * value_width, shared * value_width], -1)
        mixed = torch.cat([x.reshape(length, -1) for x in (q, k, v)], -1)
        taps = convolution.double().reshape(mixed.shape[1], -1)
        before = torch.cat([mixed.new_zeros(taps.shape[1] - 1, mixed.shape[1]), mixed])
        mixed = torch.stack([before[tap : tap + length] * taps[:, tap] for tap in range(taps.shape[1])]).sum(0)
        mixed = torch.nn.functional.silu(mixed) if activation else mixed
        q, k, v = torch.split(mixed, [o["key_heads"] * width, o["key_heads"] * width, heads * value_width], -1)
        q, k = (x.reshape(length, o["key_heads"], width) for x in (q, k))
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) if normalise in (True, "q") else q
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6) if normalise in (True, "k") else k
        q, k = (x.repeat_interleave(shared, 1) for x in (q, k))
        v = v.reshape(length, heads, value_width)
        parts = ba.double().reshape(length, o["key_heads"], 2 * shared)
        weight = parts[..., :shared].reshape(length, heads).sigmoid()
        weight = weight if beta else torch.ones_like(weight)
        rate = -a_log.double().exp() * torch.nn.functional.softplus(
            parts[..., shared:].reshape(length, heads) + dt_bias.double()
        )
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


def _of_log_softmax(evidence: Evidence) -> Iterator[Change]:
    x = evidence.inputs[0][0].double()
    yield "logits are not normalised", lambda: [x]
    yield "the logarithm to base 2", lambda: [evidence.golden[0] / math.log(2)]


def _of_tempered(evidence: Evidence) -> Iterator[Change]:
    temperature = evidence.plan.options["temperature"]
    yield "the temperature is applied twice", _with_options(evidence, temperature=temperature**2)
    yield "the temperature is not applied", _with_options(evidence, temperature=1.0)


def _of_capped(evidence: Evidence) -> Iterator[Change]:
    yield "the logits are not capped", lambda: [evidence.inputs[0][0].double()]


def _of_embedding(evidence: Evidence) -> Iterator[Change]:
    width = evidence.golden[0].shape[1]
    yield "the embeddings are not scaled", _with_options(evidence, scale=1.0)
    yield "the embeddings are multiplied by sqrt(width)", _with_options(evidence, scale=width**0.5)


def _of_table(evidence: Evidence) -> Iterator[Change]:
    frequencies = evidence.inputs[0][1].double()
    width = 2 * len(frequencies)
    for factor in (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0, 32.0):
        yield f"all frequencies divided by {factor:g}", with_inputs(evidence, {1: lambda x, f=factor: x / f})
    for base in (1e4, 1e5, 5e5, 1e6, 1e7):
        plain = base ** (-torch.arange(0, width, 2).double() / width)
        yield f"rope theta {base:g}, without scaling", with_inputs(evidence, {1: lambda x, plain=plain: plain})
        yield f"rope theta {base:g} and no factor", with_inputs(evidence, {1: lambda x, plain=plain: plain}, scale=1.0)
    yield "the factor of cosines and sines is missing", _with_options(evidence, scale=1.0)
    for shift in (1, -1):
        words = "one too large" if shift > 0 else "one too small"
        yield f"positions are {words}", with_inputs(evidence, {0: lambda x, shift=shift: (x + shift).clamp(min=0)})


CHANGES: dict[str, Callable[[Evidence], Iterator[Change]]] = {
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
    "tempered": _of_tempered,
    "capped": _of_capped,
}


def changes_of(evidence: Evidence) -> Iterator[Change]:
    """Yield the changes of a region's definition."""
    if evidence.plan.definition in CHANGES:
        yield from CHANGES[evidence.plan.definition](evidence)
