"""Places in a TOML text: the line of each key and element, whatever way it is written."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden.jobs.positions import Path, Positions

DOCUMENT = '''# a comment with = and [brackets]
top = 1 # another, with "quotes"
"quoted = key" = 'literal # no comment'
dotted.inner."last one" = [ 1,
  2, # two
  [3, 4], { a = 5, b.c = 6 },
]

[table]
text = """
[not.a.table]
key = 1 ""\\" """
raw = \'\'\'
# no comment\'\'\'
after = true

[[golden]]
spec = ["softmax",
        "gemm"]
shapes = [{ R = 2,   N = 3 }]
[golden.options]
causal = ["none"]
[[golden]]
when = 1979-05-27 07:32:00 # a date
[golden.shapes]
N = -1
[[golden.deep]]
x = 1
[[golden.deep]]
x = 2
'''


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("top",), 2),
        (("quoted = key",), 3),
        (("dotted",), 4),
        (("dotted", "inner", "last one"), 4),
        (("dotted", "inner", "last one", 1), 5),
        (("dotted", "inner", "last one", 2, 1), 6),
        (("dotted", "inner", "last one", 3, "b", "c"), 6),
        (("table",), 9),
        (("table", "text"), 10),
        (("table", "raw"), 13),
        (("table", "after"), 15),
        (("golden",), 17),
        (("golden", 0), 17),
        (("golden", 0, "spec", 1), 19),
        (("golden", 0, "shapes", 0, "N"), 20),
        (("golden", 0, "options"), 21),
        (("golden", 0, "options", "causal", 0), 22),
        (("golden", 1), 23),
        (("golden", 1, "when"), 24),
        (("golden", 1, "shapes", "N"), 26),
        (("golden", 1, "deep", 1, "x"), 30),
        (("golden", 1, "nothing", "of", "the", "kind"), 23),
        (("nothing",), 1),
    ],
)
def test_a_place_has_its_line(path: Path, line: int, ends: str) -> None:
    """Comments, strings of all kinds, nested values and tables don't lead it astray."""
    text = DOCUMENT.replace("\n", ends)
    tomllib.loads(text)
    assert Positions(text).line(path) == line


KEYS = st.text("abc-_ .#=[]{}\"',é", min_size=1, max_size=6)
LEAVES = st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
TABLES = st.dictionaries(KEYS, VALUES, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    TABLES,
    st.lists(st.tuples(KEYS, TABLES), max_size=3, unique_by=lambda table: table[0]),
    st.lists(TABLES, max_size=3),
)
def test_every_place_of_any_document_is_found(
    top: dict[str, Any], named: list[tuple[str, dict[str, Any]]], rows: list[dict[str, Any]]
) -> None:
    """What tomllib reads from a text, each part has a line, and where it is a key that line holds the key."""
    heads = {*top, *(name for name, _ in named), "rows"}
    if len(heads) != len(top) + len(named) + 1:
        return
    lines = [*_assignments(top)]
    for name, table in named:
        lines += [f"[{_key(name)}] # head", *_assignments(table)]
    for row in rows:
        lines += ["[[rows]]", *_assignments(row)]
    text = "\n".join(lines)
    positions = Positions(text)
    for path in _paths(tomllib.loads(text)):
        assert path in positions, path
        held = text.split("\n")[positions.line(path) - 1]
        assert not isinstance(path[-1], str) or _key(path[-1]) in held or path[-1] == "rows"


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from _paths(part, (*path, key))


def _assignments(table: dict[str, Any]) -> list[str]:
    return [line for key, value in table.items() for line in f"{_key(key)} = {_value(value)} # =".split("\n")]


def _key(key: str) -> str:
    return '"' + key.replace('"', '\\"') + '"'


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(part)}" for key, part in value.items()) + " }"
    if isinstance(value, list):
        return "[\n" + "".join(f"  {_value(part)}, # ]\n" for part in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(letter):08x}" for letter in value) + '"'
    return repr(value)
