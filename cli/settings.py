"""Options shared by several commands, each declared once, and the `Settings` made from them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.golden.registry import Spec, load_ops
from assay.verify.errors import ContractError, SettingError

if TYPE_CHECKING:
    from assay.verify.settings import Settings

Ops = Annotated[
    list[str] | None,
    typer.Option(
        "--ops",
        "--import",
        callback=load_ops,
        is_eager=True,
        help="A module that defines ops of your own; may be repeated.",
    ),
]
_WORDS = {"none": None, "true": True, "false": False}

Dtype = Annotated[str, typer.Option(help="bfloat16, or q=float16,k=bfloat16.")]
Dtypes = Annotated[list[str] | None, typer.Option(help="bfloat16, or q=float16,k=bfloat16; may be repeated.")]
Options = Annotated[
    list[str] | None, typer.Option(help="causal=none,bottom_right: values to vary over; may be repeated.")
]
Shapes = Annotated[list[str] | None, typer.Option(help="D=64,128 or Sq=1:300 (as Python's range); may be repeated.")]
At = Annotated[
    list[str] | None,
    typer.Option(help="R=8192,N=4096: sizes of production, at which samples are judged; may be repeated."),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--at", help="M=16,N=4096: sizes of a call; the others, and all if none, are usual ones. May be repeated."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead.")]
Anew = Annotated[bool, typer.Option("--anew", help="Make again what is stored there of the same question.")]
Budget = Annotated[float | None, typer.Option(min=0, help="Seconds of the whole run: begin nothing more after it.")]
ContractFields = Annotated[list[str] | None, typer.Option(help="A contract's name, or field=value; may be repeated.")]
OutDtype = Annotated[str, typer.Option(help="Dtype of the result, where it isn't the inputs'.")]
Layouts = Annotated[list[str] | None, typer.Option(help="Memory layouts that the kernel takes, where not all.")]
TensorLayouts = Annotated[
    list[str] | None, typer.Option("--layout", help="b=transposed: how a tensor lies in memory; may be repeated.")
]
Framework = Annotated[
    str, typer.Option(help="torch (the default), numpy, jax or cupy: what the kernel is called with.")
]
Effort = Annotated[
    str,
    typer.Option(metavar="quick|usual|thorough", help="How much each examination tries, usual where nothing is said."),
]
Examples = Annotated[
    int | None,
    typer.Option(min=0, help="Fuzzed cases of each examination, beside the fixed ones; 12, 60 or 200 by the effort."),
]
Seed = Annotated[int, typer.Option(help="Seed of every examination.")]
Device = Annotated[str, typer.Option(help="Where the kernel runs.")]
Timeout = Annotated[float, typer.Option(min=0.01, help="Seconds for one call; 10 more where no alarm is heard.")]
Isolate = Annotated[
    bool, typer.Option("--isolate", help="Each kernel in a process of its own: what it dies of is a finding.")
]
Memory = Annotated[float, typer.Option(min=0.01, help="GiB that an isolated kernel may hold.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="NaN, infinities, signed zeros and subnormals are part of every promise.")
]
Faithful = Annotated[
    str, typer.Option(metavar="DEVICE", help="h200, b200, ...: its tensor cores in Triton's dots, on a CPU.")
]
Pretend = Annotated[
    str,
    typer.Option(metavar="DEVICE", help='cuda (an h200), a100, ...: "cuda" answers as this device, and is the CPU.'),
]

Emission = Annotated[
    str,
    typer.Option(
        metavar="nvidia|CHOICES", help="Triton kernels as a compiler has them: contraction,flush,approximate."
    ),
]
Refuses = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="A message by which the kernel documents to refuse, e.g. 'too wide where N > 65536'; may be repeated.",
    ),
]


def adapted(
    settings: Settings,
    option: Sequence[str] | None = None,
    shape: Sequence[str] | None = None,
    contract: Sequence[str] | None = None,
    at: Sequence[str] | None = None,
    refuses: Sequence[str] | None = None,
    **others: Any,
) -> Settings:
    """Return the settings with the values of the command line; None or empty values change nothing."""
    from assay.verify.cases.at_shape import read_sizes
    from assay.verify.contract import contract_from_table

    said = {name: value for name, value in others.items() if value not in (None, "", [])}
    if contract:
        said["contract"] = contract_from_table(contract_fields(contract))
    if at:
        said["at"] = [read_sizes(text, "--at") for text in at]
    if refuses:
        said["refuses"] = {**settings.refuses, **dict(map(_refusal, refuses))}
    said["options"] = {**settings.options, **options(settings.definition, option or ())}
    return replace(settings, **said, shapes={**settings.shapes, **shapes(shape or ())})


def dtypes(texts: Sequence[str]) -> tuple[Any, ...]:
    """Parse ``bfloat16``, or ``q=float16,k=bfloat16`` for a dtype per tensor; each text is a separate examination."""
    return tuple(_assignments("--dtype", text) if "=" in text else text for text in texts)


def options(definition: Spec, texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse ``causal=none,bottom_right``: an option and its values; tuples are in parentheses."""
    results: dict[str, list[Any]] = {}
    for text in texts:
        name, values = _split("--option", text, "name=value,value")
        results[name] = [_option_value(definition, name, value) for value in _parts(values)]
    return results


def _option_value(definition: Spec, name: str, text: str) -> Any:
    """Return ``text`` as a Python literal or as itself, whichever the option accepts."""
    readings = [text, *([literal(text)] if literal(text) != text else [])]
    option = definition.options.get(name)
    fitting = [reading for reading in readings if option is None or option.accepts(reading)]
    value = fitting[0] if fitting else readings[-1]
    definition.complete({name: value})
    return value


def shapes(texts: Sequence[str]) -> dict[str, Sequence[int] | str]:
    """Parse sizes ``D=64,128``, and ranges ``Sq=1:300`` or ``N=0:4096:16`` as in Python's ``range(0, 4096, 16)``.

    ``Sk=Sq``: the same as another size.
    """
    results: dict[str, Sequence[int] | str] = {}
    for text in texts:
        symbol, sizes = _split("--shape", text, "D=64,128, D=1:300 or Sk=Sq")
        if sizes.isidentifier():
            results[symbol] = sizes
            continue
        try:
            numbers = [int(part) for part in sizes.split(":" if ":" in sizes else ",")]
            results[symbol] = range(*numbers) if ":" in sizes else numbers
        except (TypeError, ValueError):
            raise SettingError(f"--shape {text!r}; expected D=64,128, D=1:300 or Sk=Sq") from None
    return results


def tensor_layouts(texts: Sequence[str] | None) -> dict[str, str]:
    """Parse ``b=transposed``: a tensor's name and its layout. Raises `SettingError`."""
    return dict(_split("--layout", text, "tensor=layout, e.g. b=transposed") for text in texts or ())


def _refusal(text: str) -> tuple[str, str]:
    """Parse ``pattern where condition``, in the words of a report; a pattern alone applies to all sizes."""
    pattern, where, condition = text.rpartition(" where ")
    return (pattern.strip(), condition.strip()) if where else (text, "")


def contract_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``field=value``, ``stages.name=format``, ``ulps.name=2``, or a contract's name."""
    from assay.verify.named_contracts import contract_named

    fields: dict[str, Any] = {}
    for text in texts:
        if "=" not in text:
            fields |= contract_named(text)
            continue
        name, value = _split("--contract", text, "a contract's name, or field=value")
        group, _, inner = name.partition(".")
        if group in ("stages", "ulps"):
            fields[group] = dict(fields.get(group, {})) | _inner(text, group, inner, value)
        else:
            fields[name] = _WORDS.get(value.lower(), value)
    return fields


def _inner(text: str, group: str, name: str, value: str) -> dict[str, Any]:
    """Parse one entry of a contract's ``stages`` or ``ulps``; ``stages=none`` clears them."""
    if not name and value.lower() in ("none", "{}"):
        return {}
    if not name:
        raise ContractError(f"--contract {text!r}; expected {group}.name={value}, or {group}=none")
    if group == "stages":
        return {name: _WORDS.get(value.lower(), value)}
    try:
        return {name: float(value)}
    except ValueError:
        raise ContractError(f"--contract {text!r}; expected a number of ulps") from None


def _assignments(flag: str, text: str) -> Mapping[str, str]:
    return dict(_split(flag, part, "name=dtype,name=dtype") for part in _parts(text))


def _split(flag: str, text: str, expected: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise SettingError(f"{flag} {text!r}; expected {expected}")
    return name, value


def _parts(text: str) -> list[str]:
    """Split at commas that are not inside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def literal(text: str) -> Any:
    """Return ``text`` as a Python literal, or itself if it is none."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value
