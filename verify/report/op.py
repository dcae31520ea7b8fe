"""What an op means, in words: `assay op NAME` prints it, and docs/ops.md has it for every op."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from assay.golden.registry import Spec, spec
from assay.golden.signature import TensorSpec
from assay.verify.explanation.fault_models.evaluation import kernel_of

_ROLES = {
    "scale": "scales, positive",
    "weight": "shares, between 0 and 1",
    "angle": "between -1 and 1",
    "slope": "positive, at most 1",
    "code": "integers below {bound}",
    "index": "indices below {bound}",
    "length": "lengths up to {bound}",
    "offsets": "where each part begins, and {bound} at the end",
    "pair": "pairs of indices below {bound}",
    "label": "labels below {bound}, or {none} for none",
    "lse": "log-sum-exps, -inf among them",
    "bits": "any bit pattern",
    "rounded": "codes that numbers are rounded to",
    "simplex": "not negative, of sum one along the last axis",
    "sorted": "ascending along the last axis",
    "spd": "symmetric positive definite matrices",
}
_OF_ATTENTION = re.compile("attention|mla_decode")
_OF_EXPONENTIALS = re.compile("attention|softmax|logsumexp|cross_entropy|mla|merge|kl_div|jsd")


def example(name: str) -> Callable[..., Any]:
    """Return a kernel of an op that keeps the default contract: its definition in float32, rounded once at the end."""
    return kernel_of(None, name)


def example_text(name: str) -> str:
    """Return a script that examines the op's `example`; a kernel of one's own takes its place."""
    settings = {key: value for key, value in spec(name).default_settings.items() if value}
    given = "".join(f", {key}={value!r}" for key, value in settings.items()).replace("'", '"')
    return (
        "from assay.verify import check\n"
        "from assay.verify.report.op import example\n\n"
        f'kernel = example("{name}")  # or yours: {call_in_words(spec(name))}\n'
        f'print(check(kernel, "{name}", effort="quick"{given}))\n'
    )


def call_in_words(op: Spec) -> str:
    """Return how a kernel of the op is called, and what it returns."""
    positional = [tensor.name for tensor in op.tensors if not tensor.keyword]
    options = [f"{key}={option.default!r}" for key, option in op.options.items()]
    arguments = ", ".join([*positional, *(["*", *options] if options else [])]).replace("'", '"')
    return f"def {op.name}({arguments}) -> {', '.join(tensor.name for tensor in op.signature().returns)}"


def tensor_in_words(tensor: TensorSpec) -> str:
    """Return a tensor with its dimensions, dtype and the meaning of its numbers."""
    dtype = {None: "the dtype under examination", "fp8": "any 8-bit float"}.get(tensor.dtype, tensor.dtype)
    role = _ROLES.get(tensor.role, "").format(bound=tensor.bound or "the number of codes", none=tensor.none)
    role = f"in {tensor.interval}" if tensor.role == "in" else role
    keyword = "passed by keyword" if tensor.keyword else ""
    return f"{tensor}: {', '.join(filter(None, (dtype, role, keyword)))}"


def facts(op: Spec) -> Iterator[tuple[str, str]]:
    """Yield what is to know of an op, each fact with its heading."""
    for words in (inspect.getdoc(op.definition) or f"{op.name}(x), element by element.").split("\n\n"):
        yield "computes", " ".join(words.split())
    yield "call", call_in_words(op)
    for tensor in op.tensors:
        yield "takes", tensor_in_words(tensor)
    yield from _of_other_signatures(op)
    for tensor in op.signature().returns:
        yield "returns", tensor_in_words(tensor)
    for name, option in op.options.items():
        also = ", ".join(repr(value) for value in option.usual if value != option.default)
        words = f"{name}={option.default!r}: {option.expected}" + (f"; a survey tries {also} too" if also else "")
        yield "option", words.replace("'", '"')
    yield from _of_sizes(op)
    for name, format in op.stages.items():
        kept = {None: "not rounded", "input": "rounded to the input's dtype"}.get(format, f"rounded to {format}")
        yield "stage", f'{name}: {kept} by default; Contract(stages={{"{name}": ...}}) names another format'
    if op.outputs.chosen:
        words = "where several are right (ties), any is; other results are judged given it"
        yield "choice", f"{', '.join(op.outputs.chosen)}: the kernel's own choice, {words}"
    if op.outputs.gradient_of:
        yield "gradient", f"of {op.outputs.gradient_of}; each result is named after a tensor of it, after a d"
    yield "contract", f"fields that apply: {', '.join(_fields(op))}"
    for fault in op.faults:
        if not isinstance(fault, str):
            yield "known fault", f"{fault.description} ({fault.origin})"


def _of_other_signatures(op: Spec) -> Iterator[tuple[str, str]]:
    """Yield the tensors that are others under some value of an option."""
    for name, option in op.options.items():
        for value in option.usual:
            others = [tensor for tensor in op.signature({name: value}).tensors if tensor not in op.tensors]
            if others:
                words = "; ".join(map(tensor_in_words, others))
                yield "takes", f"with {name}={value!r}: {words}".replace("'", '"')


def _of_sizes(op: Spec) -> Iterator[tuple[str, str]]:
    sizes = op.sizes
    for symbol, partner in sizes.multiples.items():
        yield "sizes", f"{symbol} is a multiple of {partner}"
    for symbol, option in sizes.minimum.items():
        yield "sizes", f"{symbol} is at least {option}"
    for symbol, allowed in sizes.allowed.items():
        yield "sizes", f"{symbol} is one of {', '.join(map(str, allowed))}"
    rows = op.row_axis(op.complete({}))
    if rows:
        yield "rows", f"results along {rows} are independent of each other"


def _fields(op: Spec) -> list[str]:
    """Return the fields of a contract that can change what is allowed of the op."""
    attention, rows = bool(_OF_ATTENTION.search(op.name)), op.row_axis(op.complete({}))
    given: Mapping[str, bool] = {
        "accumulate": not op.axes.elementwise,
        "compute": True,
        "stages": bool(op.stages),
        "ulps": True,
        "rounding": True,
        "overflow": True,
        "subnormals": True,
        "nonfinite": True,
        "rescale_every": bool(_OF_EXPONENTIALS.search(op.name)),
        "order": not op.axes.elementwise,
        "masked_rows": attention,
        "deterministic": True,
        "batch_invariant": bool(rows),
    }
    return [name for name, applies in given.items() if applies]


def op_in_words(name: str) -> str:
    """Return all that `assay op` prints of an op. Raises `UnknownSpec`."""
    op, lines, before = spec(name), list[str](), ""
    for heading, words in facts(op):
        lines.append(f"  {heading if heading != before else '':12}{words}")
        before = heading
    script = "\n".join(f"    {line}" for line in example_text(op.name).splitlines())
    return "\n".join([op.name, *lines, "  example", "", script])


def op_as_markdown(name: str) -> str:
    """Return the same as a section of docs/ops.md."""
    rows: dict[str, list[str]] = {}
    for heading, words in facts(spec(name)):
        rows.setdefault(heading, []).append(words.replace("|", "\\|"))
    lines = [f"| {heading} | {'<br>'.join(words)} |" for heading, words in rows.items()]
    return "\n".join([f"## {name}", "", "| | |", "| --- | --- |", *lines])
