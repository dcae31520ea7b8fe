"""Options shared by several commands, each declared once, and the `Settings` made from them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from assay.golden.registry import Spec, load_ops
from assay.runtime.reading import Reader, ReadingError
from assay.runtime.records import LARGEST_SEED, MOST_EXAMPLES
from assay.verify.errors import ContractError, SettingError

if TYPE_CHECKING:
    from assay.bench.inspection.calls import Request
    from assay.verify.campaign.table import Entry
    from assay.verify.settings import Settings

LONGEST = 1e7  # seconds: about four months
MOST_MEMORY = 2.0**20  # GiB
MOST_JOBS = 4096
Texts = list[str] | None
"""An option that may be repeated."""
_OPS = "A module that defines ops of your own; may be repeated."
Ops = Annotated[Texts, Option("--ops", "--import", callback=load_ops, is_eager=True, help=_OPS)]
SpecName = Annotated[str, Option(help="What package.module:function implements, e.g. softmax.")]
Dtype = Annotated[str, Option(help="bfloat16, or q=float16,k=bfloat16.")]
Dtypes = Annotated[Texts, Option(help="bfloat16, or q=float16,k=bfloat16; may be repeated.")]
Options = Annotated[Texts, Option(help="causal=none,bottom_right: values to vary over; may be repeated.")]
Shapes = Annotated[Texts, Option(help="D=64,128 or Sq=1:300 (as Python's range); may be repeated.")]
At = Annotated[Texts, Option(help="R=8192,N=4096: sizes of production, at which samples are judged; may be repeated.")]
_SIZES = "M=16,N=4096: sizes of a call; the others, and all if none, are usual ones. May be repeated."
Sizes = Annotated[Texts, Option("--at", help=_SIZES)]
ContractFields = Annotated[Texts, Option(help="A contract's name, or field=value; may be repeated.")]
OutDtype = Annotated[str, Option(help="Dtype of the result, where it isn't the inputs'.")]
Layouts = Annotated[Texts, Option(help="Memory layouts that the kernel takes, where not all.")]
_TENSOR_LAYOUT = "b=transposed: a tensor's layout in memory; may be repeated. --layout is its earlier name."
TensorLayouts = Annotated[Texts, Option("--tensor-layout", "--layout", help=_TENSOR_LAYOUT)]
Framework = Annotated[str, Option(help="torch (the default), numpy, jax or cupy: what the kernel is called with.")]
_EFFORT = "How much each examination tries; usual by default."
Effort = Annotated[str, Option(metavar="quick|usual|thorough", help=_EFFORT)]
_EXAMPLES = "Fuzzed cases of each examination, beside the fixed ones; 12, 60 or 200 by the effort."
Examples = Annotated[int | None, Option(min=0, max=MOST_EXAMPLES, help=_EXAMPLES)]
Seed = Annotated[int, Option(min=0, max=LARGEST_SEED, help="Seed of every examination.")]
Device = Annotated[str, Option(help="Where the kernel runs.")]
Timeout = Annotated[float, Option(min=0.01, max=LONGEST, help="Seconds for one call; 10 more if it ignores the alarm.")]
_ISOLATE = "Each kernel in a process of its own: what it dies of is a finding."
Isolate = Annotated[bool, Option("--isolate", help=_ISOLATE)]
Memory = Annotated[float, Option(min=0.01, max=MOST_MEMORY, help="GiB that an isolated kernel may hold.")]
_STRICT = "NaN, infinities, signed zeros and subnormals are part of every promise."
Strict = Annotated[bool, Option("--strict", help=_STRICT)]
_FAITHFUL = "h200, b200, ...: its tensor cores in Triton's dots, on a CPU."
Faithful = Annotated[str, Option(metavar="DEVICE", help=_FAITHFUL)]
_PRETEND = 'cuda (an h200), a100, ...: "cuda" answers as this device, and is the CPU.'
Pretend = Annotated[str, Option(metavar="DEVICE", help=_PRETEND)]
_EMISSION = "Triton kernels as a compiler has them: contraction,flush,approximate."
Emission = Annotated[str, Option(metavar="nvidia|CHOICES", help=_EMISSION)]
_REFUSES = "A message by which the kernel documents to refuse, e.g. 'too wide where N > 65536'; may be repeated."
Refuses = Annotated[Texts, Option(metavar="PATTERN", help=_REFUSES)]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON instead.")]
Page = Annotated[Path | None, Option(metavar="FILE.md", dir_okay=False, help="Write a page in Markdown, too.")]
Anew = Annotated[bool, Option("--anew", help="Compute again, also where a stored result answers the question.")]
Budget = Annotated[
    float | None, Option(min=0, max=LONGEST, help="Seconds of the whole run: begin nothing more after it.")
]
EngineName = Annotated[str, Option(help="local, or ray: at RAY_ADDRESS, or started here.")]
Part = Annotated[str, Option(help="3/10: only the third of ten parts; the same --out or --store joins them.")]
Jobs = Annotated[int, Option("--jobs", min=0, max=MOST_JOBS, help="Examinations at a time; 0: one for each core.")]


def adapted(
    settings: Settings,
    option: Texts = None,
    shape: Texts = None,
    contract: Texts = None,
    at: Texts = None,
    refuses: Texts = None,
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
    for text in refuses or ():  # a pattern, or "pattern where condition" as a report has it
        if not text.strip():
            raise SettingError("--refuses: expected a message by which the kernel refuses, e.g. 'too wide', got none")
        pattern, where, condition = text.rpartition(" where ")
        known = said.setdefault("refuses", dict(settings.refuses))
        known[pattern.strip() if where else text] = condition.strip() if where else ""
    said["options"] = {**settings.options, **options(settings.definition, option or ())}
    return replace(settings, **said, shapes={**settings.shapes, **shapes(shape or ())})


def adapted_entries(entries: Iterable[Entry], dtype: Texts, *texts: Texts, **others: Any) -> list[Entry]:
    """Return entries in the dtypes of the command line, if any, with `adapted` settings."""
    return [
        replace(entry, dtypes=dtypes(dtype or ()) or entry.dtypes, settings=adapted(entry.settings, *texts, **others))
        for entry in entries
    ]


def check_ours(flag: str, path: Path | None, head: str) -> None:
    """Raise `SettingError` if a file has content that doesn't begin with ``head``, as what assay writes there does.

    A folder isn't written to either.
    """
    if path is not None and path.is_dir():
        raise SettingError(f"{flag} {path}: it is a folder; expected the name of a file")
    if path is None or not path.is_file():
        return
    with path.open("rb") as file:
        begin = file.read(len(head))
    if begin not in (b"", head.encode()):
        expected = "expected a new file, or one that assay wrote and may replace"
        raise SettingError(f"{flag} {path}: {expected}, got {begin.decode(errors='replace')!r}...; give another name")


def usual_dtype(settings: Settings, dtype: Any) -> Settings:
    """Return the settings in ``dtype``, or in the usual one of their op if it is None."""
    return replace(settings, dtype=settings.definition.default_settings["dtype"] if dtype is None else dtype)


def one_dtype(text: str) -> Any:
    """Parse ``--dtype`` of a command that takes one; None if it is empty."""
    return dtypes([text])[0] if text else None


def request(at: Texts, layout: Texts) -> Request:
    """Return the sizes ``--at`` and the layouts (``b=transposed``) of a call. Raises `SettingError`."""
    from assay.bench.inspection.calls import Request
    from assay.verify.cases.at_shape import read_sizes

    layouts = dict(_one("--tensor-layout", text, "a tensor", "b=transposed") for text in layout or ())
    return Request(tuple(read_sizes(text, "--at") for text in at or ()), layouts)


def dtypes(texts: Sequence[str]) -> tuple[Any, ...]:
    """Parse ``bfloat16``, or ``q=float16,k=bfloat16`` for a dtype per tensor; each text is a separate examination."""
    return tuple(
        {name: values[-1] for name, values in _pairs("--dtype", text, "a tensor", "q=float16,k=bfloat16")}
        if "=" in text
        else text
        for text in texts
    )


def options(definition: Spec, texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse ``causal=none,bottom_right``: an option and its values; tuples are in parentheses.

    A value is a Python literal or the text itself, whichever the option accepts.
    """
    results: dict[str, list[Any]] = {}
    for text in texts:
        name, values = pair("--option", text, "an option", "causal=none,bottom_right")
        option, results[name] = definition.options.get(name), []
        for part in values:
            readings = [part, *([literal(part)] if literal(part) != part else [])]
            fitting = [reading for reading in readings if option is None or option.accepts(reading)]
            results[name].append(fitting[0] if fitting else readings[-1])
            definition.complete({name: results[name][-1]})
    return results


def shapes(texts: Sequence[str]) -> dict[str, Sequence[int] | str]:
    """Parse sizes ``D=64,128``, and ranges ``Sq=1:300`` or ``N=0:4096:16`` as in Python's ``range(0, 4096, 16)``.

    ``Sk=Sq``: the same as another size.
    """
    results: dict[str, Sequence[int] | str] = {}
    for text in texts:
        symbol, parts = pair("--shape", text, "a size", "D=64,128, D=1:300 or Sk=Sq")
        sizes = ",".join(parts)
        if sizes.isidentifier():
            results[symbol] = sizes
            continue
        try:
            numbers = [int(part) for part in sizes.split(":" if ":" in sizes else ",")]
            results[symbol] = range(*numbers) if ":" in sizes else numbers
        except (TypeError, ValueError):
            raise SettingError(
                f"--shape {text!r}: expected whole numbers, as in D=64,128 or D=1:300, or a size"
            ) from None
    return results


def contract_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``field=value``, ``stages.name=format``, ``ulps.name=2``, ``stages=none``, or a contract's name."""
    from assay.verify.named_contracts import contract_named

    fields: dict[str, Any] = {}
    for text in texts:
        if "=" not in text:
            fields |= contract_named(text)
            continue
        name, value = _one("--contract", text, "a field", "accumulate=float16")
        group, _, inner = name.partition(".")
        if group not in ("stages", "ulps"):
            fields[name] = int(value) if value.isdecimal() else _WORDS.get(value.lower(), value)
            continue
        within = fields[group] = dict(fields.get(group, {}))
        if not inner and value.lower() not in ("none", "{}"):
            raise ContractError(f"--contract {text!r}; expected {group}.name={value}, or {group}=none")
        if group == "stages" and inner:
            within[inner] = _WORDS.get(value.lower(), value)
        elif inner:
            try:
                within[inner] = float(value)
            except ValueError:
                raise ContractError(f"--contract {text!r}; expected a number of ulps") from None
    return fields


_NAME = r"[A-Za-z_][\w.]*"
_VALUE = r"(\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\]|[^,()\[\]=])+"  # up to a comma that isn't inside of brackets


def _pairs(flag: str, text: str, what: str, example: str) -> list[tuple[str, list[str]]]:
    """Read ``name=value,value,name=value``: what each name has. Raises `SettingError` with a caret at what isn't so."""
    reader, results = Reader(text), list[tuple[str, list[str]]]()
    try:
        while not results or not reader.is_at(r"\Z"):
            if not results or reader.is_at(rf"{_NAME}\s*="):
                name = reader.take(_NAME, f"{what} (as in {example})")
                reader.take("=", f"= after {name} (as in {example})")
                results.append((name, []))
            results[-1][1].append(reader.take(_VALUE, f"a value of {results[-1][0]} (as in {example})").strip())
            if not reader.is_at(r"\Z"):
                reader.take(",", f", or the end after a value of {results[-1][0]}")
                reader.take(r"(?=.)", f"a value of {results[-1][0]}", keep=True)
    except ReadingError as error:
        raise SettingError(f"{flag} {error.marked!r}: {error}") from None
    return results


def _one(flag: str, text: str, what: str, example: str) -> tuple[str, str]:
    """Read ``name=value``."""
    name, values = pair(flag, text, what, example)
    return name, ",".join(values)


def pair(flag: str, text: str, what: str, example: str) -> tuple[str, list[str]]:
    """Read ``name=value,value``, of one name."""
    pairs = _pairs(flag, text, what, example)
    if len(pairs) > 1:
        raise SettingError(f"{flag} {text!r}: expected one name (as in {example}); give {flag} again for {pairs[1][0]}")
    return pairs[0]


_WORDS = {"none": None, "true": True, "false": False}


def literal(text: str) -> Any:
    """Return ``text`` as a Python literal, or itself if it is none."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return tuple(value) if isinstance(value, list) else value
