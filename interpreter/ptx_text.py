"""PTX's text as instructions: comments, scopes, declarations of registers, predicates and operands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from assay.interpreter.faults import NotInterpreted

Operand = str | tuple[str, ...]
"""A register, immediate or ``$n`` by its text; several of them in braces are a vector."""


@dataclass(frozen=True)
class Instruction:
    """``name`` up to its first dot, the ``modifiers`` after it, operands; ``guard``: a predicate, or "!" and one."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str = ""
    text: str = field(default="", compare=False)

    def refusal(self, why: str = "is not interpreted") -> NotInterpreted:
        """The error for an instruction that can't be followed."""
        return NotInterpreted(f"inline assembly: {self.text!r} {why}")


@dataclass(frozen=True)
class Program:
    """Instructions in turn, and the widths in bits of the registers that are declared."""

    instructions: tuple[Instruction, ...]
    widths: dict[str, int]


@lru_cache(1024)
def parsed(text: str) -> Program:
    """The program that ``text`` is. Raises `NotInterpreted` for a label, a branch or a directive but ``.reg``."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    instructions, widths = [], dict[str, int]()
    scopes: list[dict[str, str]] = [{}]
    for statement in _statements(text.replace("$$", "$")):
        if statement == "{":
            scopes.append({})
        elif statement == "}":
            scopes.pop()
        elif statement.startswith(".reg"):
            for name, width in _declared(statement):
                unique = f"{name}@{len(widths)}"
                scopes[-1][name] = unique
                widths[unique] = width
        else:
            instructions.append(_instruction(statement, scopes))
    return Program(tuple(instructions), widths)


def _statements(text: str) -> Iterator[str]:
    """What semicolons and the braces of scopes part; braces within a statement are a vector's."""
    statement, inside = "", False
    for letter in text:
        if letter in "{}" and not statement.strip() and not inside:
            yield letter
            statement = ""
        elif letter == ";":
            if statement.strip():
                yield " ".join(statement.split())
            statement = ""
        else:
            inside = (inside or letter == "{") and letter != "}"
            statement += letter
    if statement.strip():
        yield " ".join(statement.split())


def _declared(statement: str) -> Iterator[tuple[str, int]]:
    """The registers of ``.reg .b32 a, b<3>`` and their widths: a, b0, b1, b2."""
    match = re.fullmatch(r"\.reg\s*\.(pred|[a-z]+\d+(?:x\d)?)\s+(.*)", statement)
    if match is None:
        raise NotInterpreted(f"inline assembly: {statement!r} is not interpreted")
    width = width_of(match[1])
    for name in match[2].split(","):
        many = re.fullmatch(r"(.*)<(\d+)>", name.strip())
        for each in [f"{many[1]}{place}" for place in range(int(many[2]))] if many else [name.strip()]:
            yield each, width


def width_of(kind: str) -> int:
    """The bits of a type: 32 of b32 and f16x2, 1 of pred."""
    if kind == "pred":
        return 1
    parts = re.fullmatch(r"[a-z]+(\d+)(?:x(\d))?", kind)
    return int(parts[1]) * int(parts[2] or 1) if parts else 32


def _instruction(statement: str, scopes: list[dict[str, str]]) -> Instruction:
    match = re.fullmatch(r"(?:@(!?)\s*([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", statement)
    if match is None or statement.partition(" ")[0].endswith(":"):
        raise NotInterpreted(f"inline assembly: {statement!r} is not interpreted")
    negated, guard, opcode, rest = match.groups()
    name, *modifiers = opcode.split(".")
    operands: list[Operand] = []
    for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest):
        if part.startswith("{"):
            operands.append(tuple(_resolved(each.strip(), scopes) for each in part[1:-1].split(",")))
        else:
            operands.append(_resolved(part.strip(), scopes))
    where = (negated or "") + _resolved(guard, scopes) if guard else ""
    return Instruction(name, tuple(modifiers), tuple(operands), where, statement)


def _resolved(name: str, scopes: list[dict[str, str]]) -> str:
    """A register by its unique name; of ``p|q`` both."""
    if "|" in name:
        return "|".join(_resolved(part.strip(), scopes) for part in name.split("|"))
    negated, name = ("!", name[1:].strip()) if name.startswith("!") else ("", name)
    return negated + next((scope[name] for scope in reversed(scopes) if name in scope), name)
