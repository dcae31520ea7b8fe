"""Generates the parts of docs/interface.md, judge.md and kernels.md that describe the code: ``./dev docs`` runs it.

The function NAME generates the text between ``<!-- generated: NAME -->`` and ``<!-- end -->``. A test compares.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
from _pytest.config.argparsing import Parser

from assay.cli.main import app
from assay.golden import evaluate, spec, specs
from assay.golden.signature import TensorSpec
from assay.judge.tampering import CHEATS
from assay.precision import audit
from assay.pytest_plugin import plugin
from assay.verify import Contract, Failure, Verdict, contract, examine, judge
from assay.verify.campaign.table import entries
from assay.verify.examination import phases
from assay.verify.findings import KINDS, OUTCOMES
from assay.verify.report.op import op_as_markdown

PAGE = Path(__file__).parent / "interface.md"
PAGES = (PAGE, *(PAGE.with_name(name) for name in ("judge.md", "kernels.md", "ops.md")))
WIDTH = 116


def signatures() -> str:
    """Return the signatures of the public functions, with every keyword and its default."""
    lines = []
    for function in (examine, judge, evaluate, audit):
        signature = inspect.signature(function)
        kinds = [each.kind for each in signature.parameters.values()]
        parts = [str(each.replace(annotation=each.empty)) for each in signature.parameters.values()]
        if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
        result = str(signature.return_annotation).replace("Golden | tuple[Golden, ...]", "Golden")
        name = function.__name__
        if isinstance(function, type):  # a record that is called by a name in small letters
            name, result = name.lower(), name
        lines.append(_wrapped(f"{name}({', '.join(parts)}) -> {result}", " " * 4))
    return "\n".join(["```python", *lines, "```"])


def verdict() -> str:
    """Return the fields of verdicts and failures, outcomes and kinds."""
    lines = [
        f"`Verdict`: {_names(Verdict, ('coverage', 'passed', 'to_json', 'to_html'))}. Outcomes: {_listed(OUTCOMES)}.",
        f"`Failure`: {_names(Failure, ('percent',))}.",
        f"Kinds: {_listed(KINDS)}.",
    ]
    return "\n".join(map(_wrapped, lines))


def contract_fields() -> str:
    """Return the fields of a contract, with their docstrings."""
    source = ast.parse(inspect.getsource(contract))
    body = next(node.body for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Contract")
    said = {
        field.target.id: text.value.value
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    rows = []
    for field in fields(Contract):
        default = field.default if field.default is not MISSING else getattr(Contract(), field.name)
        choices = contract.CHOICES.get(field.name, ())
        values = f" ({', '.join(_code(value) for value in choices)})" if choices and field.type != "bool" else ""
        rows.append(
            (
                f"`{field.name}`",
                _code(default),
                " ".join(said[field.name].split()).rstrip(".").replace("``", "`") + values,
            )
        )
    return _table(("field", "default", "meaning"), rows)


def phase_table() -> str:
    """Return the table of phases in the docstring of their module."""
    rows = [line for line in (phases.__doc__ or "").splitlines() if line.startswith("|")]
    return "\n".join(re.sub(r"\s+\|", " |", re.sub(r"-{4,}", "---", row)) for row in rows)


def pytest_options() -> str:
    """Return the options that the plugin adds to pytest."""
    parser = Parser(_ispytest=True)
    plugin.pytest_addoption(parser)
    rows = [
        (f"`{' '.join(filter(None, (option.names()[-1], option.attrs().get('metavar'))))}`", option.attrs()["help"])
        for group in parser._groups
        for option in group.options
    ]
    return _table(("option", "meaning"), rows)


def commands() -> str:
    """Return every command with its arguments and options."""
    rows: list[tuple[str, str]] = []
    for name, command in _commands(typer.main.get_command(app), "assay"):
        arguments = [f"[{p.name.upper()}]" for p in command.params if p.param_type_name == "argument"]
        options = [f"`{p.opts[0]}`" for p in command.params if p.param_type_name == "option"]
        rows.append((f"`{' '.join((name, *arguments))}`", ", ".join(options)))
    return _table(("command", "options"), rows)


def ops() -> str:
    """Return every op: tensors, options with usual values, results, and stages with their default format."""
    rows: list[tuple[str, ...]] = []
    for name in specs():
        op = spec(name)
        tensors, returns = (_tensors(part) for part in (op.signature().tensors, op.signature().returns))
        usual = {key: (option.default, *(option.usual or ())) for key, option in op.options.items()}
        shown = {key: dict.fromkeys(repr(value).replace("'", '"') for value in values) for key, values in usual.items()}
        options = "; ".join(f"{key}={','.join(values)}" for key, values in shown.items())
        stages = ", ".join(key + (f" ({format})" if format else "") for key, format in op.stages.items())
        if rows and rows[-1][1:] == (tensors, options, returns, stages):
            rows[-1] = (f"{rows[-1][0]}, `{name}`", *rows[-1][1:])
        else:
            rows.append((f"`{name}`", tensors, options, returns, stages))
    return _table(("op", "tensors", "options", "returns", "stages"), rows)


def op_pages() -> str:
    """Return what each op means, as `assay op` prints it."""
    return "\n\n".join(map(op_as_markdown, specs()))


def cheats() -> str:
    """Return the names of the cheats in verdicts on solutions."""
    return _table(("cheat", "what was seen"), [(f"`{name}`", words) for name, words in CHEATS.items()])


def kernels() -> str:
    """Return every bundled kernel: its op, language, dtypes, contract, and facts of its compiled code."""
    compiled = _compiled()
    rows = []
    for entry in sorted(entries(), key=lambda entry: entry.settings.definition.name):
        if entry.group not in _WRITTEN_IN:
            continue
        promised = entry.settings.contract
        promises = [
            name.replace("_", "-")
            for name, kept in (("deterministic", promised.deterministic), ("batch_invariant", promised.batch_invariant))
            if kept
        ]
        dtypes = [", ".join(kind.values()) if isinstance(kind, dict) else kind or "" for kind in entry.dtypes]
        row = (
            f"`{entry.settings.definition.name}`",
            f"`{entry.name}`",
            _WRITTEN_IN[entry.group],
            "; ".join(filter(None, dtypes)),
            str(replace(promised, batch_invariant=False)),
            ", ".join(promises),
            "; ".join(compiled.get(entry.name, ())),
        )
        rows.append(row)
    return _table(("op", "kernel", "written in", "dtypes", "contract", "promises", "compiled for sm_90a"), rows)


_WRITTEN_IN = {"assay": "Triton", "pallas": "Pallas", "cuda": "CUDA C++"}
"""The groups of configs/survey.toml whose kernels are ours."""


def _compiled() -> dict[str, list[str]]:
    """Return the facts of each kernel's launches in docs/inspect.md: registers, spills if any, products."""
    results: dict[str, list[str]] = {}
    for line in PAGE.with_name("inspect.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) > 8 and cells[0] not in ("kernel", "---"):
            name, _, launched, _, registers, spilled, _, _, products, copies, *_ = cells
            parts = [f"{registers} registers", "" if spilled == "0" else f"{spilled} bytes spilled", products, copies]
            results.setdefault(name, []).append(f"`{launched}`: {', '.join(filter(None, parts))}")
    return results


PARTS: dict[str, Callable[[], str]] = {
    "signatures": signatures,
    "verdict": verdict,
    "contract": contract_fields,
    "phases": phase_table,
    "pytest": pytest_options,
    "commands": commands,
    "ops": ops,
    "op_pages": op_pages,
    "cheats": cheats,
    "kernels": kernels,
}


def written(page: str) -> str:
    """Return the page with every generated part renewed; raise `KeyError` for an unknown part."""
    return re.sub(
        r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


def _names(kind: type, more: Iterable[str]) -> str:
    return _listed([*(field.name for field in fields(kind)), *more])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _code(value: Any) -> str:
    return f"`{value!r}`".replace("'", '"')


def _tensors(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{t.name} {t.dtype or ''}".rstrip() + f"[{','.join(t.dims)}]" for t in tensors)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", None)
    if not below:
        yield name, command
    for part, nested in (below or {}).items():
        yield from _commands(nested, f"{name} {part}")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _wrapped(text: str, indent: str = "") -> str:
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + len(word) >= WIDTH:
            lines.append(line)
            line = indent + word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
